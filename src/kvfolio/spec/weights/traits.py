"""What a config leaves to the code of its model type: gated or plain feed-forward, biases, norms, tied embeddings.

Knows nothing of sizes. The facts are those of the model classes that published the checkpoints; an unknown type is
read as the Llama family, which most new models follow.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Traits:
    """Facts of a model type. Where a config has a field for one of them, the field wins."""

    gated: bool = True  # three matrices of feed-forward instead of two
    norms: int = 2  # of one layer
    norm_bias: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    qk_norm: str = ""  # head: one norm for all heads; all: as wide as the heads together
    tied: bool = False  # output matrix = embedding, where the config does not say
    feed_forward: bool = True  # a feed-forward part in every layer
    gate: str = ""  # of the attention's output: query (as wide as the queries) or head (one number a head)


_PLAIN = Traits(gated=False, norm_bias=True, qkv_bias=True, o_bias=True, mlp_bias=True)  # as GPT-2 has it
_PLAIN_TIED = Traits(gated=False, norm_bias=True, qkv_bias=True, o_bias=True, mlp_bias=True, tied=True)
_BARE = Traits(gated=False, tied=True)
_TIED = Traits(tied=True)
_QKV = Traits(qkv_bias=True)
_HEAD_NORM = Traits(qk_norm="head")
_GEMMA = Traits(norms=4, qk_norm="head", tied=True)
_GATED = Traits(qk_norm="head", gate="query")
_NO_FEED_FORWARD = Traits(norms=1, feed_forward=False)

_LIKE_BART = (
    *("blenderbot", "blenderbot_small", "bigbird_pegasus", "ctrl", "gpt_sw3", "led", "m2m_100", "marian", "mbart"),
    *("mvp", "openai_gpt", "pegasus", "pegasus_x", "plbart"),
)
_TRAITS = {
    "afmoe": Traits(norms=4, qk_norm="head", gate="query"),
    "apertus": Traits(gated=False, qk_norm="head"),
    "apertus1p5": Traits(gated=False, qk_norm="head"),
    "arcee": Traits(gated=False),
    "bart": _PLAIN_TIED,
    "biogpt": _PLAIN_TIED,
    "bloom": _PLAIN_TIED,
    "codegen": Traits(gated=False, norms=1, norm_bias=True, mlp_bias=True, head_bias=True),
    "cohere": Traits(norms=1, tied=True),
    "cohere2": Traits(norms=1, tied=True),
    "ernie4_5": _TIED,
    "ernie4_5_moe": _TIED,
    "exaone4": _HEAD_NORM,
    "falcon": Traits(gated=False, norm_bias=True, tied=True),
    "falcon_mamba": Traits(norms=1, feed_forward=False, tied=True),
    "gemma": _TIED,
    "gemma2": Traits(norms=4, tied=True),
    "gemma3": _GEMMA,
    "gemma3n": _GEMMA,
    "gemma4_unified": _GEMMA,
    "gemma4": _GEMMA,
    "glm": _QKV,
    "glm4": Traits(norms=4, qkv_bias=True),
    "glm4_moe": _QKV,
    "gpt2": _PLAIN_TIED,
    "gpt_bigcode": _PLAIN_TIED,
    "gpt_neo": Traits(gated=False, norm_bias=True, o_bias=True, mlp_bias=True, tied=True),
    "gpt_neox": _PLAIN,
    "gpt_oss": Traits(qkv_bias=True, o_bias=True, mlp_bias=True),
    "gpt_neox_japanese": _BARE,
    "gptj": Traits(gated=False, norms=1, norm_bias=True, mlp_bias=True, head_bias=True),
    "hunyuan": Traits(qk_norm="head", tied=True),
    "hunyuan_v1_dense": _HEAD_NORM,
    "hunyuan_v1_moe": _HEAD_NORM,
    "jais2": _PLAIN,
    "internlm": Traits(qkv_bias=True, o_bias=True),
    "lfm2": Traits(qk_norm="head", tied=True),
    "lfm2_moe": Traits(qk_norm="head", tied=True),
    "longt5": _BARE,
    "mamba": Traits(norms=1, feed_forward=False, tied=True),
    "mamba2": _NO_FEED_FORWARD,
    "mimo": _QKV,
    "minicpm": _TIED,
    "minicpm3": _TIED,
    "minimax_m2": Traits(qk_norm="all"),
    "minimax_m3_vl": _HEAD_NORM,
    "minimax_m3": _HEAD_NORM,
    "mpt": _BARE,
    "mt5": Traits(),
    "nanochat": Traits(gated=False, norms=0),
    "nemotron": Traits(gated=False, norm_bias=True),
    "nemotron_h": Traits(gated=False, norms=1),
    "nllb_moe": _PLAIN_TIED,
    "olmo": Traits(norms=0),
    "olmo2": Traits(qk_norm="all"),
    "olmo3": Traits(qk_norm="all"),
    "olmoe": Traits(qk_norm="all"),
    "openelm": Traits(qk_norm="head", tied=True),
    "opt": _PLAIN_TIED,
    "persimmon": _PLAIN,
    "phi": Traits(gated=False, norms=1, norm_bias=True, qkv_bias=True, o_bias=True, mlp_bias=True, head_bias=True),
    "phi3small": Traits(norm_bias=True, qkv_bias=True, o_bias=True, mlp_bias=True, tied=True),
    "phimoe": Traits(norm_bias=True, qkv_bias=True, o_bias=True, head_bias=True),
    "qwen": _QKV,
    "qwen2": _QKV,
    "qwen2_5_vl": _QKV,
    "qwen2_audio": _QKV,
    "qwen2_moe": _QKV,
    "qwen2_vl": _QKV,
    "qwen3": _HEAD_NORM,
    "qwen3_5": _GATED,
    "qwen3_5_moe": _GATED,
    "qwen3_moe": _HEAD_NORM,
    "qwen3_next": _GATED,
    "qwen3_vl": _HEAD_NORM,
    "qwen3_vl_moe": _HEAD_NORM,
    "recurrent_gemma": Traits(o_bias=True, mlp_bias=True, tied=True),
    "refinedweb": Traits(gated=False, norm_bias=True, tied=True),
    "refinedwebmodel": Traits(gated=False, norm_bias=True, tied=True),
    "rwkv": Traits(norms=2, norm_bias=True, feed_forward=False),
    "seed_oss": _QKV,
    "smollm3": _TIED,
    "stablelm": Traits(norm_bias=True),
    "starcoder2": _PLAIN_TIED,
    "step3p5": Traits(qk_norm="head", gate="head"),
    "step3p7": Traits(qk_norm="head", gate="head"),
    "switch_transformers": _BARE,
    "t5": _BARE,
    "t5gemma": Traits(norms=4, tied=True),
    "t5gemma2": _GEMMA,
    "t5gemma2_decoder": _GEMMA,
    "umt5": Traits(),
    "vaultgemma": _TIED,
    "whisper": _PLAIN_TIED,
    "xglm": _PLAIN_TIED,
    "youtu": _TIED,
    "zamba": _TIED,
    "zamba2": _TIED,
} | dict.fromkeys(_LIKE_BART, _PLAIN_TIED)


def bare_type(model_type: str) -> str:
    """``model_type`` without what marks the text half of a larger model: gemma3_text → gemma3."""
    return model_type.lower().replace("-", "_").removesuffix("_text")


def traits_of(model_type: str) -> Traits:
    """What is known of ``model_type``; those of the Llama family where nothing is."""
    return _TRAITS.get(bare_type(model_type), _LLAMA)


_LLAMA = Traits()
