"""What configs say of their experts, in every spelling; routers that are not computed are refused by name.

Knows nothing of what is done with the numbers (``tests/models/test_experts.py``).
"""

from dataclasses import replace

import pytest
from published import MIXTRAL_8X7B, QWEN3_06B, QWEN3_30B_A3B, QWEN15_MOE, Config, read, windows, without

from kvfolio.errors import BrokenModelError, UnknownModelError
from kvfolio.spec.config.class_defaults import find_class_defaults
from kvfolio.spec.config.experts import experts_from_config
from kvfolio.spec.config.families import spec_from_config
from kvfolio.spec.fields import Fields
from kvfolio.spec.model import Experts

V2: Config = {
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 1536,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 160,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_experts_per_tok": 6,
    "routed_scaling_factor": 16.0,
    "scoring_func": "softmax",
    "topk_group": 3,
    "topk_method": "group_limited_greedy",
}
V2_LITE: Config = V2 | {
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "routed_scaling_factor": 1.0,
    "topk_group": 1,
    "topk_method": "greedy",
}
V3: Config = V2 | {
    "first_k_dense_replace": 3,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "topk_method": "noaux_tc",
}


def read_deepseek(config: Config, model_type: str, num_layers: int = 61) -> tuple[Experts | None, list[str]]:
    """The experts, and what was assumed."""
    defaults = find_class_defaults(model_type)
    assert defaults is not None
    fields = Fields(config, "toy", usual=defaults.usual, usual_of=model_type)
    return experts_from_config(fields, model_type, num_layers), fields.assumptions


# ---- sizes and layers -----------------------------------------------------------------------------------------------


def test_mixtral_has_experts_in_every_layer_and_weighs_the_chosen_ones_among_themselves() -> None:
    spec = read(MIXTRAL_8X7B)
    assert spec.network.experts == Experts(8, 2, 14336, tuple(range(32)), normalise=True)
    assert windows(spec) == [None] * 32
    assert read(MIXTRAL_8X7B, sliding_window=4096).layers[0].window == 4096


def test_qwen_moe_leaves_layers_dense_by_step_and_by_list() -> None:
    usual = Experts(60, 4, 1408, tuple(range(24)), shared_width=5632, has_shared_gate=True)
    assert read(QWEN15_MOE).network.experts == usual
    changed = read(QWEN15_MOE, decoder_sparse_step=3, mlp_only_layers=[5, 11], num_hidden_layers=12)
    assert changed.network.experts == replace(usual, layers=(2, 8))
    assert read(QWEN3_30B_A3B).network.experts == Experts(128, 8, 768, tuple(range(48)), normalise=True)


def test_a_model_all_of_whose_layers_are_dense_has_no_experts() -> None:
    assert read(QWEN3_06B).network.experts is None
    assert read(QWEN3_30B_A3B, mlp_only_layers=list(range(48))).network.experts is None
    assert read_deepseek(V3 | {"first_k_dense_replace": 61}, "deepseek_v3")[0] is None


def test_the_number_of_experts_has_several_names_that_must_agree() -> None:
    renamed = without(QWEN3_30B_A3B, "num_experts") | {"num_local_experts": 128}  # as transformers 5 writes it
    assert read(renamed).network.experts == read(QWEN3_30B_A3B).network.experts
    with pytest.raises(BrokenModelError, match="num_experts 128, num_local_experts 64 mean the same and differ"):
        read(QWEN3_30B_A3B, num_local_experts=64)


@pytest.mark.parametrize("config", [MIXTRAL_8X7B, QWEN15_MOE, QWEN3_30B_A3B], ids=lambda config: config["model_type"])
def test_weights_are_counted_as_the_planner_counts_them(config: Config) -> None:
    some_dense = config | {"mlp_only_layers": [0, 3]} if config["model_type"] != "mixtral" else config
    assert read(some_dense).weights == spec_from_config(some_dense, "toy").weights
    assert read(some_dense).weights.num_active_params < 0.4 * read(some_dense).num_params


# ---- DeepSeek -------------------------------------------------------------------------------------------------------


def test_deepseek_v2_scores_groups_by_their_best_expert_or_has_none() -> None:
    experts = Experts(160, 6, 1536, tuple(range(1, 60)), factor=16.0, num_groups=8, groups_per_token=3)
    experts = replace(experts, router_f32=True, shared_width=3072)
    assert read_deepseek(V2, "deepseek_v2", 60) == (experts, [])
    lite, assumed = read_deepseek(V2_LITE, "deepseek_v2", 27)
    assert lite is not None and (lite.num_groups, lite.groups_per_token, lite.shared_width) == (1, 1, 2816)
    assert (lite.normalise, lite.factor, assumed) == (False, 1.0, [])


def test_deepseek_v3_scores_groups_by_their_two_best_experts_with_a_bias() -> None:
    experts = Experts(256, 8, 2048, tuple(range(3, 61)), "sigmoid", True, 2.5, 8, 4, 2, True, True, 2048)
    assert read_deepseek(V3, "deepseek_v3") == (experts, [])


def test_absent_fields_take_the_defaults_of_transformers_classes_and_are_listed() -> None:
    experts, assumed = read_deepseek({}, "deepseek_v3")
    assert experts == read_deepseek(V3, "deepseek_v3")[0]
    for field in ("n_routed_experts", "n_group", "topk_group", "routed_scaling_factor", "norm_topk_prob"):
        assert any(note.startswith(f"{field} is absent") for note in assumed), field
    spec = read(without(QWEN3_30B_A3B, "norm_topk_prob"))
    assert "norm_topk_prob is absent: False assumed, the default of transformers' class" in spec.assumptions
    assert spec.network.experts == replace(read(QWEN3_30B_A3B).network.experts, normalise=False)


# ---- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'; computed for deepseek_v2: 'greedy', "),
        ("deepseek_v2", {"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'; computed for deepseek_v2: 'softmax'"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob is True; computed for deepseek_v2: False"),
        ("deepseek_v2", {"mlp_bias": True}, "mlp_bias is True"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method is 'greedy'; computed for deepseek_v3: 'noaux_tc'"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func is 'softmax'; computed for deepseek_v3: 'sigmoid'"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq is 2; computed for deepseek_v3: 1"),
    ],
)
def test_a_router_that_is_not_computed_is_refused_by_name(model_type: str, changes: Config, message: str) -> None:
    with pytest.raises(UnknownModelError, match=f"toy: {message}"):
        read_deepseek((V3 if model_type == "deepseek_v3" else V2) | changes, model_type)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 257}, "256 experts, 257 for a token: a token cannot pass through more than there are"),
        ({"n_group": 7}, r"7 groups \(n_group\), 4 for a token \(topk_group\): accepted: groups of equally many"),
        ({"n_group": 256}, "256 groups .*: accepted: groups of equally many, at least 2"),
        ({"topk_group": 9}, "8 groups .*, 9 for a token .*: a token's groups must be among all"),
        ({"n_group": 128, "topk_group": 3}, "128 groups .*, 3 for a token .*: .* hold its experts"),
        ({"n_group": "8"}, "n_group is '8'; accepted: a whole number"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace is -1; accepted"),
        ({"n_shared_experts": 1.5}, "n_shared_experts is 1.5; accepted"),
        ({"routed_scaling_factor": "big"}, "routed_scaling_factor is 'big'; accepted"),
        ({"norm_topk_prob": "yes"}, "norm_topk_prob is 'yes'; accepted: true or false"),
    ],
)
def test_numbers_that_no_router_can_work_with_are_refused(changes: Config, message: str) -> None:
    with pytest.raises(BrokenModelError, match=f"toy: .*{message}|toy: {message}"):
        read_deepseek(V3 | changes, "deepseek_v3")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (MIXTRAL_8X7B | {"num_experts_per_tok": 9}, "8 experts, 9 for a token"),
        (MIXTRAL_8X7B | {"num_local_experts": 0}, "num_local_experts is 0; accepted: a whole number from 1"),
        (QWEN15_MOE | {"mlp_only_layers": [True]}, r"mlp_only_layers is \[True\]; accepted: a list of layer indices"),
        (QWEN15_MOE | {"decoder_sparse_step": 0}, "decoder_sparse_step is 0; accepted"),
        (QWEN15_MOE | {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size is 0; accepted"),
    ],
)
def test_a_wrong_number_of_experts_or_layers_is_named(config: Config, message: str) -> None:
    with pytest.raises(BrokenModelError, match=message):
        read(config)
