"""Falcon configs become the right model, or are refused by name: 7B, 40B, 11B, the oldest, and those before its class.

Knows nothing of what the network computes (``tests/parity``). Counts are those of transformers 5.24 (meta device).
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from published import FALCON_7B, FALCON_40B, Config, growing_bytes, read, without

import kvfolio
from kvfolio.errors import BrokenModelError, UnknownModelError
from kvfolio.spec.config.families import spec_from_config
from kvfolio.spec.layers import FullAttention
from kvfolio.spec.model import Rope
from kvfolio.spec.source import open_model

if TYPE_CHECKING:
    from tiny import TinyModel

FALCON_11B = FALCON_40B | {
    "activation": "gelu",
    "ffn_hidden_size": 16384,
    "hidden_size": 4096,
    "max_position_embeddings": 8192,
    "num_attention_heads": 32,
    "num_ln_in_parallel_attn": 1,
    "rope_theta": 500042.0,
    "tie_word_embeddings": False,
}
OLDEST = FALCON_7B | {  # the shape of falcon-rw-1b, but for its positions
    "bias": True,
    "hidden_size": 2048,
    "multi_query": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 24,
    "parallel_attn": False,
    "vocab_size": 50304,
}
OLD_NAMES = {"num_attention_heads": "n_head", "num_hidden_layers": "n_layer", "num_kv_heads": "n_head_kv"}


def before_its_class(config: Config, model_type: str) -> Config:
    """``config`` as it was published beside modelling_RW.py."""
    old = {OLD_NAMES.get(name, name): value for name, value in config.items()}
    old |= {"model_type": model_type, "architectures": ["RWForCausalLM"]}
    return without(old, "new_decoder_architecture", "multi_query") if "n_head_kv" in old else old


# ---- what is read ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "layers", "num_bytes", "num_params"),
    [
        (FALCON_7B, (FullAttention(1, 64, 64),) * 32, 8_192, 6_921_720_704),
        (FALCON_40B, (FullAttention(8, 64, 64),) * 60, 122_880, 41_303_293_952),
        (FALCON_11B, (FullAttention(8, 128, 128),) * 60, 245_760, 11_102_822_400),
        (OLDEST, (FullAttention(32, 64, 64),) * 24, 196_608, 1_311_625_216),
    ],
    ids=["7b", "40b", "11b", "oldest"],
)
def test_every_shape_has_its_heads_bytes_and_weights(
    config: Config, layers: tuple[FullAttention, ...], num_bytes: int, num_params: int
) -> None:
    spec, planned = read(config), spec_from_config(config, "toy")
    assert spec.layers == planned.layers == layers
    assert growing_bytes(spec) == num_bytes
    assert spec.num_params == planned.num_params == num_params
    assert spec.max_context == planned.max_context


@pytest.mark.parametrize("name", ["falcon-7b", "falcon-40b", "falcon-11b", "falcon-rw"])
def test_planner_and_engine_read_the_same_from_a_saved_folder(
    name: str, tiny_model: "Callable[[str], TinyModel]"
) -> None:
    folder = tiny_model(name).folder
    planned, run = kvfolio.read_model(folder), open_model(folder).spec
    assert (planned.layers, planned.max_context) == (run.layers, run.max_context)
    assert planned.num_params == run.num_params == tiny_model(name).model.num_parameters()


def test_the_7b_is_read_in_full() -> None:
    spec = read(FALCON_7B)
    assert (spec.family, spec.model_type, spec.dtype, spec.eos_token_ids) == ("falcon", "falcon", "bf16", (11,))
    assert spec.max_context == 2048
    assert spec.assumptions == (
        "activation is absent: gelu assumed",
        "max_position_embeddings is absent: 2,048 assumed",
        "rope_theta is absent: 10,000 assumed",
    )
    network = spec.network
    assert (network.hidden_size, network.num_q_heads, network.intermediate_size) == (4544, 71, 4 * 4544)
    assert (network.norm_eps, network.activation, network.attention_scale) == (1e-5, "gelu", 0.125)
    assert (network.qkv_bias, network.o_bias, network.mlp_bias, network.tie_embeddings) == (False, False, False, True)
    assert (network.rope, network.rope_local) == (Rope(10_000.0, 64), None)


def test_norms_are_one_two_or_behind_one_another() -> None:
    def form(config: Config, **changes: object) -> tuple[bool, int]:
        network = read(config, **changes).network
        return network.parallel, network.num_norms

    assert form(FALCON_7B) == form(FALCON_11B) == (True, 1)
    assert form(FALCON_40B) == form(FALCON_11B, num_ln_in_parallel_attn=None) == (True, 2)
    assert form(OLDEST) == (False, 2)
    assert form(OLDEST, num_ln_in_parallel_attn=2) == (False, 2)  # not read there


def test_the_old_architecture_alone_has_one_head_for_all() -> None:
    assert read(FALCON_7B, num_kv_heads=71).layers[0].num_kv_heads == 1  # as transformers saves it
    assert read(without(FALCON_7B, "multi_query")).layers[0].num_kv_heads == 1
    assert read(FALCON_40B, multi_query=True).layers[0].num_kv_heads == 8
    assert read(without(FALCON_40B, "num_kv_heads")).layers[0].num_kv_heads == 128


def test_biases_activation_and_width_of_the_feed_forward_part_are_those_of_the_config() -> None:
    network = read(FALCON_40B, bias=True, activation="silu", ffn_hidden_size=100).network
    assert (network.qkv_bias, network.o_bias, network.mlp_bias) == (True, True, True)
    assert (network.activation, network.intermediate_size) == ("silu", 100)


def test_rotary_positions_have_both_spellings() -> None:
    old = read(FALCON_11B, rope_scaling={"type": "linear", "factor": 2.0}).network.rope
    parameters = {"rope_type": "linear", "rope_theta": 500042.0, "factor": 2.0}
    new = read(without(FALCON_11B, "rope_theta"), rope_parameters=parameters).network.rope
    assert old == new == Rope(500_042.0, 128, "linear", 2.0)


# ---- before transformers had the class ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "model_type"), [(FALCON_7B, "RefinedWebModel"), (FALCON_40B, "RefinedWeb"), (OLDEST, "RefinedWebModel")]
)
def test_a_config_from_before_the_class_is_the_same_model(config: Config, model_type: str) -> None:
    old = before_its_class(config, model_type)
    assert read(old) == read(config)
    planned = spec_from_config(old, "toy")
    assert (planned.layers, planned.num_params) == (read(config).layers, read(config).num_params)


@pytest.mark.parametrize(
    ("config", "field"), [(FALCON_7B, "multi_query"), (FALCON_7B, "parallel_attn"), (FALCON_40B, "parallel_attn")]
)
def test_a_flag_whose_absence_meant_something_else_before_the_class_must_stand_there(
    config: Config, field: str
) -> None:
    with pytest.raises(BrokenModelError, match=f"toy: {field} is missing"):
        read(without(before_its_class(config, "RefinedWebModel"), field))


def test_a_number_under_both_names_is_refused() -> None:
    with pytest.raises(BrokenModelError, match="n_head and num_attention_heads mean the same"):
        read(before_its_class(FALCON_7B, "RefinedWebModel"), num_attention_heads=71)


# ---- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (FALCON_7B | {"alibi": True}, "alibi is True: kvfolio does not compute this"),
        (
            before_its_class(OLDEST, "RefinedWebModel") | {"alibi": True},
            "alibi is True: kvfolio does not compute this",
        ),
        (FALCON_7B | {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm is"),
        (FALCON_7B | {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn is 2 without new_decoder_architecture"),
        (FALCON_40B | {"parallel_attn": False}, "parallel_attn is False beside new_decoder_architecture"),
        (FALCON_7B | {"activation": "relu2"}, "activation 'relu2' is not known; known: silu"),
        (FALCON_7B | {"architectures": ["FalconForSequenceClassification"]}, "accepted for falcon: FalconForCausalLM"),
        (FALCON_7B | {"head_dim": 128}, "1 key/value heads of 128; known for falcon: full, 1 of 64"),
        (FALCON_40B | {"num_key_value_heads": 4}, "4 key/value heads of 64; known for falcon: full, 8 of 64"),
        (without(FALCON_40B, "num_kv_heads", "multi_query") | {"n_head_kv": 8}, "known for falcon: full, 128 of 64"),
        (FALCON_7B | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic' is not supported"),
        (FALCON_7B | {"quantization_config": {"quant_method": "gptq"}}, "quantization_config is .*'gptq'"),
    ],
)
def test_what_would_change_the_result_is_refused_by_name(config: Config, message: str) -> None:
    with pytest.raises(UnknownModelError, match=message):
        read(config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (FALCON_40B | {"num_ln_in_parallel_attn": 3}, "num_ln_in_parallel_attn is 3; accepted: 1, 2 or null"),
        (OLDEST | {"num_kv_heads": 8}, "num_kv_heads is 8; accepted: 32, as multi_query is false, or null"),
        (FALCON_40B | {"num_kv_heads": 24}, "is 24; accepted: a number that 128 query heads can be divided by"),
        (FALCON_7B | {"n_embed": 64}, "n_embed is 64; accepted: null, or hidden_size, 4,544"),
        (FALCON_7B | {"multi_query": 1}, "multi_query is 1; accepted: true or false"),
    ],
)
def test_a_wrong_value_is_refused_with_what_is_accepted(config: Config, message: str) -> None:
    with pytest.raises(BrokenModelError, match=message):
        read(config)


@pytest.mark.parametrize("field", ["num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size"])
def test_a_missing_field_is_named_not_filled_with_the_7b_s_number(field: str) -> None:
    with pytest.raises(BrokenModelError, match=f"toy: {field} is missing"):
        read(without(FALCON_7B, field))
