"""Weights counted from configs, against the networks that transformers builds on the meta device.

Knows nothing of published counts. Every class is taken at its own default sizes, unless those make no network.
"""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from kvfolio.spec.config.families import spec_from_config

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.20")

TOLERANCE = 0.01
SHARED = Path(__file__).resolve().parents[3] / "shared" / "configs"
TEXT = """
    afmoe apertus arcee bailing_hybrid bamba biogpt bitnet bloom codegen cohere cohere2 cwm deepseek_v2 deepseek_v3
    deepseek_v32 deepseek_v4 diffllama ernie4_5 ernie4_5_moe exaone4 falcon falcon_h1 falcon_mamba gemma gemma2
    gemma3_text gemma3n_text glm glm4 glm4_moe_lite glm_moe_dsa gpt2 gpt_bigcode gpt_neo gpt_neox gpt_oss gptj granite
    granitemoe granitemoehybrid granitemoeshared helium jais2 jamba kimi_linear lfm2 llama llama4_text mamba mamba2
    mimo_v2_flash minicpm3 minimax minimax_m2 ministral3 mistral mixtral mpt nanochat nemotron_h olmo olmo2 olmo3
    olmo_hybrid olmoe opt persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe
    qwen3_next recurrent_gemma rwkv seed_oss smollm3 solar_open stablelm starcoder2 vaultgemma xglm youtu zamba zamba2
"""
IMAGES = "gemma3 gemma4 glm4v kimi_k25 llama4 mistral3 mllama qwen2_5_vl qwen2_vl qwen3_5 qwen3_vl qwen3_vl_moe"
ENCODERS = "bart longt5 m2m_100 mbart mt5 nllb-moe pegasus switch_transformers t5 t5gemma t5gemma2 umt5"
# Files that are trimmed or hold values from memory, so that a class's own defaults would be compared with guesses.
UNLIKE = {"google__gemma-3n-E4B-it", "openai__whisper-large-v3"}
OLD_NAMES = {"kimi_k2": "deepseek_v3"}


def network_size(config: Any, auto: str) -> int:
    """Numbers of all parameters of the network that ``auto`` builds, tied ones once."""
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = getattr(transformers, auto)._model_mapping[type(config)]
        model = model[0] if isinstance(model, tuple) else model
        network = model(config)
        network.tie_weights()
    return sum(parameter.numel() for parameter in network.parameters())


def counted(config: dict[str, Any]) -> int:
    return spec_from_config(config, "test").weights.num_params


def default_config(model_type: str) -> Any:
    mapping = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    if model_type not in mapping:
        pytest.skip(f"this transformers has no {model_type}")
    return mapping[model_type]()


@pytest.mark.parametrize(
    ("model_type", "auto"),
    [(name, "AutoModelForCausalLM") for name in TEXT.split()]
    + [(name, "AutoModelForImageTextToText") for name in IMAGES.split()]
    + [(name, "AutoModelForSeq2SeqLM") for name in ENCODERS.split()],
)
def test_weights_are_those_of_the_network(model_type: str, auto: str) -> None:
    config = default_config(model_type)
    written = json.loads(config.to_json_string(use_diff=False))
    assert counted(written) == pytest.approx(network_size(config, auto), rel=TOLERANCE)


@pytest.mark.parametrize("path", sorted(SHARED.glob("*__*.json")), ids=lambda path: path.stem)
def test_weights_of_published_configs_are_those_of_the_network(path: Path) -> None:
    written = json.loads(path.read_text())
    known = OLD_NAMES.get(written["model_type"], written["model_type"])
    mapping = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    if path.stem in UNLIKE or known not in mapping or known == "bert":
        pytest.skip("no class that reads this file as it is meant, or no cache")
    plain = {key: value for key, value in written.items() if key not in ("auto_map", "quantization_config")}
    config = mapping[known].from_dict(plain | {"model_type": known})
    auto = "AutoModelForCausalLM"
    for name in ("AutoModelForImageTextToText", "AutoModelForSeq2SeqLM"):
        if type(config) in getattr(transformers, name)._model_mapping:
            auto = name
    assert counted(written) == pytest.approx(network_size(config, auto), rel=TOLERANCE)
