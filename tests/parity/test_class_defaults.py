"""The defaults that kvfolio carries along are those of transformers' classes.

Knows nothing of what they are used for.
"""

import json

import pytest

transformers = pytest.importorskip("transformers")

from make_class_defaults import FILE, make, text_of  # noqa: E402


@pytest.mark.skipif(not transformers.__version__.startswith("5.24."), reason="the facts are those of 5.24")
def test_the_file_is_what_the_classes_say() -> None:
    entries = make()
    carried = json.loads(FILE.read_bytes())
    assert sorted(entries) == sorted(carried)
    for name, entry in entries.items():
        assert carried[name] == json.loads(json.dumps(entry)), name
    assert FILE.read_text(encoding="utf-8") == text_of(entries)
