"""Explains the start-up log of vLLM or SGLang: which arithmetic gives its numbers, and where it leaves the plan.

Knows nothing of how a log is written (``log_lines.py``) or of an engine's arithmetic (``log_arithmetic.py``). A number
counts as reproduced within 1 %, or within what its printed decimals leave open.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG

from kvfolio.errors import OptionError
from kvfolio.planner import sizes
from kvfolio.planner.engines import log_arithmetic as arithmetic
from kvfolio.planner.engines.log_arithmetic import Guess, LogScene
from kvfolio.planner.engines.log_lines import GIB, LOOKED_FOR, Found, read_lines
from kvfolio.planner.options import PlanOptions
from kvfolio.spec.model import ModelSpec
from kvfolio.units import format_bytes

MOST_BYTES = 64 << 20  # of a log file
_NEAR = 0.01  # a number within 1 % counts as reproduced
_SURE = 0.002  # a guess this near is taken before the nearest
_PRINTED = 0.006 * GIB  # what two decimals of GiB leave open
_COUNTS = ("KV cache tokens", "blocks")
_REASONS = (
    "usual reasons: another rank had less memory, a draft (MTP) model keeps layers of its own, pages widened to fit "
    "recurrent states, a storage format that the log does not name, or another model than the plan's"
)


@dataclass(frozen=True, slots=True)
class LogLine:
    """One number of the log against the arithmetic. Memory in bytes, of one device."""

    quantity: str  # weights, KV cache memory, KV cache tokens, blocks, concurrency, one request, states
    logged: int | float
    planned: int | float | None  # by the assumption that comes nearest; None: nothing to compute it from
    ratio: float | None  # logged / planned, before a count was cut to a whole one; None for a negative number, too
    is_reproduced: bool | None  # whether an assumption gives the number; None: it is held against the plan alone
    explanation: str
    quote: str  # the line, cut


@dataclass(frozen=True, slots=True)
class LogReport:
    """A log, explained. ``settings``: those found in it, which override the options of the plan."""

    engine: str  # vllm or sglang
    version: str | None
    settings: Mapping[str, int | float | str]
    lines: tuple[LogLine, ...]
    unexplained: tuple[str, ...]  # lines about the cache that were not understood
    verdict: str


def read_log(path: Path) -> str:
    """The text of a log file; what is no UTF-8 is replaced.

    Raises OptionError for a file that is missing, empty, binary or larger than 64 MiB, and for what is no file: a pipe
    would be waited for without end.
    """
    try:
        if not S_ISREG(path.stat().st_mode):
            raise OptionError(
                f"{path} is a directory, a pipe or a device; give a file that holds the start-up log of vLLM or SGLang"
            )
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise OptionError(f"{path}: {error.strerror or error}; give the start-up log of vLLM or SGLang") from error
    if len(content) > MOST_BYTES:
        raise OptionError(f"{path} has more than 64 MiB; cut it to its start, such as with: head -n 5000")
    if not content.strip():
        raise OptionError(f"{path} is empty; give the start-up log of vLLM or SGLang")
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):  # what PowerShell writes
        return content.decode("utf-16", errors="replace")
    if b"\0" in content[:65536]:
        raise OptionError(f"{path} is binary; give the start-up log of vLLM or SGLang as text")
    return content.decode("utf-8-sig", errors="replace")


def explain_log(text: str, spec: ModelSpec, options: PlanOptions) -> LogReport:
    """``text`` line by line against the plan of ``spec`` under ``options``, with the settings that the log names.

    Raises OptionError, with the lines that are looked for, where it holds none of them.
    """
    facts = read_lines(text)
    if not facts.numbers:
        raise OptionError(f"the log has no line about the cache that kvfolio knows; looked for are {LOOKED_FOR}")
    scene = arithmetic.read_scene(facts, spec, options)
    lines = tuple(_line(scene, found) for found in facts.numbers)
    return LogReport(
        engine=facts.engine,
        version=facts.version,
        settings=dict(facts.settings),
        lines=lines,
        unexplained=facts.unknown,
        verdict=_verdict(scene, lines),
    )


# ---- one number -----------------------------------------------------------------------------------------------------


def _line(scene: LogScene, found: Found) -> LogLine:
    tell = {"weights": _tell_weights, "KV cache memory": _tell_memory, "states": _tell_states}.get(found.quantity)
    if tell is not None:
        planned, explanation = tell(scene, found)
    elif not _is_computed(scene, found):
        planned, explanation = _tell_against_plan(scene, found)
    else:
        planned, explanation = _tell_computed(scene, found)
    if found.times > 1:
        explanation += f"; logged {found.times} times, by ranks or repeats"
    ratio = None if not planned or found.value < 0 else found.value / planned
    near = ratio is not None and abs(ratio - 1) <= max(_NEAR, _slack(scene, found))
    return LogLine(
        quantity="KV cache memory" if found.quantity == "pool" else found.quantity,
        logged=_plain(found.value),
        planned=None if planned is None else _whole(planned) if found.quantity in _COUNTS else _plain(planned),
        ratio=ratio,
        is_reproduced=near if _is_computed(scene, found) else None,
        explanation=explanation,
        quote=found.quote,
    )


def _whole(count: float) -> int:
    """Tokens and blocks that fit; a float's last digit does not cost one."""
    return int(count + 1e-6)


def _plain(value: float) -> int | float:
    """A whole number where it is one or is large, as bytes and tokens are."""
    return int(value) if value == int(value) or abs(value) >= 1e6 else round(value, 4)


def _is_computed(scene: LogScene, found: Found) -> bool:
    """Whether the number follows from others of the log; what does not is held against the plan alone."""
    if found.quantity in _COUNTS:
        return scene.pool is not None
    return found.quantity in ("pool", "concurrency", "one request")


def _guesses(scene: LogScene, found: Found) -> Iterator[Guess]:
    if found.quantity == "pool":
        return arithmetic.pool_guesses(scene, found.tokens)
    if found.quantity == "concurrency":
        return arithmetic.concurrency_guesses(scene, found.tokens)
    if found.quantity == "one request":
        return arithmetic.request_guesses(scene, found.tokens)
    return arithmetic.token_guesses(scene, scene.block if found.quantity == "blocks" else 1)


def _slack(scene: LogScene, found: Found) -> float:
    """How far off a number may be for what was rounded when it and its sources were printed."""
    if found.quantity in ("pool", "one request"):
        return 0.0005 + 2 * _PRINTED / max(1, found.value)
    printed = _PRINTED / scene.pool if scene.pool is not None and scene.pool > 0 else 0.0
    if found.quantity == "concurrency":
        return 0.0005 + printed + 0.006 / max(0.01, found.value)
    return _SURE + printed


def _tell_computed(scene: LogScene, found: Found) -> tuple[float | None, str]:
    guess = arithmetic.nearest(found.value, _guesses(scene, found), _slack(scene, found))
    if guess is None:
        return None, "this model keeps no cache that a number could be computed from"
    if guess.value and abs(found.value / guess.value - 1) <= max(_NEAR, _slack(scene, found)):
        return guess.value, guess.assumption
    return guess.value, f"no assumption gives this; the nearest: {guess.assumption}; {_REASONS}"


def _tell_against_plan(scene: LogScene, found: Found) -> tuple[float | None, str]:
    """Tokens or blocks of a log that does not say how much memory they take."""
    candidates = list(arithmetic.per_token(scene.spec, scene.fmt))
    each, assumption = candidates[0 if scene.facts.engine == "sglang" or candidates[0][0] == candidates[1][0] else 1]
    unit = scene.block if found.quantity == "blocks" else 1
    if not each:
        return None, "this model keeps no cache that grows with the text"
    implied = int(found.value * unit * each)
    told = f"{arithmetic.tokens_of(found.value * unit)}: {format_bytes(implied)} ({assumption})"
    return float(scene.room / (unit * each)), f"{told}; {_difference(scene, implied)}"


def _tell_weights(scene: LogScene, found: Found) -> tuple[float | None, str]:
    planned = scene.share.weights_bytes
    more = found.value - planned
    if abs(more) <= max(_NEAR * planned, _PRINTED):
        return planned, "the published bytes, divided among the devices"
    if more > 0:
        return planned, (
            f"{format_bytes(int(more))} more than the published bytes of a device's part: what is kept whole on each "
            "device (embeddings, a vision encoder), a draft (MTP) layer, padding or scales"
        )
    return planned, (
        f"{format_bytes(int(-more))} less than the published bytes of a device's part: a quantised checkpoint, "
        "weights left out (draft layers, a vision encoder), experts spread over more devices, or offloading"
    )


def _tell_memory(scene: LogScene, found: Found) -> tuple[float | None, str]:
    if found.value <= 0:
        told = "the log's budget is negative" if found.value < 0 else "nothing is left"
        return scene.room, f"{told}: weights and activations take the whole share; raise it, or use more devices"
    return scene.room, _difference(scene, int(found.value))


def _difference(scene: LogScene, memory: int) -> str:
    """Why the cache is smaller or larger than the plan's."""
    less = scene.room - memory
    sums = f"{format_bytes(scene.usable)} usable - weights {format_bytes(scene.share.weights_bytes)}"
    if abs(less) <= max(_NEAR * scene.room, _PRINTED):
        return f"as planned: {sums}"
    if less < 0:
        return (
            f"{format_bytes(-less)} more than planned ({sums}): a larger device or share, smaller weights, or a size "
            "that was set by hand"
        )
    weights = next((found.value for found in scene.facts.numbers if found.quantity == "weights"), None)
    beyond = 0 if weights is None else int(weights) - scene.share.weights_bytes
    part = f", {format_bytes(beyond)} of it heavier weights" if beyond > _PRINTED else ""
    return (
        f"{format_bytes(less)} less than planned ({sums}){part}: activations of the largest step, CUDA graphs and the "
        "runtime, or a device that others use too"
    )


def _tell_states(scene: LogScene, found: Found) -> tuple[float | None, str]:
    fixed = sizes.fixed_bytes(scene.spec, scene.fmt)
    if not fixed:
        return None, "states that the plan's model does not have"
    return None, f"room for {found.value / fixed:,.1f} states of {fixed:,} B, beside the cache of tokens"


# ---- all of them ----------------------------------------------------------------------------------------------------


def _verdict(scene: LogScene, lines: tuple[LogLine, ...]) -> str:
    computed = [line.is_reproduced for line in lines if line.is_reproduced is not None]
    told = []
    if computed:
        told.append(f"{sum(computed)} of {len(computed)} numbers about the cache follow from the model's bytes")
    memory = next((line for line in lines if line.quantity == "KV cache memory"), None)
    tokens = next((line for line in lines if line.quantity in ("KV cache tokens", "blocks")), None)
    share = scene.pool / scene.room if scene.pool is not None and scene.room else None
    if share is None and memory is None and tokens is not None:
        share = tokens.ratio
    if memory is not None and memory.logged <= 0:
        told.append("the engine had no memory left for a cache")
    elif share is not None:
        told.append(f"the cache has {share:.0%} of the memory that the plan gives it")
    elif not scene.room:
        told.append("by the plan the weights leave no memory for a cache")
    told += scene.notes
    if scene.facts.cut:
        told.append("the log is long and only its start was read")
    return "; ".join(told) if told else "the log says nothing of how large the cache is"
