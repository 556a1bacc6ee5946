"""GGUF files written by hand, byte for byte, so that a test can also write a wrong one.

Knows nothing of kvfolio. ``Typed(4, 7)`` is the value 7 of GGUF type 4 (u32); plain values take their usual type.
"""

import struct
from dataclasses import dataclass

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
_CODES = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "?", U64: "Q", I64: "q", F64: "d"}


@dataclass(frozen=True)
class Typed:
    type_id: int
    value: object


@dataclass(frozen=True)
class Items:
    """An array; its elements are plain values or ``Items`` again."""

    type_id: int
    values: tuple[object, ...]


@dataclass(frozen=True)
class Tensor:
    name: str
    shape: tuple[int, ...]  # rows first
    type_id: int = 0
    data: bytes = b""


def text(value: str) -> bytes:
    raw = value.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(raw)) + raw


def payload(type_id: int, value: object) -> bytes:
    if type_id == STRING:
        return text(str(value))
    if type_id == ARRAY:
        assert isinstance(value, Items)
        head = struct.pack("<IQ", value.type_id, len(value.values))
        return head + b"".join(payload(value.type_id, item) for item in value.values)
    return struct.pack("<" + _CODES[type_id], value)


def entry(key: str, value: object) -> bytes:
    kind = value.type_id if isinstance(value, Typed) else usual_type(value)
    return text(key) + struct.pack("<I", kind) + payload(kind, value.value if isinstance(value, Typed) else value)


def usual_type(value: object) -> int:
    if isinstance(value, bool):
        return BOOL
    kinds: dict[type, int] = {int: U32, float: F32, str: STRING, Items: ARRAY}
    return kinds[type(value)]


def gguf(metadata: dict[str, object], tensors: tuple[Tensor, ...] = (), version: int = 3, alignment: int = 32) -> bytes:
    """A whole file; every tensor's data starts at a multiple of ``alignment`` behind the header."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    head += b"".join(entry(key, value) for key, value in metadata.items())
    data = b""
    for tensor in tensors:
        head += text(tensor.name) + struct.pack("<I", len(tensor.shape))
        head += b"".join(struct.pack("<Q", size) for size in reversed(tensor.shape))
        head += struct.pack("<IQ", tensor.type_id, len(data))
        data += tensor.data + b"\0" * (-len(tensor.data) % alignment)
    return head + b"\0" * (-len(head) % alignment) + data


def tiny_llama() -> dict[str, object]:
    """Metadata of a llama with 2 layers, 4 query and 2 key/value heads of 8, and a vocabulary of 3."""
    return {
        "general.architecture": "llama",
        "llama.block_count": 2,
        "llama.context_length": 64,
        "llama.embedding_length": 32,
        "llama.feed_forward_length": 48,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.tokens": Items(STRING, ("a", "b", "c")),
        "tokenizer.ggml.eos_token_id": 2,
    }
