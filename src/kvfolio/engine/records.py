"""A file of finished measurements, one JSON object a line: what it holds is not measured again.

Every line has its whole key, so that nothing is taken for what it is not. A line is written in one go when its
measurement is done: whenever the process ends, the file is whole, but for a last line that is cut and then ignored.

Knows nothing of what is measured.
"""

import json
import logging
import os
from pathlib import Path
from typing import Any

from kvfolio.errors import OptionError

logger = logging.getLogger("kvfolio")

RECORD_VERSION = 1  # raised when a key or a result changes its meaning: older lines are measured again
_MARK = "kvfolio_check"
_BEGIN = f'{{"{_MARK}"'.encode()  # of every line that we write


class Records:
    """Results by key. Without a file they are forgotten when the process ends."""

    def __init__(self, path: Path | None = None) -> None:
        """Reads ``path`` if it is there, and makes sure that it can be written. Raises OptionError if it is neither."""
        self.path = path
        self._found: dict[str, dict[str, Any]] = {}
        if path is None:
            return
        try:
            data = path.read_bytes() if path.exists() else b""
            self._read(path, data)
            with path.open("ab") as file:
                if data and not data.endswith(b"\n"):  # cut in the midst of a line: the next one begins anew
                    file.write(b"\n")
        except (OSError, ValueError) as error:  # ValueError: a NUL in the name
            reason = getattr(error, "strerror", None) or str(error)
            raise OptionError(f"{path} cannot hold measurements: {reason}; name a file that you may write") from error

    def _read(self, path: Path, data: bytes) -> None:
        lines = [(number, line) for number, line in enumerate(data.splitlines(), 1) if line.strip()]
        damaged, num_foreign = [], 0
        for number, line in lines:
            try:
                record = json.loads(line)
                version, key, result = record[_MARK], record["key"], dict(record["result"])
            except (ValueError, TypeError, KeyError, RecursionError):
                damaged.append(number)
                num_foreign += not line.startswith(_BEGIN[: len(line)])
                continue
            if version == RECORD_VERSION:
                self._found[_text(key)] = result
        if num_foreign and len(damaged) == len(lines):
            raise OptionError(f"{path} holds no measurements of kvfolio check: name another file, or a new one")
        for number in damaged:
            logger.warning("%s, line %d is damaged: what it held is measured again", path, number)

    def __len__(self) -> int:
        return len(self._found)

    def has(self, key: object) -> bool:
        return _text(key) in self._found

    def find(self, key: object) -> dict[str, Any] | None:
        """The result under an equal key, None if there is none."""
        return self._found.get(_text(key))

    def add(self, key: object, result: dict[str, Any]) -> None:
        """Keep a result, in the file at once. Raises OptionError if it cannot be written."""
        self._found[_text(key)] = result
        if self.path is None:
            return
        line = json.dumps({_MARK: RECORD_VERSION, "key": key, "result": result}) + "\n"
        try:
            with self.path.open("ab") as file:
                file.write(line.encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise OptionError(f"{self.path} cannot be written: {error.strerror}; what it holds stays") from error


def _text(key: object) -> str:
    return json.dumps(key, sort_keys=True)
