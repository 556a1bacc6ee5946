"""The verbs, one a file: parse, call, print. Everything they do is in the Python API.

Knows nothing of how a model is run. Every error is one line on standard error and exit status 2; with --json it is an
object on standard output.
"""

import io
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NoReturn

import typer

from kvfolio import __version__
from kvfolio.cli.options import printable
from kvfolio.errors import KvfolioError

# Turns that a thread of libgomp spins at a barrier before it sleeps. Its own default, hundreds of thousands, is a
# little quicker on idle cores and many times slower where another process holds one of them: docs/lab.md.
SPIN_COUNT = "5000"

MOST_LETTERS = 2000  # of an error line
VERBS = ("plan", "fleet", "models", "devices", "run", "compare", "check", "convert")
_WrongUsage: Any = typer.BadParameter.__mro__[1]  # click's UsageError, which typer carries under a private name


def make_app(words: Sequence[str] = ()) -> typer.Typer:
    """The command line for ``words``: where they begin with a verb, only that verb's module is loaded."""
    app = typer.Typer(
        help="Plan the KV cache of any language model to the byte, and run models on one that keeps to its plan.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback(invoke_without_command=True)(_options)
    for verb in VERBS if not words or words[0] not in VERBS else words[:1]:
        app.command()(_load(verb))
    return app


def _load(verb: str) -> Callable[..., None]:
    match verb:
        case "plan":
            from kvfolio.cli.plan import plan

            return plan
        case "fleet":
            from kvfolio.cli.fleet import fleet

            return fleet
        case "models":
            from kvfolio.cli.models import models

            return models
        case "devices":
            from kvfolio.cli.devices import devices

            return devices
        case "run":
            from kvfolio.cli.run import run

            return run
        case "compare":
            from kvfolio.cli.compare import compare

            return compare
        case "convert":
            from kvfolio.cli.convert import convert

            return convert
        case _:
            from kvfolio.cli.check import check

            return check


def _options(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        print(f"kvfolio {__version__}")
        raise typer.Exit


def main() -> None:
    """Run the command line; exits with 2 and one line for an error of kvfolio, 130 when interrupted."""
    if "OMP_WAIT_POLICY" not in os.environ:  # read by libgomp when torch loads it, later
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    for stream in (sys.stdout, sys.stderr):  # a terminal that cannot show a letter shows ? instead
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started us
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - for the life of the process
    try:
        status = make_app(sys.argv[1:])(standalone_mode=False)
        sys.stdout.flush()
        sys.exit(status)
    except KvfolioError as error:
        _refuse(type(error).__name__, str(error))
    except _WrongUsage as error:
        if len(sys.argv) == 1:  # no verb: the help
            error.show()
            sys.exit(2)
        _refuse("OptionError", f"{error.format_message()} (see: kvfolio {sys.argv[1]} --help)")
    except BrokenPipeError:  # whoever read our output has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except OSError as error:  # such as a full disk behind standard output
        _refuse("OSError", str(error))
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)


def _refuse(kind: str, message: str) -> NoReturn:
    """Say what is wrong, in one line, and leave with status 2."""
    message = printable(" ".join(message.split()))[:MOST_LETTERS]
    if "--json" in sys.argv:
        try:
            print(json.dumps({"error": {"kind": kind, "message": message}}, ensure_ascii=False), flush=True)
            sys.exit(2)
        except OSError as error:
            message = f"{message} (and standard output cannot be written: {error})"
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - it would be flushed once more at the end
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)
