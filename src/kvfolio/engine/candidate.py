"""What ``check`` compares: storage formats with their options, as typed and as an LLM takes them, and their size.

Bytes come from the layout that the planner makes. Knows nothing of quality, and not what a format is.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

from kvfolio.errors import OptionError
from kvfolio.planner.memory import CacheOptions, plan_cache
from kvfolio.spec.layout import CacheLayout, GroupLayout
from kvfolio.spec.model import RunnableSpec

DEFAULT_FORMATS = ("bf16", "fp8", "int8", "int8-channel", "k8v4", "int6", "k6v4", "int4", "k5v3", "k4v3", "int3")
ENOUGH = 1 << 60  # bytes of kv_memory for a layout that is only counted
MAX_DIGITS = 9  # of a number that is typed


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to store a cache. Fields are options of LLM and of CacheOptions under the same names; None: theirs.

    A field that is added here can be typed at once.
    """

    kv_format: str
    block_tokens: int | None = None
    kv_layers: str | None = None
    sink_blocks: int | None = None

    @property
    def name(self) -> str:
        """As it is typed: ``int8``, ``int8@64``, ``int8@64@option=value``."""
        words = [self.kv_format]
        for name, value in self.options().items():
            if name != "kv_format":
                words.append(str(value) if name == "block_tokens" else f"{name}={str(value).replace(',', '+')}")
        return "@".join(words)

    def options(self) -> dict[str, Any]:
        """The options that are set, by name."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in fields.items() if value is not None}

    def layout(self, spec: RunnableSpec, dtype: str, kv_memory: int) -> CacheLayout:
        """The cache of one sequence computed in ``dtype``. Raises UnknownModelError for a format that is not known."""
        return plan_cache(spec, dtype, CacheOptions(kv_memory=kv_memory, max_running=1, **self.options()))

    def kv_memory(self, spec: RunnableSpec, dtype: str, num_tokens: int) -> int:
        """Bytes that hold a lone sequence of ``num_tokens``."""
        return self.layout(spec, dtype, ENOUGH).kv_memory_for(num_tokens)


EXACT = Candidate("f32")  # the cache of the reference, which computes in f32


def parse_candidates(text: str) -> tuple[Candidate, ...]:
    """Candidates as typed, a comma between them: ``int8,bf16/int8,int4@128,int4@sink_blocks=1``.

    Behind the format @ and its block_tokens, or @NAME=VALUE for any option of Candidate (+ stands for a comma in it).
    Raises OptionError for what cannot be read or is there twice; whether there is such a format the layout knows.
    """
    candidates = [_parse_candidate(word.strip()) for word in text.split(",")]
    for candidate in candidates:
        if candidates.count(candidate) > 1:
            raise OptionError(f"the format {candidate.name} is given twice; leave one of them out")
    return tuple(candidates)


def _parse_candidate(text: str) -> Candidate:
    known = {field.name: field for field in dataclasses.fields(Candidate)}
    kv_format, *words = text.split("@")
    if kv_format in ("", "auto"):
        raise OptionError(f"{text!r} names no format to check; give some, such as {','.join(DEFAULT_FORMATS)}")
    options: dict[str, Any] = {}
    for word in words:
        name, _, value = (word if "=" in word else f"block_tokens={word}").partition("=")
        if name not in known or name == "kv_format" or not value:
            accepted = ", ".join(f"@{name}=…" for name in known if name != "kv_format")
            raise OptionError(
                f"{word!r} in {text!r} is no option of a format; accepted: @64 (block_tokens), {accepted}"
            )
        if name in options:
            raise OptionError(f"{text!r} has {name} twice; leave one of them out")
        is_number = "int" in str(known[name].type)
        if is_number and not (value.isascii() and value.isdigit() and len(value) <= MAX_DIGITS):
            raise OptionError(
                f"{name} is {value!r} in {text!r}; accepted: a whole number of at most {MAX_DIGITS} digits"
            )
        options[name] = int(value) if is_number else value.replace("+", ",")
    return Candidate(kv_format, **options)


@dataclass(frozen=True, slots=True)
class StoredSize:
    """What a lone sequence's cache takes at the end of its text."""

    num_bytes: int  # sealed blocks in their format, scales and pads included, and one open block a group
    bits: float  # of one number that the layers remember: num_bytes over these
    bytes_per_token: int  # what one more token adds while no window has passed
    block_tokens: int


def stored_size(candidate: Candidate, spec: RunnableSpec, dtype: str, num_tokens: int) -> StoredSize:
    """Counted for a cache whose exact tokens, those of open blocks, are of ``dtype``.

    A window layer remembers its window, so bits of different models can be compared.
    """
    layout = candidate.layout(spec, dtype, ENOUGH)
    num_bytes = layout.bytes_held(num_tokens) + sum(group.open_block_bytes for group in layout.groups)
    numbers = sum(_numbers_held(group, num_tokens) for group in layout.groups if not group.is_sinks)
    return StoredSize(num_bytes, 8 * num_bytes / numbers, layout.bytes_per_token, layout.block_tokens)


def _numbers_held(group: GroupLayout, num_tokens: int) -> int:
    kind = group.group.kind
    tokens = num_tokens if kind.window is None else min(num_tokens, kind.window)
    return group.group.num_layers * tokens * kind.token_numbers
