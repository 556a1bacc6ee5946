"""The feed-forward part of a layer: one gated MLP, or a router and many small ones of which a token takes a few.

Knows nothing of attention, families or files: numbers come in ``Experts``, weights by name, arithmetic through ops.
"""

import torch
from torch import Tensor

from kvfolio.models.parts import Linear, Ops
from kvfolio.models.weights import Weights
from kvfolio.spec.model import Experts, Network, RunnableSpec

# Below any sum of scores that counts; keeps a row whose chosen scores are all 0 from dividing by it. As in DeepSeek-V3.
_LEAST_SUM = 1e-20


class GatedMlp:
    """down(activation(gate(x)) * up(x))."""

    def __init__(self, gate_up: Linear, down: Linear, activation: str) -> None:
        self.gate_up = gate_up  # [2 * width, hidden]: gate, then up
        self.down = down  # [hidden, width]
        self.activation = activation

    def forward(self, x: Tensor, ops: Ops) -> Tensor:
        """x [num_tokens, hidden] → [num_tokens, hidden]."""
        gate_up = self.gate_up.forward(x, ops)  # [num_tokens, 2 * width]
        return self.down.forward(ops.gated(gate_up, self.activation), ops)


class SparseMlp:
    """Routed experts, each weighed by the router's score, and the shared expert that every token passes through.

    A row's bits never depend on the rows beside it, if those of ``ops.linear`` do not: every expert computes the rows
    that chose it, a row's experts are added up in f32 by ascending number, and what is between the products is exact
    for each element or works along one row. Experts that no row chose are not read.
    """

    def __init__(self, network: Network, experts: Experts, weights: Weights, name: str) -> None:
        hidden, count, width = network.hidden_size, experts.num_experts, experts.width
        self.experts = experts
        router_dtype = torch.float32 if experts.router_f32 else weights.dtype
        self.router = weights.get(f"{name}.gate.weight", (count, hidden), router_dtype)  # [num_experts, hidden]
        self.bias = None  # [num_experts] f32, added to the scores for choosing alone
        if experts.has_bias:
            self.bias = weights.get(f"{name}.gate.e_score_correction_bias", (count,), torch.float32)
        each = [f"{name}.experts.{number}" for number in range(count)]
        gate_up = weights.stack(  # [num_experts * 2 * width, hidden], every expert's gate before its up
            [f"{one}.{part}_proj.weight" for one in each for part in ("gate", "up")], [(width, hidden)] * (2 * count)
        )
        down = weights.stack([f"{one}.down_proj.weight" for one in each], [(hidden, width)] * count)
        self.routed = [  # views of the two stacks
            GatedMlp(Linear(ways_in, None), Linear(way_out, None), network.activation)
            for ways_in, way_out in zip(torch.split(gate_up, 2 * width), torch.split(down, hidden), strict=True)
        ]
        self.shared = self.shared_gate = None
        if experts.shared_width:
            self.shared = dense(network, weights, f"{name}.shared_experts", experts.shared_width)
        if experts.has_shared_gate:
            self.shared_gate = weights.get(f"{name}.shared_expert_gate.weight", (1, hidden))  # [1, hidden]

    def forward(self, x: Tensor, ops: Ops) -> Tensor:
        """x [num_tokens, hidden] → [num_tokens, hidden]."""
        chosen, shares = self.route(x, ops)
        chosen, places = chosen.sort(dim=1)  # a row's experts by number: in this order they are added up
        shares = shares.gather(1, places)
        pairs = chosen.flatten()  # [num_pairs] of a row and an expert it chose
        order = pairs.argsort(stable=True)  # by expert, those of one expert by row
        rows = order // self.experts.per_token
        counts = [(number, count) for number, count in enumerate(pairs.bincount().tolist()) if count]
        parts = torch.split(x[rows], [count for _, count in counts])  # each expert's rows
        done = [self.routed[number].forward(part, ops) for (number, _), part in zip(counts, parts, strict=True)]
        outs = torch.empty(*chosen.shape, x.shape[1], dtype=torch.float32, device=x.device)  # [num_tokens, …, hidden]
        outs.flatten(0, 1)[order] = torch.cat(done) * shares.flatten()[order, None]
        out = outs[:, 0]
        for rank in range(1, chosen.shape[1]):  # one after the other: a sum over an axis has no fixed order everywhere
            out = out + outs[:, rank]
        if self.shared is not None:
            beside = self.shared.forward(x, ops)  # [num_tokens, hidden]
            if self.shared_gate is not None:
                beside = beside * _sigmoid(ops.linear(x, self.shared_gate).float())
            out = out + beside
        return out.to(x.dtype)

    def route(self, x: Tensor, ops: Ops) -> tuple[Tensor, Tensor]:
        """(the experts of each row, best first, and the share that each has), both [num_tokens, per_token].

        int64 and f32. Of equal scores the expert with the lower number is the better one, as is the group. Sources:
        Mixtral 2401.04088 sec. 2.1, DeepSeek-V2 2405.04434 sec. 2.2, DeepSeek-V3 2412.19437 sec. 2.1.2.
        """
        experts = self.experts
        logits = ops.linear(x.to(self.router.dtype), self.router).float()  # [num_tokens, num_experts]
        scores = logits.softmax(dim=-1) if experts.scoring == "softmax" else _sigmoid(logits)
        ranked = scores if self.bias is None else scores + self.bias
        if experts.groups_per_token < experts.num_groups:
            ranked = self._within_groups(ranked)
        chosen = _best(ranked, experts.per_token)
        shares = scores.gather(1, chosen)
        if experts.normalise:  # cumsum adds from the first to the last, however many rows there are
            shares = shares / (shares.cumsum(dim=-1)[:, -1:] + _LEAST_SUM)
        return chosen, shares * experts.factor

    def _within_groups(self, ranked: Tensor) -> Tensor:
        """``ranked`` [num_tokens, num_experts] with -inf outside each row's best groups of neighbouring experts."""
        experts = self.experts
        grouped = ranked.view(len(ranked), experts.num_groups, -1)  # [num_tokens, num_groups, experts of a group]
        best = grouped.topk(experts.group_best, dim=-1).values.sum(dim=-1)  # of one or two numbers: exact in any order
        outside = torch.ones_like(best, dtype=torch.bool).scatter_(1, _best(best, experts.groups_per_token), False)
        return grouped.masked_fill(outside[:, :, None], -torch.inf).flatten(1)


def dense(network: Network, weights: Weights, name: str, width: int) -> GatedMlp:
    """The gated MLP under ``name``, ``width`` wide inside."""
    hidden = network.hidden_size
    gate_up = weights.linear(
        [f"{name}.gate_proj", f"{name}.up_proj"], [width, width], hidden, network.mlp_bias
    )  # [2 * width, hidden]
    down = weights.linear([f"{name}.down_proj"], [hidden], width, network.mlp_bias)  # [hidden, width]
    return GatedMlp(gate_up, down, network.activation)


def feed_forward(spec: RunnableSpec, weights: Weights, index: int) -> GatedMlp | SparseMlp:
    """What follows attention in layer ``index``: experts where the network has them there."""
    network, name, experts = spec.network, f"model.layers.{index}.mlp", spec.network.experts
    if experts is not None and index in experts.layers:
        return SparseMlp(network, experts, weights, name)
    return dense(network, weights, name, network.intermediate_size)


def _best(scores: Tensor, count: int) -> Tensor:
    """[num_tokens, count] int64: where the largest of ``scores`` [num_tokens, n] stand, best first, ties by place."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def _sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)). torch.sigmoid rounds the last few numbers of a tensor otherwise than those before them."""
    return 1.0 / (1.0 + torch.exp(-x))
