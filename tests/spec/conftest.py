"""Lets the tests of the spec room import their GGUF writer, ``gguf_bytes.py``, whichever way pytest is started."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
