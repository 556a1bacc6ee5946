"""Configs in which the sort of a layer is easily read wrong, trimmed as in ``traps.py``; ``ALL`` has those of both.

Knows nothing of expected results beyond the bytes beside each config.
"""

from traps import GATED_DELTA, HEADS, LATENT, LATENTS, MAMBA2, Config, Trap, plain

NAS_BLOCK: Config = {"n_heads_in_group": 8, "no_op": False, "replace_with_linear": False, "sparsify": None}

# ---- windows --------------------------------------------------------------------------------------------------------

WINDOWS = {
    "every layer": Trap(plain("mistral", 32, 4096, 32, 8, sliding_window=4096), 0, 4096 * 131_072, 131_072),
    "null": Trap(plain("mixtral", 32, 4096, 32, 8, sliding_window=None), 131_072, 0, 131_072),
    "zero": Trap(plain("mistral", 32, 4096, 32, 8, sliding_window=0), 131_072, 0, 131_072),
    "minus one": Trap(plain("mistral", 32, 4096, 32, 8, sliding_window=-1), 131_072, 0, 131_072),
    "left to the class": Trap(plain("mistral", 32, 4096, 32, 8), 0, 4096 * 131_072, 131_072),
    "switched off": Trap(
        plain("qwen2", 28, 3584, 28, 4, sliding_window=131072, use_sliding_window=False), 57_344, 0, 57_344
    ),
    "switched on from a layer on": Trap(
        plain("qwen2", 36, 2048, 16, 2, sliding_window=4096, use_sliding_window=True, max_window_layers=28),
        28 * 1024,
        8 * 4096 * 1024,
        36 * 1024,
    ),
    "no switch, off by default": Trap(plain("qwen3", 36, 2560, 32, 8, sliding_window=2048), 147_456, 0, 147_456),
    "the list wins over the switch": Trap(
        plain("qwen2", 2, 2048, 16, 2, sliding_window=512, use_sliding_window=False)
        | {"layer_types": ["sliding_attention", "full_attention"]},
        1024,
        512 * 1024,
        2048,
    ),
    "a class without windows": Trap(plain("llama", 32, 4096, 32, 8, sliding_window=4096), 131_072, 0, 131_072),
    "every second layer, by the class": Trap(
        plain("gemma2", 42, 3584, 16, 8, head_dim=256, sliding_window=4096), 172_032, 4096 * 172_032, 344_064
    ),
    "five of six, by the class": Trap(
        {
            "model_type": "gemma3",
            "text_config": plain("gemma3_text", 62, 5376, 32, 16, head_dim=128, sliding_window=1024),
        },
        81_920,
        1024 * 425_984,
        507_904,
    ),
    "a class that says almost all": Trap(
        {"model_type": "gemma3", "text_config": {"hidden_size": 2560, "num_hidden_layers": 34, "sliding_window": 1024}},
        5 * 4 * 256 * 4,
        29 * 4 * 256 * 4 * 1024,
        34 * 4 * 256 * 4,
    ),
    "a count": Trap(
        plain("gemma3_text", 26, 1152, 4, 1, head_dim=256, sliding_window=512, sliding_window_pattern=6),
        4096,
        22 * 512 * 1024,
        26 * 1024,
    ),
    "a count under another name": Trap(
        plain("cohere2", 32, 4096, 32, 8, head_dim=128, sliding_window=4096, layer_switch=4),
        32_768,
        4096 * 98_304,
        131_072,
    ),
    "letters": Trap(
        plain("exaone4", 64, 5120, 40, 8, head_dim=128, sliding_window=4096, sliding_window_pattern="LLLG"),
        16 * 4096,
        48 * 4096 * 4096,
        64 * 4096,
    ),
    "letters without a window": Trap(
        plain("exaone4", 30, 2048, 32, 8, sliding_window=None, sliding_window_pattern=None), 61_440, 0, 61_440
    ),
    "a list": Trap(
        plain("gpt_oss", 4, 2880, 64, 8, head_dim=64, sliding_window=128)
        | {"layer_types": ["sliding_attention", "full_attention"] * 2},
        4096,
        128 * 4096,
        8192,
    ),
    "global and local": Trap(
        {
            "model_type": "gpt_neo",
            "num_layers": 24,
            "num_heads": 16,
            "hidden_size": 2048,
            "attention_types": [[["global", "local"], 12]],
            "window_size": 256,
        },
        12 * 8192,
        12 * 256 * 8192,
        24 * 8192,
    ),
    "chunks, by an empty list": Trap(
        {
            "model_type": "llama4",
            "text_config": plain(
                "llama4_text", 48, 5120, 40, 8, head_dim=128, attention_chunk_size=8192, no_rope_layers=[]
            ),
        },
        49_152,
        8192 * 147_456,
        196_608,
    ),
    "wider global heads": Trap(
        {
            "model_type": "gemma4",
            "text_config": plain("gemma4_text", 30, 2816, 16, 8, head_dim=256, sliding_window=1024)
            | {"global_head_dim": 512, "num_global_key_value_heads": 2, "attention_k_eq_v": True},
        },
        20_480,
        1024 * 204_800,
        225_280,
    ),
    "wider global heads and shared layers": Trap(
        {
            "model_type": "gemma4",
            "text_config": plain("gemma4_text", 35, 1536, 8, 1, head_dim=256, sliding_window=512)
            | {
                "global_head_dim": 512,
                "num_kv_shared_layers": 20,
                "layer_types": ([*["sliding_attention"] * 4, "full_attention"] * 7),
            },
        },
        3 * 2048,
        12 * 512 * 1024,
        7 * 2048 + 28 * 1024,
    ),
}

# ---- layers that keep nothing, something else or both ---------------------------------------------------------------

LAYERS = {
    "no attention left": Trap(
        plain("nemotron-nas", 4, 8192, 64)
        | {
            "num_key_value_heads": None,
            "block_configs": [
                {"attention": NAS_BLOCK},
                {"attention": {"no_op": True, "n_heads_in_group": None}},
                {"attention": {"no_op": False, "replace_with_linear": True, "n_heads_in_group": None}},
                {"attention": NAS_BLOCK},
            ],
        },
        8_192,
        0,
        8_192,
    ),
    "the last layers share": Trap(
        plain("gemma3n_text", 35, 2048, 8, 2, head_dim=256, sliding_window=512, num_kv_shared_layers=15)
        | {"layer_types": [*["sliding_attention"] * 4, "full_attention"] * 7},
        8_192,
        512 * 32_768,
        71_680,
    ),
    "the last layers share, all of one width": Trap(
        plain("gemma3n_text", 30, 2048, 8, 2, head_dim=256, num_kv_shared_layers=10)
        | {"layer_types": ["full_attention"] * 30},
        20 * 2048,
        0,
        30 * 2048,
    ),
    "pairs share": Trap(plain("hunyuan", 64, 6400, 80, 8, use_cla=True, cla_share_factor=2), 81_920, 0, 163_840),
    "a factor without the switch": Trap(
        plain("hunyuan_v1_moe", 32, 4096, 32, 8, head_dim=128, use_cla=False, cla_share_factor=2), 131_072, 0, 131_072
    ),
    "a letter for each layer": Trap(
        plain("nemotron_h", 6, 2688, 32, 2, head_dim=128, hybrid_override_pattern="MEM*E-")
        | {"mamba_num_heads": 64, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4},
        1_024,
        2 * 2_134_016,
        1_024,
    ),
    "an interval": Trap(
        plain("qwen3_next", 48, 2048, 16, 2, head_dim=256, full_attention_interval=4, **GATED_DELTA),
        24_576,
        39_518_208,
        24_576,
    ),
    "a period and an offset": Trap(
        plain("jamba", 32, 4096, 32, 8, attn_layer_period=8, attn_layer_offset=4)
        | {"mamba_d_conv": 4, "mamba_d_state": 16, "mamba_expand": 2},
        16_384,
        8_716_288,
        16_384,
    ),
    "a list with states": Trap(
        plain("granitemoehybrid", 4, 4096, 32, 8, layer_types=["mamba", "mamba", "attention", "mamba"], **MAMBA2),
        4_096,
        3 * 77_322_240 // 36,
        4_096,
    ),
    "layers by number": Trap(
        plain("bamba", 4, 4096, 32, 8, attn_layer_indices=[2], **MAMBA2), 4_096, 3 * 77_322_240 // 36, 4_096
    ),
    "layers by number, convolutions": Trap(
        plain("lfm2", 16, 2048, 32, 8, full_attn_idxs=[2, 5, 8, 10, 12, 14], conv_L_cache=3, conv_dim=2048),
        6 * 2048,
        10 * 2 * 2048 * 2,
        6 * 2048,
    ),
    "layers by number from one": Trap(
        {
            "model_type": "kimi_k3",
            "text_config": plain("kimi_linear", 4, 7168, 96, 96, **LATENT)
            | {
                "linear_attn_config": {
                    "full_attn_layers": [4],
                    "kda_layers": [1, 2, 3],
                    "head_dim": 128,
                    "num_heads": 96,
                    "short_conv_kernel_size": 4,
                },
            },
        },
        1_152,
        3 * 449_372_160 // 69,
        96 * 640,
    ),
    "windows and states": Trap(
        plain("recurrent_gemma", 26, 2560, 10, 1, head_dim=256, lru_width=2560, attention_window_size=2048)
        | {"block_types": ["recurrent", "recurrent", "attention"], "conv1d_width": 4},
        0,
        2048 * 8_192 + 460_800,
        8_192,
    ),
    "one flag a layer": Trap(
        plain("minimax_text_01", 8, 6144, 64, 8, head_dim=128, attn_type_list=[0, 0, 0, 0, 0, 0, 0, 1]),
        4_096,
        7 * 64 * 128 * 128 * 2,
        4_096,
    ),
    "attention beside a state": Trap(
        plain("falcon_h1", 36, 1024, 8, 2, head_dim=64, attn_layer_indices=None, mamba_d_ssm=1536, mamba_n_heads=24)
        | {"mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1, "mamba_d_conv": 4},
        18_432,
        14_542_848,
        18_432,
    ),
    "states alone": Trap(
        {
            "model_type": "mamba",
            "hidden_size": 2560,
            "num_hidden_layers": 64,
            "state_size": 16,
            "conv_kernel": 4,
            "intermediate_size": 5120,
            "torch_dtype": "float32",
        },
        0,
        12_451_840,
        0,
    ),
    "layers for pictures": Trap(
        {
            "model_type": "mllama",
            "text_config": plain(
                "mllama_text_model", 40, 4096, 32, 8, cross_attention_layers=[3, 8, 13, 18, 23, 28, 33, 38]
            ),
        },
        131_072,
        0,
        131_072,
    ),
    "an encoder of any length": Trap(
        {"model_type": "t5", "d_model": 512, "d_kv": 64, "num_heads": 8, "num_layers": 6, "is_encoder_decoder": True},
        12_288,
        0,
        12_288,
    ),
    "an encoder of one length": Trap(
        {
            "model_type": "whisper",
            "d_model": 1280,
            "decoder_layers": 32,
            "decoder_attention_heads": 20,
            "encoder_layers": 32,
            "encoder_attention_heads": 20,
            "num_hidden_layers": 32,
            "max_source_positions": 1500,
            "max_target_positions": 448,
        },
        163_840,
        245_760_000,
        163_840,
    ),
    "fewer layers in the decoder": Trap(
        {
            "model_type": "bart",
            "d_model": 1024,
            "encoder_layers": 12,
            "decoder_layers": 6,
            "encoder_attention_heads": 16,
            "decoder_attention_heads": 16,
        },
        6 * 4096,
        0,
        6 * 4096,
    ),
}

ALL = {
    f"{kind}: {name}": trap
    for kind, traps in (("heads", HEADS), ("latents", LATENTS), ("windows", WINDOWS), ("layers", LAYERS))
    for name, trap in traps.items()
}
