"""What llama.cpp knows of an architecture that its GGUF header leaves out, and the words that are refused.

Knows nothing of layers or bytes: tables, and the checks a header must pass before its keys are read. Facts from
llama.cpp's llama-arch.cpp, llama-model.cpp (load_hparams, create_memory) and src/models/*.cpp.
"""

from dataclasses import dataclass

from kvfolio.errors import BrokenModelError, UnknownModelError
from kvfolio.spec.fields import Fields, show
from kvfolio.spec.gguf.header import GgufHeader


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


@dataclass(frozen=True, slots=True)
class WindowRule:
    """Which layers have a window where the header does not say: all but one of every ``period``."""

    period: int  # 0: every layer has a window, 1: none has
    dense_first: bool = False  # the layer without a window stands first of its period, not last
    window: int | None = None  # tokens, where the header leaves them out; None: the header must say
    optional: bool = False  # no window in the header: no layer has one


WINDOW_RULES = {
    "afmoe": WindowRule(4, optional=True),
    "cohere2": WindowRule(4),
    "exaone-moe": WindowRule(4, optional=True),
    "exaone4": WindowRule(4, optional=True),
    "gemma2": WindowRule(2, window=4096),
    "gemma3": WindowRule(6),
    "gemma3n": WindowRule(5),
    "gpt-oss": WindowRule(2),
    "laguna": WindowRule(4, dense_first=True, optional=True),
    "llama4": WindowRule(4, window=8192),
    "olmo2": WindowRule(4, optional=True),
    "plamo3": WindowRule(8, optional=True),
    "smallthinker": WindowRule(4, dense_first=True, optional=True),
}
WINDOW_BY_LIST = frozenset({"gemma4", "mimo2", "step35"})  # their headers must list the layers with a window
CHUNKED = frozenset({"llama4"})  # the window is a piece of the text, cut at its multiples

# Layers that keep a state: all of them, those that a stride leaves, or those with 0 key/value heads.
STATES = {
    "arwkv7": "rwkv",
    "falcon-h1": "mamba2",
    "granitehybrid": "mamba2",
    "jamba": "mamba",
    "kimi-linear": "kda",
    "lfm2": "short_conv",
    "lfm2moe": "short_conv",
    "mamba": "mamba",
    "mamba2": "mamba2",
    "nemotron_h": "mamba2",
    "nemotron_h_moe": "mamba2",
    "plamo2": "mamba2",
    "qwen35": "gated_delta_net",
    "qwen35moe": "gated_delta_net",
    "qwen3next": "gated_delta_net",
    "rwkv6": "rwkv",
    "rwkv6qwen2": "rwkv",
    "rwkv7": "rwkv",
}
STATES_ONLY = frozenset({"arwkv7", "mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7"})
STATES_BESIDE_ATTENTION = frozenset({"falcon-h1"})
STATES_BY_STRIDE = frozenset({"qwen35", "qwen35moe", "qwen3next"})
STATES_WHERE_NO_FEED_FORWARD = frozenset({"nemotron_h", "nemotron_h_moe"})
STATE_KEYS = ("ssm.", "wkv.", "kda.", "shortconv.")

_ENCODERS = _words(
    """bert eurobert gemma-embedding jina-bert-v2 jina-bert-v3 llama-embed modern-bert neo-bert nomic-bert
    nomic-bert-moe t5encoder wavtokenizer-dec"""
)
_DIFFUSION = frozenset({"diffusion-gemma", "dream", "llada", "llada-moe", "rnd1"})
_NO_LANGUAGE_MODEL = {
    "clip": "the vision or audio part of a model (mmproj)",
    "controlvector": "a control vector",
    "imatrix": "an importance matrix",
}
KNOWN = (
    _words(
        """apertus arcee arctic baichuan bailingmoe bailingmoe2 bitnet bloom chameleon chatglm codeshell cogvlm
        cohere2moe command-r dbrx deci deepseek deepseek2 deepseek2-ocr deepseek32 deepseek4 dots1 ernie4_5
        ernie4_5-moe exaone falcon gemma glm-dsa glm4 glm4moe gpt2 gptj gptneox granite granitemoe grok grovemoe
        hunyuan-dense hunyuan-moe hunyuan_vl internlm2 jais jais2 llama maincoder mellum minicpm minicpm3 minimax-m2
        minimax-m3 mistral3 mistral4 mpt nemotron olmo olmoe openelm orion paddleocr pangu-embedded phi2 phi3 phimoe
        plamo plm qwen qwen2 qwen2moe qwen2vl qwen3 qwen3moe qwen3vl qwen3vlmoe refact seed_oss smollm3 stablelm
        starcoder starcoder2 t5 xverse"""
    )
    | WINDOW_RULES.keys()
    | WINDOW_BY_LIST
    | STATES.keys()
)

# A whole number or a list under these groups can decide what a cache holds; those named are known to us, either
# because they are read or because they decide nothing.
_DECIDING = ("attention.", *STATE_KEYS)
_FAMILIAR = frozenset(
    f"attention.{name}"
    for name in _words(
        """causal clamp_kqv decay_lora_rank gate_lora_rank group_norm_epsilon group_norm_groups head_count
        head_count_kv iclr_lora_rank indexer.head_count indexer.key_length indexer.top_k indexer.types key_length
        key_length_mla key_length_swa kv_lora_rank layer_norm_epsilon layer_norm_rms_epsilon max_alibi_bias
        output_scale q_lora_rank recurrent_layers relative_buckets_count scale shared_kv_layers sliding_window
        sliding_window_pattern temperature_length temperature_scale value_length value_length_mla value_length_swa
        value_residual_mix_lora_rank value_scale"""
    )
) | _words(
    """kda.head_dim shortconv.l_cache ssm.conv_kernel ssm.dt_b_c_rms ssm.group_count ssm.inner_size ssm.state_size
    ssm.time_step_rank wkv.head_size"""
)
_FAMILIAR_OF = {
    "deepseek4": frozenset(
        f"attention.{name}"
        for name in ("compress_ratios", "compress_rope_freq_base", "output_group_count", "output_lora_rank")
    ),
    "minimax-m3": frozenset({"attention.indexer.block_size", "attention.indexer.local_blocks"}),
}
_HARMLESS_GROUPS = _words(
    """activation_sparsity_scale altup attention audio classifier kda rope shortconv ssm vision
    wkv xielu"""
)
_GIVE_A_GENERATOR = "give a model that generates text token by token"
_NEEDED = ("block_count", "context_length", "embedding_length", "attention.head_count")


def architecture_word(header: GgufHeader) -> str:
    """The word under ``general.architecture``.

    Raises UnknownModelError for a file that is no language model, BrokenModelError where the word is missing.
    """
    where = str(header.path)
    general = Fields(header.metadata, where, "general.")
    kind = general.text("type") or "model"
    if kind != "model":
        raise UnknownModelError(f"{where} holds a GGUF of type {show(kind)}, not a model; give the model's own file")
    architecture = general.text("architecture")
    if architecture is None:
        raise BrokenModelError(f"{where}: general.architecture is missing; give a GGUF file of a language model")
    if architecture in _NO_LANGUAGE_MODEL:
        raise UnknownModelError(
            f"{where} holds {_NO_LANGUAGE_MODEL[architecture]}, not a language model; give the model's own file"
        )
    return architecture


def architecture_of(header: GgufHeader) -> tuple[str, Fields]:
    """The architecture's word, and a reader of its keys that notes what is assumed.

    Raises as ``architecture_word`` does, and UnknownModelError for a file that keeps no cache and for keys that may
    decide a cache and are not known.
    """
    architecture, where = architecture_word(header), str(header.path)
    fields = Fields(header.metadata, where, f"{architecture}.")
    if not header.tensors and not fields.names("block_count"):
        raise UnknownModelError(f"{where} holds a vocabulary only, no model; give the model's own file")
    _refuse_without_cache(fields, architecture)
    if architecture not in KNOWN:
        _refuse_without_keys(fields, architecture)
        fields.note(f"architecture {show(architecture)} is not known here: read by its standard keys alone")
    _refuse_unfamiliar(fields, architecture)
    return architecture, fields


def _refuse_without_cache(fields: Fields, architecture: str) -> None:
    if architecture in _DIFFUSION:
        raise UnknownModelError(
            f"{fields.where}: {architecture} is a diffusion model: no KV cache; {_GIVE_A_GENERATOR}"
        )
    encodes = f"{architecture} is encoder-only: no KV cache; {_GIVE_A_GENERATOR}"
    if architecture in _ENCODERS:
        raise UnknownModelError(f"{fields.where}: {encodes}")
    if not fields.flag("attention.causal", True):
        raise UnknownModelError(f"{fields.where}: {fields.prefix}attention.causal is false: {encodes}")


def _refuse_without_keys(fields: Fields, architecture: str) -> None:
    """An architecture that is not known must at least describe itself as every other does."""
    missing = [f"{fields.prefix}{key}" for key in _NEEDED if not fields.names(key)]
    if missing:
        raise UnknownModelError(
            f"{fields.where}: architecture {show(architecture)} is not supported, and it cannot be read by its keys "
            f"alone: {', '.join(missing)} missing; use the Hugging Face folder of the model"
        )


def _refuse_unfamiliar(fields: Fields, architecture: str) -> None:
    """Refuse by name a key that may decide what the cache holds and is not known."""
    known = architecture in KNOWN
    familiar = _FAMILIAR | _FAMILIAR_OF.get(architecture, frozenset())
    for full_key, value in fields.values.items():
        key = full_key.removeprefix(fields.prefix)
        if key == full_key or key in familiar:
            continue
        group, dot, _ = key.partition(".")
        deciding = key.startswith(_DECIDING) and not isinstance(value, float | str)
        if known:  # a flag of an architecture that llama.cpp runs changes no size
            deciding = deciding and not isinstance(value, bool)
        elif dot and group not in _HARMLESS_GROUPS:
            deciding = True
        if deciding or (key == "num_loops" and value != 1):
            raise UnknownModelError(
                f"{fields.where}: {full_key} is {show(value)}: not known here, and it may decide what the cache "
                "holds; use the Hugging Face folder of the model"
            )
