"""Which layers of a GGUF model have a window, and how long it is.

Knows nothing of heads or bytes. A list in the header wins, then a period in the header, then what llama.cpp has in
its code for the architecture (``architectures.WINDOW_RULES``).
"""

from dataclasses import dataclass

from kvfolio.errors import UnknownModelError
from kvfolio.spec.fields import Fields
from kvfolio.spec.gguf.architectures import CHUNKED, KNOWN, WINDOW_BY_LIST, WINDOW_RULES, WindowRule
from kvfolio.spec.gguf.keys import LayerCounts, flags

_KEY, _PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"
_EXAONE4_32B_LAYERS = 64  # its first files leave the window out


@dataclass(frozen=True, slots=True)
class Windows:
    """For each layer whether it has a window, and the window's length in tokens."""

    slides: tuple[bool, ...]
    window: int
    chunked: bool


def windows_of(fields: Fields, architecture: str, counts: LayerCounts) -> Windows:
    """The windows that ``fields`` describe.

    Raises UnknownModelError where a window is given and neither the header nor the architecture says for which layers.
    """
    none = Windows((False,) * counts.model, 0, False)
    rule = WINDOW_RULES.get(architecture)
    window = _window(fields, architecture, rule, counts)
    if window == 0:
        return none
    slides = _slides(fields, architecture, rule, counts)
    if slides is None:
        fields.note(f"llama.cpp gives {architecture} no window: every layer counted as full, not {window:,} tokens")
        return none
    return Windows(slides, window, architecture in CHUNKED)


def _window(fields: Fields, architecture: str, rule: WindowRule | None, counts: LayerCounts) -> int:
    """Tokens of the window; 0: there is none, or it is switched off."""
    if rule is None:
        needed = architecture in WINDOW_BY_LIST
        return fields.integer(_KEY, default=None if needed else 0, low=0)
    if rule.window is not None:
        return fields.integer(_KEY, assume=rule.window, low=0)
    if architecture == "exaone4" and counts.model == _EXAONE4_32B_LAYERS:
        return fields.integer(_KEY, assume=4096, low=0)
    return fields.integer(_KEY, default=0 if rule.optional else None, low=0)


def _slides(fields: Fields, architecture: str, rule: WindowRule | None, counts: LayerCounts) -> tuple[bool, ...] | None:
    """For each layer whether it has a window; None where llama.cpp would not read the key."""
    listed = flags(fields, _PATTERN, counts)
    if listed is not None:
        return listed
    if fields.get(_PATTERN) is None:
        if architecture in WINDOW_BY_LIST:
            raise fields.missing(_PATTERN)
        if rule is None and architecture in KNOWN:
            return None
        if rule is None:
            raise UnknownModelError(
                f"{fields.where}: {fields.prefix}{_KEY} is given, but neither the header nor an architecture known "
                "here says which layers have it; use the Hugging Face folder of the model"
            )
        if rule.period > 1:
            place = "first" if rule.dense_first else "last"
            fields.note(f"{fields.prefix}{_PATTERN} is absent: the {place} of every {rule.period} layers is full")
    period = fields.integer(_PATTERN, default=rule.period if rule else None, low=0)
    if period == 0:
        return (True,) * counts.model
    full = 0 if rule is not None and rule.dense_first else period - 1
    return tuple(index % period != full for index in range(counts.model))
