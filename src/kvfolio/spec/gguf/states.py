"""Which layers of a GGUF model keep a state of constant size, and how many numbers it has, as llama.cpp allocates it.

Knows nothing of attention. llama.cpp (llama-hparams.cpp: n_embd_r, n_embd_s) keeps both parts in f32: the last inputs
of the short convolution and the state itself.
"""

from kvfolio.errors import UnknownModelError
from kvfolio.spec.fields import Fields, show
from kvfolio.spec.formats import F32
from kvfolio.spec.gguf.architectures import (
    KNOWN,
    STATE_KEYS,
    STATES,
    STATES_BESIDE_ATTENTION,
    STATES_BY_STRIDE,
    STATES_ONLY,
    STATES_WHERE_NO_FEED_FORWARD,
)
from kvfolio.spec.gguf.keys import LayerCounts, flags, integers
from kvfolio.spec.layers import RecurrentState

_USUAL_STRIDE = 4  # every fourth layer of the Qwen hybrids is attention
_USUAL_SHIFTS = 2  # RWKV: the last input of time mixing and of channel mixing
_LIST, _STRIDE = "attention.recurrent_layers", "full_attention_interval"


def may_keep_states(fields: Fields, architecture: str) -> bool:
    """Whether layers of this model can keep a state; UnknownModelError where a known one should not and says so."""
    found = [key for key in fields.values if key.removeprefix(fields.prefix).startswith(STATE_KEYS)]
    if architecture in STATES:
        return True
    if found and architecture in KNOWN:
        raise UnknownModelError(
            f"{fields.where}: {found[0]} is given, and {architecture} is not known to keep states; "
            "use the Hugging Face folder of the model"
        )
    return bool(found)


def recurrent_layers(
    fields: Fields, architecture: str, counts: LayerCounts, kv_heads: tuple[int, ...]
) -> tuple[bool, ...]:
    """For each layer whether it keeps a state."""
    if not may_keep_states(fields, architecture):
        return (False,) * counts.model
    if architecture in STATES_ONLY or architecture in STATES_BESIDE_ATTENTION:
        return (True,) * counts.model
    listed = flags(fields, _LIST, counts)
    if listed is not None:
        return listed
    if architecture in STATES_BY_STRIDE or (architecture not in KNOWN and fields.get(_STRIDE) is not None):
        stride = fields.integer(_STRIDE, assume=_USUAL_STRIDE)
        return tuple((index + 1) % stride != 0 for index in range(counts.model))
    without = tuple(heads == 0 for heads in kv_heads)
    if architecture in STATES_WHERE_NO_FEED_FORWARD:
        widths = integers(fields, "feed_forward_length", counts)
        return tuple(none and width == 0 for none, width in zip(without, widths, strict=True))
    if architecture not in KNOWN and not any(without):
        raise UnknownModelError(
            f"{fields.where}: architecture {show(architecture)} keeps states, but its header does not say in which "
            "layers; use the Hugging Face folder of the model"
        )
    return without


def state_of(fields: Fields, architecture: str, num_q_heads: int) -> RecurrentState:
    """The state of one layer, in f32.

    With d the inner width, s the state's size, g the groups and c the convolution's length: (c - 1) * (d + 2 g s)
    inputs and d * s numbers of state.
    """
    fields.note("states are counted in f32, as llama.cpp keeps them")
    mechanism = STATES.get(architecture, "state")
    if fields.get("wkv.head_size") is not None:
        width = fields.integer("embedding_length")
        shifts = fields.integer("token_shift_count", default=_USUAL_SHIFTS)
        return RecurrentState(mechanism, width * fields.integer("wkv.head_size"), F32, shifts * width, F32)
    if fields.get("shortconv.l_cache") is not None:
        inputs = fields.integer("embedding_length") * (fields.integer("shortconv.l_cache") - 1)
        return RecurrentState(mechanism, 0, F32, inputs, F32)
    kernel = fields.integer("ssm.conv_kernel")
    if fields.get("kda.head_dim") is not None:
        head = fields.integer("kda.head_dim")
        return RecurrentState(mechanism, num_q_heads * head**2, F32, 3 * (kernel - 1) * num_q_heads * head, F32)
    inner, size = fields.integer("ssm.inner_size"), fields.integer("ssm.state_size")
    groups = fields.integer("ssm.group_count", default=0, low=0)  # Mamba 1 has none
    return RecurrentState(mechanism, inner * size, F32, (kernel - 1) * (inner + 2 * groups * size), F32)
