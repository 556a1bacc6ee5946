"""What makes two blocks the same: roots of scopes that must differ, chains that grow, beginnings in common.

Knows nothing of the cache: the digest itself is held by test_digest.py.
"""

import itertools
import os
import struct

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvfolio.cache.digest import ADAPTER, BLOCK_TOKENS, FINGERPRINT, NAMESPACE, keyed_digest, pack_tokens
from kvfolio.cache.prefix import Scope, TokenChain, common_tokens
from kvfolio.errors import OptionError

Parts = tuple[bytes, str | None, str | None, int]  # fingerprint, namespace, adapter, block_tokens


def root_of(parts: Parts) -> bytes:
    fingerprint, namespace, adapter, block_tokens = parts
    return Scope(fingerprint, namespace, adapter).root(block_tokens)


# ---- scopes ---------------------------------------------------------------------------------------------------------

# Pairs that somebody who joins fields by their bytes, or takes what is missing for what is empty, would confuse.
PAIRS: list[tuple[str, Parts, Parts]] = [
    ("namespace for adapter", (b"m", "x", None, 16), (b"m", None, "x", 16)),
    ("boundary moved", (b"m", "ab", "c", 16), (b"m", "a", "bc", 16)),
    ("all in the namespace", (b"m", "abc", "", 16), (b"m", "", "abc", 16)),
    ("namespace and adapter exchanged", (b"m", "a", "b", 16), (b"m", "b", "a", 16)),
    ("no namespace or an empty one", (b"m", None, None, 16), (b"m", "", None, 16)),
    ("no adapter or an empty one", (b"m", None, None, 16), (b"m", None, "", 16)),
    ("empty namespace or empty adapter", (b"m", "", None, 16), (b"m", None, "", 16)),
    ("fingerprint moved into namespace", (b"mx", None, None, 16), (b"m", "x", None, 16)),
    ("fingerprint moved into namespace whole", (b"", "mx", None, 16), (b"mx", "", None, 16)),
    ("fingerprint is the default key", (b"", None, None, 16), (b"kvfolio", None, None, 16)),
    ("block tokens", (b"m", "x", None, 16), (b"m", "x", None, 32)),
    ("block tokens by one byte", (b"m", None, None, 1), (b"m", None, None, 256)),
    ("an end of zero bytes", (b"m", "x", None, 16), (b"m", "x\0", None, 16)),
    ("a fingerprint's end of zero bytes", (b"m", None, None, 16), (b"m\0", None, None, 16)),
    ("case", (b"m", "tenant", None, 16), (b"m", "Tenant", None, 16)),
    ("two ways to write é", (b"m", "\u00e9", None, 16), (b"m", "e\u0301", None, 16)),
    ("a field written in the name", (b"m", "x\5\1\0\0\0y", None, 16), (b"m", "x", "y", 16)),
    ("None as a word", (b"m", "None", None, 16), (b"m", None, None, 16)),
    ("half a character", (b"m", "\ud800", None, 16), (b"m", "\ud801", None, 16)),
]


@pytest.mark.parametrize(("one", "other"), [pair[1:] for pair in PAIRS], ids=[pair[0] for pair in PAIRS])
def test_scopes_that_differ_have_roots_that_differ(one: Parts, other: Parts) -> None:  # WO-09
    assert root_of(one) != root_of(other)
    assert root_of(one) == root_of(one)


def test_no_two_of_all_these_scopes_have_a_root_in_common() -> None:
    scopes = {parts for _, *pair in PAIRS for parts in pair}
    assert len({root_of(parts) for parts in scopes}) == len(scopes)


def test_the_roots_of_this_version_are_those_of_every_version() -> None:
    """They may lie on a disk."""
    assert Scope().root(16).hex() == "5a6018f8df401fb3447b56506b189649956531741feaa240ec124984be9740e8"
    assert Scope(b"model", "tenant", "lora").root(32).hex() == (
        "263315d8df62ac69aacd655f500cc0d8b3d7da889dbee7f8d17dcac4cac1bad9"
    )


def test_a_root_is_the_digest_of_its_typed_fields_under_the_fingerprint_as_key() -> None:
    fields = [(FINGERPRINT, b"m"), (BLOCK_TOKENS, struct.pack("<I", 16)), (NAMESPACE, b"x"), (ADAPTER, b"y")]
    assert Scope(b"m", "x", "y").root(16) == keyed_digest(b"m", fields)


def test_a_fingerprint_is_at_most_a_key() -> None:
    assert len(Scope(bytes(64)).root(16)) == 32
    with pytest.raises(OptionError, match="a key of 65 bytes"):
        Scope(bytes(65)).root(16)


names = st.one_of(st.none(), st.text(max_size=3))
scopes = st.builds(Scope, st.binary(max_size=3), names, names)


@given(one=scopes, other=scopes, sizes=st.tuples(st.sampled_from((4, 16)), st.sampled_from((4, 16))))
def test_roots_are_equal_exactly_where_scopes_and_block_sizes_are(
    one: Scope, other: Scope, sizes: tuple[int, int]
) -> None:
    assert (one.root(sizes[0]) == other.root(sizes[1])) is ((one, sizes[0]) == (other, sizes[1]))


# ---- chains ---------------------------------------------------------------------------------------------------------

SCOPE = Scope(b"model", "tenant")
token_lists = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def test_a_token_of_the_first_block_changes_the_digest_of_the_second() -> None:
    one, other = TokenChain(range(12), SCOPE, 4), TokenChain([7, *range(1, 12)], SCOPE, 4)
    assert one.token_ids[4:] == other.token_ids[4:]
    assert all(a != b for a, b in zip(one.digests(3), other.digests(3), strict=True))


def test_the_same_tokens_in_another_block_have_another_digest() -> None:
    digests = TokenChain([5] * 16, SCOPE, 4).digests(4)
    assert len(set(digests)) == 4


def test_a_scope_changes_the_digest_of_every_block() -> None:
    one, other = TokenChain(range(8), SCOPE, 4), TokenChain(range(8), Scope(b"model", "other"), 4)
    assert not set(one.digests(2)) & set(other.digests(2))


@given(tokens=token_lists, stops=st.lists(st.integers(0, 10), max_size=5), block_tokens=st.sampled_from((1, 4, 5)))
def test_a_chain_that_grows_has_the_digests_of_one_made_at_once(
    tokens: list[int], stops: list[int], block_tokens: int
) -> None:
    whole = TokenChain(tokens, SCOPE, block_tokens)
    num_blocks = len(tokens) // block_tokens
    grown = TokenChain(tokens[: len(tokens) // 2], SCOPE, block_tokens)
    asked = iter(stops)
    for token in tokens[len(tokens) // 2 :]:
        grown.digests(min(next(asked, 0), len(grown.token_ids) // block_tokens))
        grown.append(token)
    assert grown.digests(num_blocks) == whole.digests(num_blocks)
    assert [grown.parent(block) for block in range(num_blocks + 1)] == [whole.root, *whole.digests(num_blocks)]
    assert grown.packed(0, len(tokens)) == pack_tokens(tokens, 0, len(tokens))


def test_a_chain_has_no_digest_of_a_block_that_is_not_full() -> None:
    chain = TokenChain(range(7), SCOPE, 4)
    assert len(chain.digests(1)) == 1
    with pytest.raises(OptionError, match="tokens 4 to 8 are asked for, of 7"):
        chain.digests(2)


def test_a_chain_keeps_its_own_tokens() -> None:
    tokens = [1, 2, 3, 4]
    chain = TokenChain(tokens, SCOPE, 4)
    tokens[0] = 9
    assert chain.token_ids == [1, 2, 3, 4]


def test_a_private_chain_has_no_digests() -> None:
    with pytest.raises(AssertionError):
        TokenChain(range(8), None, 4).digests(1)


# ---- common beginnings ----------------------------------------------------------------------------------------------


@given(start=token_lists, one=token_lists, other=token_lists)
@example(start=[], one=[0], other=[2**24])  # three of the four bytes agree
@example(start=[1], one=[], other=[5])
@example(start=[1, 2, 3], one=[4, 5], other=[6, 5])
def test_common_tokens_is_the_longest_common_beginning(start: list[int], one: list[int], other: list[int]) -> None:
    left, right = [*start, *one], [*start, *other]
    expected = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))
    packed = [pack_tokens(tokens, 0, len(tokens)) for tokens in (left, right)]
    assert common_tokens(*packed) == common_tokens(*packed[::-1]) == expected


@pytest.mark.parametrize("differs_at", range(17))
def test_common_tokens_finds_every_place_of_a_difference(differs_at: int) -> None:
    one = os.urandom(64)
    at = 4 * differs_at + differs_at % 4
    other = one if at >= 64 else one[:at] + bytes([one[at] ^ 1]) + one[at + 1 :]
    assert common_tokens(one, other) == differs_at
