"""What identifies the stored bits of a cache: one digest of weights, tokenizer, spec, layout and kernels (TI-01).

Computed from contents, never from names or paths. Knows nothing of blocks or of who compares fingerprints.
"""

import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, is_dataclass
from enum import IntEnum, unique
from fnmatch import fnmatchcase
from hashlib import blake2b
from pathlib import Path

import torch

from kvfolio.cache.digest import keyed_digest
from kvfolio.errors import BrokenModelError
from kvfolio.kernels.shapes import LAYOUT_VERSION
from kvfolio.models.weights_folder import read_headers
from kvfolio.spec.layout import CacheLayout
from kvfolio.spec.model import RunnableSpec
from kvfolio.spec.source import ModelSource

PIECE_BYTES = 16 << 20  # so many bytes are one digest; threads take them in turn
READ_BYTES = 1 << 20
MAX_THREADS = 8

# Fields of the spec that change no stored number; a field that is added later counts until it is named here.
NOT_COMPUTED_WITH = frozenset({"name", "dtype", "weights", "assumptions", "eos_token_ids"})
# Files of a folder that can decide which ids a text gets: transformers' names, and sentencepiece under any name.
TOKENIZER_PATTERNS = (
    "tokenizer*.json",  # tokenizer_config.json, and tokenizer.4.0.0.json for one version of transformers
    "*.model",
    "*.tiktoken",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "tekken.json",
)


@unique
class _Part(IntEnum):
    """The types of the fields that are hashed. A number, once used, keeps its meaning."""

    LAYOUT_VERSION = 1
    SPEC = 2
    LAYOUT = 3
    DTYPE = 4
    OPS = 5
    DETERMINISTIC = 6
    TORCH = 7
    WEIGHTS = 8  # digest of one file
    TOKENIZER_CLASS = 9
    TOKENIZER_NAME = 10
    TOKENIZER_FILE = 11  # digest of the file whose name stands before
    FILE_BYTES = 12
    PIECE = 13


def model_fingerprint(
    source: ModelSource, dtype: str, layout: CacheLayout, ops_name: str, deterministic: bool
) -> bytes:
    """32 bytes that are equal where equal tokens leave equal bits in a cache: what cached blocks may be kept under.

    ``dtype``: the compute dtype, resolved. Reads every byte of the model's files. Raises BrokenModelError for a file
    that is missing or cannot be read.
    """
    weights = _weight_files(source)
    tokenizer = _tokenizer_files(source)
    digests = _file_digests([*weights, *tokenizer])
    parts = [
        (_Part.LAYOUT_VERSION, str(LAYOUT_VERSION).encode()),
        (_Part.SPEC, _spec_text(source.spec)),
        (_Part.LAYOUT, _layout_text(layout)),
        (_Part.DTYPE, dtype.encode()),
        (_Part.OPS, ops_name.encode()),
        (_Part.DETERMINISTIC, bytes([deterministic])),
        (_Part.TORCH, str(torch.__version__).encode()),  # the large products are torch's own
        *((_Part.WEIGHTS, digest) for digest in digests[: len(weights)]),
    ]
    if source.config is not None:  # what transformers goes by when tokenizer_config.json names no class
        parts.append((_Part.TOKENIZER_CLASS, _text(source.config.get("tokenizer_class"))))
    for file, digest in zip(tokenizer, digests[len(weights) :], strict=True):
        parts += [(_Part.TOKENIZER_NAME, os.fsencode(file.name)), (_Part.TOKENIZER_FILE, digest)]
    return keyed_digest(b"kvfolio model", parts)


# ---- the spec and the layout ----------------------------------------------------------------------------------------


def _spec_text(spec: RunnableSpec) -> bytes:
    return _text(
        {
            field.name: getattr(spec, field.name)
            for field in fields(spec)
            if field.compare and field.name not in NOT_COMPUTED_WITH
        }
    )


def _layout_text(layout: CacheLayout) -> bytes:
    """What a block of ``layout`` holds, and how; not how many blocks there are."""
    groups = [(group.group, group.fmt, group.num_sinks, group.block_bytes) for group in layout.groups]
    return _text((layout.block_tokens, layout.exact, groups))


def _text(value: object) -> bytes:
    """JSON of plain values and dataclasses; equal texts are equal values, floats to the last bit."""
    return json.dumps(_plain(value), sort_keys=True).encode()


def _plain(value: object) -> object:
    if is_dataclass(value) and not isinstance(value, type):  # two kinds of layers may have equal fields
        return [type(value).__name__, {field.name: _plain(getattr(value, field.name)) for field in fields(value)}]
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value


# ---- the files ------------------------------------------------------------------------------------------------------


def _weight_files(source: ModelSource) -> list[Path]:
    """The files that ``open_weights`` reads, in its order: of two tensors with one name it takes the last."""
    if source.kind == "gguf":
        return [source.path]  # its header has the tokenizer, too
    try:
        return list(dict.fromkeys(tensor.file for tensor in read_headers(source.path)))
    except OSError as error:  # the folder itself is gone
        raise _unreadable(source.path, error) from error


def _tokenizer_files(source: ModelSource) -> list[Path]:
    """Those of a folder, by name. A link to a file that is gone counts, and is refused when it is read."""
    if source.kind == "gguf":
        return []
    try:
        return sorted(
            file
            for file in source.path.iterdir()
            if any(fnmatchcase(file.name, pattern) for pattern in TOKENIZER_PATTERNS)
            and (file.is_file() or file.is_symlink())
        )
    except OSError as error:
        raise _unreadable(source.path, error) from error


def _file_digests(files: Sequence[Path]) -> list[bytes]:
    """One digest a file: its size, and the digests of its pieces in order. All pieces are hashed side by side."""
    sizes = [_size_of(file) for file in files]
    pieces = [
        (file, begin, min(PIECE_BYTES, size - begin))
        for file, size in zip(files, sizes, strict=True)
        for begin in range(0, size, PIECE_BYTES)
    ]
    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as threads:
        done = threads.map(lambda piece: _piece_digest(*piece), pieces)
        return [
            keyed_digest(
                b"kvfolio file",
                [
                    (_Part.FILE_BYTES, str(size).encode()),
                    *((_Part.PIECE, next(done)) for _ in range(0, size, PIECE_BYTES)),
                ],
            )
            for size in sizes
        ]


def _size_of(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError as error:
        raise _unreadable(file, error) from error


def _piece_digest(file: Path, begin: int, num_bytes: int) -> bytes:
    """Of ``num_bytes`` bytes from ``begin`` on. Read, not mapped: a file cut meanwhile would end the process."""
    digest = blake2b(digest_size=32)
    buffer = memoryview(bytearray(min(READ_BYTES, num_bytes)))
    try:
        with file.open("rb", buffering=0) as stream:
            stream.seek(begin)
            while num_bytes:
                count = stream.readinto(buffer[: min(len(buffer), num_bytes)])
                if not count:
                    raise BrokenModelError(f"{file} became shorter while it was read; wait until its copy is complete")
                digest.update(buffer[:count])
                num_bytes -= count
    except OSError as error:
        raise _unreadable(file, error) from error
    return digest.digest()


def _unreadable(file: Path, error: OSError) -> BrokenModelError:
    return BrokenModelError(f"{file} cannot be read: {error.strerror}; check that it is there and its permissions")
