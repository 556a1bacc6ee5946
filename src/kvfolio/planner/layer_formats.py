"""In which format each layer of a model is stored: one for all, and the exceptions that were asked for by number.

Knows nothing of blocks or bytes. ``0-1=bf16,29=int8``: layers are counted from 0, ranges include both ends.
"""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from kvfolio.errors import OptionError, UnknownModelError
from kvfolio.spec.formats import find_cache_format

EXACT = "exact"  # in place of a format: as computed
_FORM = "such as 0-1=bf16,29=int8: layers, counted from 0, and a format, or exact"
_EXCEPTION = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?=(\S+)", re.ASCII)


@dataclass(frozen=True, slots=True)
class LayerFormat:
    """Layers [first, last], both included, and the name of their format."""

    first: int
    last: int
    name: str

    def __str__(self) -> str:
        return f"layer {self.first}" if self.first == self.last else f"layers {self.first} to {self.last}"


def parse_layer_formats(text: str) -> tuple[LayerFormat, ...]:
    """The exceptions that ``text`` lists, in order of their layers; of an empty one, none.

    Raises OptionError for what is no list, reversed ranges and layers named twice, UnknownModelError for formats that
    there are not.
    """
    if not text.strip():
        return ()
    found = []
    for part in text.split(","):
        match = _EXCEPTION.fullmatch(part.strip())
        if match is None:
            raise OptionError(f"kv_layers has {part.strip()!r}; accepted: exceptions with commas between them, {_FORM}")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise OptionError(f"kv_layers has the layers {first}-{last}, which are none; give {last}-{first}")
        found.append(LayerFormat(first, last, match[3]))
        _check_name(found[-1])
    found.sort(key=lambda one: one.first)
    for one, other in itertools.pairwise(found):
        if other.first <= one.last:
            raise OptionError(f"kv_layers names layer {other.first} twice, in {one.name} and in {other.name}")
    return tuple(found)


def _check_name(one: LayerFormat) -> None:
    try:
        if one.name != EXACT:
            find_cache_format(one.name)
    except UnknownModelError as error:
        raise UnknownModelError(f"kv_layers, {one}: {error}, or {EXACT}") from error


def names_by_layer(exceptions: Sequence[LayerFormat], num_layers: int, default: str, exact: str) -> list[str]:
    """The name of each layer's format: ``default``, but where an exception says else. Raises OptionError."""
    names = [default] * num_layers
    for one in exceptions:
        if one.last >= num_layers:
            raise OptionError(f"kv_layers has {one}, but the model has {num_layers} layers: 0 to {num_layers - 1}")
        name = exact if one.name == EXACT else one.name
        names[one.first : one.last + 1] = [name] * (one.last + 1 - one.first)
    return names
