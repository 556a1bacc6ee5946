"""Reads the header of a GGUF file, versions 2 and 3: metadata and tensor table, never the tensors.

Knows nothing of models or of how a tensor type is decoded. It is our own reader because the gguf package refuses
tensor types it does not know, decodes every token of the vocabulary (seconds) and is a third-party import, which
this room has none of. Format: ggml's docs/gguf.md.
"""

import math
import mmap
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeVar

from kvfolio.errors import BrokenModelError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    _BOOL: struct.Struct("<B"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_U32, _U64 = _SCALARS[4], _SCALARS[10]
_MAX_ARRAY_DEPTH = 8  # no file nests deeper than two; a bound keeps a hostile one from exhausting the stack
_MAX_DIMENSIONS = 8  # ggml itself stops at four
_PART = re.compile(r"^(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class TensorType:
    """How ggml stores a tensor: blocks of ``block_values`` numbers, each ``block_bytes`` long."""

    name: str
    block_values: int
    block_bytes: int


TENSOR_TYPES = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    9: TensorType("Q8_1", 32, 40),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    15: TensorType("Q8_K", 256, 292),
    16: TensorType("IQ2_XXS", 256, 66),
    17: TensorType("IQ2_XS", 256, 74),
    18: TensorType("IQ3_XXS", 256, 98),
    19: TensorType("IQ1_S", 256, 50),
    20: TensorType("IQ4_NL", 32, 18),
    21: TensorType("IQ3_S", 256, 110),
    22: TensorType("IQ2_S", 256, 82),
    23: TensorType("IQ4_XS", 256, 136),
    24: TensorType("I8", 1, 1),
    25: TensorType("I16", 1, 2),
    26: TensorType("I32", 1, 4),
    27: TensorType("I64", 1, 8),
    28: TensorType("F64", 1, 8),
    29: TensorType("IQ1_M", 256, 56),
    30: TensorType("BF16", 1, 2),
    34: TensorType("TQ1_0", 256, 54),
    35: TensorType("TQ2_0", 256, 66),
    39: TensorType("MXFP4", 32, 17),
    40: TensorType("NVFP4", 64, 36),
    41: TensorType("Q1_0", 128, 18),
}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One line of the tensor table. A type that is not known here is kept as its number."""

    name: str
    shape: tuple[int, ...]  # rows first, as in torch; the file lists the dimensions the other way round
    type_id: int
    offset: int  # bytes from the header's data_offset

    @property
    def num_values(self) -> int:
        return math.prod(self.shape)

    @property
    def type_name(self) -> str:
        known = TENSOR_TYPES.get(self.type_id)
        return known.name if known is not None else f"type {self.type_id}"

    @property
    def num_bytes(self) -> int | None:
        """Bytes of the stored tensor; None when its type is not known here."""
        known = TENSOR_TYPES.get(self.type_id)
        return None if known is None else math.ceil(self.num_values / known.block_values) * known.block_bytes


@dataclass(frozen=True, slots=True)
class LazyArray:
    """An array of the metadata, left in the file: a vocabulary is skipped until someone asks for its values."""

    element_type: int
    count: int
    path: Path
    offset: int  # of the first element, bytes from the start of the file

    def __len__(self) -> int:
        return self.count

    def values(self) -> tuple[object, ...]:
        """All elements, decoded; an array inside is a LazyArray again. Opens the file each time it is called."""
        return _with_file(self.path, lambda cursor: cursor.elements(self))


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Everything before the tensor data."""

    version: int
    metadata: dict[str, object]  # int, float, bool, str or LazyArray
    tensors: tuple[GgufTensor, ...]
    data_offset: int  # where the tensor data starts, bytes from the start of the file
    alignment: int
    path: Path
    file_bytes: int


def read_header(path: Path) -> GgufHeader:
    """The header of the GGUF file at ``path``.

    Raises BrokenModelError for a file that is missing, cut, big-endian, of another version or one part of several.
    """
    _refuse_part(path)
    return _with_file(path, lambda cursor: cursor.header(whole=True))


def read_part(path: Path) -> GgufHeader:
    """As ``read_header``, and one part of several is read as well: its own tensors, and in the first the metadata."""
    return _with_file(path, lambda cursor: cursor.header(whole=False))


def part_names(path: Path) -> tuple[str, ...]:
    """The file names of all parts, in order, when the name of ``path`` says that it is one of several; else none."""
    match = _PART.match(path.name)
    if match is None or int(match["count"]) < 2:
        return ()
    return tuple(f"{match['stem']}-{n:05}-of-{match['count']}.gguf" for n in range(1, int(match["count"]) + 1))


def check_complete(header: GgufHeader) -> None:
    """Raise BrokenModelError when tensor data ends after the file does; tensors of unknown type are passed over."""
    for tensor in sorted(header.tensors, key=lambda tensor: tensor.offset):
        num_bytes = tensor.num_bytes
        if num_bytes is None:
            continue
        missing = header.data_offset + tensor.offset + num_bytes - header.file_bytes
        if missing > 0:
            raise BrokenModelError(
                f"{header.path} is cut: it ends at byte {header.file_bytes:,}, and tensor {tensor.name!r} lacks "
                f"{min(missing, num_bytes):,} of its {num_bytes:,} bytes; copy or download the file again"
            )


def read_f32(header: GgufHeader, tensor: GgufTensor) -> tuple[float, ...]:
    """The values of a small F32 tensor, such as rotary divisors. Raises BrokenModelError for another type."""
    if tensor.type_name != "F32":
        raise BrokenModelError(f"{header.path}: tensor {tensor.name!r} is {tensor.type_name}; accepted here: F32")
    start = header.data_offset + tensor.offset
    return _with_file(header.path, lambda cursor: cursor.floats(start, tensor.num_values, f"tensor {tensor.name!r}"))


class _Cursor:
    """A position in a mapped file; every read says what it was reading if the file ends there."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data = data
        self._path = path
        self._size = len(data)
        self._at = 0

    def header(self, whole: bool) -> GgufHeader:
        magic = self._data[:4]
        if magic != _MAGIC:
            raise BrokenModelError(
                f"{self._path} is not a GGUF file: it starts with {magic!r}, not {_MAGIC!r}; "
                "download the file itself (a text file here is often a Git LFS pointer or a web page)"
            )
        self._at = 4
        version = self._integer(_U32, "the version")
        self._check_version(version)
        num_tensors = self._integer(_U64, "the number of tensors")
        num_entries = self._integer(_U64, "the number of metadata entries")
        metadata: dict[str, object] = {}
        for index in range(num_entries):
            key = self._key(f"key {index + 1} of {num_entries} of the metadata")
            if key in metadata:
                self._fail(f"metadata key {key!r} stands there twice; convert the model again")
            metadata[key] = self._value(self._integer(_U32, f"metadata {key!r}"), f"metadata {key!r}")
        tensors = tuple(self._tensor(f"tensor {index + 1} of {num_tensors}") for index in range(num_tensors))
        if whole:
            _refuse_split(self._path, metadata)
        if len({tensor.name for tensor in tensors}) < num_tensors:
            self._fail("two tensors have the same name; convert the model again")
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0 or alignment % 8:
            self._fail(f"general.alignment is {alignment!r}; accepted: a positive multiple of 8")
        data_offset = -(-self._at // alignment) * alignment
        return GgufHeader(version, metadata, tensors, data_offset, alignment, self._path, self._size)

    def elements(self, array: LazyArray) -> tuple[object, ...]:
        self._at = array.offset
        what = "an array of the metadata"
        if array.element_type == _STRING:
            return self._strings(array.count, what)
        return tuple(self._value(array.element_type, what) for _ in range(array.count))

    def floats(self, start: int, count: int, what: str) -> tuple[float, ...]:
        self._at = start
        self._skip(4 * count, what)
        return struct.unpack_from(f"<{count}f", self._data, start)

    def _check_version(self, version: int) -> None:
        if version in _VERSIONS:
            return
        if version != 0 and version & 0xFFFF == 0:
            self._fail("it is big-endian; accepted: little-endian GGUF, so convert the model again on this machine")
        self._fail(f"it is GGUF version {version}; accepted: 2 and 3, so convert the model again with a current tool")

    def _value(self, type_id: int, what: str) -> object:
        if type_id == _STRING:
            # Bytes that are not UTF-8 survive as surrogates: vocabularies hold such pieces.
            return self._bytes(what).decode("utf-8", "surrogateescape")
        if type_id == _ARRAY:
            return self._array(what, 1)
        scalar = _SCALARS.get(type_id)
        if scalar is None:
            self._refuse_type(type_id, what)
        value: object = self._scalar(scalar, what)
        if type_id == _BOOL:
            if value not in (0, 1):
                self._fail(f"{what} is a true-or-false value that holds {value}; convert the model again")
            return value == 1
        return value

    def _array(self, what: str, depth: int) -> LazyArray:
        """The array at the cursor, which moves behind its last element without decoding any."""
        if depth > _MAX_ARRAY_DEPTH:
            self._fail(f"{what} nests arrays deeper than {_MAX_ARRAY_DEPTH}; convert the model again")
        element_type = self._integer(_U32, what)
        count = self._integer(_U64, what)
        array = LazyArray(element_type, count, self._path, self._at)
        if element_type == _STRING:
            self._skip_strings(count, what)
        elif element_type == _ARRAY:
            for _ in range(count):
                self._array(what, depth + 1)
        elif element_type in _SCALARS:
            self._skip(count * _SCALARS[element_type].size, what)
        else:
            self._refuse_type(element_type, what)
        return array

    def _tensor(self, what: str) -> GgufTensor:
        name = self._key(f"the name of {what}")
        num_dimensions = self._integer(_U32, what)
        if num_dimensions > _MAX_DIMENSIONS:
            self._fail(f"{what}, {name!r}, has {num_dimensions} dimensions; accepted: up to {_MAX_DIMENSIONS}")
        dimensions = [self._integer(_U64, what) for _ in range(num_dimensions)]
        type_id = self._integer(_U32, what)
        return GgufTensor(name, tuple(reversed(dimensions)), type_id, self._integer(_U64, what))

    # The two loops that run once for every token of a vocabulary; kept free of calls to ourselves.

    def _strings(self, count: int, what: str) -> tuple[str, ...]:
        data, start, unpack = self._data, self._at, _U64.unpack_from
        self._skip_strings(count, what)
        texts = []
        for _ in range(count):
            end = start + 8 + unpack(data, start)[0]
            texts.append(data[start + 8 : end].decode("utf-8", "surrogateescape"))
            start = end
        return tuple(texts)

    def _skip_strings(self, count: int, what: str) -> None:
        data, at, unpack = self._data, self._at, _U64.unpack_from
        try:
            for _ in range(count):
                at += 8 + unpack(data, at)[0]
        except (struct.error, OverflowError):
            at = self._size + 1
        self._at = at
        if at > self._size:
            self._cut(what)

    def _key(self, what: str) -> str:
        raw = self._bytes(what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            self._fail(f"{what} is not UTF-8 text: {raw[:40]!r}; copy or download the file again")

    def _bytes(self, what: str) -> bytes:
        length = self._integer(_U64, what)
        start = self._at
        self._skip(length, what)
        return self._data[start : self._at]

    def _integer(self, scalar: struct.Struct, what: str) -> int:
        return int(self._scalar(scalar, what))

    def _scalar(self, scalar: struct.Struct, what: str) -> int | float:
        start = self._at
        self._skip(scalar.size, what)
        value: int | float = scalar.unpack_from(self._data, start)[0]
        return value

    def _skip(self, num_bytes: int, what: str) -> None:
        self._at += num_bytes
        if self._at > self._size:
            self._cut(what)

    def _cut(self, what: str) -> NoReturn:
        raise BrokenModelError(
            f"{self._path} is cut: it ends at byte {self._size:,}, inside {what}; copy or download the file again"
        )

    def _refuse_type(self, type_id: int, what: str) -> NoReturn:
        self._fail(f"{what} has value type {type_id}; accepted: 0 to 12, so copy or convert the file again")

    def _fail(self, fault: str) -> NoReturn:
        raise BrokenModelError(f"{self._path}: {fault}")


def _with_file(path: Path, read: Callable[[_Cursor], Answer]) -> Answer:
    """``read`` on the mapped file; the map is closed before the answer is returned."""
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):  # a pipe would keep us waiting
            raise BrokenModelError(f"{path} is not a regular file; give the path of a GGUF file")
        with path.open("rb") as file:
            if path.stat().st_size == 0:  # an empty file cannot be mapped
                raise BrokenModelError(f"{path} is cut: it ends at byte 0; copy or download the file again")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return read(_Cursor(data, path))
    except OSError as error:
        raise BrokenModelError(f"{path} cannot be read: {error.strerror}; give the path of a GGUF file") from error


def _refuse_part(path: Path) -> None:
    """Raise BrokenModelError when the name says that ``path`` is one part of a split model."""
    names = part_names(path)
    if not names:
        return
    missing = [name for name in names if not (path.parent / name).is_file()]
    if missing:
        raise BrokenModelError(
            f"{path} is one part of {len(names)}, and {missing[0]} is missing ({len(missing)} in all); "
            "get every part, then merge them: llama-gguf-split --merge FIRST_PART MERGED.gguf"
        )
    raise BrokenModelError(
        f"{path} is one part of {len(names)}; split files must be merged first: "
        f"llama-gguf-split --merge {names[0]} {names[0][: -len('-00001-of-00001.gguf')]}.gguf"
    )


def _refuse_split(path: Path, metadata: dict[str, object]) -> None:
    """Raise BrokenModelError when the metadata says so, though the file was renamed."""
    count, number = metadata.get("split.count", 0), metadata.get("split.no", 0)
    if isinstance(count, int) and isinstance(number, int) and count > 1:
        raise BrokenModelError(
            f"{path} is part {number + 1} of {count} under another name; give all parts their names back "
            f"(…-{number + 1:05}-of-{count:05}.gguf), then merge them: llama-gguf-split --merge FIRST_PART MERGED.gguf"
        )
