"""Every text model that transformers has, planned from a config and held against its own cache on the meta device.

    python benchmarks/verify_classes.py [--variant default|bare|odd] [model_type …]

One line a model: equal, explained, UNEXPLAINED, refused (by the planner) or not loadable (by transformers). The
configs are the classes' defaults in full; ``bare``: the model_type alone, everything else left to the planner's
knowledge of defaults; ``odd``: with values changed so that fields which often agree do not.
"""

import argparse
import json
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator

import transformers
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from kvfolio.engine.verify import Verification, verify
from kvfolio.errors import KvfolioError
from kvfolio.spec.config.families import spec_from_config

SECONDS = 60  # a model
MAPPINGS = (
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)


# Where a class's defaults are no model at all: what published files say, by path.
PUBLISHED: dict[str, dict[str, object]] = {
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "dbrx": {"attn_config": {"kv_n_heads": 8, "clip_qkv": 8.0, "rope_theta": 500000.0}},
    "deepseek_v2": {"num_experts_per_tok": 6, "n_group": 8, "topk_group": 3},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6},
    "glm46v": {"text_config.rope_parameters.partial_rotary_factor": 0.5},
    "glm4_moe": {"head_dim": 128},
    "glm4v": {"text_config.rope_parameters.partial_rotary_factor": 0.5},
    "glm4v_moe": {"text_config.head_dim": 128, "text_config.rope_parameters.partial_rotary_factor": 0.5},
    "glmga": {"text_config.rope_parameters.partial_rotary_factor": 0.5},
    "granitemoehybrid": {"layer_types": (["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 3 + ["mamba"] * 2},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "hunyuan_vl": {"text_config.head_dim": 128},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "qwen3_omni_moe": {"thinker_config.text_config.head_dim": 128},
    "qwen3_omni_moe_thinker": {"text_config.head_dim": 128},
}


def model_types() -> list[str]:
    """Every model_type with a class that writes text."""
    return sorted({name for mapping in MAPPINGS for name in mapping if name in CONFIG_MAPPING})


def default_config(model_type: str) -> dict[str, object]:
    """The class's defaults as a config.json would say them."""
    config = CONFIG_MAPPING[model_type]()
    values = json.loads(config.to_json_string(use_diff=False))
    values = {name: value for name, value in values.items() if value is not None} | {"model_type": model_type}
    for path, value in PUBLISHED.get(model_type, {}).items():
        *parents, name = path.split(".")
        part = values
        for parent in parents:
            part = part[parent]
        part[name] = value
    return values


WINDOWS = ("sliding_window", "attention_window_size", "attention_chunk_size", "sliding_window_size", "window_size")
WIDER = ("kv_lora_rank", "index_head_dim", "global_head_dim", "v_head_dim", "linear_value_head_dim")
STATES = ("state_size", "ssm_state_size", "mamba_d_state")
KERNELS = ("conv_kernel", "linear_conv_kernel_dim", "mamba_d_conv", "conv_kernel_size", "conv_L_cache")
PARTS = ("text_config", "decoder", "llm_config", "thinker_config")


def odd(values: dict[str, object]) -> dict[str, object]:
    """Values that often agree, changed so that they differ: heads, widths, windows, states. Layers stay as many."""
    numbers = {name: value for name, value in values.items() if type(value) is int and value > 0}
    changed = dict(values)
    heads, kv_heads = numbers.get("num_attention_heads", 0), numbers.get("num_key_value_heads")
    latent, sections = "kv_lora_rank" in numbers, "mrope_section" in json.dumps(values)
    if kv_heads is not None and heads % 4 == 0 and not latent:
        changed["num_key_value_heads"] = heads // 4 if kv_heads != heads // 4 else heads // 2
    if "head_dim" in numbers and not latent and not sections:
        changed["head_dim"] = numbers["head_dim"] + 32
    changed |= {name: 96 for name in WINDOWS if name in numbers}
    changed |= {name: numbers[name] + 32 for name in WIDER if name in numbers}
    changed |= {name: numbers[name] * 2 for name in STATES if name in numbers}
    changed |= {name: numbers[name] + 2 for name in KERNELS if name in numbers}
    return changed | {name: odd(values[name]) for name in PARTS if isinstance(values.get(name), dict)}


def windows(values: object) -> Iterator[int]:
    """Every window or chunk length that a config names."""
    for name, value in values.items() if isinstance(values, dict) else ():
        if isinstance(value, dict):
            yield from windows(value)
        elif ("window" in name or "chunk_size" in name) and type(value) is int and "vision" not in name:
            yield value


def check(model_type: str, variant: str) -> tuple[str, str]:
    """(outcome, details) of one model."""
    try:
        full = default_config(model_type)
    except Exception as error:
        return "no config", f"{type(error).__name__}: {error}"
    config = {"model_type": model_type} if variant == "bare" else odd(full) if variant == "odd" else full
    num_tokens = max([300, *(length + 50 for length in windows(full) if length <= 8192)]) if variant != "odd" else 300
    try:
        spec = spec_from_config(config, model_type)
    except KvfolioError as error:
        return "refused", str(error)
    signal.alarm(SECONDS)
    try:
        return outcome(verify(spec, config, num_tokens))
    except _TooLong:
        return "not loadable", f"took longer than {SECONDS} s"
    finally:
        signal.alarm(0)


def outcome(result: Verification) -> tuple[str, str]:
    """One word for a verification, and its differences."""
    if result.measured is None:
        return "not loadable", result.not_verified or ""
    details = "; ".join(f"{count} layers {why.num_bytes:+,} B: {why.reason}" for why, count in result.differences())
    word = "equal" if not details else "explained" if result.verdict else "UNEXPLAINED"
    kinds = Counter(layer.planned_kind for layer in result.layers)
    shape = " ".join(f"{count} {kind}" for kind, count in kinds.items())
    return word, f"{result.measured.class_name}, {result.num_tokens} tokens, {shape}. {details}"


class _TooLong(BaseException):
    """Not an Exception: whoever tries the next way after an error must not catch it."""


def _too_long(*_: object) -> None:
    raise _TooLong


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--variant", choices=("default", "bare", "odd"), default="default")
    parser.add_argument("model_types", nargs="*")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    signal.signal(signal.SIGALRM, _too_long)
    counts: Counter[str] = Counter()
    for model_type in options.model_types or model_types():
        started = time.perf_counter()
        try:
            word, details = check(model_type, options.variant)
        except Exception as error:  # a bug of ours: named, and the sweep goes on
            word, details = "FAILED", f"{type(error).__name__}: {error}"
        counts[word] += 1
        print(f"{word:13} {model_type:28} {time.perf_counter() - started:5.1f} s  {details}", flush=True)
    print(", ".join(f"{count} {word}" for word, count in counts.most_common()), file=sys.stderr)


if __name__ == "__main__":
    main()
