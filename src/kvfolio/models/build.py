"""Which network runs which family, and the check that every weight found its place in it.

Knows nothing of caches or of what a network computes.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from kvfolio.errors import BrokenModelError, UnknownModelError
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


class _WithHead(LanguageModel, Protocol):
    """A network as it is built here."""

    head: Tensor  # [vocab_size, hidden], of the last product


NETWORKS: dict[str, Callable[[RunnableSpec, Weights], _WithHead]] = {
    "llama": llama,
    "gemma3": Gemma3Model,
    "gpt2": Gpt2Model,
    "falcon": FalconModel,
    "deepseek": deepseek,
    "gpt_oss": gpt_oss,
}
HEAD = "lm_head.weight"
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
    guessing = f"model.layers.{len(spec.layers)}."  # DeepSeek's layer behind the last, which guesses further tokens
    has_guessing = spec.family == "deepseek" and weights.has(f"{guessing}eh_proj.weight")

    def may_stay(name: str) -> bool:
        return name.endswith(UNUSED) or (has_guessing and name.startswith(guessing))

    if spec.network.tie_embeddings and weights.has(HEAD):
        _check_copy(model, weights)
    weights.refuse_unread(may_stay)
    return model


def _check_copy(model: _WithHead, weights: Weights) -> None:
    """Raise BrokenModelError where a head is stored beside the embeddings that the config makes it, and is another."""
    stored = weights.get(HEAD, tuple(model.head.shape))
    if not stored.is_meta and not torch.equal(stored, model.head):
        raise BrokenModelError(
            f"{model.spec.name}: the config ties the output to the embeddings, and the file holds an {HEAD} that "
            "differs from them; set tie_word_embeddings to false, or remove that tensor"
        )
