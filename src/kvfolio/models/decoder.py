"""The body of most decoders: two norms a layer, before attention and before the feed-forward part. What attention and
feed-forward compute is theirs.

Knows nothing of caches, files or kernels: weights come by name, memory through a view, arithmetic through ops.
"""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from kvfolio.errors import UnknownModelError
from kvfolio.models.parts import KVView, Ops, RopeTable, Rotary
from kvfolio.models.weights import Weights
from kvfolio.spec.model import RunnableSpec


class Attention(Protocol):
    """One layer's attention, its projections included."""

    def forward(self, x: Tensor, rotary: Rotary, view: KVView, ops: Ops) -> Tensor:
        """x [num_tokens, hidden], normed → [num_tokens, hidden]."""
        ...


class FeedForward(Protocol):
    """What follows attention: one gated MLP, or experts."""

    def forward(self, x: Tensor, ops: Ops) -> Tensor:
        """x [num_tokens, hidden], normed → [num_tokens, hidden]."""
        ...


class DecoderLayer:
    """norm → attention → add and norm → feed-forward part. The last addition is left to the next norm."""

    def __init__(
        self, spec: RunnableSpec, weights: Weights, index: int, attention: Attention, mlp: FeedForward
    ) -> None:
        hidden, name = spec.network.hidden_size, f"model.layers.{index}"
        self.is_local = spec.layers[index].window is not None
        self.norm_eps = spec.network.norm_eps
        self.input_norm = weights.norm_scale(f"{name}.input_layernorm.weight", hidden)  # [hidden] f32
        self.attention = attention
        self.mlp_norm = weights.norm_scale(f"{name}.post_attention_layernorm.weight", hidden)  # [hidden] f32
        self.mlp = mlp

    def forward(
        self, delta: Tensor | None, residual: Tensor, rotary: Rotary, view: KVView, ops: Ops
    ) -> tuple[Tensor, Tensor]:
        """(delta, residual), both [num_tokens, hidden]; their sum is the hidden state. No delta: nothing to add yet."""
        if delta is None:
            x = ops.rms_norm(residual, self.input_norm, self.norm_eps)
        else:
            x, residual = ops.add_rms_norm(delta, residual, self.input_norm, self.norm_eps)
        delta = self.attention.forward(x, rotary, view, ops)  # [num_tokens, hidden]
        x, residual = ops.add_rms_norm(delta, residual, self.mlp_norm, self.norm_eps)
        return self.mlp.forward(x, ops), residual


class Decoder:
    """Embedding, layers, final norm, head."""

    def __init__(
        self,
        spec: RunnableSpec,
        weights: Weights,
        attention: Callable[[RunnableSpec, Weights, int], Attention],
        feed_forward: Callable[[RunnableSpec, Weights, int], FeedForward],
    ) -> None:
        network = spec.network
        if network.rope is None:
            raise UnknownModelError(
                f"{spec.name}: a network of the family {spec.family} needs rotary positions, none are given"
            )
        vocab, hidden = network.vocab_size, network.hidden_size
        self.spec = spec
        self.embedding = weights.get("model.embed_tokens.weight", (vocab, hidden))  # [vocab, hidden]
        self.layers = [
            DecoderLayer(spec, weights, index, attention(spec, weights, index), feed_forward(spec, weights, index))
            for index in range(len(spec.layers))
        ]
        self.norm = weights.norm_scale("model.norm.weight", hidden)  # [hidden] f32
        self.head = (  # [vocab, hidden]
            self.embedding if network.tie_embeddings else weights.get("lm_head.weight", (vocab, hidden))
        )
        self.rope = RopeTable(network.rope, weights.device)  # of full-attention layers
        self.rope_local = (  # of sliding-window layers: the same one, but for rare configurations
            self.rope if network.rope_local is None else RopeTable(network.rope_local, weights.device)
        )
        self.weight_bytes = weights.delivered_bytes

    def forward(self, token_ids: Tensor, positions: Tensor, view: KVView, ops: Ops, rows: Tensor) -> Tensor:
        """token_ids, positions [num_tokens], rows [num_rows] → logits [num_rows, vocab] of the compute dtype."""
        rotary = self.rope.at(positions)
        rotary_local = rotary if self.rope_local is self.rope else self.rope_local.at(positions)
        delta, residual = None, self.embedding[token_ids]  # [num_tokens, hidden]
        for layer in self.layers:
            delta, residual = layer.forward(delta, residual, rotary_local if layer.is_local else rotary, view, ops)
        assert delta is not None
        x, _ = ops.add_rms_norm(
            delta[rows], residual[rows], self.norm, self.spec.network.norm_eps
        )  # [num_rows, hidden]
        return ops.linear(x, self.head)
