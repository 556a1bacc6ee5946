"""Logits at every position of a text, out of the engine's own steps, and a file that keeps them for comparison.

The reference's logits go to disk: in f32 4,096 positions of a vocabulary of 49,152 take 0.8 GB, of 262,144 4.3 GB. To
compute reference and candidates side by side instead would need every cache at once, or the reference once more for
each, and nothing would be finished until all are. The file has no name: it is gone when closed, however the process
ends. It is written and read, not mapped: a full disk is an error then, not the end of the process.

Knows nothing of formats or of what the logits are compared by.
"""

import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from kvfolio.engine.llm import LLM
from kvfolio.engine.loaded import LoadedModel
from kvfolio.engine.params import SamplingParams
from kvfolio.errors import BudgetError
from kvfolio.models.build import LanguageModel
from kvfolio.models.parts import KVView, Ops
from kvfolio.spec.model import RunnableSpec
from kvfolio.units import format_bytes

OnLogits = Callable[[int, Tensor], None]  # (position of the first row, logits [num_tokens, vocab])


class ObservedNetwork:
    """A network that computes the logits of all tokens of a step, and shows them before the engine takes its own."""

    def __init__(self, network: LanguageModel, on_logits: OnLogits) -> None:
        self.spec: RunnableSpec = network.spec
        self.weight_bytes = network.weight_bytes
        self._network = network
        self._on_logits = on_logits

    def forward(self, token_ids: Tensor, positions: Tensor, view: KVView, ops: Ops, rows: Tensor) -> Tensor:
        """As LanguageModel has it. The step must be of one sequence."""
        every = torch.arange(len(token_ids), device=token_ids.device)
        logits = self._network.forward(token_ids, positions, view, ops, every)
        self._on_logits(int(positions[0]), logits)
        return logits[rows]


def text_logits(loaded: LoadedModel, token_ids: Sequence[int], on_logits: OnLogits, **options: Any) -> None:
    """Hand ``on_logits`` the logits at every position of a text but its last, which no token follows.

    The text is one request of an LLM with ``options``: scheduled in chunks of max_step_tokens, its blocks sealed.
    Raises BudgetError if its cache cannot hold the text, and whatever ``on_logits`` does.
    """
    observed = replace(loaded, network=ObservedNetwork(loaded.network, on_logits))
    llm = LLM(observed, dtype=loaded.dtype, device=str(loaded.device), prefix_cache=False, max_running=1, **options)
    prompt, params = tuple(token_ids[:-1]), SamplingParams(max_tokens=1, ignore_eos=True)
    reason = llm.engine.refusal(prompt, params)
    if reason is not None:
        raise BudgetError(reason)
    llm.generate([prompt], params)


class LogitsFile:
    """Rows of logits [num_rows, vocab] in f32, in a temporary file: write them in order, then read any."""

    def __init__(self, num_rows: int, vocab: int, folder: str | None = None) -> None:
        """``folder``: None is the system's (TMPDIR). Raises BudgetError if its disk has not enough room."""
        folder = folder or tempfile.gettempdir()
        self._row_bytes = 4 * vocab
        self._vocab = vocab
        need, free = num_rows * self._row_bytes, shutil.disk_usage(folder).free
        if need > free:
            raise BudgetError(
                f"the reference's logits take {format_bytes(need)} for {num_rows:,} positions, {folder} has "
                f"{format_bytes(free)} free; measure fewer tokens, or name a larger folder in TMPDIR"
            )
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed by our own __exit__

    def __enter__(self) -> "LogitsFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def write(self, rows: Tensor) -> None:
        """Append ``rows`` [n, vocab]. Raises BudgetError when the disk is full after all."""
        try:
            self._file.write(rows.to("cpu", torch.float32).contiguous().numpy().data)
        except OSError as error:
            raise BudgetError(
                f"the reference's logits cannot be written: {error.strerror}; measure fewer tokens, or name a larger "
                "folder in TMPDIR"
            ) from error

    def read(self, first: int, num_rows: int) -> Tensor:
        """Rows ``first`` … as [num_rows, vocab] f32."""
        self._file.seek(first * self._row_bytes)
        data = bytearray(num_rows * self._row_bytes)
        if self._file.readinto(data) != len(data):
            raise BudgetError("the file of the reference's logits ends early; is its disk full?")
        return torch.frombuffer(data, dtype=torch.float32).reshape(num_rows, self._vocab)
