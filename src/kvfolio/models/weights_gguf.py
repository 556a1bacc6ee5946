"""Tensors of a GGUF file: names and row orders brought back to those of Hugging Face folders, blocks dequantised.

Knows nothing of networks. Reads through a memory map at the offsets of our own header, a chunk at a time.
"""

import re
from dataclasses import dataclass

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize
from torch import Tensor

from kvfolio.errors import BrokenModelError, UnknownModelError
from kvfolio.spec.gguf.header import TENSOR_TYPES, GgufHeader, check_complete
from kvfolio.spec.model import RunnableSpec

CHUNK_NUMBERS = 1 << 18  # dequantised at once; whole rows of 16 as gguf does it are half as fast
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

LLAMA_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GEMMA3_LAYER = LLAMA_LAYER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
GPT2_LAYER = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
LLAMA_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
GPT2_OUTER = {"token_embd": "wte", "position_embd": "wpe", "output_norm": "ln_f", "output": "lm_head"}
NAMES = {  # family: (tensors outside the layers, how a folder begins a layer's names, tensors of a layer)
    "llama": (LLAMA_OUTER, "model.layers", LLAMA_LAYER),
    "gemma3": (LLAMA_OUTER, "model.layers", GEMMA3_LAYER),
    "gpt2": (GPT2_OUTER, "h", GPT2_LAYER),
}
LAYER_NAME = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)")
ROTATED_ROWS = re.compile(r"blk\.(\d+)\.attn_(q|k)\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """Where one tensor lies in the file and how it is packed."""

    key: str  # as the file spells it
    kind: GGMLQuantizationType
    shape: tuple[int, ...]  # rows first, as in torch
    begin: int  # bytes from the start of the file
    num_bytes: int


class GgufTensors:
    """The tensors of one GGUF file, by the names that a Hugging Face folder gives them."""

    def __init__(self, header: GgufHeader, spec: RunnableSpec) -> None:
        self.where = header.path
        self.norm_offset = 0.0  # llama.cpp stores Gemma's norm weights as they multiply
        # llama.cpp pairs neighbours in rotary positions for this architecture alone, and reorders rows for it.
        self._is_interleaved = header.metadata["general.architecture"] == "llama"
        self._num_q_heads = spec.network.num_q_heads
        self._num_kv_heads = [kind.num_kv_heads for kind in spec.layers]
        self._packed = {spelling(line.key, spec.family): line for line in _lines(header)}
        self._bytes = np.memmap(header.path, dtype=np.uint8, mode="r")
        self.shapes = {name: line.shape for name, line in self._packed.items()}

    def stored_bytes(self, name: str) -> int:
        return self._packed[name].num_bytes

    def read_into(self, name: str, out: Tensor) -> None:
        line = self._packed[name]
        rotated = ROTATED_ROWS.fullmatch(line.key) if self._is_interleaved else None
        if rotated is None:
            self._decode(line, out)
            return
        num_heads = self._num_q_heads if rotated[2] == "q" else self._num_kv_heads[int(rotated[1])]
        stored = torch.empty_like(out)
        self._decode(line, stored)
        out.copy_(halves_paired(stored, num_heads))

    def _decode(self, line: PackedTensor, out: Tensor) -> None:
        data = self._bytes[line.begin : line.begin + line.num_bytes]
        flat = out.view(-1)
        if line.kind.name in PLAIN:
            flat.copy_(torch.from_numpy(np.array(data)).view(PLAIN[line.kind.name]))
            return
        numbers, num_bytes = GGML_QUANT_SIZES[line.kind]  # of one block; a chunk holds whole blocks: powers of two
        for first in range(0, flat.numel(), CHUNK_NUMBERS):
            chunk = flat[first : first + CHUNK_NUMBERS]
            begin = first // numbers * num_bytes
            packed = np.array(data[begin : begin + chunk.numel() // numbers * num_bytes])
            chunk.copy_(torch.from_numpy(dequantize(packed[None, :], line.kind)[0]))


def spelling(key: str, family: str) -> str:
    """The name a Hugging Face folder gives to GGUF's ``key``; a name that is not known stays, to be refused unread."""
    outer, prefix, layer_names = NAMES[family]
    layer = LAYER_NAME.fullmatch(key)
    if layer is not None and layer[2] in layer_names:
        return f"{prefix}.{layer[1]}.{layer_names[layer[2]]}.{layer[3]}"
    stem, _, suffix = key.rpartition(".")
    return f"{outer[stem]}.{suffix}" if stem in outer else key


def halves_paired(rows: Tensor, num_heads: int) -> Tensor:
    """Rows of q or k from llama.cpp's order, where a rotated pair is (2i, 2i + 1), to ours: (i, i + half).

    rows [num_heads * head_width, ...] → the same shape.
    """
    half = rows.shape[0] // num_heads // 2
    return rows.view(num_heads, half, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _lines(header: GgufHeader) -> list[PackedTensor]:
    """The file's tensors; UnknownModelError for a packing that gguf cannot undo, BrokenModelError for a cut file."""
    check_complete(header)
    kinds = {type_id: _kind(type_id) for type_id in {tensor.type_id for tensor in header.tensors}}
    lines = []
    for tensor in header.tensors:
        kind, num_bytes = kinds[tensor.type_id], tensor.num_bytes
        if kind is None or num_bytes is None:
            raise UnknownModelError(
                f"{header.path}: tensor {tensor.name!r} is stored as {tensor.type_name}, which cannot be dequantised; "
                "use another quantisation of the model, such as Q8_0 or Q4_K_M"
            )
        numbers = TENSOR_TYPES[tensor.type_id].block_values
        row = tensor.shape[-1] if tensor.shape else 1
        if row % numbers != 0:
            raise BrokenModelError(
                f"{header.path}: tensor {tensor.name!r} has rows of {row} numbers, and {tensor.type_name} "
                f"packs {numbers} at a time; convert the model again"
            )
        begin = header.data_offset + tensor.offset
        lines.append(PackedTensor(tensor.name, kind, tensor.shape, begin, num_bytes))
    return lines


def _kind(type_id: int) -> GGMLQuantizationType | None:
    """gguf's name for a tensor type, None if it cannot dequantise it: found out by trying on one empty block."""
    try:
        kind = GGMLQuantizationType(type_id)
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), dtype=np.uint8), kind)
    except (ValueError, KeyError, NotImplementedError):
        return None
    return kind
