"""A Hugging Face folder written once more, with another config and some tensors longer or shorter: whole or not at all.

Knows nothing of what the change means. Shards, order of tensors, dtypes and metadata stay; what does not change is
copied byte for byte, and memory holds one changed tensor at a time.
"""

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import torch
from torch import Tensor

from kvfolio.errors import BrokenModelError, OptionError
from kvfolio.models.weights import Progress
from kvfolio.models.weights_folder import INDEX, PICKLES, SINGLE, VALUE_BYTES, read_headers
from kvfolio.units import format_bytes

CONFIG = "config.json"
CHUNK_BYTES = 1 << 24  # copied at once
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_WEIGHTS = (
    ".safetensors",
    ".gguf",
    ".onnx",
    ".onnx_data",
    ".h5",
    ".msgpack",
    *PICKLES,
)  # suffixes of what stays behind
_TEMPLATES = "additional_chat_templates"  # the one folder that belongs to a tokenizer


@dataclass(frozen=True, slots=True)
class _Tensor:
    """Where a tensor lies in its file, and how long it becomes."""

    dtype: str
    start: int  # of its bytes in the file
    num_bytes: int
    new_bytes: int


@dataclass(frozen=True, slots=True)
class _Shard:
    """One safetensors file: the header of the new one, and the old one's tensors in the order of their bytes."""

    file: Path
    header: bytes
    tensors: tuple[_Tensor, ...]


class FolderCopy:
    """What is to be written of ``folder``, whose files have been checked. Opening reads headers alone."""

    def __init__(self, folder: Path, config: bytes, growth: Callable[[str], Fraction]) -> None:
        """``config``: the new config.json; ``growth``: by a tensor's name, new rows for each old one."""
        files = dict.fromkeys(line.file for line in read_headers(folder))
        self._shards = [_read_shard(file, growth) for file in files]
        tensors = [tensor for shard in self._shards for tensor in shard.tensors]
        self.old_bytes = sum(tensor.num_bytes for tensor in tensors)  # of all tensors
        self.new_bytes = sum(tensor.new_bytes for tensor in tensors)
        self._texts = {CONFIG: config}
        if not (folder / SINGLE).is_file():
            self._texts[INDEX] = _index_text(folder / INDEX, tensors)
        self._copies = _other_files(folder)
        self._folder = folder

    def write(
        self,
        target: Path,
        change: Callable[[Tensor], Tensor],
        check: Callable[[Path], None],
        on_progress: Progress | None,
    ) -> None:
        """Write all files beside ``target``, let ``check`` look at them, then give them that name.

        ``change``: the numbers of a tensor that grows or shrinks, [num_values] → [new number of values], in its dtype.
        Raises OptionError where they cannot be written, BrokenModelError where they cannot be read.
        """
        pieces: dict[Path, Iterator[bytes | memoryview]] = {
            Path(name): iter([text]) for name, text in self._texts.items()
        }
        sizes = {name: (self._folder / name).stat().st_size for name in self._copies}
        pieces |= {name: _stored(self._folder / name, 0, size) for name, size in sizes.items()}
        pieces |= {Path(shard.file.name): _shard_pieces(shard, change) for shard in self._shards}
        total = sum(sizes.values()) + sum(map(len, self._texts.values())) + self.new_bytes
        total += sum(len(shard.header) for shard in self._shards)
        done = 0
        with _whole_or_none(target, total) as partial:
            for name, written in pieces.items():
                (partial / name).parent.mkdir(exist_ok=True)
                with (partial / name).open("xb") as stream:
                    for piece in written:
                        stream.write(piece)
                        done += len(piece)
                        if on_progress is not None:
                            on_progress(done, total)
            check(partial)


# ---- where it is written --------------------------------------------------------------------------------------------


def free_place(out: str | Path) -> Path:
    """``out`` in full; OptionError if something is there already."""
    try:
        target = Path(out).resolve()
        is_taken = target.exists() and (not target.is_dir() or any(target.iterdir()))
    except (OSError, ValueError, RuntimeError) as error:  # ValueError: a NUL in the name; RuntimeError: a ring of links
        raise _unwritable(Path(out), error) from error
    if target.is_mount():
        raise OptionError(f"{out} is a mount point, and a folder is renamed into place; give a new name inside it")
    if is_taken:
        raise OptionError(f"{out} is there already and is no empty folder; give a new name, or remove it first")
    return target


@contextlib.contextmanager
def _whole_or_none(target: Path, num_bytes: int) -> Iterator[Path]:
    """A new folder beside ``target``, which takes its name at the end; after an error it is gone."""
    partial = target.with_name(f".{target.name}.partial")
    try:
        free = shutil.disk_usage(target.parent).free
        if free < num_bytes:
            raise OptionError(
                f"{target} needs {format_bytes(num_bytes)} ({num_bytes:,} bytes), and {format_bytes(free)} ({free:,} "
                "bytes) are free there; free some, or give a folder on another disk"
            )
        partial.mkdir()
    except FileExistsError:
        raise OptionError(
            f"{partial} is there: another conversion is writing {target.name}, or one was killed; remove that folder "
            "if none is running"
        ) from None
    except OSError as error:
        raise _unwritable(target, error) from error
    try:
        yield partial
        partial.replace(target)
    except OSError as error:
        raise _unwritable(target, error) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _unwritable(target: Path, error: Exception) -> OptionError:
    reason = getattr(error, "strerror", None) or str(error)
    return OptionError(f"{target} cannot be written: {reason}; give a new folder in one that you may write to")


# ---- what is written ------------------------------------------------------------------------------------------------


def _read_shard(file: Path, growth: Callable[[str], Fraction]) -> _Shard:
    """The tensors of ``file``; the new header keeps its order and its metadata."""
    header_bytes = int.from_bytes(b"".join(_stored(file, 0, 8)), "little")
    header = json.loads(b"".join(_stored(file, 8, header_bytes)))
    tensors, end = [], 0
    for name in sorted(header.keys() - {"__metadata__"}, key=lambda name: tuple(header[name]["data_offsets"])):
        line, ratio = header[name], growth(name)
        first, last = line["data_offsets"]
        new_bytes = int((last - first) * ratio)
        if ratio != 1:
            line["shape"][0] = int(line["shape"][0] * ratio)
        line["data_offsets"] = [end, end + new_bytes]
        end += new_bytes
        tensors.append(_Tensor(line["dtype"], 8 + header_bytes + first, last - first, new_bytes))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # the data begins at a multiple of 8, as the library has it
    return _Shard(file, len(text).to_bytes(8, "little") + text, tuple(tensors))


def _shard_pieces(shard: _Shard, change: Callable[[Tensor], Tensor]) -> Iterator[bytes | memoryview]:
    """The new file, piece by piece."""
    yield shard.header
    for tensor in shard.tensors:
        pieces = _stored(shard.file, tensor.start, tensor.num_bytes)
        if tensor.new_bytes == tensor.num_bytes:
            yield from pieces
        else:
            values = torch.frombuffer(bytearray(b"".join(pieces)), dtype=DTYPES[tensor.dtype])  # [num_values]
            yield change(values).view(torch.uint8).numpy().data


def _index_text(file: Path, tensors: list[_Tensor]) -> bytes:
    """The index with its totals changed by what the tensors change."""
    text = b"".join(_stored(file, 0, file.stat().st_size))
    changes = {
        "total_size": sum(tensor.new_bytes - tensor.num_bytes for tensor in tensors),
        "total_parameters": sum((one.new_bytes - one.num_bytes) // VALUE_BYTES[one.dtype] for one in tensors),
    }
    index = json.loads(text)
    totals = index.get("metadata")
    if not any(changes.values()) or not isinstance(totals, dict):
        return text
    for name, change in changes.items():
        if isinstance(totals.get(name), int | float):  # some indices write it as 1.6e10
            totals[name] = int(totals[name]) + change
    return json.dumps(index, indent=2, ensure_ascii=False).encode() + b"\n"


def _other_files(folder: Path) -> list[Path]:
    """What is copied beside config and weights, relative to ``folder``: tokenizer, generation config, licence, …"""
    found = [path for path in sorted(folder.iterdir()) if path.is_file() and not path.name.startswith(".")]
    files = [path for path in found if path.suffix not in _WEIGHTS and not path.name.endswith(".index.json")]
    templates = sorted((folder / _TEMPLATES).glob("*.jinja"))
    return [path.relative_to(folder) for path in (*files, *templates) if path.name != CONFIG]


def _stored(file: Path, start: int, num_bytes: int) -> Iterator[bytes]:
    """``num_bytes`` of ``file`` from ``start``, a chunk at a time; BrokenModelError if they cannot be read."""
    try:
        with file.open("rb") as stream:
            stream.seek(start)
            while num_bytes:
                piece = stream.read(min(num_bytes, CHUNK_BYTES))
                if not piece:
                    raise OSError(0, "it ends too early")
                num_bytes -= len(piece)
                yield piece
    except OSError as error:
        raise BrokenModelError(
            f"{file} cannot be read: {error.strerror}; check its permissions, or fetch it again"
        ) from error
