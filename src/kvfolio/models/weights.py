"""Weights by name: read when asked for, checked, converted to the compute dtype, stacked, counted.

Knows nothing of file layouts (``weights_folder``, ``weights_gguf``) or of what a network does with a tensor.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from kvfolio.errors import BrokenModelError
from kvfolio.models.parts import Linear
from kvfolio.models.weights_folder import FolderTensors
from kvfolio.models.weights_gguf import GgufTensors
from kvfolio.spec.source import ModelSource

Progress = Callable[[int, int], None]  # (bytes of the files read so far, bytes of all tensors)
CHECK_BOTH = "check that configuration and weights belong together"


class TensorSource(Protocol):
    """Where tensors lie. Names and layouts are those of Hugging Face folders, matrices always [out, in]."""

    where: Path  # the folder or file, for messages
    shapes: dict[str, tuple[int, ...]]  # of every tensor there
    norm_offset: float  # what must be added to a stored norm weight so that it multiplies directly

    def stored_bytes(self, name: str) -> int:
        """Bytes of the tensor in its file."""
        ...

    def read_into(self, name: str, out: Tensor) -> None:
        """Read one tensor into ``out``, which has its shape, converting to out's dtype and device."""
        ...


class Weights:
    """The tensors of one model, handed out once each to the network that is built from them."""

    def __init__(
        self, source: TensorSource, dtype: torch.dtype, device: torch.device, on_progress: Progress | None = None
    ) -> None:
        self.dtype = dtype
        self.device = device
        self.delivered_bytes = 0  # of the tensors handed out, in the dtype they were handed out in
        self._source = source
        self._on_progress = on_progress
        self._read: set[str] = set()
        self._done_bytes = 0
        self._total_bytes = sum(source.stored_bytes(name) for name in source.shapes)

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """The tensor ``name`` in ``dtype``, None: the compute dtype.

        Raises BrokenModelError if it is missing or not of ``shape``.
        """
        return self.stack([name], [shape], dtype)

    def stack(
        self, names: Sequence[str], shapes: Sequence[tuple[int, ...]], dtype: torch.dtype | None = None
    ) -> Tensor:
        """The tensors joined along their first axis, each read straight into its place."""
        for name, shape in zip(names, shapes, strict=True):
            self._check(name, shape)
        num_rows = sum(shape[0] for shape in shapes)
        out = torch.empty(num_rows, *shapes[0][1:], dtype=dtype or self.dtype, device=self.device)
        row = 0
        for name, shape in zip(names, shapes, strict=True):
            self._read_into(name, out[row : row + shape[0]])
            row += shape[0]
        return self._deliver(out)

    def linear(self, names: Sequence[str], rows: Sequence[int], width: int, bias: bool) -> Linear:
        """The projections ``names`` as one: weight [sum(rows), width] and, with ``bias``, bias [sum(rows)]."""
        weight = self.stack([f"{name}.weight" for name in names], [(count, width) for count in rows])
        if not bias:
            return Linear(weight, None)
        return Linear(weight, self.stack([f"{name}.bias" for name in names], [(count,) for count in rows]))

    def norm_scale(self, name: str, width: int) -> Tensor:
        """[width] f32, the scale of an RMS norm as it multiplies (a folder of Gemma stores scale - 1)."""
        self._check(name, (width,))
        scale = torch.empty(width, dtype=torch.float32, device=self.device)
        self._read_into(name, scale)
        return self._deliver(scale + self._source.norm_offset)

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this name."""
        return name in self._source.shapes

    def refuse_unread(self, may_stay: Callable[[str], bool]) -> None:
        """Raise BrokenModelError if the files hold a tensor that the network never asked for.

        A bias or a norm that the configuration does not mention would otherwise change answers silently.
        """
        unread = [name for name in self._source.shapes if name not in self._read and not may_stay(name)]
        if unread:
            raise BrokenModelError(
                f"{self._source.where}: {len(unread)} of {len(self._source.shapes)} tensors have no place in the "
                f"network that the configuration describes, {unread[0]!r} for one; {CHECK_BOTH}"
            )
        if self._on_progress is not None:
            self._on_progress(self._total_bytes, self._total_bytes)

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        found = self._source.shapes.get(name)
        if found is None:
            raise BrokenModelError(
                f"{self._source.where}: tensor {name!r} is missing ({len(self._source.shapes)} tensors there); "
                f"fetch the model again, or {CHECK_BOTH}"
            )
        if found != shape:
            raise BrokenModelError(
                f"{self._source.where}: tensor {name!r} has shape {list(found)}, and the configuration needs "
                f"{list(shape)}; {CHECK_BOTH}"
            )

    def _read_into(self, name: str, out: Tensor) -> None:
        self._source.read_into(name, out)
        if name not in self._read:
            self._read.add(name)
            self._done_bytes += self._source.stored_bytes(name)
        if self._on_progress is not None:
            self._on_progress(self._done_bytes, self._total_bytes)

    def _deliver(self, tensor: Tensor) -> Tensor:
        self.delivered_bytes += tensor.nbytes
        return tensor


def open_weights(
    source: ModelSource, dtype: torch.dtype, device: torch.device, on_progress: Progress | None = None
) -> Weights:
    """The weights of a model's folder or GGUF file; headers are read and checked now, tensors later.

    Raises BrokenModelError for files that are missing, cut or inconsistent, UnknownModelError for tensor types.
    """
    if source.header is None:
        return Weights(FolderTensors(source.path, source.spec), dtype, device, on_progress)
    return Weights(GgufTensors(source.header, source.spec), dtype, device, on_progress)
