"""What is no start-up log, or no file that could hold one, is refused in words; odd numbers break nothing.

Knows nothing of what an engine's numbers mean (``test_logs.py``).
"""

import dataclasses
import json
import os
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvfolio.errors import OptionError
from kvfolio.planner.engines.logs import explain_log, read_log
from kvfolio.planner.options import read_options
from kvfolio.spec.layers import FullAttention, SlidingWindow
from kvfolio.spec.model import ModelSpec, WeightCount

LOG = "INFO Available KV cache memory: 19.92 GiB\nINFO GPU KV cache size: 163,168 tokens\n"
WEIGHTS = WeightCount(100, 100, 16_060_522_496, "config")
LAYERS = (*(SlidingWindow(16, 128, 128, 1024),) * 52, *(FullAttention(16, 128, 128),) * 10)
SPEC = ModelSpec("toy", "toy", LAYERS, 131072, "bf16", 64, 32, WEIGHTS, ())
OPTIONS = read_options(device="a100-sxm-40gb")


@pytest.mark.parametrize("text", ["", "hello", "GPU KV cache size: many tokens", "the KV cache is a cache"])
def test_a_text_without_a_known_line_is_refused_with_those_that_are_looked_for(text: str) -> None:
    with pytest.raises(OptionError, match=r"GPU KV cache size.*KV Cache is allocated"):
        explain_log(text, SPEC, OPTIONS)


@given(st.text(max_size=300), st.integers(-(10**20), 10**20), st.integers(0, 10**20))
@example("tensor_parallel_size=0 block_size=0 args\n", 0, 0)
def test_any_text_is_explained_or_refused_in_words(noise: str, number: int, other: int) -> None:
    text = (
        f"{noise}\nAvailable KV cache memory: {number} GiB\n{noise}GPU KV cache size: {other:,} tokens\n"
        f"Maximum concurrency for {other} tokens per request: {abs(number)}.00x\n# GPU blocks: {other}\n"
    )
    report = explain_log(text, SPEC, OPTIONS)
    assert json.dumps(dataclasses.asdict(report), allow_nan=False)
    assert all(line.ratio is None or line.ratio >= 0 for line in report.lines)


def test_a_log_is_read_from_a_file_in_what_encoding_it_has(tmp_path: Path) -> None:
    path = tmp_path / "start.log"
    path.write_bytes(LOG.encode() + b"\xff\xfe broken \n")
    assert "broken" in read_log(path)
    path.write_bytes(LOG.encode("utf-16"))
    assert read_log(path) == LOG


def test_a_file_that_is_no_log_is_refused_with_its_path(tmp_path: Path) -> None:
    path = tmp_path / "start.log"
    with pytest.raises(OptionError, match=r"start\.log: No such file"):
        read_log(path)
    path.write_bytes(b" \n")
    with pytest.raises(OptionError, match=r"start\.log is empty"):
        read_log(path)
    path.write_bytes(b"GGUF\0\0\1\2")
    with pytest.raises(OptionError, match=r"start\.log is binary"):
        read_log(path)
    with pytest.raises(OptionError, match="is a directory, a pipe or a device"):
        read_log(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with a name here")
def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "pipe.log"
    os.mkfifo(path)
    with pytest.raises(OptionError, match=r"pipe\.log is a directory, a pipe or a device; give a file"):
        read_log(path)


def test_a_huge_file_is_refused_before_it_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "start.log"
    with path.open("wb") as file:
        file.write(b"x")
        file.truncate((64 << 20) + 1)
    with pytest.raises(OptionError, match="more than 64 MiB"):
        read_log(path)
