"""Experts on random weights: routed as by transformers' own modules, row by row, and reading only what was chosen."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import transformers
from tiny import TinyModel
from torch import Tensor
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

from kvfolio.kernels.native import NativeOps
from kvfolio.kernels.reference import ReferenceOps
from kvfolio.models.experts import SparseMlp
from kvfolio.models.weights import Weights
from kvfolio.spec.config.experts import experts_from_config
from kvfolio.spec.fields import Fields
from kvfolio.spec.model import Experts, Network

HIDDEN, NUM_EXPERTS = 40, 12
SIZES = {"hidden_size": HIDDEN, "n_routed_experts": NUM_EXPERTS, "moe_intermediate_size": 24, "num_experts_per_tok": 3}
V2 = {**SIZES, "first_k_dense_replace": 0, "routed_scaling_factor": 1.5}
V3 = {**SIZES, "first_k_dense_replace": 0, "n_shared_experts": 1}
ROUTERS: dict[str, tuple[str, dict[str, object]]] = {
    "V2 greedy": ("deepseek_v2", {**V2, "topk_method": "greedy"}),
    "V2 groups": ("deepseek_v2", {**V2, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}),
    "V3 groups": ("deepseek_v3", {**V3, "n_group": 4, "topk_group": 2}),
    "V3 one group": ("deepseek_v3", {**V3, "n_group": 1, "topk_group": 1}),
    "V3 not normalised": ("deepseek_v3", {**V3, "n_group": 3, "topk_group": 2, "norm_topk_prob": False}),
}
# Every combination that a reader makes, sizes odd so that no row fills whole vector registers.
PLAIN = Experts(num_experts=7, per_token=3, width=20, layers=(0,))
SHAPES = {
    "Mixtral": replace(PLAIN, normalise=True),
    "Qwen2-MoE": replace(PLAIN, shared_width=28, has_shared_gate=True),
    "V3": Experts(
        num_experts=NUM_EXPERTS,
        per_token=3,
        width=20,
        layers=(0,),
        scoring="sigmoid",
        normalise=True,
        factor=2.5,
        num_groups=4,
        groups_per_token=2,
        group_best=2,
        has_bias=True,
        router_f32=True,
        shared_width=20,
    ),
}
TinyModels = Callable[[str], TinyModel]


class DictSource:
    """Tensors by name, from memory."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.where, self.norm_offset, self._tensors = "memory", 0.0, tensors
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}

    def stored_bytes(self, name: str) -> int:
        return self._tensors[name].nbytes

    def read_into(self, name: str, out: Tensor) -> None:
        out.copy_(self._tensors[name])


def random_tensors(experts: Experts, hidden: int = HIDDEN) -> dict[str, Tensor]:
    """The weights of one feed-forward part under the name "mlp"."""
    shapes: dict[str, tuple[int, ...]] = {"gate.weight": (experts.num_experts, hidden)}
    widths = {f"experts.{number}": experts.width for number in range(experts.num_experts)}
    if experts.shared_width:
        widths["shared_experts"] = experts.shared_width
    for part, width in widths.items():
        shapes |= {f"{part}.{way}_proj.weight": (width, hidden) for way in ("gate", "up")}
        shapes[f"{part}.down_proj.weight"] = (hidden, width)
    if experts.has_bias:
        shapes["gate.e_score_correction_bias"] = (experts.num_experts,)
    if experts.has_shared_gate:
        shapes["shared_expert_gate.weight"] = (1, hidden)
    generator = torch.Generator().manual_seed(7)
    return {f"mlp.{name}": torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}


def built(experts: Experts, tensors: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> SparseMlp:
    network = Network(HIDDEN, 4, 96, 256, 1e-6, "silu", 1.0, experts=experts)
    return SparseMlp(network, experts, Weights(DictSource(tensors), dtype, torch.device("cpu")), "mlp")


def some_rows(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(count)).to(dtype)


@pytest.mark.parametrize("name", ROUTERS)
def test_a_router_of_deepseek_chooses_weighs_and_adds_up_as_that_of_transformers(name: str) -> None:
    model_type, config = ROUTERS[name]
    experts = experts_from_config(Fields(config, "toy"), model_type, 1)
    assert experts is not None
    settings = {**config, "num_attention_heads": 4, "n_shared_experts": config.get("n_shared_experts", 2)}
    experts = replace(experts, shared_width=24 * settings["n_shared_experts"])
    tensors = random_tensors(experts)
    if model_type == "deepseek_v2":
        theirs = DeepseekV2Moe(transformers.DeepseekV2Config(**settings)).eval()
    else:
        theirs = DeepseekV3MoE(transformers.DeepseekV3Config(**settings)).eval()
    theirs.load_state_dict(fused(tensors, experts))

    x, ours = some_rows(200), built(experts, tensors)
    with torch.inference_mode():
        _, their_shares, their_chosen = theirs.gate(x)
        chosen, shares = ours.route(x, ReferenceOps())
        table = torch.zeros(200, NUM_EXPERTS)
        torch.testing.assert_close(
            table.scatter(1, chosen, shares), table.scatter(1, their_chosen, their_shares), atol=1e-6, rtol=0
        )
        torch.testing.assert_close(ours.forward(x, ReferenceOps()), theirs(x[None])[0], atol=2e-5, rtol=0)
    unbiased, _ = built(replace(experts, has_bias=False), tensors).route(x, ReferenceOps())
    ungrouped, _ = built(replace(experts, num_groups=1, groups_per_token=1), tensors).route(x, ReferenceOps())
    assert torch.equal(unbiased, chosen) == (not experts.has_bias)  # so bias and groups do decide here
    assert torch.equal(ungrouped, chosen) == (experts.num_groups == 1)


def fused(tensors: dict[str, Tensor], experts: Experts) -> dict[str, Tensor]:
    """The same weights under the names that transformers' modules give them."""
    state = {name.removeprefix("mlp."): tensor for name, tensor in tensors.items() if ".experts." not in name}
    each = [f"mlp.experts.{number}" for number in range(experts.num_experts)]
    state["experts.gate_up_proj"] = torch.stack(
        [torch.cat([tensors[f"{one}.{way}_proj.weight"] for way in ("gate", "up")]) for one in each]
    )
    state["experts.down_proj"] = torch.stack([tensors[f"{one}.down_proj.weight"] for one in each])
    return state


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["native", "reference"])
@pytest.mark.parametrize("name", SHAPES)
def test_a_rows_bits_do_not_depend_on_the_rows_beside_it(name: str, kind: str, dtype: torch.dtype) -> None:
    ops = NativeOps(1, deterministic=True) if kind == "native" else ReferenceOps(deterministic=True)
    part, x = built(SHAPES[name], random_tensors(SHAPES[name]), dtype), some_rows(90, dtype)
    together = part.forward(x, ops)
    assert together.dtype == dtype
    alone = torch.cat([part.forward(row, ops) for row in x.split(1)])
    assert torch.equal(together, alone)
    order = torch.randperm(90, generator=torch.Generator().manual_seed(1))
    assert torch.equal(part.forward(x[order], ops), together[order])
    assert torch.equal(torch.cat([part.forward(piece, ops) for piece in x.split(37)]), together)


def test_of_equal_scores_the_expert_and_the_group_with_the_lower_number_are_chosen() -> None:
    tensors = random_tensors(PLAIN)
    tensors["mlp.gate.weight"].zero_()
    chosen, shares = built(PLAIN, tensors).route(some_rows(3), ReferenceOps())
    assert chosen.tolist() == [[0, 1, 2]] * 3
    torch.testing.assert_close(shares, torch.full((3, 3), 1 / 7))

    experts = replace(SHAPES["V3"], has_bias=False)  # groups of 3: the first two groups, and their first three experts
    tensors = random_tensors(experts)
    tensors["mlp.gate.weight"].zero_()
    assert built(experts, tensors).route(some_rows(2), ReferenceOps())[0].tolist() == [[0, 1, 2]] * 2


def test_experts_that_no_row_chose_are_not_read() -> None:
    tensors, x = random_tensors(PLAIN), some_rows(1)
    part = built(PLAIN, tensors)
    chosen = set(part.route(x, ReferenceOps())[0].flatten().tolist())
    expected = part.forward(x, ReferenceOps())
    for number in set(range(PLAIN.num_experts)) - chosen:
        tensors[f"mlp.experts.{number}.down_proj.weight"].fill_(torch.nan)
    assert torch.equal(built(PLAIN, tensors).forward(x, ReferenceOps()), expected)
    tensors[f"mlp.experts.{min(chosen)}.down_proj.weight"].fill_(torch.nan)
    assert built(PLAIN, tensors).forward(x, ReferenceOps()).isnan().all()


def test_deepseeks_router_computes_in_f32_whatever_the_rest_computes_in() -> None:
    experts = SHAPES["V3"]
    tensors = random_tensors(experts)
    exact, rounded = built(experts, tensors), built(experts, tensors, torch.bfloat16)
    x = some_rows(50, torch.bfloat16)
    for ours, theirs in zip(rounded.route(x, ReferenceOps()), exact.route(x.float(), ReferenceOps()), strict=True):
        assert torch.equal(ours, theirs)
    without = built(replace(experts, router_f32=False), tensors, torch.bfloat16)
    assert not torch.equal(without.route(x, ReferenceOps())[1], exact.route(x.float(), ReferenceOps())[1])
