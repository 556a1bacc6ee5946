"""The C++ extension, as digest.py sees it."""

from collections.abc import Sequence

def chain_digests(
    key: bytes,
    parent: bytes,
    token_ids: Sequence[int],
    start: int,
    num_blocks: int,
    block_tokens: int,
) -> list[bytes] | None: ...
