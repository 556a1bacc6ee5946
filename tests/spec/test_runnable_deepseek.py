"""What configs of DeepSeek V2 and V3 say of the network; what is not computed is refused by name.

Knows nothing of experts (``test_experts.py``) or files.
"""

import math

import pytest
from published import DEEPSEEK_V2, DEEPSEEK_V2_LITE, DEEPSEEK_V3, Config, read, without

from kvfolio.errors import BrokenModelError, UnknownModelError
from kvfolio.spec.layers import LatentAttention


def test_a_latent_layer_is_read_in_full() -> None:
    spec = read(DEEPSEEK_V3)
    assert spec.layers == (LatentAttention(512, 64, 128, 192, 128),) * 61
    network = spec.network
    assert (network.num_q_heads, network.q_rank, network.rope_in_pairs) == (128, 1536, True)
    assert network.rope is not None
    assert (network.rope.width, network.rope.scaling, network.rope.attention_factor) == (64, "yarn", 1.0)
    magnitude = 0.1 * math.log(40) + 1
    assert network.attention_scale == pytest.approx(192**-0.5 * magnitude**2, rel=1e-12)
    assert (spec.max_context, spec.eos_token_ids, spec.family) == (163840, (1,), "deepseek")
    assert read(DEEPSEEK_V2_LITE).network.q_rank == 0
    plain = read(without(DEEPSEEK_V2, "rope_scaling")).network
    assert plain.attention_scale == pytest.approx(192**-0.5, rel=1e-12)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"num_key_value_heads": 8}, "num_key_value_heads is 8.*as many as query heads, 128"),
        ({"qk_rope_head_dim": 0}, "rotary key"),
        ({"qk_nope_head_dim": 0}, "without positions"),
        ({"qk_rope_head_dim": 63}, "even number"),
        ({"rope_interleave": False}, "always rotates neighbours"),
        ({"rope_interleave": None}, "rope_interleave is None.*true or false"),
        ({"head_dim": 128}, "head_dim is 128.*rotary key's width, 64"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"sliding_window": 4096}, "sliding_window"),
        ({"kv_lora_rank": 0}, "kv_lora_rank"),
        ({"index_topk": 2048, "index_head_dim": 128}, "latent_indexed"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised weights"),
        ({"rope_scaling": DEEPSEEK_V2["rope_scaling"] | {"type": "deepseek_yarn"}}, "deepseek_yarn"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(changes: Config, match: str) -> None:
    with pytest.raises((UnknownModelError, BrokenModelError), match=match):
        read(DEEPSEEK_V2, **changes)


@pytest.mark.parametrize("name", ["q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "v_head_dim", "num_hidden_layers"])
def test_a_number_of_one_checkpoint_is_not_assumed_of_another(name: str) -> None:
    with pytest.raises(BrokenModelError, match=name):
        read(without(DEEPSEEK_V2, name))


def test_halves_are_rotated_where_v3_says_so() -> None:
    assert not read(DEEPSEEK_V3, rope_interleave=False).network.rope_in_pairs
