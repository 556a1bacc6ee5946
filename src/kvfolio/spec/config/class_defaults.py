"""What transformers' configuration classes assume for keys that a config.json leaves out, by model_type.

Knows nothing of what a field means. The facts lie in class_defaults.json, which a script extracts from the classes of
transformers 5.24; published files keep only what differs from them.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

_FILE = Path(__file__).with_name("class_defaults.json")


@dataclass(frozen=True, slots=True)
class Pattern:
    """The kinds of layers that a class gives to a config without a list of them."""

    cycle: tuple[str, ...]  # repeated behind ``head``
    head: tuple[str, ...] = ()
    last: str | None = None  # of the last layer, whatever the cycle says
    from_end: bool = False  # the cycle is counted from the last layer backwards
    only: int | None = None  # the one number of layers that the pattern is for; None: any

    def spread(self, num_layers: int) -> list[str] | None:
        """The kind of each of ``num_layers`` layers, in order; None where the pattern is for another number."""
        if self.only is not None and self.only != num_layers:
            return None
        rest = range(num_layers - len(self.head))
        kinds = [*self.head, *(self.cycle[index % len(self.cycle)] for index in rest)][:num_layers]
        if self.from_end:
            kinds.reverse()
        if self.last is not None:
            kinds[-1] = self.last
        return kinds


@dataclass(frozen=True, slots=True)
class ClassDefaults:
    """One configuration class."""

    usual: Mapping[str, object]  # None: a number of key/value heads that is one for each query head
    pattern: Pattern | None
    has_window: bool  # whether the class reads sliding_window at all
    text: str | None  # model_type of the language model inside; None: the class describes it itself
    inner: Mapping[str, object]  # what the class changes in that one's defaults where a config says nothing about it
    has_cross: bool  # the decoder inside reads an encoder's tokens

    @property
    def has_windows_in_pattern(self) -> bool:
        """Whether the class gives some layers a window and others none."""
        return self.pattern is not None and "sliding_attention" in {*self.pattern.cycle, *self.pattern.head}

    @property
    def has_states_in_pattern(self) -> bool:
        """Whether the class gives some layers a recurrent state."""
        return self.pattern is not None and bool({"linear_attention", "conv", "hybrid"} & set(self.pattern.cycle))


def find_class_defaults(model_type: str) -> ClassDefaults | None:
    """The defaults of ``model_type``'s class; None where no such class is known."""
    entry = _entries().get(model_type)
    if entry is None:
        return None
    pattern = entry.get("pattern")
    return ClassDefaults(
        usual=MappingProxyType(entry.get("usual", {})),
        pattern=None
        if pattern is None
        else Pattern(
            tuple(pattern["cycle"]),
            tuple(pattern.get("head", ())),
            pattern.get("last"),
            pattern.get("from_end", False),
            pattern.get("only"),
        ),
        has_window="window" in entry,
        text=entry.get("text"),
        inner=MappingProxyType(entry.get("inner", {})),
        has_cross="cross" in entry,
    )


def class_names() -> Iterable[str]:
    """Every model_type whose class is known."""
    return _entries().keys()


@cache
def _entries() -> dict[str, dict[str, Any]]:
    entries: dict[str, dict[str, Any]] = json.loads(_FILE.read_bytes())
    return entries
