"""Tensors of a Hugging Face folder: model.safetensors, or the shards that its index names.

Knows nothing of networks; it levels out the spellings and layouts in which the same tensor is published.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvfolio.errors import BrokenModelError, UnknownModelError
from kvfolio.models.mxfp4 import BLOCK_BYTES, GROUP, decode_mxfp4
from kvfolio.spec.model import RunnableSpec

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
VALUE_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
BYTES = "U8"  # what codes of MXFP4 and their scales are stored as
CODES, SCALES = "_blocks", "_scales"  # behind the name of the tensor that they stand for
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format
MALFORMED = (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError)  # what foreign JSON may raise
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
TURNED = {  # stored [in, out]
    "gpt2": ("c_attn.weight", "c_proj.weight", "c_fc.weight"),
    "gpt_oss": (".experts.gate_up_proj", ".experts.down_proj"),  # of all experts: [experts, in, out]
}
FUSED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}  # experts as transformers holds them
MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
PREFIXED = ("gpt2", "falcon")  # published with "transformer." before their names, and without


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One line of a safetensors header, or the part of it that one expert's matrix is."""

    file: Path
    key: str  # as the file spells it
    dtype: str
    shape: tuple[int, ...]
    part: tuple[int, int] | None = None  # of a tensor [num_experts, rows, width]: which expert, from which row on


class FolderTensors:
    """The tensors of a folder, by one spelling. Opening reads and checks headers; tensors are read one at a time."""

    def __init__(self, folder: Path, spec: RunnableSpec) -> None:
        self.where = folder
        self.norm_offset = 1.0 if spec.family == "gemma3" else 0.0
        self._turned = TURNED.get(spec.family, ())
        self._stored: dict[str, StoredTensor] = {}
        for line in read_headers(folder):
            for name, part in parts(spelling(line.key, spec.family), line, spec.family):
                _refuse_two(self._stored.setdefault(name, part), part)
        self._packed = take_packed(self._stored) if spec.family == "gpt_oss" else {}
        for name in self._packed.keys() & self._stored.keys():
            _refuse_two(self._packed[name][0], self._stored[name])
        self._open: dict[Path, Any] = {}  # safetensors handles; each keeps its file mapped
        self.shapes = {
            name: (*line.shape[:-2], *line.shape[:-3:-1]) if name.endswith(self._turned) else line.shape
            for name, line in self._stored.items()
        } | {name: (*codes.shape[:-2], codes.shape[-2] * GROUP) for name, (codes, _) in self._packed.items()}

    def stored_bytes(self, name: str) -> int:
        if name in self._packed:
            return sum(prod(line.shape) for line in self._packed[name])
        line = self._stored[name]
        return prod(line.shape) * VALUE_BYTES.get(line.dtype, 0)

    def read_into(self, name: str, out: Tensor) -> None:
        if name in self._packed:
            codes, scales = self._packed[name]
            decode_mxfp4(self._tensor(codes), self._tensor(scales), out, f"{scales.file}: tensor {scales.key!r}")
            return
        line = self._stored[name]
        if line.dtype not in VALUE_BYTES:
            raise UnknownModelError(
                f"{line.file}: tensor {line.key!r} is stored as {line.dtype}; known: {', '.join(VALUE_BYTES)}; "
                "use an unquantised copy of the model or a GGUF file"
            )
        tensor = self._tensor(line)
        out.copy_(tensor.mT if name.endswith(self._turned) else tensor)

    def _tensor(self, line: StoredTensor) -> Tensor:
        try:
            if line.file not in self._open:
                self._open[line.file] = safe_open(line.file, framework="pt", device="cpu")
            tensor: Tensor
            if line.part is None:
                tensor = self._open[line.file].get_tensor(line.key)
            else:
                expert, row = line.part
                tensor = self._open[line.file].get_slice(line.key)[expert, row : row + line.shape[0]]
            return tensor
        except (SafetensorError, OSError) as error:
            raise BrokenModelError(
                f"{line.file}: tensor {line.key!r} cannot be read ({error}); fetch it again"
            ) from None


def spelling(key: str, family: str) -> str:
    """The one name by which the networks know the tensor that a folder calls ``key``."""
    if family in PREFIXED:
        return key.removeprefix("transformer.")
    key = key.replace(".block_sparse_moe.", ".mlp.").replace(".shared_expert.", ".shared_experts.")
    return re.sub(r"(?<=\.)w[123](?=\.weight$)", lambda found: MIXTRAL[found[0]], key) if ".experts." in key else key


def parts(name: str, line: StoredTensor, family: str) -> Iterator[tuple[str, StoredTensor]]:
    """The tensor itself under ``name``, or each expert's matrices where one tensor holds those of all experts.

    Folders are published with a tensor for each; transformers 5 holds [num_experts, 2 * width, hidden], gates before
    ups, and [num_experts, hidden, width], and writes either. gpt-oss's own stay together, as its network reads them.
    """
    stem, _, fused = name.rpartition(".experts.")
    names = FUSED.get(fused) if stem and len(line.shape) == 3 and family != "gpt_oss" else None
    if names is None or line.shape[1] % len(names):
        yield name, line
        return
    count, rows, width = line.shape
    rows //= len(names)
    for expert in range(count):
        for place, one in enumerate(names):
            part = replace(line, shape=(rows, width), part=(expert, place * rows))
            yield f"{stem}.experts.{expert}.{one}.weight", part


def _refuse_two(one: StoredTensor, other: StoredTensor) -> None:
    """Raise BrokenModelError where two stored tensors claim one place."""
    if one is not other:
        raise BrokenModelError(
            f"{other.file}: tensor {other.key!r} has the place of {one.key!r} in {one.file.name}; "
            "remove the one that is not meant"
        )


def take_packed(stored: dict[str, StoredTensor]) -> dict[str, tuple[StoredTensor, StoredTensor]]:
    """Takes out of ``stored`` the codes and scales of MXFP4 tensors, and gives them by the tensor's name.

    Raises BrokenModelError for codes without fitting scales.
    """
    packed = {}
    for name in [name.removesuffix(CODES) for name in stored if name.endswith(CODES)]:
        codes, scales = stored.pop(name + CODES), stored.pop(name + SCALES, None)
        fits = scales is not None and scales.shape == codes.shape[:-1] and codes.shape[3:] == (BLOCK_BYTES,)
        if scales is None or not fits or (codes.dtype, scales.dtype) != (BYTES, BYTES):
            found = "none" if scales is None else f"{list(scales.shape)} {scales.dtype}"
            raise BrokenModelError(
                f"{codes.file}: tensor {codes.key!r} is {list(codes.shape)} {codes.dtype}, its scales are {found}; "
                f"accepted: [count, rows, groups, {BLOCK_BYTES}] {BYTES} and scales without the last axis; "
                "fetch both again"
            )
        packed[name] = codes, scales
    return packed


def read_headers(folder: Path) -> list[StoredTensor]:
    """Every tensor of the folder's safetensors files; BrokenModelError if a file is missing, cut or inconsistent."""
    if (folder / SINGLE).is_file():
        return read_header(folder / SINGLE)
    if not (folder / INDEX).exists():
        raise BrokenModelError(_nothing_to_read(folder))
    weight_map = _read_index(folder / INDEX)
    shards = sorted(set(weight_map.values()))
    lines: list[StoredTensor] = []
    for number, shard in enumerate(shards, start=1):
        if Path(shard).name != shard or len(shard) > 255 or not (folder / shard).is_file():
            raise BrokenModelError(
                f"{folder / INDEX} names {len(shards)} files; number {number}, {shard[:80]!r}, is not in the folder; "
                "fetch it again"
            )
        lines += read_header(folder / shard)
    held = {(line.file.name, line.key) for line in lines}
    for key, shard in weight_map.items():
        if (shard, key) not in held:
            raise BrokenModelError(
                f"{folder / INDEX} places tensor {key!r} in {shard}, which does not hold it; fetch both again"
            )
    return lines


def read_header(file: Path) -> list[StoredTensor]:
    """The tensors that one safetensors file describes, after checking that the file is as long as it says."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            header_bytes = int.from_bytes(stream.read(8), "little")
            text = stream.read(header_bytes) if header_bytes <= MAX_HEADER_BYTES else b""
    except OSError as error:
        raise BrokenModelError(f"{file} cannot be read: {error.strerror}; check its permissions") from None
    if size < 8 or len(text) < header_bytes:
        raise BrokenModelError(
            f"{file}: {size:,} bytes, too few for a header of {header_bytes:,} bytes; it was cut or is not "
            "a safetensors file; fetch it again"
        )
    try:
        described = {key: value for key, value in json.loads(text).items() if key != "__metadata__"}
        data_bytes = max((int(value["data_offsets"][1]) for value in described.values()), default=0)
        lines = [
            StoredTensor(file, key, str(value["dtype"]), tuple(int(count) for count in value["shape"]))
            for key, value in described.items()
        ]
    except MALFORMED as error:
        message = f"{file}: its header is not that of a safetensors file ({error!r}); fetch it again"
        raise BrokenModelError(message) from None
    if size != 8 + header_bytes + data_bytes:
        raise BrokenModelError(
            f"{file}: its header says {8 + header_bytes + data_bytes:,} bytes, the file has {size:,}; fetch it again"
        )
    return lines


def _read_index(file: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(file.read_bytes())["weight_map"]
        return {str(key): str(shard) for key, shard in weight_map.items()}
    except OSError as error:
        raise BrokenModelError(f"{file} cannot be read: {error.strerror}; check its permissions") from None
    except MALFORMED as error:
        message = f"{file}: no table 'weight_map' can be read from it ({error!r}); fetch it again"
        raise BrokenModelError(message) from None


def _nothing_to_read(folder: Path) -> str:
    pickles = sorted(file.name for file in folder.iterdir() if file.suffix in PICKLES)
    if pickles:
        return (
            f"{folder}: the weights are in {pickles[0]!r}, a pickle, which can run code when read and is refused; "
            "accepted: model.safetensors (load it with transformers where you trust it and save_pretrained it)"
        )
    return f"{folder}: neither {SINGLE} nor {INDEX} is there; fetch the weights, or name another folder"
