"""Which network runs which family, and the check that every weight found its place in it.

Knows nothing of caches or of what a network computes.
"""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from kvfolio.errors import UnknownModelError
from kvfolio.models.deepseek import deepseek
from kvfolio.models.falcon import FalconModel
from kvfolio.models.gemma3 import Gemma3Model
from kvfolio.models.gpt2 import Gpt2Model
from kvfolio.models.gpt_oss import gpt_oss
from kvfolio.models.llama import llama
from kvfolio.models.parts import KVView, Ops
from kvfolio.models.weights import Weights
from kvfolio.spec.model import RunnableSpec


class LanguageModel(Protocol):
    """A network: token ids in, logits out. It holds weights and nothing else; memory is the view's."""

    spec: RunnableSpec
    weight_bytes: int  # of the distinct tensors it holds

    def forward(self, token_ids: Tensor, positions: Tensor, view: KVView, ops: Ops, rows: Tensor) -> Tensor:
        """One step over the tokens of all its sequences, flattened in one axis.

        token_ids, positions [num_tokens] int64; rows [num_rows] int64, the tokens whose logits are wanted
        → [num_rows, vocab_size] of the compute dtype. Side effect: the view's cache holds the step's keys and values.
        """
        ...


NETWORKS: dict[str, Callable[[RunnableSpec, Weights], LanguageModel]] = {
    "llama": llama,
    "gemma3": Gemma3Model,
    "gpt2": Gpt2Model,
    "falcon": FalconModel,
    "deepseek": deepseek,
    "gpt_oss": gpt_oss,
}
# Stored, but computed here: buffers of older transformers, and GGUF's rotary divisors, which the spec has read.
UNUSED = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias", "rope_freqs.weight")


def build_model(spec: RunnableSpec, weights: Weights) -> LanguageModel:
    """The network of ``spec.family`` with its weights read.

    Raises UnknownModelError for a family without a network, BrokenModelError for weights that are missing, of another
    shape, or left over.
    """
    if spec.family not in NETWORKS:
        raise UnknownModelError(
            f"no network runs the family {spec.family!r} of {spec.name}; known: {', '.join(NETWORKS)}"
        )
    model = NETWORKS[spec.family](spec, weights)
    guessing = f"model.layers.{len(spec.layers)}."  # the layer behind the last guesses further tokens (MTP)

    def may_stay(name: str) -> bool:
        tied_copy = name == "lm_head.weight" and spec.network.tie_embeddings
        return tied_copy or name.endswith(UNUSED) or (spec.family == "deepseek" and name.startswith(guessing))

    weights.refuse_unread(may_stay)
    return model
