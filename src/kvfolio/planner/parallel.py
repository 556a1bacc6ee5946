"""What one of several devices holds: tensor parallel (heads cut), pipeline parallel (layers cut).

Knows nothing of memory sizes or speeds. The result is again a ModelSpec, so that everything that counts bytes counts
a device's bytes too.
"""

from dataclasses import dataclass, replace

from kvfolio.errors import OptionError
from kvfolio.spec.layers import (
    BlockSparse,
    ChunkedAttention,
    CombinedLayer,
    CrossAttention,
    FullAttention,
    LayerKind,
    RecurrentState,
    SharedCache,
    SingleKind,
    SlidingWindow,
)
from kvfolio.spec.model import ModelSpec


@dataclass(frozen=True, slots=True)
class DeviceShare:
    """The part of a model on one device: the first of the most loaded pipeline stage."""

    spec: ModelSpec  # its layers, with its heads
    weights_bytes: int
    weights_share: float  # of all the model's weights
    pipeline: int  # stages that a token passes one after the other
    notes: tuple[str, ...]  # how heads were cut where they do not divide


def device_share(spec: ModelSpec, weights_bytes: int, tensor: int, pipeline: int = 1) -> DeviceShare:
    """What each of ``tensor`` · ``pipeline`` devices holds.

    Key/value heads are divided, and copied where there are fewer heads than devices (MQA on 8 devices: 8 copies); a
    latent has no heads, so every device holds it whole. Weights are divided evenly. Raises OptionError for counts below
    1 and for more pipeline stages than layers.
    """
    if tensor < 1 or pipeline < 1:
        raise OptionError(f"{tensor} · {pipeline} devices; at least 1 of each kind of parallelism")
    if pipeline > len(spec.layers):
        raise OptionError(f"{pipeline} pipeline stages for {len(spec.layers)} layers; at most one a layer")
    layers = spec.layers if pipeline == 1 else _fullest_stage(spec, pipeline)
    cut = {kind: _cut(kind, tensor) for kind in dict.fromkeys(layers)}
    pieces = len(spec.layers) * tensor
    own = replace(spec, layers=tuple(cut[kind] for kind in layers), num_q_heads=-(-spec.num_q_heads // tensor))
    own_bytes = -(-weights_bytes * len(layers) // pieces)
    return DeviceShare(own, own_bytes, len(layers) / pieces, pipeline, tuple(_notes(spec, tensor)))


def _fullest_stage(spec: ModelSpec, pipeline: int) -> tuple[LayerKind, ...]:
    """The stage with the most layers that hold a cache; stages are runs of layers, equal to one layer."""
    per_stage = -(-len(spec.layers) // pipeline)
    stages = [spec.layers[start : start + per_stage] for start in range(0, len(spec.layers), per_stage)]
    return max(stages, key=lambda stage: (sum(kind.kind not in ("none", "shared") for kind in stage), len(stage)))


def _cut(kind: LayerKind, tensor: int) -> LayerKind:
    if isinstance(kind, CombinedLayer):
        return CombinedLayer(tuple(_cut_single(part, tensor) for part in kind.parts))
    return _cut_single(kind, tensor)


def _cut_single(kind: SingleKind, tensor: int) -> SingleKind:
    if isinstance(kind, FullAttention | SlidingWindow | ChunkedAttention | BlockSparse | CrossAttention):
        return replace(kind, num_kv_heads=-(-kind.num_kv_heads // tensor))
    if isinstance(kind, RecurrentState):
        return replace(
            kind,
            state_numbers=-(-kind.state_numbers // tensor),
            conv_numbers=-(-kind.conv_numbers // tensor),
        )
    if isinstance(kind, SharedCache):
        source = kind.source
        if isinstance(source, FullAttention | SlidingWindow):
            return SharedCache(replace(source, num_kv_heads=-(-source.num_kv_heads // tensor)))
    return kind


def _notes(spec: ModelSpec, tensor: int) -> list[str]:
    if tensor == 1:
        return []
    notes = []
    heads = {kind.num_kv_heads for kind in spec.layers if isinstance(kind, FullAttention | SlidingWindow)}
    for count in sorted(heads):
        if count < tensor:
            copies = -(-tensor // count)
            notes.append(f"{count} key/value heads on {tensor} devices: each is stored {copies} times")
        elif count % tensor:
            notes.append(
                f"{count} key/value heads do not divide into {tensor} devices: counted as {-(-count // tensor)}"
            )
    if any(kind.kind.startswith(("latent", "compressed")) for kind in spec.layers):
        notes.append(f"latent layers are stored whole on each of {tensor} devices")
    if spec.num_q_heads % tensor:
        notes.append(f"{spec.num_q_heads} query heads do not divide into {tensor} devices: most engines refuse that")
    return notes
