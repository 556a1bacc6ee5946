"""What makes two blocks the same: a chain of digests over their tokens, and the scope within which they are shared.

Knows nothing of who holds a block or whether anybody has it.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from kvfolio.cache.digest import (
    ADAPTER,
    BLOCK_TOKENS,
    FINGERPRINT,
    NAMESPACE,
    chain_digests,
    keyed_digest,
    pack_tokens,
)


@dataclass(frozen=True, slots=True)
class Scope:
    """Within what a block is shared: requests of an equal scope find each other's blocks, others never do."""

    fingerprint: bytes = b""  # of everything that decides the stored bits: engine/fingerprint.py; at most 64 bytes
    namespace: str | None = None  # a tenant; None is a namespace of its own, not the empty one
    adapter: str | None = None

    @property
    def key(self) -> bytes:
        """The key of all digests in this scope."""
        return self.fingerprint or b"kvfolio"

    def root(self, block_tokens: int) -> bytes:
        """The parent of every first block in this scope."""
        return _root(self, block_tokens)


@lru_cache(maxsize=1024)
def _root(scope: Scope, block_tokens: int) -> bytes:
    fields = [(FINGERPRINT, scope.fingerprint), (BLOCK_TOKENS, struct.pack("<I", block_tokens))]
    if scope.namespace is not None:
        fields.append((NAMESPACE, scope.namespace.encode("utf-8", "surrogatepass")))
    if scope.adapter is not None:
        fields.append((ADAPTER, scope.adapter.encode("utf-8", "surrogatepass")))
    return keyed_digest(scope.key, fields)


class TokenChain:
    """The known tokens of one sequence, in order, and the digests of its full blocks, made once and when asked for.

    Without a scope the chain is private: its blocks are never looked up and never found.
    """

    __slots__ = ("_digests", "block_tokens", "root", "scope", "token_ids")

    def __init__(self, token_ids: Sequence[int], scope: Scope | None, block_tokens: int) -> None:
        self.token_ids = list(token_ids)
        self.scope = scope
        self.block_tokens = block_tokens
        self.root = b"" if scope is None else scope.root(block_tokens)
        self._digests: list[bytes] = []

    def append(self, token_id: int) -> None:
        """One more token is known."""
        self.token_ids.append(token_id)

    def digests(self, num_blocks: int) -> list[bytes]:
        """Digests of at least the first ``num_blocks`` blocks; the list is the chain's own. Not for private chains."""
        assert self.scope is not None
        made = self._digests
        if len(made) < num_blocks:
            tokens = self.block_tokens
            made += chain_digests(
                self.scope.key,
                made[-1] if made else self.root,
                self.token_ids,
                len(made) * tokens,
                num_blocks - len(made),
                tokens,
            )
        return made

    def parent(self, block: int) -> bytes:
        """The digest in front of ``block``: what every block that may follow there has as its parent."""
        return self.root if block == 0 else self.digests(block)[block - 1]

    def packed(self, start: int, stop: int) -> bytes:
        """Tokens [start, stop), 4 bytes each."""
        return pack_tokens(self.token_ids, start, stop)


def common_tokens(one: bytes, other: bytes) -> int:
    """How many tokens two packed stretches begin with alike."""
    if one[:4] != other[:4]:
        return 0
    size = min(len(one), len(other))
    if one[:size] == other[:size]:
        return size // 4
    low, high = 0, size // 4  # one[:4 * low] is equal, one[:4 * high] is not
    while high - low > 1:
        middle = (low + high) // 2
        if one[: 4 * middle] == other[: 4 * middle]:
            low = middle
        else:
            high = middle
    return low
