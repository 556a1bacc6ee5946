"""The verbs, one a file: parse, call, print. Everything they do is in the Python API.

Knows nothing of how a model is run. Every error of kvfolio is one line on standard error and exit status 2.
"""

import io
import logging
import os
import sys
from typing import Annotated

import typer

from kvfolio import __version__
from kvfolio.cli.compare import compare
from kvfolio.cli.run import run
from kvfolio.errors import KvfolioError

# Turns that a thread of libgomp spins at a barrier before it sleeps. Its own default, hundreds of thousands, is a
# little quicker on idle cores and many times slower where another process holds one of them: docs/lab.md.
SPIN_COUNT = "5000"

app = typer.Typer(
    help="Run language models on a KV cache that is planned, and accounted for, to the byte.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(run)
app.command()(compare)


@app.callback(invoke_without_command=True)
def options(
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
    try:
        app()
    except KvfolioError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:  # whoever read our output has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except OSError as error:  # such as a full disk behind standard output
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
