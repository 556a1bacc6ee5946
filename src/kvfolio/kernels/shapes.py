"""What every attention kernel is told: geometry, the blocks of each chunk, and the memory of one layer.

Plain data over spec.formats and torch tensors. Knows nothing of ledgers, schedulers or models.

One layer's part of a block, from its first byte (the layout both kernels read and write):

    keys      [num_kv_heads, own_k_width, block_tokens]   channels outermost: 16 tokens are one vector register
    k scales  [num_kv_heads, …]                       of formats that have scales
    values    [num_kv_heads, block_tokens, v_width]
    v scales  [num_kv_heads, …]

Scales are one a token, f32 or bf16, or of the channels of a block: [least values | steps, own_k_width] bf16. In packed
formats widths are rounded up to whole packs, and the pads are zeros. codec.py has the bits. Where the value is a prefix
of the key (latent layers), it is stored as a value, once, and the key's own part is what is behind it.
"""

from dataclasses import dataclass

from torch import Tensor

from kvfolio.spec.formats import CacheFormat

RUN_TOKENS = 256  # tokens of one run: the fixed split of every query's reduction
# Counted up when the same tokens leave other bytes in a sealed block: another layout, another encoding, sums in another
# order. The model's fingerprint holds it, so that blocks kept by an older version are found no more.
LAYOUT_VERSION = 2


@dataclass(frozen=True, slots=True)
class LayerGeometry:
    """One layer's attention: heads, widths, window and how blocks are stored."""

    num_q_heads: int
    num_kv_heads: int
    k_width: int
    v_width: int
    block_tokens: int
    window: int | None
    stored: CacheFormat  # of sealed blocks
    exact: CacheFormat  # of open blocks, q, k, v and the output
    v_is_prefix_of_k: bool = False  # the first v_width numbers of a key are its value, stored once

    def __post_init__(self) -> None:
        assert not self.v_is_prefix_of_k or self.num_kv_heads == 1  # kernels decode latents for all query heads at once

    @property
    def own_k_width(self) -> int:
        """Numbers of one head's key that are stored as a key."""
        return self.k_width - self.v_width if self.v_is_prefix_of_k else self.k_width

    @property
    def run_blocks(self) -> int:
        """Blocks of one run; at least one."""
        return max(1, RUN_TOKENS // self.block_tokens)

    @property
    def is_lossless(self) -> bool:
        return self.stored == self.exact

    def layer_bytes(self, fmt: CacheFormat) -> int:
        """Bytes of one layer's part of a block in ``fmt``."""
        vector_bytes = fmt.k.vector_bytes(self.own_k_width) + fmt.v.vector_bytes(self.v_width)
        return self.num_kv_heads * self.block_tokens * vector_bytes


@dataclass(frozen=True, slots=True)
class ChunkBlocks:
    """Consecutive tokens of one sequence, and the blocks it holds.

    Block ``first_block + i`` is sealed block ``sealed[i]``, including those that this chunk fills;
    tokens behind the last full block are in open slot ``open_slot``.
    """

    start: int
    num_tokens: int
    first_block: int
    sealed: tuple[int, ...]
    open_slot: int
    sinks: tuple[int, ...] = ()  # block i < len(sinks) lies exact in sink block sinks[i], those it fills included

    @property
    def stop(self) -> int:
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """Where one layer finds its blocks: two pools of bytes and the layer's place in a block of each."""

    sealed: Tensor  # uint8 [num_blocks, block_bytes]
    sealed_offset: int
    open: Tensor  # uint8 [num_open_blocks, open_block_bytes]
    open_offset: int
    sinks: Tensor | None = None  # uint8 [num_blocks, block_bytes]: exact, of the sink group; None: there is none
    sinks_offset: int = 0
