"""Reads one model description field by field: every value typed, bounded and named in the error.

Knows nothing of what a field means; JSON configs and GGUF metadata are the same to it. ``usual`` holds the values
that a model's own class takes for absent fields, where such a class is known; None: it derives one from others.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvfolio.errors import BrokenModelError, UnknownModelError

MAX_LAYERS = 10_000  # a bound for absurd files, far above any model
# Beyond these, no model exists and the arithmetic that follows would overflow instead of naming the field.
_MAX_INTEGER = 2**40
_MAX_NUMBER = 1e30


def show(value: object) -> str:
    """``value`` as it stands in the file, cut to a length that fits an error line."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"


@dataclass(frozen=True, slots=True)
class Fields:
    """A mapping read with checks. ``null`` counts as absent. What was assumed for an absent field is noted.

    A field that is not there at all, not even as null, takes its value in ``usual``, which is noted, too.
    """

    values: Mapping[str, object]
    where: str  # what errors call the source: a file or a model
    prefix: str = ""  # stands before every name looked up, such as "llama."
    assumptions: list[str] = field(default_factory=list)
    usual: Mapping[str, object] = field(default_factory=dict)
    usual_of: str = ""  # whose values ``usual`` are: a model_type
    asked: set[str] = field(default_factory=set)  # every name looked up so far

    def note(self, assumption: str) -> None:
        """Record what the description left open and how it was read."""
        if assumption not in self.assumptions:
            self.assumptions.append(assumption)

    def get(self, name: str) -> object:
        """The raw value, None when absent or null."""
        self.asked.add(name)
        return self.values.get(self.prefix + name)

    def names(self, name: str) -> bool:
        """Whether the field stands in the description at all, null included."""
        self.asked.add(name)
        return self.prefix + name in self.values

    def silent(self, name: str) -> object:
        """The raw value, or the class's where the field is absent; what is assumed is not noted."""
        value = self.get(name)
        return self.usual.get(name) if value is None and not self.names(name) else value

    def stated_or_usual(self, name: str) -> object:
        """The raw value, or the class's where the field is absent, which is noted."""
        value = self.silent(name)
        return value if value is None or self.names(name) else self._usual_noted(name, value)

    def over(self, changes: Mapping[str, object]) -> "Fields":
        """The same fields with some values replaced; notes and names asked for are shared."""
        values = {**self.values, **changes}
        return Fields(values, self.where, self.prefix, self.assumptions, self.usual, self.usual_of, self.asked)

    def child(self, name: str) -> "Fields | None":
        """The mapping under ``name``; None when absent, null or empty and the class has no values for its fields."""
        value = self.get(name)
        usual = self.usual.get(name)
        own = usual if isinstance(usual, Mapping) else {}
        if value is None or value == {}:
            if not own:
                return None
            value = {}
            self.note(f"{self.prefix}{name} is absent: the defaults of model_type {self.usual_of} assumed")
        if not isinstance(value, dict):
            raise self.wrong(name, value, "an object or null")
        where = f"{self.where}: {self.prefix}{name}"
        return Fields(value, where, "", self.assumptions, own, self.usual_of if own else "")

    def integer(
        self, *names: str, default: int | None = None, assume: int | None = None, low: int = 1, high: int = _MAX_INTEGER
    ) -> int:
        """The whole number under the first of ``names`` that is set.

        Absent: the class's ``usual`` value; ``default`` where absence has a meaning of its own, ``assume`` (noted)
        where it has not; with none of them, BrokenModelError.
        """
        name, value = self._first(names)
        if value is None:
            return int(self._absent(name, default, assume))
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.wrong(name, value, f"a whole number from {low:,} to {high:,}")
        return value

    def number(self, *names: str, default: float | None = None, assume: float | None = None, low: float = 0.0) -> float:
        """The finite number above ``low`` under the first of ``names`` that is set; absence as in ``integer``."""
        name, value = self._first(names)
        if value is None:
            return self._absent(name, default, assume)
        if isinstance(value, bool) or not isinstance(value, int | float) or not low < value <= _MAX_NUMBER:
            raise self.wrong(name, value, f"a number above {low:g}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """True or false; ``default`` when absent."""
        value = self.get(name)
        if value is None:
            usual = None if self.names(name) else self.usual.get(name)
            if usual is None or usual == default:
                return default
            value = self._usual_noted(name, usual)
        if not isinstance(value, bool):
            raise self.wrong(name, value, "true or false")
        return value

    def stated_flag(self, name: str, default: bool) -> bool:
        """As ``flag``, but a null is refused: transformers takes it for false, whatever an absent one means."""
        if self.names(name) and self.get(name) is None:
            raise self.wrong(name, None, "true or false, or no such field")
        return self.flag(name, default)

    def text(self, *names: str) -> str | None:
        """The text under the first of ``names`` that is set; None when none is."""
        name, value = self._first(names)
        if value is None:
            return None
        if not isinstance(value, str):
            raise self.wrong(name, value, "a text")
        return value

    def texts(self, name: str) -> tuple[str, ...] | None:
        """A list of texts; None when absent."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.wrong(name, value, "a list of texts")
        return tuple(value)

    def token_ids(self, name: str) -> tuple[int, ...] | None:
        """One token id or a list of them, without repeats; None when absent."""
        value = self.get(name)
        if value is None:
            return None
        items = value if isinstance(value, list) else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in items):
            raise self.wrong(name, value, "a token id, a list of token ids or null")
        return tuple(dict.fromkeys(items))

    def refuse_if_set(self, name: str, why: str) -> None:
        """Raise UnknownModelError when ``name`` is anything but absent, null, false or zero."""
        value = self.get(name)
        if value:
            raise UnknownModelError(f"{self.where}: {self.prefix}{name} is {show(value)}: {why}")

    def wrong(self, name: str, value: object, accepted: str) -> BrokenModelError:
        """The error for a value of the wrong type or outside its range."""
        return BrokenModelError(f"{self.where}: {self.prefix}{name} is {show(value)}; accepted: {accepted}")

    def missing(self, name: str) -> BrokenModelError:
        """The error for a field that must be there."""
        return BrokenModelError(f"{self.where}: {self.prefix}{name} is missing; add it, or take a complete file")

    def _first(self, names: tuple[str, ...]) -> tuple[str, object]:
        for name in names:
            value = self.get(name)
            if value is not None:
                return name, value
        if self.usual and not any(self.names(name) for name in names):
            for name in names:
                if self.usual.get(name) is not None:
                    return name, self._usual_noted(name, self.usual[name])
        return names[0], None

    def _usual_noted(self, name: str, value: object) -> object:
        number = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else show(value)
        self.note(f"{self.prefix}{name} is absent: {number} assumed, the default of model_type {self.usual_of}")
        return value

    def _absent(self, name: str, default: float | None, assume: float | None) -> float:
        if default is not None:
            return default
        if assume is None:
            raise self.missing(name)
        self.note(f"{self.prefix}{name} is absent: {assume:,.12g} assumed")
        return assume
