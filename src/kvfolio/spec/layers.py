"""The kinds of layer memory: what one layer keeps of each token.

Knows nothing of storage formats, blocks or models. MHA, GQA and MQA differ only in ``num_kv_heads``.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FullAttention:
    """Every token's key and value stay, for as long as the sequence lives."""

    num_kv_heads: int
    k_width: int  # numbers in one head's key
    v_width: int  # numbers in one head's value

    @property
    def kind(self) -> str:
        return "full"

    @property
    def window(self) -> int | None:
        return None

    def first_token_needed(self, position: int) -> int:
        """The earliest token that a query at ``position`` reads."""
        return 0


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """A query at position p reads the tokens p - window + 1 … p; older ones may be forgotten."""

    num_kv_heads: int
    k_width: int
    v_width: int
    window: int

    @property
    def kind(self) -> str:
        return "sliding_window"

    def first_token_needed(self, position: int) -> int:
        """The earliest token that a query at ``position`` reads."""
        return max(0, position - self.window + 1)


LayerKind = FullAttention | SlidingWindow
