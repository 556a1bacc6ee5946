"""Reads keys of a GGUF header that hold one value for all layers, or an array of one for each.

Knows nothing of what a key means.
"""

from dataclasses import dataclass

from kvfolio.spec.fields import Fields
from kvfolio.spec.gguf.header import LazyArray

_MAX_VALUE = 2**40  # as in ``fields``: beyond it no model exists


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks of a file: those of the model, and behind them those that only draft tokens."""

    total: int
    layers: int


def integers(fields: Fields, key: str, blocks: Blocks, default: int | None = None, low: int = 0) -> tuple[int, ...]:
    """A whole number for every layer; an array may also hold those of the drafting blocks, which are dropped.

    A single number must be ``low`` or more, one in an array may be 0. Raises BrokenModelError that names the key.
    """
    array = fields.get(key)
    if not isinstance(array, LazyArray):
        return (fields.integer(key, default=default, low=low),) * blocks.layers
    values = _values(fields, key, array, blocks)
    numbers = tuple(v for v in values if isinstance(v, int) and not isinstance(v, bool) and 0 <= v <= _MAX_VALUE)
    if len(numbers) < len(values):
        raise fields.wrong(key, list(values), "whole numbers from 0")
    return numbers


def flags(fields: Fields, key: str, blocks: Blocks) -> tuple[bool, ...] | None:
    """True or false for every layer, also written as 1 and 0; None when the key holds no array."""
    array = fields.get(key)
    if not isinstance(array, LazyArray):
        return None
    values = _values(fields, key, array, blocks)
    if not all(isinstance(value, int) and value in (0, 1) for value in values):
        raise fields.wrong(key, list(values), "true or false for each layer")
    return tuple(bool(value) for value in values)


def _values(fields: Fields, key: str, array: LazyArray, blocks: Blocks) -> tuple[object, ...]:
    if len(array) not in (blocks.total, blocks.layers):
        raise fields.wrong(key, f"{len(array)} values", f"one value, or {blocks.total} of them, one for each layer")
    return array.values()[: blocks.layers]
