"""Whatever field a config lacks, its sizes are the same, or what was assumed is noted, or it is refused.

Knows nothing of what the sizes should be; those stand in ``traps.py``, the catalogue and the files they came from.
"""

import copy
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from traps import DEEPSEEK_V3, LATENT, Config, plain
from traps_layers import ALL, LAYERS

from kvfolio.errors import BrokenModelError, SpecError
from kvfolio.spec.catalogue import catalogue
from kvfolio.spec.config.families import spec_from_config
from kvfolio.spec.formats import BF16, CacheFormat
from kvfolio.spec.model import ModelSpec

CONFIGS = Path(__file__).resolve().parents[3] / "shared" / "configs"
FILES = sorted(path for path in CONFIGS.glob("*.json") if path.name != "truth.json")
BYTES16 = CacheFormat(BF16, BF16)
# Fields whose absence says something by itself: a checkpoint that is not quantised, a layer without values of its own.
MEANINGFUL = {"quantization_config", "per_layer_config", "indexer_types", "attention_head_type"}
# Notes that name a rule or another spelling instead of the absent field.
RULES = {
    "torch_dtype": "dtype is absent",
    "group_0": "config_groups is absent or empty",
    "layer_types": "use_sliding_window is off",
    "model_type": "model_type is absent",
}
PATTERN = "no list of layer types: the pattern of model_type"
UNCOUNTED = "weights are not counted"


def read(config: Mapping[str, object]) -> ModelSpec:
    return spec_from_config(dict(config), "model")


def notes_of(config: Mapping[str, object]) -> str:
    return "\n".join(read(config).assumptions)


def cache_bytes(spec: ModelSpec) -> int:
    return sum(layer.bytes_at(40_000, BYTES16) for layer in spec.layers)


def without(config: Mapping[str, object], *path: str) -> Config:
    left = copy.deepcopy(dict(config))
    inner = left
    for name in path[:-1]:
        found = inner[name]
        assert isinstance(found, dict)
        inner = found
    del inner[path[-1]]
    return left


def paths_of(config: Mapping[str, object], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, value in config.items():
        path = (*above, name)
        if MEANINGFUL & set(path) and path[-1] not in ("quant_method", "config_groups"):
            continue
        yield path
        if isinstance(value, dict):
            yield from paths_of(value, path)


def is_told(name: str, notes: set[str]) -> bool:
    named = "model_type is absent" if name == "model_type" else name  # most notes say whose default they name
    return any(named in note or RULES.get(name, PATTERN) in note or PATTERN in note for note in notes)


def silent_deletions(config: Mapping[str, object]) -> list[str]:
    """The fields without which the sizes are others and nothing says so."""
    whole, found = read(config), []
    for path in paths_of(config):
        try:
            spec = read(without(config, *path))
        except SpecError:
            continue
        notes = set(spec.assumptions) - set(whole.assumptions)
        before, after = whole.weights, spec.weights
        same_weights = any(UNCOUNTED in note for note in spec.assumptions) or (
            after.num_params == pytest.approx(before.num_params, rel=0.01)
            and after.num_bytes == pytest.approx(before.num_bytes, rel=0.01)
        )
        same = cache_bytes(spec) == cache_bytes(whole) and same_weights
        if not same and not is_told(path[-1], notes):
            found.append(".".join(path))
    return found


@pytest.mark.parametrize("name", ALL)
def test_no_field_of_a_trap_is_missed_in_silence(name: str) -> None:
    assert silent_deletions(ALL[name].config) == []


@pytest.mark.parametrize("name", catalogue())
def test_no_field_of_a_published_config_is_missed_in_silence(name: str) -> None:
    assert silent_deletions(catalogue()[name].config) == []


@pytest.mark.skipif(not FILES, reason="no folder of configs beside the checkout")
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_no_field_of_a_complete_file_is_missed_in_silence(path: Path) -> None:
    config = json.loads(path.read_bytes())
    if config["model_type"] != "bert":  # refused whatever it holds
        assert silent_deletions(config) == []


@pytest.mark.parametrize("name", catalogue())
def test_a_published_config_of_the_catalogue_leaves_nothing_to_assume(name: str) -> None:
    assert not any("is absent" in note for note in read(catalogue()[name].config).assumptions)


# ---- refused --------------------------------------------------------------------------------------------------------

KIMI_K2 = plain("kimi_k2", 61, 7168, 64, 64, **LATENT)
HYBRIDS = {
    "nemotron_h": "hybrid_override_pattern",
    "minimax_text_01": "attn_type_list",
    "minimax_m1": "attn_type_list",
    "minimax_m3": "sparse_attention_config",
    "nemotron-nas": "block_configs",
    "bailing_moe_linear": "layer_group_size",
    "lfm2_moe": "layer_types",
    "plamo2": "layers_block_type",
}


@pytest.mark.parametrize("model_type", HYBRIDS)
def test_a_hybrid_without_its_list_of_layers_is_refused_by_the_lists_name(model_type: str) -> None:
    with pytest.raises(BrokenModelError, match=f"{HYBRIDS[model_type]} is missing"):
        read(plain(model_type, 8, 2048, 16, 4))


@pytest.mark.parametrize("model_type", ["kimi_k2", "deepseek", "somebody_v9"])
def test_a_latent_without_a_rank_is_no_plain_head(model_type: str) -> None:
    config = KIMI_K2 | {"model_type": model_type}
    with pytest.raises(BrokenModelError, match="kv_lora_rank is missing"):
        read(without(config, "kv_lora_rank"))
    with pytest.raises(BrokenModelError, match="kv_lora_rank is missing"):
        read(config | {"kv_lora_rank": None})
    with pytest.raises(BrokenModelError, match="kv_lora_rank is 0; accepted"):
        read(config | {"kv_lora_rank": 0})


def test_a_rank_that_a_class_knows_is_taken_from_it() -> None:
    config = without(plain("deepseek_v2", 60, 5120, 128, 128, **LATENT), "kv_lora_rank")
    assert "kv_lora_rank is absent: 512 assumed, the default of model_type deepseek_v2" in notes_of(config)
    assert cache_bytes(read(config)) == 60 * 1152 * 40_000


# ---- noted ----------------------------------------------------------------------------------------------------------


def test_an_interval_that_is_absent_is_the_classs_whatever_the_switch_of_windows_says() -> None:
    config = LAYERS["an interval"].config | {"use_sliding_window": False}
    bare = without(config, "full_attention_interval")
    assert read(bare).layers == read(config).layers
    assert f"{PATTERN} qwen3_next assumed" in notes_of(bare)


def test_a_field_inside_a_mapping_has_the_default_of_the_class_of_that_mapping() -> None:
    config = ALL["heads: heads in a mapping"].config
    for bare in (without(config, "attn_config", "kv_n_heads"), without(config, "attn_config")):
        assert "kv_n_heads is absent: 1 assumed, the default of model_type dbrx" in notes_of(bare)
        assert {layer.num_kv_heads for layer in read(bare).layers} == {1}
    with pytest.raises(BrokenModelError, match="kv_n_heads is missing"):
        read(config | {"attn_config": {"kv_n_heads": None}})


@pytest.mark.parametrize("model_type", ["llama", "olmo2", "cohere2", "granite", "recurrent_gemma"])
def test_one_key_head_for_each_query_head_is_noted_where_the_class_knows_fewer(model_type: str) -> None:
    notes = notes_of(plain(model_type, 4, 2048, 16, head_dim=128))
    assert f"num_key_value_heads is absent: one for each of the 16 query heads, as model_type {model_type}" in notes


@pytest.mark.parametrize("model_type", ["gpt2", "opt", "bloom", "gpt_neox"])
def test_nothing_is_noted_of_key_heads_where_the_class_has_no_field_for_them(model_type: str) -> None:
    assert "query heads" not in notes_of(plain(model_type, 4, 2048, 16))


def test_a_number_of_key_heads_that_is_null_is_stated() -> None:
    assert "query heads" not in notes_of(plain("llama", 4, 2048, 16, num_key_value_heads=None))


@pytest.mark.parametrize(
    ("config", "note"),
    [
        (
            plain("falcon", 60, 8192, 128, num_kv_heads=8),
            "new_decoder_architecture is absent: False assumed",
        ),
        (plain("falcon", 60, 8192, 128, new_decoder_architecture=True), "num_kv_heads is absent: one for each of"),
        (plain("phi3", 32, 3072, 32, 32), "sliding_window is absent: no window, as model_type phi3 assumes"),
        (plain("falcon_h1", 4, 1024, 8, 2), "head_dim is absent: 128 assumed"),
        (plain("mistral", 40, 5120, 32, 8), "head_dim is absent: 160 assumed"),
        (plain("granitemoehybrid", 4, 4096, 32, 8), f"{PATTERN} granitemoehybrid assumed"),
        (plain("hunyuan", 64, 6400, 80, 8, cla_share_factor=2), "use_cla is absent: off assumed"),
        (plain("hunyuan", 64, 6400, 80, 8, use_cla=True), "cla_share_factor is absent: 1 assumed"),
        (plain("step3_text", 61, 7168, 64, 1), "head_dim is absent: 256 assumed, the default of model_type step3_text"),
        (
            plain("gemma4_text", 12, 2816, 16, 8, attention_k_eq_v=True),
            "num_global_key_value_heads is absent: num_key_value_heads assumed",
        ),
        (plain("chatglm", 28, 4096, 32, multi_query_group_num=2), "multi_query_attention is absent: off assumed"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_is_assumed_for_an_absent_field_is_noted(config: Config, note: str) -> None:
    assert note in notes_of(config)


# ---- weights --------------------------------------------------------------------------------------------------------

SIZES: Config = {"vocab_size": 129280, "intermediate_size": 18432, "tie_word_embeddings": False}
EXPERTS: Config = {
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
}
MOE = DEEPSEEK_V3 | SIZES | EXPERTS
REMOTE_MOE = MOE | {"model_type": "kimi_k2"}


def test_first_layers_without_experts_are_the_classs_where_the_config_is_silent() -> None:
    bare = without(MOE, "first_k_dense_replace")
    assert "first_k_dense_replace is absent: 3 assumed" in notes_of(bare)
    assert read(bare).weights == read(MOE).weights
    assert "first_k_dense_replace is absent" in notes_of(without(REMOTE_MOE, "first_k_dense_replace"))


def test_experts_without_a_width_of_their_own_are_noted() -> None:
    assert "moe_intermediate_size is absent" in notes_of(without(REMOTE_MOE, "moe_intermediate_size"))


def test_fields_of_experts_without_a_number_of_experts_are_no_dense_model() -> None:
    bare = without(REMOTE_MOE, "n_routed_experts")
    assert read(bare).weights.num_params == 0
    assert "n_routed_experts" in notes_of(bare) and UNCOUNTED in notes_of(bare)
    assert read(bare | {"n_routed_experts": None}).weights.num_params > 0  # null says that it is dense
    assert "n_routed_experts is 0: every layer is counted as dense" in notes_of(bare | {"n_routed_experts": 0})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("moe_layer_freq", 1e30),
        ("moe_layer_freq", 0),
        ("intermediate_size", 0),
        *(("weight_block_size", value) for value in ("8", 0, -1, True, [0, 128], [128])),
    ],
)
def test_a_value_that_is_no_size_is_named_instead_of_counted(field: str, value: object) -> None:
    changed: Config = {field: value}
    if field == "weight_block_size":
        changed = {"quantization_config": {"quant_method": "fp8", field: value}}
    spec = read(MOE | changed)
    assert spec.weights.num_params == 0
    assert any(UNCOUNTED in note and f"{field} is {value!r}" in note for note in spec.assumptions)


def test_the_encoder_of_a_class_that_has_one_is_counted_where_the_config_is_silent() -> None:
    config: Config = {"model_type": "t5", "d_model": 512, "d_ff": 2048, "d_kv": 64, "num_heads": 8, "num_layers": 6}
    config |= {"vocab_size": 32128, "is_encoder_decoder": True}
    assert read(without(config, "is_encoder_decoder")).weights == read(config).weights


def test_a_tower_of_qwen2_vl_is_never_as_wide_as_the_text() -> None:
    config = plain("qwen2_vl", 28, 3584, 28, 4, vocab_size=152064, intermediate_size=18944, tie_word_embeddings=False)
    vision: Config = {"depth": 32, "embed_dim": 1280, "hidden_size": 3584, "mlp_ratio": 4, "spatial_merge_size": 2}
    bare = config | {"vision_config": without(vision, "embed_dim")}
    assert read(bare).weights == read(config | {"vision_config": vision}).weights
    assert "embed_dim is absent: 1,280 assumed" in notes_of(bare)
