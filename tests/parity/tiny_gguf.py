"""A tiny folder model written as a GGUF file, with the renaming and reordering that llama.cpp's converter does.

Knows nothing of kvfolio: it goes from Hugging Face names to GGUF names, the package goes back.
"""

from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType
from tiny import TinyModel

ARCHITECTURES = {"mistral": "llama", "gemma3_text": "gemma3"}  # others keep their model_type
CONV1D = ("c_attn.weight", "c_proj.weight", "c_fc.weight")


def write(tiny: TinyModel, file: Path, kind: GGMLQuantizationType = GGMLQuantizationType.F32) -> Path:
    """Write ``tiny`` with its matrices packed as ``kind``; vectors stay f32, as llama.cpp leaves them."""
    config = tiny.model.config
    architecture = ARCHITECTURES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(file, architecture)
    _write_numbers(writer, config)
    code = next(code for code, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(code, config.num_hidden_layers)
    for key, parameter in tiny.model.named_parameters():  # tied weights come once
        stored = _converted(key, parameter.detach().numpy(), architecture, config)
        packed = gguf.quantize(stored, kind if stored.ndim == 2 else GGMLQuantizationType.F32)
        writer.add_tensor(
            names.get_name(key, (".weight", ".bias")), packed, raw_dtype=kind if stored.ndim == 2 else None
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _write_numbers(writer: gguf.GGUFWriter, config: object) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    if config.model_type == "gpt2":
        writer.add_feed_forward_length(4 * config.hidden_size)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
        return
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if config.model_type == "gemma3_text":
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    else:
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])


def _converted(key: str, stored: np.ndarray, architecture: str, config: object) -> np.ndarray:
    if architecture == "llama" and ".q_proj." in key:
        return interleaved(stored, config.num_attention_heads)
    if architecture == "llama" and ".k_proj." in key:
        return interleaved(stored, config.num_key_value_heads)
    if architecture == "gemma3" and key.endswith("norm.weight"):
        return stored + 1
    if architecture == "gpt2" and key.endswith(CONV1D):
        return np.ascontiguousarray(stored.T)
    return stored


def interleaved(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp's order of the rows of q and k (``permute`` of convert_hf_to_gguf.py)."""
    halves = rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)
