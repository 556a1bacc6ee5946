"""The sorts of layer as words, and how lists and patterns of a config spell them.

Knows nothing of which field means what; that is ``patterns.py``.
"""

import re
from collections.abc import Sequence
from typing import TypeVar

from kvfolio.errors import UnknownModelError
from kvfolio.spec.fields import Fields, show

_Item = TypeVar("_Item")

FULL, SLIDING, CHUNKED, RECURRENT, NONE = "full", "sliding", "chunked", "recurrent", "none"
HYBRID, HYBRID_SLIDING = "hybrid", "hybrid_sliding"  # attention beside a state
CROSS = "cross"  # reads an encoder's tokens instead of the text's
SPARSE = "sparse"  # blocks chosen by index keys
CSA, HCA = "csa", "hca"  # compressed, with and without an index

_WORDS = {
    "full_attention": FULL,
    "attention": FULL,
    "full": FULL,
    "global": FULL,
    "global_attention": FULL,
    "indexed_attention": FULL,
    "deepseek_sparse_attention": FULL,
    "sliding_attention": SLIDING,
    "sliding_window_attention": SLIDING,
    "sliding_window": SLIDING,
    "sliding": SLIDING,
    "local": SLIDING,
    "local_attention": SLIDING,
    "chunked_attention": CHUNKED,
    "linear_attention": RECURRENT,
    "recurrent": RECURRENT,
    "mamba": RECURRENT,
    "mamba2": RECURRENT,
    "conv": RECURRENT,
    "moe": NONE,
    "mlp": NONE,
    "hybrid": HYBRID,
    "hybrid_sliding": HYBRID_SLIDING,
    "cross_attention": CROSS,
    "minimax_m3_sparse": SPARSE,
    "compressed_sparse_attention": CSA,
    "heavily_compressed_attention": HCA,
}
_LETTERS = {"M": RECURRENT, "*": FULL, "-": NONE, "E": NONE, "L": SLIDING, "G": FULL}
WINDOW_NAMES = ("sliding_window", "sliding_window_size", "attention_window_size", "window_size")


def has_window(fields: Fields) -> bool:
    """Whether a window is set; null, 0 and negative numbers switch it off."""
    for name in WINDOW_NAMES:
        value = fields.silent(name)
        if isinstance(value, list):
            if any(value):
                return True
        elif value is not None and type(value) is not int and value is not False:
            raise fields.wrong(name, value, "a whole number, null or a list")
        elif value and value > 0:
            return True
    return False


def sort_of_word(fields: Fields, name: str, word: object) -> str:
    """The sort of layer that ``word`` stands for; raises UnknownModelError with the known ones."""
    if not isinstance(word, str) or word not in _WORDS:
        raise UnknownModelError(f"{fields.where}: {name} holds {show(word)}; known: {', '.join(_WORDS)}")
    return _WORDS[word]


def sort_of_letter(fields: Fields, name: str, letter: str) -> str:
    """The sort of layer that one letter of a pattern stands for."""
    if letter not in _LETTERS:
        raise UnknownModelError(f"{fields.where}: {name} holds {show(letter)}; known: {' '.join(_LETTERS)}")
    return _LETTERS[letter]


def sort_of_entry(fields: Fields, name: str, item: object) -> str:
    """An entry of a pattern: a letter, a word, or 1 for a window and 0 for none."""
    if isinstance(item, str):
        return sort_of_letter(fields, name, item) if re.fullmatch("[A-Z]", item) else sort_of_word(fields, name, item)
    if not isinstance(item, int):
        raise fields.wrong(name, item, "a list of kinds, or of 1 for a window and 0 for none")
    return SLIDING if item else FULL


def repeated(kinds: Sequence[str], num_layers: int) -> list[str]:
    """``kinds`` repeated over all layers."""
    return [kinds[index % len(kinds)] for index in range(num_layers)]


def one_each(fields: Fields, name: str, items: Sequence[_Item], num_layers: int) -> Sequence[_Item]:
    """The first ``num_layers`` items; more are allowed only for the prediction layers behind the last one."""
    extra = len(items) - num_layers
    allowed = 0
    if extra > 0:
        allowed = max(
            fields.integer("num_nextn_predict_layers", default=0, low=0),
            fields.integer("mtp_num_hidden_layers", "num_mtp_modules", default=0, low=0),
        )
    if extra < 0 or extra > allowed:
        raise fields.wrong(name, f"{len(items)} entries", f"one for each of the {num_layers} layers")
    return items[:num_layers]


def number_list(fields: Fields, name: str, num_layers: int) -> Sequence[int] | None:
    """A list of whole numbers, or of true and false, with one for each layer; None when absent."""
    value = fields.get(name)
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(item, int) for item in value):
        raise fields.wrong(name, value, "a list of whole numbers")
    return one_each(fields, name, value, num_layers)


def layer_numbers(fields: Fields, name: str, stop: int) -> set[int]:
    """A list of layers by number, each below ``stop``; empty when absent."""
    value = fields.stated_or_usual(name)
    if value is None:
        return set()
    if not isinstance(value, list) or not all(type(item) is int and 0 <= item < stop for item in value):
        raise fields.wrong(name, value, f"a list of layer numbers below {stop}")
    return set(value)
