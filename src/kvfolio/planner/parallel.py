"""What one of several devices holds: tensor parallel (heads cut), pipeline parallel (layers cut).

Knows nothing of memory sizes or speeds. The result is again a ModelSpec, so that everything that counts bytes counts
a device's bytes too.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvfolio.errors import OptionError
from kvfolio.spec.layers import (
    CompressedSparse,
    FullAttention,
    HeadLayer,
    LatentAttention,
    LayerKind,
    RecurrentState,
    SharedCache,
    SingleKind,
    SlidingWindow,
    parts_of,
    with_parts,
)
from kvfolio.spec.model import ModelSpec


@dataclass(frozen=True, slots=True)
class DeviceShare:
    """The part of a model on one device. Pipeline stages that look alike are one share."""

    spec: ModelSpec  # its layers, with its heads
    weights_bytes: int
    weights_share: float  # of all the model's weights
    num_stages: int  # stages that look like this one
    notes: tuple[str, ...]  # how heads were cut where they do not divide


def device_shares(spec: ModelSpec, weights_bytes: int, tensor: int, pipeline: int = 1) -> tuple[DeviceShare, ...]:
    """What each of ``tensor`` · ``pipeline`` devices holds, one share for every kind of stage.

    Key/value heads are divided, and copied where there are fewer heads than devices (MQA on 8 devices: 8 copies); a
    latent has no heads, so every device holds it whole. Stages are runs of layers, equal to one layer; weights are
    divided by the number of layers. Raises OptionError for counts below 1 and for more stages than layers.
    """
    if tensor < 1 or pipeline < 1:
        raise OptionError(f"{tensor} · {pipeline} devices; at least 1 of each kind of parallelism")
    if pipeline > len(spec.layers):
        raise OptionError(f"{pipeline} pipeline stages for {len(spec.layers)} layers; at most one a layer")
    cut = {kind: with_parts(kind, lambda part: _cut(part, tensor)) for kind, _ in spec.kinds()}
    layers = tuple(cut[kind] for kind in spec.layers)
    heads, notes = -(-spec.num_q_heads // tensor), tuple(_notes(spec, tensor))
    stages = Counter(tuple(sorted(Counter(stage).items(), key=repr)) for stage in _stages(layers, pipeline))
    shares = []
    for kinds, count in stages.items():
        own = tuple(kind for kind, number in kinds for _ in range(number)) if pipeline > 1 else layers
        pieces = len(layers) * tensor
        own_bytes = -(-weights_bytes * len(own) // pieces)
        part = replace(spec, layers=own, num_q_heads=heads)
        shares.append(DeviceShare(part, own_bytes, len(own) / pieces, count, notes))
    return tuple(shares)


def divides_evenly(spec: ModelSpec, tensor: int) -> bool:
    """Whether engines can cut the heads over ``tensor`` devices: query heads evenly, key/value heads too or copied."""
    held = {part.num_kv_heads for kind, _ in spec.kinds() for part in parts_of(kind)} - {0}
    return spec.num_q_heads % tensor == 0 and all(tensor % heads == 0 or heads % tensor == 0 for heads in held)


def fullest(
    shares: Sequence[DeviceShare], memory: Callable[[DeviceShare], int], bytes_each: Callable[[ModelSpec], int]
) -> DeviceShare:
    """The share on which the fewest sequences fit: ``memory`` for caches there over what each takes of it."""
    return min(shares, key=lambda share: memory(share) / max(1, bytes_each(share.spec)))


def _stages(layers: tuple[LayerKind, ...], pipeline: int) -> list[tuple[LayerKind, ...]]:
    """``pipeline`` runs of layers; the first ones take those that do not divide."""
    each, more = divmod(len(layers), pipeline)
    ends = [each * stage + min(stage, more) for stage in range(pipeline + 1)]
    return [layers[start:end] for start, end in itertools.pairwise(ends)]


def _cut(part: SingleKind, tensor: int) -> SingleKind:
    """What one device keeps of a memory: heads and states are divided, a latent is whole on each."""
    if isinstance(part, HeadLayer):
        return replace(part, num_kv_heads=-(-part.num_kv_heads // tensor))
    if isinstance(part, RecurrentState):
        numbers = -(-part.state_numbers // tensor)
        return replace(part, state_numbers=numbers, conv_numbers=-(-part.conv_numbers // tensor))
    if isinstance(part, SharedCache) and isinstance(part.source, FullAttention | SlidingWindow):
        return SharedCache(replace(part.source, num_kv_heads=-(-part.source.num_kv_heads // tensor)))
    return part


def _notes(spec: ModelSpec, tensor: int) -> list[str]:
    if tensor == 1:
        return []
    notes = []
    parts = [part for kind, _ in spec.kinds() for part in parts_of(kind)]
    for count in sorted({part.num_kv_heads for part in parts if isinstance(part, HeadLayer)}):
        if count < tensor:
            copies = -(-tensor // count)
            notes.append(f"{count} key/value heads on {tensor} devices: each is stored {copies} times")
        elif count % tensor:
            each = -(-count // tensor)
            notes.append(f"{count} key/value heads do not divide into {tensor} devices: counted as {each}")
    if any(isinstance(part, LatentAttention | CompressedSparse) for part in parts):
        notes.append(f"latent layers are stored whole on each of {tensor} devices")
    if spec.num_q_heads % tensor:
        notes.append(f"{spec.num_q_heads} query heads do not divide into {tensor} devices: most engines refuse that")
    return notes
