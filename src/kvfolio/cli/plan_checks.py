"""A plan held against the world: the cache of transformers' class (--verify), an engine's start-up log (--log).

Knows nothing of how either is measured or read.
"""

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

from kvfolio.errors import OptionError
from kvfolio.planner.engines.logs import LogLine, explain_log, read_log
from kvfolio.planner.options import PlanOptions
from kvfolio.units import format_bytes

if TYPE_CHECKING:
    from kvfolio.engine.verify import Verification
    from kvfolio.spec.model import ModelSpec

FEW_TOKENS, WIDE_WINDOW = 300, 5000


def show_log(spec: "ModelSpec", options: PlanOptions, path: Path, as_json: bool) -> None:
    """What the log of ``path`` says, beside what the plan says."""
    report = explain_log(read_log(path), spec, options)
    if as_json:
        print(json.dumps(dataclasses.asdict(report), ensure_ascii=False))
        return
    settings = ", ".join(f"{name} {value}" for name, value in report.settings.items())
    print(f"{report.engine}{f' {report.version}' if report.version else ''}: {settings or 'no settings found'}")
    for line in report.lines:
        print(f"\n{line.quantity}: logged {_number(line, line.logged)}", end="")
        print(f", planned {_number(line, line.planned)}" if line.planned is not None else "", end="")
        print(f" ({line.ratio:.3f}×)" if line.ratio is not None else "")
        print(f"  {line.explanation}\n  > {line.quote}")
    for quote in report.unexplained:
        print(f"\nnot explained\n  > {quote}")
    print(f"\n{report.verdict}")


def _number(line: LogLine, value: float) -> str:
    if "memory" in line.quantity.lower() or "weights" in line.quantity.lower():
        return format_bytes(int(value))
    return f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"


def show_verification(source: str, spec: "ModelSpec", options: PlanOptions, as_json: bool) -> bool:
    """The plan beside the cache that transformers builds; True unless a difference has no explanation."""
    from kvfolio.engine.verify import verify
    from kvfolio.spec.source import read_config

    if options.kv_format != "auto":
        raise OptionError(f"--verify compares at 16 bits, as transformers stores; leave {options.kv_format} out")
    if len(options.contexts) > 1:
        raise OptionError(f"--verify takes one --context; {len(options.contexts)} were given")

    tokens = options.contexts[0] if options.contexts else _enough_tokens(spec)
    result = verify(spec, read_config(source), max(1, tokens))
    if as_json:
        print(json.dumps(_as_object(spec.name, result), ensure_ascii=False))
    else:
        _print_verification(spec.name, result)
    return result.verdict is not False


def _enough_tokens(spec: "ModelSpec") -> int:
    """So many that a usual window is passed; a wide one would take minutes and show nothing more."""
    windows = [layer.window for layer in spec.layers if layer.window]
    return max([FEW_TOKENS, *(window + 64 for window in windows if window <= WIDE_WINDOW)])


def _as_object(name: str, result: "Verification") -> dict[str, object]:
    return {
        "model": name,
        "model_type": result.model_type,
        "verdict": result.verdict,
        "not_verified": result.not_verified,
        "num_tokens": result.num_tokens,
        "planned_bytes": result.planned_bytes,
        "measured_bytes": result.measured_bytes,
        "differences": [
            dataclasses.asdict(difference) | {"num_layers": count} for difference, count in result.differences()
        ],
        "layers": [dataclasses.asdict(layer) for layer in result.layers],
    }


def _print_verification(name: str, result: "Verification") -> None:
    if result.measured is None:
        print(f"{name}: {result.not_verified}")
        return
    print(
        f"{name} at {result.num_tokens:,} tokens: planned {result.planned_bytes:,} B, "
        f"transformers holds {result.measured_bytes:,} B in {len(result.layers)} layers"
    )
    for difference, count in result.differences():
        mark = "·" if difference.explained else "NOT EXPLAINED:"
        print(f"  {mark} {difference.reason}: {difference.num_bytes:+,} B in {count} layers")
    print("equal, or every difference has a name" if result.verdict else "the plan and the class disagree")
