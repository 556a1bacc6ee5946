"""Configs in which a size is easily read wrong, each trimmed to the fields that decide it; published values.

Knows nothing of expected results beyond the bytes beside each config: those that one more token takes at 16 bits, and
those that do not grow (windows full, states as vLLM stores them).
"""

from typing import NamedTuple

Config = dict[str, object]


class Trap(NamedTuple):
    """One config, and what it must give at 16 bits."""

    config: Config
    growing: int  # bytes a token behind every window
    fixed: int  # bytes that do not grow there
    naive: int  # bytes a token of a cache that keeps every head of every token


def plain(model_type: str, layers: int, hidden: int, heads: int, kv_heads: int | None = None, **more: object) -> Config:
    """The usual fields under their usual names."""
    config: Config = {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "max_position_embeddings": 32768,
        "torch_dtype": "bfloat16",
    }
    return config | ({} if kv_heads is None else {"num_key_value_heads": kv_heads}) | more


LATENT: Config = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
GATED_DELTA: Config = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
MAMBA2: Config = {
    "mamba_n_heads": 128,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
DEEPSEEK_V3 = plain("deepseek_v3", 61, 7168, 128, 128, **LATENT)

# ---- heads and widths -----------------------------------------------------------------------------------------------

HEADS = {
    "a stated head_dim": Trap(plain("qwen3", 36, 2560, 32, 8, head_dim=128), 147_456, 0, 147_456),
    "a stated head_dim, larger": Trap(plain("qwen3", 64, 5120, 64, 8, head_dim=128), 262_144, 0, 262_144),
    "one key head for each query head": Trap(plain("cohere", 40, 8192, 64, 64), 1_310_720, 0, 1_310_720),
    "old names": Trap({"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12}, 36_864, 0, 36_864),
    "old names and the flag": Trap(
        {"model_type": "gpt_bigcode", "n_layer": 24, "n_embd": 2048, "n_head": 16, "multi_query": True},
        12_288,
        0,
        12_288,
    ),
    "one key head, the flag left to the class": Trap(
        {"model_type": "gpt_bigcode", "n_layer": 40, "n_embd": 6144, "n_head": 48}, 20_480, 0, 20_480
    ),
    "falcon's old architecture": Trap(
        plain("falcon", 32, 4544, 71, multi_query=True, new_decoder_architecture=False), 8_192, 0, 8_192
    ),
    "falcon's new architecture wins over the flag": Trap(
        plain("falcon", 60, 8192, 128, multi_query=True, new_decoder_architecture=True, num_kv_heads=8),
        122_880,
        0,
        122_880,
    ),
    "falcon before its class, one head": Trap(
        {"model_type": "RefinedWebModel", "hidden_size": 4544, "n_head": 71, "n_layer": 32, "multi_query": True},
        8_192,
        0,
        8_192,
    ),
    "falcon before its class, eight heads": Trap(
        {"model_type": "RefinedWeb", "hidden_size": 8192, "n_head": 128, "n_head_kv": 8, "n_layer": 60},
        122_880,
        0,
        122_880,
    ),
    "one head by its type, under the name of GPT-2": Trap(
        {"model_type": "gpt2", "n_layer": 24, "n_embd": 2048, "n_head": 16, "attention_head_type": "multiquery"},
        12_288,
        0,
        12_288,
    ),
    "groups of chatglm": Trap(
        {
            "model_type": "chatglm",
            "num_layers": 28,
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "kv_channels": 128,
            "multi_query_attention": True,
            "multi_query_group_num": 2,
            "seq_length": 8192,
        },
        28_672,
        0,
        28_672,
    ),
    "heads in a mapping": Trap(
        {
            "model_type": "dbrx",
            "d_model": 6144,
            "n_heads": 48,
            "n_layers": 40,
            "max_seq_len": 32768,
            "attn_config": {"clip_qkv": 8, "kv_n_heads": 8},
        },
        163_840,
        0,
        163_840,
    ),
    "a mapping without heads": Trap(
        {
            "model_type": "mpt",
            "d_model": 4096,
            "n_heads": 32,
            "n_layers": 32,
            "max_seq_len": 2048,
            "attn_config": {"attn_type": "multihead_attention"},
        },
        524_288,
        0,
        524_288,
    ),
    "attention groups": Trap(
        {
            "model_type": "step3_vl",
            "text_config": plain("step3_text", 61, 7168, 64, num_attention_groups=1, head_dim=256),
        },
        62_464,
        0,
        62_464,
    ),
    "key and value of different width": Trap(
        plain(
            "mimo_v2_flash",
            48,
            4096,
            64,
            4,
            head_dim=192,
            v_head_dim=128,
            swa_num_key_value_heads=8,
            swa_head_dim=192,
            swa_v_head_dim=128,
            sliding_window=128,
            hybrid_layer_pattern=[int(bool(index) and (index + 1) % 6 != 0) for index in range(48)],
        ),
        23_040,
        128 * 199_680,
        222_720,
    ),
    "heads that differ from layer to layer": Trap(
        plain("openelm", 4, 512, 8, head_dim=64) | {"num_kv_heads": [1, 2, 4, 8]}, 15 * 256, 0, 15 * 256
    ),
    "heads under other numbers for some layers": Trap(
        plain("llama", 4, 512, 8, 4, head_dim=64, per_layer_config={"1": {"num_key_value_heads": 2, "head_dim": 128}}),
        3 * 1024 + 1024,
        0,
        4096,
    ),
    "twice the hidden size": Trap(
        plain(
            "zamba2", 3, 2560, 32, layers_block_type=["mamba", "hybrid", "mamba"], n_mamba_heads=80, mamba_d_state=64
        ),
        32 * 160 * 4,
        3 * (80 * 64 * 64 * 2 + 3 * (5120 + 128) * 2),
        32 * 160 * 4,
    ),
}

# ---- latent vectors and indices -------------------------------------------------------------------------------------

LATENTS = {
    "a latent": Trap(DEEPSEEK_V3, 70_272, 0, 4_997_120),
    "a latent by its fields alone": Trap(DEEPSEEK_V3 | {"model_type": "somebody_v9"}, 70_272, 0, 4_997_120),
    "a latent inside": Trap(
        {"model_type": "kimi_k25", "text_config": DEEPSEEK_V3 | {"model_type": "kimi_k2"}}, 70_272, 0, 4_997_120
    ),
    "a latent without a stated value width": Trap(
        plain("minicpm3", 62, 2560, 40, 40, kv_lora_rank=256, qk_rope_head_dim=32, qk_nope_head_dim=64),
        35_712,
        0,
        793_600,
    ),
    "a latent that is switched off": Trap(
        {
            "model_type": "deepseek_vl_v2",
            "language_config": plain(
                "deepseek_v2",
                12,
                1280,
                10,
                10,
                kv_lora_rank=None,
                qk_nope_head_dim=0,
                qk_rope_head_dim=0,
                v_head_dim=0,
                use_mla=False,
            ),
        },
        61_440,
        0,
        61_440,
    ),
    "an index key": Trap(
        DEEPSEEK_V3 | {"model_type": "deepseek_v32", "index_head_dim": 128, "index_topk": 2048, "index_n_heads": 64},
        85_888,
        0,
        4_997_120,
    ),
    "index keys that some layers share": Trap(
        plain("glm_moe_dsa", 8, 6144, 64, 64, head_dim=192, index_head_dim=128, index_topk=2048, **LATENT)
        | {"indexer_types": ["full", "full", "full", "shared", "shared", "shared", "full", "shared"]},
        8 * 1152 + 4 * 256,
        0,
        8 * 64 * 2 * 320,
    ),
    "index keys that some layers share, as numbers": Trap(
        plain("glm_moe_dsa", 8, 6144, 64, 64, index_head_dim=128, index_topk=2048, index_topk_freq=4, **LATENT)
        | {"index_skip_topk_offset": 3},
        8 * 1152 + 4 * 256,
        0,
        8 * 64 * 2 * 320,
    ),
    "two latents a layer": Trap(
        {
            "model_type": "longcat_flash",
            "num_layers": 28,
            "hidden_size": 6144,
            "num_attention_heads": 64,
            "max_position_embeddings": 131072,
            **LATENT,
        },
        56 * 1152,
        0,
        56 * 64 * 640,
    ),
    "compressed vectors": Trap(
        plain("deepseek_v4", 43, 4096, 64, 1, head_dim=512, index_head_dim=128, index_topk=512, sliding_window=128)
        | {"compress_ratios": [0, 0, *[4, 128] * 20, 4, 0], "num_nextn_predict_layers": 1},
        6_880,
        128 * 44_032,
        88_064,
    ),
    "blocks chosen by an index": Trap(
        plain(
            "minimax_m3",
            60,
            6144,
            64,
            4,
            head_dim=128,
            sparse_attention_config={
                "use_sparse_attention": True,
                "sparse_attention_freq": [0, 0, 0, *[1] * 57],
                "sparse_block_size": 128,
                "sparse_index_dim": 128,
                "sparse_topk_blocks": 16,
            },
        ),
        60 * 2048 + 57 * 256,
        0,
        60 * 2048,
    ),
}
