"""Reads rotary positions out of a Hugging Face config (both spellings) or a GGUF header, and the context they reach.

Knows nothing of weights. Scalings it cannot express are refused by name.
"""

import math
from collections.abc import Sequence

from kvfolio.errors import BrokenModelError, UnknownModelError
from kvfolio.spec.fields import Fields
from kvfolio.spec.layers import PagedLayer
from kvfolio.spec.model import Rope

FULL, SLIDING = "full_attention", "sliding_attention"

_KNOWN_KEYS = {
    "rope_type",
    "type",
    "rope_theta",
    "factor",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "partial_rotary_factor",
    "truncate",
}


def usable_context(max_positions: int, rope: Rope | None) -> int:
    """Tokens a sequence may have.

    The stored maximum already holds the scaled length, but for plain YaRN switched on by hand: there it still
    equals the original one and the factor applies.
    """
    if rope is not None and rope.scaling == "yarn" and rope.original_context == max_positions:
        return int(max_positions * rope.factor)
    return max_positions


def rope_parameters(fields: Fields) -> Fields | None:
    """The rotary parameters of a config, in either spelling; the old one wins where both are there."""
    return fields.child("rope_scaling") or fields.child("rope_parameters")


def require_base(fields: Fields) -> None:
    """Raise BrokenModelError where no rotary base is stated, for classes whose own is that of one checkpoint."""
    parameters = rope_parameters(fields)
    if fields.get("rope_theta") is None and (parameters is None or parameters.get("rope_theta") is None):
        raise fields.missing("rope_theta")


def ropes_from_config(
    fields: Fields, width: int, max_positions: int, layers: Sequence[PagedLayer]
) -> tuple[Rope, Rope | None]:
    """(rope of full-attention layers, rope of sliding-window layers or None for the same) of the llama family.

    Parameters that are nested must have an entry for each kind that ``layers`` has.
    """
    parameters = rope_parameters(fields)
    if parameters is None or not (parameters.names(FULL) or parameters.names(SLIDING)):
        return _rope(fields, parameters, width, max_positions), None
    flat = sorted(_KNOWN_KEYS.intersection(parameters.values))
    if flat:
        raise BrokenModelError(
            f"{parameters.where}: {flat[0]} stands beside entries for kinds of layers ({FULL}, {SLIDING}), and would "
            "be read for none; put it into them, or remove them"
        )
    by_kind: dict[str, Rope] = {}
    for kind in dict.fromkeys(FULL if layer.window is None else SLIDING for layer in layers):
        if parameters.get(kind) is None:
            raise parameters.missing(kind)
        by_kind[kind] = _rope(fields, parameters.child(kind), width, max_positions)
    rope = by_kind.get(FULL) or by_kind[SLIDING]
    local = by_kind.get(SLIDING, rope)
    return rope, local if local != rope else None


def gemma3_ropes_from_config(fields: Fields, width: int, max_positions: int) -> tuple[Rope, Rope]:
    """(rope of the global layers, rope of the sliding-window layers) of Gemma 3."""
    parameters = fields.child("rope_parameters")
    scaling = fields.child("rope_scaling")
    full, sliding = None, None
    if parameters is not None:
        full, sliding = parameters.child(FULL), parameters.child(SLIDING)
        if not (parameters.names(FULL) or parameters.names(SLIDING)):
            raise BrokenModelError(f"{parameters.where}: accepted: one entry each for {FULL} and {SLIDING}")
    if scaling is not None:  # the old spelling scales the global layers only
        merged = {**(full.values if full is not None else {}), **scaling.values}
        full = Fields(merged, scaling.where, "", scaling.assumptions)
    return (
        _rope(fields, full, width, max_positions, "rope_theta", 1_000_000.0),
        _rope(fields, sliding, width, max_positions, "rope_local_base_freq", 10_000.0),
    )


def rope_from_gguf(fields: Fields, width: int, max_positions: int, base: float) -> Rope:
    """Rope of the full-attention layers of a GGUF header; ``fields`` looks up keys of its architecture."""
    for key in ("alpha", "yarn_log_multiplier", "yarn_ext_factor", "yarn_attn_factor"):
        fields.refuse_if_set(f"rope.scaling.{key}", "this kind of rotary scaling is not supported")
    width = fields.integer("rope.dimension_count", default=width)
    factor = fields.number("rope.scaling.factor", "rope.scale_linear", default=1.0, low=-1.0) or 1.0  # 0: not scaled
    if factor < 1.0:
        raise fields.wrong("rope.scaling.factor", factor, "0 for none, or a number of 1 or more")
    scaling = fields.text("rope.scaling.type") or "linear"  # a factor alone means linear, as llama.cpp reads it
    attention_factor = fields.number("rope.scaling.attn_factor", default=1.0)
    if scaling not in ("none", "linear", "yarn"):
        raise UnknownModelError(f"{fields.where}: rope scaling {scaling!r} is not supported; known: none, linear, yarn")
    if scaling == "yarn" and factor > 1.0:
        return Rope(
            base,
            width,
            "yarn",
            factor,
            fields.integer("rope.scaling.original_context_length", assume=max_positions),
            beta_fast=fields.number("rope.scaling.yarn_beta_fast", default=32.0),
            beta_slow=fields.number("rope.scaling.yarn_beta_slow", default=1.0),
            attention_factor=None if attention_factor == 1.0 else attention_factor * _yarn_magnitude(factor, 1.0),
        )
    if attention_factor != 1.0:
        raise fields.wrong("rope.scaling.attn_factor", attention_factor, "1, unless the scaling is yarn")
    if scaling == "none" or factor == 1.0:
        return Rope(base, width)
    return Rope(base, width, "linear", factor)


def llama3_rope_from_factors(base: float, factors: Sequence[float], where: str) -> Rope:
    """The llama3 scaling that a GGUF file stores as one divisor for each frequency (``rope_freqs.weight``).

    Llama 3.1 and later use bands 1 and 4 and an original context of 8,192; the scaling factor is the largest divisor.
    Every stored divisor is compared with those parameters; anything else is refused, since it cannot be expressed.
    """
    rope = Rope(base, 2 * len(factors), "llama3", max(factors, default=1.0), 8192, 1.0, 4.0)
    if rope.factor > 1.0:
        expected = _llama3_divisors(rope)
        if all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(factors, expected, strict=True)):
            return rope
    raise UnknownModelError(
        f"{where}: rope_freqs.weight holds frequency divisors other than Llama 3's; use the Hugging Face folder"
    )


def _llama3_divisors(rope: Rope) -> list[float]:
    """How much slower each frequency turns than without scaling (Llama 3.1's published code)."""
    divisors = []
    for index in range(0, rope.width, 2):
        turns = rope.original_context / (2 * math.pi * rope.base ** (index / rope.width))  # in the original context
        share = (turns - rope.low_frequency_factor) / (rope.high_frequency_factor - rope.low_frequency_factor)
        share = min(max(share, 0.0), 1.0)
        divisors.append(1 / ((1 - share) / rope.factor + share))
    return divisors


def _rope(
    config: Fields,
    parameters: Fields | None,
    width: int,
    max_positions: int,
    base_name: str = "rope_theta",
    usual_base: float = 10_000.0,
) -> Rope:
    """One rope from its own parameters; what they leave out stands at the top of the config."""
    _refuse_partial(config)
    if parameters is None:
        return Rope(config.number(base_name, assume=usual_base, low=1.0), width)
    _refuse_partial(parameters)
    _check_keys(parameters)
    if parameters.get("rope_theta") is not None:
        base = parameters.number("rope_theta", low=1.0)
    else:
        base = config.number(base_name, assume=usual_base, low=1.0)
    scaling = parameters.text("rope_type", "type") or "default"
    if scaling == "default":
        return Rope(base, width)
    if scaling == "linear":
        return Rope(base, width, "linear", _factor(parameters))
    if scaling not in ("llama3", "yarn"):
        raise UnknownModelError(
            f"{parameters.where}: rope type {scaling!r} is not supported; known: default, linear, llama3, yarn"
        )
    holder = config if config.get("original_max_position_embeddings") is not None else parameters
    original = holder.integer("original_max_position_embeddings", assume=max_positions)
    if scaling == "yarn":
        return _yarn(parameters, Rope(base, width, "yarn", original_context=original), max_positions)
    low, high = parameters.number("low_freq_factor"), parameters.number("high_freq_factor")
    if high <= low:
        raise parameters.wrong("high_freq_factor", high, f"a number above low_freq_factor, which is {low:g}")
    return Rope(base, width, "llama3", _factor(parameters), original, low, high)


def _yarn(parameters: Fields, rope: Rope, max_positions: int) -> Rope:
    """``rope`` with YaRN's numbers (2309.00071); without a factor, the ratio of the two contexts is it."""
    if parameters.get("factor") is None:
        factor = max(1.0, max_positions / rope.original_context)
        parameters.note(f"yarn's factor is absent: {factor:g} = max_position_embeddings / original context assumed")
    else:
        factor = _factor(parameters)
    magnitude = None
    if parameters.get("attention_factor") is not None:
        magnitude = parameters.number("attention_factor")
    elif parameters.get("mscale") and parameters.get("mscale_all_dim"):
        top, bottom = parameters.number("mscale"), parameters.number("mscale_all_dim")
        magnitude = _yarn_magnitude(factor, top) / _yarn_magnitude(factor, bottom)
    fast, slow = parameters.number("beta_fast", default=32.0), parameters.number("beta_slow", default=1.0)
    if slow >= fast:
        raise parameters.wrong("beta_slow", slow, f"a number below beta_fast, which is {fast:g}")
    if rope.original_context < 2 * math.pi * slow:
        raise parameters.wrong(
            "original_max_position_embeddings", rope.original_context, f"{math.ceil(2 * math.pi * slow)} or more tokens"
        )
    return Rope(
        rope.base,
        rope.width,
        "yarn",
        factor,
        rope.original_context,
        beta_fast=fast,
        beta_slow=slow,
        attention_factor=magnitude,
        truncate=parameters.stated_flag("truncate", True),
    )


def _yarn_magnitude(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1.0


def _factor(parameters: Fields) -> float:
    factor = parameters.number("factor")
    if factor < 1.0:
        raise parameters.wrong("factor", factor, "a number of 1 or more")
    return factor


def _refuse_partial(fields: Fields) -> None:
    if fields.number("partial_rotary_factor", default=1.0) != 1.0:
        fields.refuse_if_set("partial_rotary_factor", "partly rotated heads are not supported; known: 1.0")


def _check_keys(parameters: Fields) -> None:
    for name, value in parameters.values.items():
        if name not in _KNOWN_KEYS and value is not None:
            raise UnknownModelError(
                f"{parameters.where}: rope parameter {name!r} is not known; known: {', '.join(sorted(_KNOWN_KEYS))}"
            )
