"""Bytes, counts and seconds: parsed from text and printed.

Knows nothing of models or caches. Binary units (KiB) and decimal units (KB) are never mixed up.
"""

import re

from kvfolio.errors import OptionError

_FACTORS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
    # A bare letter follows the habit of memory flags (docker, JVM): binary.
    "K": 2**10,
    "M": 2**20,
    "G": 2**30,
    "T": 2**40,
}
_SIZE = re.compile(r"^\s*([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*([A-Za-z]*)\s*$")


def parse_bytes(text: str | int) -> int:
    """Bytes meant by ``"1GiB"``, ``"80 GB"``, ``"512M"`` or a plain integer; a bare K, M, G or T is binary.

    Raises OptionError for a negative number, an unknown unit or anything that is not a size.
    """
    if isinstance(text, int):
        if text < 0:
            raise OptionError(f"a size cannot be negative: {text}")
        return text
    match = _SIZE.match(text)
    if match is None:
        raise OptionError(f"{text!r} is not a size; write a number with a unit, such as 512MiB, 1GiB or 80GB")
    number, unit = match.groups()
    factor = _FACTORS.get(unit.upper())
    if factor is None:
        raise OptionError(
            f"unknown unit {unit!r} in {text!r}; known: B, KB, MB, GB, TB, KiB, MiB, GiB, TiB, K, M, G, T"
        )
    whole, _, part = number.partition(".")
    return int(int(whole + part) * factor // 10 ** len(part))  # exact: 16.06GB is no float


_TOKENS = re.compile(r"\s*([0-9]{1,13})\s*([kKmM]?)\s*")


def parse_tokens(text: str | int) -> int:
    """Tokens meant by ``4096``, ``"32k"`` or ``"1M"``: k and M are 1,024 and 1,048,576, as context lengths are named.

    Raises OptionError for a negative number or anything that is not a count.
    """
    if isinstance(text, int):
        if not 0 <= text < 10**13:
            raise OptionError(f"{text} is no number of tokens; give 0 to 10,000,000,000,000")
        return text
    match = _TOKENS.fullmatch(text)
    if match is None:
        raise OptionError(f"{text!r} is no number of tokens; write a whole number such as 4096, 32k or 1M")
    return int(match[1]) * {"": 1, "k": 1024, "m": 1024**2}[match[2].lower()]


def format_tokens(count: int) -> str:
    """A number of tokens as people name it: ``4K``, ``128K``, ``1M``, or the plain number where that is not exact."""
    for factor, letter in ((1024**2, "M"), (1024, "K")):
        if count and count % factor == 0:
            return f"{count // factor}{letter}"
    return f"{count:,}"


def format_bytes(num_bytes: int) -> str:
    """``num_bytes`` in the largest binary unit that keeps it at 1 or more: ``22.50 KiB``, ``1.00 GiB``."""
    return _in_units(num_bytes, 1024, ("KiB", "MiB", "GiB", "TiB"), 2)


def format_decimal_bytes(num_bytes: int) -> str:
    """``num_bytes`` in the largest decimal unit that keeps it at 1 or more, as vendors write: ``80.0 GB``."""
    return _in_units(num_bytes, 1000, ("KB", "MB", "GB", "TB"), 1)


def _in_units(num_bytes: int, step: int, units: tuple[str, ...], digits: int) -> str:
    if abs(num_bytes) < step:
        return f"{num_bytes} B"
    value = float(num_bytes)
    for unit in units:
        value /= step
        if abs(value) < step or unit == units[-1]:
            return f"{value:.{digits}f} {unit}"
    raise AssertionError("the last unit takes everything")


def enough_bytes(num_bytes: int) -> str:
    """A size of at least ``num_bytes`` that can be typed as it stands: ``8MiB``, ``12KiB``; rounded up, never down."""
    unit, size = ("MiB", 2**20) if num_bytes >= 2**20 else ("KiB", 2**10)
    return f"{-(-num_bytes // size)}{unit}"


def format_seconds(seconds: float) -> str:
    """``seconds`` with a unit that keeps three figures: ``12.3 ms``, ``1.23 s``, ``3.6 h``."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 600:
        return f"{seconds:.2f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def format_params(count: int) -> str:
    """A number of parameters with the letters that model sizes are spoken of with: ``134.52 M``, ``8.03 B``."""
    for size, letter in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= 0.999995 * size:  # what would be printed as 1000.00 of the next smaller
            return f"{count / size:.2f} {letter}"
    return str(count)


def format_count(count: float) -> str:
    """A large count with a decimal prefix: ``134.5 M``, ``2.10 T``."""
    value = float(count)
    for prefix in ("", "k", "M", "G", "T", "P"):
        if abs(value) < 1000:
            return f"{value:.0f}" if prefix == "" else f"{value:.2f} {prefix}"
        value /= 1000
    return f"{value:.2f} E"
