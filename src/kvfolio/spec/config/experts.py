"""Reads how a model's experts are sized, scored and chosen: Mixtral, Qwen2-MoE, Qwen3-MoE, DeepSeek-V2 and -V3.

Knows nothing of attention, weights or files. Defaults are those of transformers 5.24's configuration classes; a router
that is not computed as written is refused by name. What is noise in training only (jitter) is not read.
"""

from collections.abc import Mapping

from kvfolio.errors import BrokenModelError, UnknownModelError
from kvfolio.spec.fields import Fields, show
from kvfolio.spec.model import Experts

# The values of a field that are computed; an absent one is the first. What DeepSeek's own code and transformers read
# differently (norm_topk_prob of V2, moe_layer_freq) is not guessed.
_ACCEPTED: Mapping[str, Mapping[str, tuple[object, ...]]] = {
    "mixtral": {},
    "qwen2_moe": {},
    "qwen3_moe": {},
    "deepseek_v2": {
        "scoring_func": ("softmax",),
        "topk_method": ("greedy", "group_limited_greedy"),
        "norm_topk_prob": (False,),
        "moe_layer_freq": (1,),
        "mlp_bias": (False,),
    },
    "deepseek_v3": {
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
        "moe_layer_freq": (1,),
        "mlp_bias": (False,),
    },
}
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def experts_from_config(fields: Fields, model_type: str, num_layers: int) -> Experts | None:
    """The experts of a model; None where its type has none, or every layer is dense.

    ``fields`` hold the class's values for absent ones. Raises UnknownModelError for a router that is not computed,
    BrokenModelError for numbers that contradict each other.
    """
    if model_type not in _ACCEPTED:
        return None
    for name, accepted in _ACCEPTED[model_type].items():
        value = fields.get(name)
        if value is not None and value not in accepted:
            known = ", ".join(show(item) for item in accepted)
            raise UnknownModelError(
                f"{fields.where}: {name} is {show(value)}; computed for {model_type}: {known}; "
                "another router gives other answers, so none is guessed"
            )
    if model_type.startswith("deepseek"):
        experts = _deepseek(fields, model_type, num_layers)
    elif model_type == "mixtral":
        experts = Experts(
            num_experts=_num_experts(fields),
            per_token=fields.integer("num_experts_per_tok"),
            width=fields.integer("intermediate_size"),
            layers=tuple(range(num_layers)),
            normalise=True,
        )
    else:
        experts = _qwen(fields, model_type, num_layers)
    _check(fields, experts)
    return experts if experts.layers else None


def _qwen(fields: Fields, model_type: str, num_layers: int) -> Experts:
    has_shared = model_type == "qwen2_moe"
    step, only_dense = fields.integer("decoder_sparse_step"), _indices(fields, "mlp_only_layers")
    return Experts(
        num_experts=_num_experts(fields),
        per_token=fields.integer("num_experts_per_tok"),
        width=fields.integer("moe_intermediate_size"),
        layers=tuple(index for index in range(num_layers) if (index + 1) % step == 0 and index not in only_dense),
        normalise=_normalises(fields, False),
        shared_width=fields.integer("shared_expert_intermediate_size") if has_shared else 0,
        has_shared_gate=has_shared,
    )


def _deepseek(fields: Fields, model_type: str, num_layers: int) -> Experts:
    is_v3 = model_type == "deepseek_v3"
    in_groups = is_v3 or fields.text("topk_method") == "group_limited_greedy"
    width = fields.integer("moe_intermediate_size")
    return Experts(
        num_experts=_num_experts(fields),
        per_token=fields.integer("num_experts_per_tok"),
        width=width,
        layers=tuple(range(fields.integer("first_k_dense_replace", low=0), num_layers)),
        scoring="sigmoid" if is_v3 else "softmax",
        normalise=is_v3 and _normalises(fields, True),
        factor=fields.number("routed_scaling_factor", assume=2.5 if is_v3 else 1.0),
        num_groups=fields.integer("n_group") if in_groups else 1,
        groups_per_token=fields.integer("topk_group", assume=4 if is_v3 else None) if in_groups else 1,
        group_best=2 if is_v3 else 1,
        has_bias=is_v3,
        router_f32=True,
        shared_width=width * fields.integer("n_shared_experts", default=0, low=0),
    )


def _normalises(fields: Fields, usual: bool) -> bool:
    if fields.get("norm_topk_prob") is None:
        fields.note(f"norm_topk_prob is absent: {usual} assumed, the default of transformers' class")
    return fields.stated_flag("norm_topk_prob", usual)


def _num_experts(fields: Fields) -> int:
    """The number of routed experts, under whichever of its names; refuses two that differ."""
    stated = {name: fields.get(name) for name in _NUM_EXPERTS if fields.get(name) is not None}
    if len({show(value) for value in stated.values()}) > 1:
        found = ", ".join(f"{name} {show(value)}" for name, value in stated.items())
        raise BrokenModelError(f"{fields.where}: {found} mean the same and differ; remove the wrong one")
    return fields.integer(*_NUM_EXPERTS)


def _indices(fields: Fields, name: str) -> list[int]:
    """A list of layer indices; empty when absent."""
    value = fields.get(name)
    if value is None:
        return []
    if not isinstance(value, list) or not all(type(item) is int and item >= 0 for item in value):
        raise fields.wrong(name, value, "a list of layer indices, from 0, or null")
    return list(value)


def _check(fields: Fields, experts: Experts) -> None:
    """Raise BrokenModelError for numbers that no router can work with."""
    count, chosen = experts.num_experts, experts.per_token
    groups, used = experts.num_groups, experts.groups_per_token
    said = f"{fields.where}: {count:,} experts, {chosen:,} for a token"
    if chosen > count:
        raise BrokenModelError(f"{said}: a token cannot pass through more than there are")
    if groups == 1 and used == 1:
        return
    said += f", {groups:,} groups (n_group), {used:,} for a token (topk_group)"
    if count % groups or count // groups < experts.group_best:
        raise BrokenModelError(f"{said}: accepted: groups of equally many, at least {experts.group_best}")
    if used > groups or chosen > used * (count // groups):
        raise BrokenModelError(f"{said}: a token's groups must be among all, and hold its experts")
