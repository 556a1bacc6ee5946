"""Writes a finished file: whoever looks meanwhile sees the old one or the new one, never a half.

Knows nothing of what is in it.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from kvfolio.errors import OptionError


def write_file(content: str | bytes, path: Path) -> None:
    """Write ``content`` to ``path``, text as UTF-8; a file that was there stays whole until then.

    Raises OptionError for what cannot be written.
    """
    data = content if isinstance(content, bytes) else content.encode(errors="backslashreplace")
    with _refusing(path):
        target = path.resolve()
        if target.exists() and not target.is_file():  # a folder is refused; a pipe or /dev/null is not to be replaced
            target.write_bytes(data)
            return
        partial = _partial(target)
        try:
            partial.write_bytes(data)
            partial.replace(target)
        finally:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)


def check_writable(path: Path) -> None:
    """Raise OptionError as ``write_file`` would, before the work whose end it would be. Leaves nothing behind."""
    with _refusing(path):
        target = path.resolve()
        if target.is_dir():
            raise IsADirectoryError(0, "it is a folder")
        if not target.exists() or target.is_file():
            partial = _partial(target)
            partial.touch()
            partial.unlink()


def _partial(target: Path) -> Path:
    return target.with_name(f".{target.name}.{os.getpid()}.partial")


@contextlib.contextmanager
def _refusing(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:  # ValueError: a NUL in the name; RuntimeError: a ring of links
        reason = getattr(error, "strerror", None) or str(error)
        raise OptionError(
            f"{path} cannot be written: {reason}; give a file in a folder that you may write to"
        ) from error
