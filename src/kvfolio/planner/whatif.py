"""The same body with other attention and other formats: what each would cost, one row each.

Knows nothing of quality: how well such a model would answer is not arithmetic.
"""

from dataclasses import dataclass, replace

from kvfolio.planner.options import PlanOptions
from kvfolio.planner.report import Plan, make_plan
from kvfolio.spec.layers import FullAttention, LatentAttention, LayerKind, SlidingWindow
from kvfolio.spec.model import ModelSpec

GROUPED_HEADS = 8
# DeepSeek-V2 (arXiv 2405.04434, section 2.1.4): d_c = 4 head widths, d_R = half of one
_LATENT_HEADS, _ROPE_PART = 4, 2
FORMATS = ("bf16", "int8", "int6", "int4")


@dataclass(frozen=True, slots=True)
class WhatIf:
    """One row of the ladder."""

    name: str  # "as published", "MHA", "GQA-8", "MQA", "MLA", or a format
    plan: Plan
    ratio: float  # bytes at the first context over those of the model as published


def what_if(spec: ModelSpec, options: PlanOptions) -> tuple[WhatIf, ...]:
    """The model as it is, as MHA, GQA-8, MQA and MLA, and in 16, 8, 6 and 4 bits.

    Designs replace every layer that keeps keys and values per head or a latent; weights are left as they are.
    """
    published = make_plan(spec, options)
    rows = [("as published", published)]
    rows += [(name, make_plan(body, options)) for name, body in _bodies(spec)]
    rows += [(fmt, make_plan(spec, replace(options, kv_format=fmt))) for fmt in FORMATS]
    base = published.contexts[0].bytes
    return tuple(WhatIf(name, plan, plan.contexts[0].bytes / base if base else 1.0) for name, plan in rows)


def _bodies(spec: ModelSpec) -> list[tuple[str, ModelSpec]]:
    width = _head_width(spec)
    if width is None:
        return []
    heads = spec.num_q_heads
    latent = LatentAttention(_LATENT_HEADS * width, width // _ROPE_PART, heads, width + width // _ROPE_PART, width)
    bodies = [("MHA", heads), (f"GQA-{GROUPED_HEADS}", GROUPED_HEADS), ("MQA", 1)]
    rows = [(name, _with_heads(spec, count, width)) for name, count in bodies if count <= heads]
    return [*rows, ("MLA", replace(spec, layers=tuple(latent if _has_heads(kind) else kind for kind in spec.layers)))]


def _with_heads(spec: ModelSpec, count: int, width: int) -> ModelSpec:
    def changed(kind: LayerKind) -> LayerKind:
        if isinstance(kind, FullAttention | SlidingWindow):
            return replace(kind, num_kv_heads=count)
        return FullAttention(count, width, width) if isinstance(kind, LatentAttention) else kind

    return replace(spec, layers=tuple(changed(kind) for kind in spec.layers))


def _head_width(spec: ModelSpec) -> int | None:
    """Numbers in one head's value, of the first layer that has heads."""
    for kind in spec.layers:
        if isinstance(kind, LatentAttention):
            return kind.expanded_v_width
        if isinstance(kind, FullAttention | SlidingWindow):
            return kind.v_width
    return None


def _has_heads(kind: LayerKind) -> bool:
    return isinstance(kind, FullAttention | SlidingWindow | LatentAttention)
