"""Reads the headers of safetensors files: which numbers are stored, in which format, and how many bytes they take.

Knows nothing of layers, and never reads a weight. https://github.com/huggingface/safetensors describes the format:
eight bytes with the length of a JSON object, the object, the data.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from kvfolio.errors import BrokenModelError
from kvfolio.spec.model import WeightCount

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000  # the limit of the format
_FLOAT_BITS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16}
_FP8_BITS = {"F8_E4M3": 8, "F8_E5M2": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8}
_OTHER_BITS = {"F8_E8M0": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4, "BOOL": 8, "I8": 8, "U8": 8}
_BITS = _FLOAT_BITS | _FP8_BITS | _OTHER_BITS | {"I16": 16, "U16": 16, "I32": 32, "U32": 32, "I64": 64, "U64": 64}
# What is stored beside the weights: scales of quantised ones, tables and masks that the network can make itself.
_NO_WEIGHT = re.compile(r"_scale$|_scale_inv$|\.inv_freq$|\.masked_bias$|\.position_ids$")
# Routed experts, numbered or fused. Shared ones (shared_experts.) and those of an encoder are no match.
_EXPERTS = re.compile(r"(?!(?:.*\.)?encoder\.)(?:.*\.)?experts\.(?:expert_)?(\d{1,9})?")
_CAUSAL_MASK = re.compile(r"\.attn\.bias$")  # of GPT-2, four axes; elsewhere a bias of that name has one
_PACKED_SHARE = 0.01  # bytes outside of plain and fp8 numbers from which weights count as packed
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")
_MALFORMED = (ValueError, TypeError, KeyError, AttributeError, RecursionError)  # what foreign JSON may raise


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a file. ``dtype`` in the format's own words: BF16, F8_E4M3, U8, …"""

    dtype: str
    shape: tuple[int, ...]
    num_bytes: int

    @property
    def num_values(self) -> int:
        """Stored numbers; of a packed format each may hold several weights."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """What one file, or all shards of a model, hold."""

    where: str  # the file or folder
    tensors: Mapping[str, StoredTensor]
    missing: tuple[str, ...] = ()  # shards that the index names and that are not there
    stated_bytes: int | None = None  # metadata.total_size of the index

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors that were found."""
        return sum(tensor.num_bytes for tensor in self.tensors.values())

    @property
    def num_values(self) -> int:
        """Numbers of all tensors that were found, as stored."""
        return sum(tensor.num_values for tensor in self.tensors.values())

    @property
    def is_packed(self) -> bool:
        """Whether weights are stored in formats that hold several in a number (GPTQ, AWQ, MXFP4, NVFP4)."""
        plain = sum(
            tensor.num_bytes
            for tensor in self.tensors.values()
            if tensor.dtype in _FLOAT_BITS or tensor.dtype in _FP8_BITS
        )
        return self.num_bytes - plain > _PACKED_SHARE * self.num_bytes

    @property
    def num_params(self) -> int:
        """Weights of an unpacked model: plain and fp8 numbers without scales, masks and frequency tables."""
        return _num_weights(self.tensors)


def read_safetensors_header(path: Path) -> SafetensorsHeader:
    """The tensors of a safetensors file, or of a folder: ``model.safetensors``, else the shards of its index.

    Raises BrokenModelError for a file that is cut, malformed or not there. Shards that are not in the folder are named
    in ``missing``.
    """
    return _read_folder(path) if path.is_dir() else _read_file(path)


def holds_safetensors(folder: Path) -> bool:
    """Whether ``read_safetensors_header`` finds a model's weights, or their index, in ``folder``."""
    return any((folder / name).is_file() for name in (SINGLE, INDEX)) or bool(_unindexed(folder))


def exact_weights(counted: WeightCount, header: SafetensorsHeader) -> tuple[WeightCount, tuple[str, ...]]:
    """``counted`` with what the files say in its place, and notes on what they leave open.

    Bytes are exact whatever the format. Of packed weights and of absent shards the number stays the counted one. Routed
    experts are known by their names; where no name says which they are, their share of the bytes stays the counted one.
    """
    notes = []
    num_bytes, is_whole = header.num_bytes, not header.missing and bool(header.tensors)
    if not is_whole:
        if header.missing:
            shown = ", ".join(header.missing[:3]) + (", …" if len(header.missing) > 3 else "")
            notes.append(f"{header.where}: {len(header.missing)} weight files are absent ({shown})")
        if header.stated_bytes is None:
            return counted, (*notes, f"{header.where}: no exact size is known, weights are counted from the config")
        num_bytes = header.stated_bytes
        notes.append(f"bytes of the weights are the total_size of {INDEX}, their number is counted from the config")
    experts = _expert_tensors(header, counted.num_experts) if is_whole and counted.expert_params else {}
    expert_bytes = sum(tensor.num_bytes for tensor in experts.values())
    if not expert_bytes and counted.num_bytes:
        expert_bytes = counted.expert_bytes * num_bytes // counted.num_bytes
    exact = replace(counted, num_bytes=num_bytes, expert_bytes=expert_bytes, source="safetensors")
    if not is_whole or header.is_packed:
        return exact, tuple(notes)
    is_dense = counted.num_active_params == counted.num_params
    num_active = header.num_params if is_dense else counted.num_active_params
    # Those of layers that guess ahead are stored, too: number and bytes of the experts must mean the same tensors.
    expert_params = _num_weights(experts) or counted.expert_params
    exact = replace(exact, num_params=header.num_params, num_active_params=num_active, expert_params=expert_params)
    return exact, tuple(notes)


def parse_header(text: bytes, where: str, data_bytes: int | None) -> dict[str, StoredTensor]:
    """The tensors of the JSON ``text``; ``data_bytes``: of the data behind it, None where that is not known.

    Raises BrokenModelError for text that is no header, and where tensors and data do not have the same size.
    """
    try:
        described = {name: value for name, value in json.loads(text).items() if name != "__metadata__"}
        tensors = {name: _stored(value) for name, value in described.items()}
        spans = sorted((int(value["data_offsets"][0]), int(value["data_offsets"][1])) for value in described.values())
    except (*_MALFORMED, IndexError) as error:
        raise BrokenModelError(
            f"{where}: its header is not that of a safetensors file ({error or type(error).__name__}); fetch it again"
        ) from None
    for name, tensor in tensors.items():
        bits = _BITS.get(tensor.dtype)
        if bits is not None and -(-tensor.num_values * bits // 8) != tensor.num_bytes:
            raise BrokenModelError(
                f"{where}: tensor {name[:80]!r} of {tensor.num_values:,} {tensor.dtype} numbers takes "
                f"{tensor.num_bytes:,} bytes; fetch the file again"
            )
    end = 0
    for start, stop in spans:  # the format allows neither holes nor overlaps
        if start != end:
            raise BrokenModelError(f"{where}: its tensors overlap or leave holes at byte {end:,}; fetch it again")
        end = stop
    if data_bytes is not None and end != data_bytes:
        raise BrokenModelError(
            f"{where}: its header describes {end:,} bytes of tensors, the file has {data_bytes:,}; it was cut, "
            "fetch it again"
        )
    return tensors


def _stored(value: Mapping[str, object]) -> StoredTensor:
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or not isinstance(shape, list) or not isinstance(offsets, list) or len(offsets) != 2:
        raise ValueError("a tensor needs dtype, shape and two data_offsets")
    if not all(isinstance(number, int) and number >= 0 for number in (*shape, *offsets)) or offsets[0] > offsets[1]:
        raise ValueError("shapes and offsets are whole numbers from 0, in order")
    return StoredTensor(dtype, tuple(shape), offsets[1] - offsets[0])


def _read_file(path: Path) -> SafetensorsHeader:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            header_bytes = int.from_bytes(start, "little")
            text = file.read(header_bytes) if header_bytes <= min(size, _MAX_HEADER_BYTES) else b""
    except OSError as error:
        raise BrokenModelError(f"{path} cannot be read: {error.strerror}; check the path and permissions") from error
    if start == b"version ":
        raise BrokenModelError(f"{path} is a git-lfs pointer, not the weights; run: git lfs pull")
    if header_bytes > _MAX_HEADER_BYTES:
        raise BrokenModelError(
            f"{path}: a header of {header_bytes:,} bytes, at most {_MAX_HEADER_BYTES:,} are allowed; it is not a "
            "safetensors file or is damaged: fetch it again"
        )
    if len(start) < 8 or len(text) < header_bytes:
        raise BrokenModelError(
            f"{path}: {size:,} bytes, too few for its header of {header_bytes:,}; it was cut, fetch it again"
        )
    return SafetensorsHeader(str(path), parse_header(text, str(path), size - 8 - header_bytes))


def _read_folder(folder: Path) -> SafetensorsHeader:
    if (folder / SINGLE).is_file():
        return _read_file(folder / SINGLE)
    if (folder / INDEX).is_file():
        shards, stated_bytes = _read_index_file(folder / INDEX)
    else:
        shards, stated_bytes = _unindexed(folder), None
    if not shards:
        raise BrokenModelError(f"{folder} holds neither {SINGLE} nor {INDEX}; give the folder that holds the weights")
    tensors: dict[str, StoredTensor] = {}
    missing = []
    for shard in shards:
        if Path(shard).name == shard and (folder / shard).is_file():
            tensors.update(_read_file(folder / shard).tensors)
        else:
            missing.append(shard[:80])
    return SafetensorsHeader(str(folder), tensors, tuple(missing), stated_bytes)


def _read_index_file(path: Path) -> tuple[tuple[str, ...], int | None]:
    try:
        return read_index(path.read_bytes(), str(path))
    except OSError as error:
        raise BrokenModelError(f"{path} cannot be read: {error.strerror}; check the path and permissions") from error


def read_index(text: bytes, where: str) -> tuple[tuple[str, ...], int | None]:
    """The shards that ``model.safetensors.index.json`` names, sorted, and its total_size in bytes, None if absent."""
    try:
        index = json.loads(text)
        shards = tuple(sorted({str(shard) for shard in index["weight_map"].values()}))
        total = (index.get("metadata") or {}).get("total_size")
    except _MALFORMED as error:
        raise BrokenModelError(
            f"{where}: no table 'weight_map' can be read from it ({error or type(error).__name__}); fetch it again"
        ) from None
    if isinstance(total, int | float) and not isinstance(total, bool) and 0 < total < 2**60:
        return shards, int(total)  # some indices write it as 1.6e10
    return shards, None


def _unindexed(folder: Path) -> tuple[str, ...]:
    """Weight files of a folder without an index: all shards of one model by their names, or the only file there is."""
    names = sorted(path.name for path in folder.glob("*.safetensors") if not path.name.startswith("adapter_"))
    shards = [match for name in names if (match := _SHARD.fullmatch(name))]
    stems = {(match[1], match[3]) for match in shards}
    if len(stems) == 1:
        stem, count = stems.pop()
        numbers = range(1, min(int(count), 10_000) + 1)
        return tuple(f"{stem}-{number:05}-of-{count}.safetensors" for number in numbers)
    return tuple(names) if len(names) == 1 else ()


def _expert_tensors(header: SafetensorsHeader, num_experts: int) -> dict[str, StoredTensor]:
    """The tensors of routed experts, scales included; experts numbered beyond ``num_experts`` are for images."""
    found = {}
    for name, tensor in header.tensors.items():
        match = _EXPERTS.match(name) if "experts." in name else None
        if match is not None and int(match[1] or 0) < num_experts:
            found[name] = tensor
    return found


def _num_weights(tensors: Mapping[str, StoredTensor]) -> int:
    return sum(tensor.num_values for name, tensor in tensors.items() if _is_weight(name, tensor))


def _is_weight(name: str, tensor: StoredTensor) -> bool:
    if tensor.dtype not in _FLOAT_BITS and tensor.dtype not in _FP8_BITS:
        return False
    is_mask = len(tensor.shape) == 4 and _CAUSAL_MASK.search(f".{name}") is not None
    return not is_mask and _NO_WEIGHT.search(name) is None
