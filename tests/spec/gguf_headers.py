"""GGUF metadata of small models of any architecture, for the tests that plan from a header.

Knows nothing of what is expected of them.
"""

from pathlib import Path

from gguf_bytes import BOOL, U32, Items, Tensor, gguf

from kvfolio.spec.gguf.header import read_part
from kvfolio.spec.gguf.layers import spec_from_gguf
from kvfolio.spec.layers import FullAttention, SlidingWindow
from kvfolio.spec.model import ModelSpec

Metadata = dict[str, object]


def planned(folder: Path, metadata: Metadata, tensors: tuple[Tensor, ...]) -> ModelSpec:
    """The spec of a file with this header, written to ``folder``."""
    path = folder / "toy.gguf"
    path.write_bytes(gguf(metadata, tensors))
    return spec_from_gguf(read_part(path))


def model(architecture: str, **changes: object) -> Metadata:
    """A model of 6 layers, 8 query and 2 key/value heads of 16; ``changes`` spell dots as ``__``, None removes."""
    keys: dict[str, object] = {
        "block_count": 6,
        "context_length": 1000,
        "embedding_length": 128,
        "attention.head_count": 8,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-5,
    }
    keys |= {name.replace("__", "."): value for name, value in changes.items()}
    metadata: Metadata = {"general.architecture": architecture}
    return metadata | {f"{architecture}.{key}": value for key, value in keys.items() if value is not None}


def numbers(*values: int) -> Items:
    return Items(U32, values)


def booleans(*values: bool) -> Items:
    return Items(BOOL, values)


FULL = FullAttention(2, 16, 16)


def window(tokens: int) -> SlidingWindow:
    return SlidingWindow(2, 16, 16, tokens)


def deepseek(architecture: str = "deepseek2", **changes: object) -> Metadata:
    """The attention of DeepSeek-V3 with 6 layers."""
    keys: dict[str, object] = {
        "attention__head_count": 128,
        "attention__head_count_kv": 1,
        "attention__kv_lora_rank": 512,
        "attention__key_length": 576,
        "attention__value_length": 512,
        "attention__key_length_mla": 192,
        "attention__value_length_mla": 128,
        "rope__dimension_count": 64,
    }
    return model(architecture, **(keys | changes))


def ssm(kernel: int, inner: int, size: int, groups: int | None = None) -> dict[str, object]:
    keys: dict[str, object] = {"ssm__conv_kernel": kernel, "ssm__inner_size": inner, "ssm__state_size": size}
    return keys | {"ssm__group_count": groups, "ssm__time_step_rank": 8}
