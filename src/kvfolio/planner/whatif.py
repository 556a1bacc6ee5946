"""The same body with other attention and other formats: what each would cost, one row each.

Knows nothing of quality: how well such a model would answer is not arithmetic.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from kvfolio.planner.options import PlanOptions
from kvfolio.planner.report import Plan, make_plan
from kvfolio.spec.layers import (
    CompressedSparse,
    CrossAttention,
    FullAttention,
    HeadLayer,
    LatentAttention,
    SingleKind,
    parts_of,
    with_parts,
)
from kvfolio.spec.model import ModelSpec

GROUPED_HEADS = 8
# DeepSeek-V2 (arXiv 2405.04434, section 2.1.4): d_c = 4 head widths, d_R = half of one
_LATENT_HEADS, _ROPE_PART = 4, 2
FORMATS = ("bf16", "int8", "int6", "int4")


@dataclass(frozen=True, slots=True)
class WhatIf:
    """One row of the ladder."""

    name: str  # "as published", "MHA", "GQA-8", "MQA", "MLA", or a format
    sort: Literal["published", "design", "format"]
    plan: Plan
    ratio: float  # bytes at the first context over those of the model as published


def what_if(spec: ModelSpec, options: PlanOptions) -> tuple[WhatIf, ...]:
    """The model as it is, as MHA, GQA-8, MQA and MLA, and in 16, 8, 6 and 4 bits.

    Designs change every layer that attends to the text's own tokens (a window or index goes with a latent); states,
    cross-attention and weights are left as they are. A model without attention has no other designs; in a format for
    latents only, MLA is the one other design.
    """
    published = make_plan(spec, options)
    base = published.contexts[0].bytes
    latents_only = options.cache_format.rope is not None

    def row(name: str, sort: Literal["published", "design", "format"], plan: Plan) -> WhatIf:
        return WhatIf(name, sort, plan, plan.contexts[0].bytes / base if base else 1.0)

    designs = [(name, body) for name, body in _bodies(spec) if name == "MLA" or not latents_only]
    return (
        row("as published", "published", published),
        *(row(name, "design", make_plan(body, options)) for name, body in designs),
        *(row(fmt, "format", make_plan(spec, options.in_format(fmt))) for fmt in FORMATS),
    )


def _bodies(spec: ModelSpec) -> list[tuple[str, ModelSpec]]:
    width = next((_value_width(part) for kind in spec.layers for part in parts_of(kind) if _attends(part)), None)
    if width is None:
        return []
    heads = spec.num_q_heads
    latent = LatentAttention(_LATENT_HEADS * width, width // _ROPE_PART, heads, width + width // _ROPE_PART, width)
    bodies = [("MHA", heads), (f"GQA-{GROUPED_HEADS}", GROUPED_HEADS), ("MQA", 1)]
    rows = [(name, _with_layers(spec, partial(_with_heads, count))) for name, count in bodies if count <= heads]
    return [*rows, ("MLA", _with_layers(spec, lambda part: latent))]


def _with_layers(spec: ModelSpec, change: Callable[[SingleKind], SingleKind]) -> ModelSpec:
    """``spec`` with every memory that attends to the text's own tokens changed."""

    def changed(part: SingleKind) -> SingleKind:
        return change(part) if _attends(part) else part

    return replace(spec, layers=tuple(with_parts(kind, changed) for kind in spec.layers))


def _with_heads(count: int, part: SingleKind) -> SingleKind:
    """The memory with so many key/value heads; a latent or compressed one becomes full attention."""
    if isinstance(part, HeadLayer):
        return replace(part, num_kv_heads=count)
    width = _value_width(part)
    return FullAttention(count, width, width)


def _attends(part: SingleKind) -> bool:
    return isinstance(part, HeadLayer | LatentAttention | CompressedSparse) and not isinstance(part, CrossAttention)


def _value_width(part: SingleKind) -> int:
    """Numbers in one head's value."""
    if isinstance(part, LatentAttention):
        return part.expanded_v_width
    return part.v_width if isinstance(part, HeadLayer) else part.head_dim
