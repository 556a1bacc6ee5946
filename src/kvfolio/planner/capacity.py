"""How many sequences fit into a cache's memory, and how long they may be.

Knows nothing of devices or speeds: it is handed bytes.
"""

from collections.abc import Callable

from kvfolio.planner.sizes import bytes_at, rounded_up
from kvfolio.spec.formats import CacheFormat
from kvfolio.spec.layers import parts_of
from kvfolio.spec.model import ModelSpec

LONGEST = 1 << 40  # tokens; where a search ends for models whose cache does not grow


def sequence_bytes(spec: ModelSpec, num_tokens: int, fmt: CacheFormat, block_tokens: int) -> int:
    """Bytes of one sequence in whole blocks."""
    return bytes_at(spec, rounded_up(num_tokens, block_tokens), fmt)


def users_that_fit(kv_memory: int, bytes_each: int, shared_bytes: int = 0) -> int | None:
    """Sequences of ``bytes_each`` that fit, ``shared_bytes`` of each being one shared prefix, stored once.

    None: an empty cache bounds nothing.
    """
    if not bytes_each:
        return None
    return max(0, kv_memory - shared_bytes) // max(1, bytes_each - shared_bytes)


def shared_prefix_bytes(spec: ModelSpec, prefix_tokens: int, fmt: CacheFormat, block_tokens: int) -> int:
    """Bytes of a common prefix that sequences can hold once: its full blocks in layers that keep every token.

    A window moves on over its own tokens and a state is each sequence's own, so neither is shared for long.
    """
    blocks = prefix_tokens // block_tokens * block_tokens
    return sum(
        count * part.bytes_at(blocks, fmt)
        for kind, count in spec.kinds()
        for part in parts_of(kind)
        if part.horizon() is None and part.growth(fmt)
    )


def largest_context(spec: ModelSpec, bytes_each: int, fmt: CacheFormat, block_tokens: int) -> int | None:
    """The most tokens, in whole blocks, of a sequence that takes at most ``bytes_each``; None: no text is too long."""
    if sequence_bytes(spec, LONGEST, fmt, block_tokens) <= bytes_each:
        return None
    return last_that_holds(lambda blocks: bytes_at(spec, blocks * block_tokens, fmt) <= bytes_each) * block_tokens


def break_even_context(spec: ModelSpec, weights_bytes: int, users: int, fmt: CacheFormat) -> int | None:
    """The fewest tokens at which the caches of ``users`` sequences outweigh the weights; None: they never do."""
    if users * bytes_at(spec, LONGEST, fmt) <= weights_bytes:
        return None
    return last_that_holds(lambda tokens: users * bytes_at(spec, tokens, fmt) <= weights_bytes) + 1


def last_that_holds(holds: Callable[[int], bool], low: int = 0, high: int = LONGEST) -> int:
    """The largest n from ``low`` to ``high`` for which ``holds``: true up to some n, false beyond; ``low`` if never."""
    while low < high:
        middle = (low + high + 1) // 2
        if holds(middle):
            low = middle
        else:
            high = middle - 1
    return low
