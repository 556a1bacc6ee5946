"""The digest by which a cache block is found again: keyed BLAKE2b over all that its content depends on, as a chain.

Knows nothing of who holds a block or where it lies, and not where a key comes from. A digest of one version is the
digest of every version: it may lie on a disk.
"""

import struct
from collections.abc import Sequence
from hashlib import blake2b

from kvfolio.errors import OptionError

try:
    from kvfolio.cache import _digest
except ImportError:  # installed without a compiler
    _digest = None  # type: ignore[assignment]

NATIVE: bool = _digest is not None  # whether chains are computed in C++; the digests are the same

DIGEST_BYTES = 32
MAX_KEY_BYTES = 64  # BLAKE2b takes no more
MAX_BLOCK_TOKENS = (1 << 30) - 1  # a field's length is four bytes

# Types of fields. A number that was ever used keeps its meaning.
PARENT = 1
TOKENS = 2
FINGERPRINT = 3
NAMESPACE = 4
ADAPTER = 5
BLOCK_TOKENS = 6


def keyed_digest(key: bytes, fields: Sequence[tuple[int, bytes]]) -> bytes:
    """Keyed BLAKE2b-256 over ``fields``: each one byte of type, u32 little endian length, payload."""
    _check_key(key)
    message = b"".join(part for kind, payload in fields for part in (struct.pack("<BI", kind, len(payload)), payload))
    return blake2b(message, digest_size=DIGEST_BYTES, key=key).digest()


def chain_digests(
    key: bytes, parent: bytes, token_ids: Sequence[int], start: int, num_blocks: int, block_tokens: int
) -> list[bytes]:
    """The digests of ``num_blocks`` blocks of ``block_tokens`` tokens each, from index ``start`` of ``token_ids`` on.

    A block's digest is that of its parent's digest and its token ids (u32 little endian); it is the next block's
    parent. ``token_ids`` is a list or a tuple. Raises OptionError for an id outside 0..2**32-1 and for too few tokens.
    """
    _check_key(key)
    if not 1 <= block_tokens <= MAX_BLOCK_TOKENS:
        raise OptionError(f"a block of {block_tokens} tokens has no digest; give 1 to {MAX_BLOCK_TOKENS:,}")
    if num_blocks < 0:
        raise OptionError(f"{num_blocks} blocks cannot be digested; give 0 or more")
    _check_span(token_ids, start, start + num_blocks * block_tokens)
    if _digest is not None:
        digests = _digest.chain_digests(key, parent, token_ids, start, num_blocks, block_tokens)
        if digests is not None:
            return digests
    return _chain_in_python(key, parent, token_ids, start, num_blocks, block_tokens)


def pack_tokens(token_ids: Sequence[int], start: int, stop: int) -> bytes:
    """The ids from index ``start`` up to ``stop`` as u32 little endian; raises OptionError as `chain_digests` does."""
    _check_span(token_ids, start, stop)
    try:
        return struct.pack(f"<{stop - start}I", *token_ids[start:stop])
    except struct.error:
        _refuse_bad_id(token_ids, start, stop)
        raise


def _chain_in_python(
    key: bytes, parent: bytes, token_ids: Sequence[int], start: int, num_blocks: int, block_tokens: int
) -> list[bytes]:
    """`chain_digests` without the extension, and the definition of what the extension computes."""
    digests = []
    for first in range(start, start + num_blocks * block_tokens, block_tokens):
        tokens = pack_tokens(token_ids, first, first + block_tokens)
        parent = keyed_digest(key, [(PARENT, parent), (TOKENS, tokens)])
        digests.append(parent)
    return digests


def _check_key(key: bytes) -> None:
    if not 1 <= len(key) <= MAX_KEY_BYTES:  # without a key, anyone could compute digests
        raise OptionError(f"a key of {len(key)} bytes; give 1 to {MAX_KEY_BYTES}")


def _check_span(token_ids: Sequence[int], start: int, stop: int) -> None:
    if not 0 <= start <= stop <= len(token_ids):
        raise OptionError(f"tokens {start} to {stop} are asked for, of {len(token_ids)}")


def _refuse_bad_id(token_ids: Sequence[int], start: int, stop: int) -> None:
    for place in range(start, stop):
        try:
            struct.pack("<I", token_ids[place])
        except struct.error:
            raise OptionError(f"token id {token_ids[place]!r} at place {place} is outside 0 to {2**32 - 1:,}") from None
