"""The digest of a cache block: C++ and its Python twin against hashlib over bytes written out by hand.

Knows nothing of who looks blocks up by it.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfolio.cache import digest
from kvfolio.cache.digest import (
    ADAPTER,
    BLOCK_TOKENS,
    FINGERPRINT,
    NAMESPACE,
    NATIVE,
    PARENT,
    TOKENS,
    _chain_in_python,
    chain_digests,
    keyed_digest,
    pack_tokens,
)
from kvfolio.errors import OptionError

Chain = Callable[[bytes, bytes, Sequence[int], int, int, int], list[bytes]]

KEY = bytes(range(32))
ROOT = bytes(range(100, 132))
CHAINS = pytest.mark.parametrize("chain", [chain_digests, _chain_in_python])

digests = st.binary(min_size=32, max_size=32)
ids = st.one_of(st.integers(0, 200_000), st.integers(0, 2**32 - 1))


def little(number: int) -> bytes:
    return number.to_bytes(4, "little")


def chain_by_hand(
    key: bytes, parent: bytes, token_ids: Sequence[int], start: int, num_blocks: int, block_tokens: int
) -> list[bytes]:
    """What the chain is said to be, with nothing of the code under test."""
    chain = []
    for block in range(num_blocks):
        first = start + block * block_tokens
        tokens = b"".join(little(token) for token in token_ids[first : first + block_tokens])
        message = b"\x01" + little(len(parent)) + parent + b"\x02" + little(len(tokens)) + tokens
        parent = blake2b(message, digest_size=32, key=key).digest()
        chain.append(parent)
    return chain


@st.composite
def spans(draw: st.DrawFn) -> tuple[Sequence[int], int, int, int]:
    """Token ids with a start, a number of blocks and a block's tokens that they suffice for."""
    block_tokens = draw(st.integers(4, 256))
    num_blocks = draw(st.integers(0, 4))
    start = draw(st.integers(0, 40))
    spare = draw(st.integers(0, 20))
    few = draw(st.lists(ids, min_size=1, max_size=40))
    num_tokens = start + num_blocks * block_tokens + spare
    token_ids = [few[(place * place) % len(few)] for place in range(num_tokens)]
    return draw(st.sampled_from([list, tuple]))(token_ids), start, num_blocks, block_tokens


def test_the_extension_is_in_use_where_it_was_built() -> None:
    built = list(Path(digest.__file__).parent.glob("_digest*.so"))
    assert NATIVE or not built


@CHAINS
@given(key=digests, parent=digests, span=spans())
def test_a_chain_is_hashlib_over_its_fields(
    chain: Chain, key: bytes, parent: bytes, span: tuple[Sequence[int], int, int, int]
) -> None:
    assert chain(key, parent, *span) == chain_by_hand(key, parent, *span)


@CHAINS
@given(key=st.binary(min_size=1, max_size=64), parent=st.binary(max_size=300), block_tokens=st.integers(1, 70))
def test_keys_parents_and_blocks_of_any_length_are_digested(
    chain: Chain, key: bytes, parent: bytes, block_tokens: int
) -> None:
    token_ids = list(range(1000, 1000 + 3 * block_tokens))
    assert chain(key, parent, token_ids, 0, 3, block_tokens) == chain_by_hand(
        key, parent, token_ids, 0, 3, block_tokens
    )


@CHAINS
@pytest.mark.parametrize("num_tokens", [21, 22, 53, 54])  # 21 and 53 end a few bytes before BLAKE2b's block does
@pytest.mark.parametrize("parent_bytes", [0, 32, 34, 35, 162, 163])  # with 21 tokens 34 fill it, 35 are one too many
def test_a_message_that_just_fills_a_block_is_digested(chain: Chain, num_tokens: int, parent_bytes: int) -> None:
    arguments = (KEY, bytes(parent_bytes), list(range(2 * num_tokens)), 0, 2, num_tokens)
    assert chain(*arguments) == chain_by_hand(*arguments)


@CHAINS
def test_a_chain_can_be_taken_up_at_any_block(chain: Chain) -> None:
    token_ids = list(range(7, 7 + 16 * 10))
    whole = chain(KEY, ROOT, token_ids, 0, 10, 16)
    assert chain(KEY, whole[3], token_ids, 4 * 16, 6, 16) == whole[4:]
    assert len(set(whole)) == 10


@CHAINS
def test_the_digests_of_this_version_are_those_of_every_version(chain: Chain) -> None:
    token_ids = [0, 1, 2, 255, 256, 65_535, 65_536, 128_000, 2**30 - 1, 2**30, 2**31, 2**32 - 1]
    assert [found.hex() for found in chain(KEY, ROOT, token_ids, 0, 3, 4)] == [
        "7df9560e3070e9ba5bd67a5b3af1e9e2df329d5b320e6c14e221d25b14c4311a",
        "0ab23409eb3a030902b4d0f7b5d5951ed2048b81d61b6e2163fdaea42267620e",
        "21361b0a86ec6ac79d832db4c5fac3e336ca63694250ac63dbef0ff4cfc0e3e0",
    ]


def test_the_digest_of_all_fields_is_that_of_every_version() -> None:
    fields = [
        (PARENT, b""),
        (TOKENS, pack_tokens((1, 2, 3), 0, 3)),
        (FINGERPRINT, b"model"),
        (NAMESPACE, b"tenant"),
        (ADAPTER, b"lora"),
        (BLOCK_TOKENS, little(16)),
    ]
    assert keyed_digest(KEY, fields).hex() == "881c16faafd949c060d05e504397585d9b71c7fef1573e0bd3095ea9637d173e"


def test_field_types_keep_their_numbers() -> None:
    assert (PARENT, TOKENS, FINGERPRINT, NAMESPACE, ADAPTER, BLOCK_TOKENS) == (1, 2, 3, 4, 5, 6)


# ---- fields ---------------------------------------------------------------------------------------------------------

field_lists = st.lists(st.tuples(st.integers(0, 255), st.binary(max_size=12)), max_size=5)


@given(key=digests, fields=field_lists)
def test_a_digest_is_hashlib_over_typed_fields_with_their_lengths(key: bytes, fields: list[tuple[int, bytes]]) -> None:
    message = b"".join(bytes([kind]) + little(len(payload)) + payload for kind, payload in fields)
    assert keyed_digest(key, fields) == blake2b(message, digest_size=32, key=key).digest()


@given(one=field_lists, other=field_lists)
def test_other_fields_give_another_digest(one: list[tuple[int, bytes]], other: list[tuple[int, bytes]]) -> None:
    assert (keyed_digest(KEY, one) == keyed_digest(KEY, other)) == (one == other)


@given(payload=st.binary(min_size=1, max_size=80), data=st.data())
def test_a_moved_boundary_gives_another_digest(payload: bytes, data: st.DataObject) -> None:
    cuts = st.integers(0, len(payload))
    here, there = data.draw(cuts), data.draw(cuts)
    made = [keyed_digest(KEY, [(PARENT, payload[:cut]), (TOKENS, payload[cut:])]) for cut in (here, there)]
    assert (made[0] == made[1]) == (here == there)


def test_the_type_the_key_and_the_order_are_part_of_the_digest() -> None:
    one, two = (NAMESPACE, b"same"), (ADAPTER, b"same")
    made = {keyed_digest(KEY, fields) for fields in ([], [one], [two], [one, two], [two, one], [one, one])}
    made |= {keyed_digest(KEY[::-1], [one]), keyed_digest(KEY + b"\0", [one])}
    assert len(made) == 8


@CHAINS
@given(place=st.integers(0, 31), bit=st.integers(0, 31))
def test_one_changed_token_changes_its_block_and_all_after_it(chain: Chain, place: int, bit: int) -> None:
    token_ids = [3] * 32
    changed = [*token_ids[:place], 3 ^ 1 << bit, *token_ids[place + 1 :]]
    before, after = chain(KEY, ROOT, token_ids, 0, 8, 4), chain(KEY, ROOT, changed, 0, 8, 4)
    assert [one == other for one, other in zip(before, after, strict=True)] == [b < place // 4 for b in range(8)]


# ---- refusals -------------------------------------------------------------------------------------------------------


@CHAINS
@pytest.mark.parametrize("bad", [-1, 2**32, -(2**31), 2**63, -(2**64), 10**30, 1.0, None, "7"])
@pytest.mark.parametrize("place", [2, 3, 9])
@pytest.mark.parametrize("kind", [list, tuple])
def test_an_id_that_is_no_u32_is_named(chain: Chain, bad: object, place: int, kind: type) -> None:
    token_ids: list[object] = list(range(12))
    token_ids[place] = bad
    with pytest.raises(OptionError) as caught:
        chain(KEY, ROOT, kind(token_ids), 2, 2, 4)
    assert str(caught.value) == f"token id {bad!r} at place {place} is outside 0 to 4,294,967,295"


@CHAINS
def test_a_bad_id_outside_the_span_is_not_looked_at(chain: Chain) -> None:
    assert chain(KEY, ROOT, [-1, 5, 6, 7, 8, -1], 1, 1, 4) == chain(KEY, ROOT, [5, 6, 7, 8], 0, 1, 4)


@CHAINS
def test_ids_that_are_ints_by_another_name_count_as_ints(chain: Chain) -> None:
    class Index:
        def __index__(self) -> int:
            return 1

    assert chain(KEY, ROOT, [True, Index(), 1, 1], 0, 1, 4) == chain(KEY, ROOT, [1, 1, 1, 1], 0, 1, 4)  # type: ignore[list-item]


@CHAINS
def test_no_blocks_have_no_digests(chain: Chain) -> None:
    assert chain(KEY, ROOT, [], 0, 0, 16) == chain(KEY, ROOT, (1, 2), 2, 0, 16) == []


@CHAINS
@pytest.mark.parametrize(("num_tokens", "start", "num_blocks"), [(63, 0, 4), (64, 1, 4), (15, 0, 1), (0, 0, 1)])
def test_too_few_tokens_are_refused_with_numbers(chain: Chain, num_tokens: int, start: int, num_blocks: int) -> None:
    with pytest.raises(OptionError, match=f"of {num_tokens}"):
        chain(KEY, ROOT, list(range(num_tokens)), start, num_blocks, 16)


@pytest.mark.parametrize(
    ("start", "num_blocks", "block_tokens", "named"),
    [
        (-1, 1, 4, "tokens -1 to 3"),
        (65, 0, 4, "tokens 65 to 65 are asked for, of 64"),
        (0, -1, 4, "-1 blocks"),
        (0, 1, 0, "block of 0 tokens"),
        (0, 0, -4, "block of -4 tokens"),
        (0, 1, 2**30, "block of 1073741824 tokens"),
        (0, 2**64, 4, "of 64"),
        (2**64, 1, 4, "of 64"),
    ],
)
def test_a_span_that_makes_no_sense_is_refused(start: int, num_blocks: int, block_tokens: int, named: str) -> None:
    with pytest.raises(OptionError, match=named):
        chain_digests(KEY, ROOT, list(range(64)), start, num_blocks, block_tokens)


@pytest.mark.parametrize("key", [b"", bytes(65)])
def test_a_key_is_neither_empty_nor_longer_than_blake2b_takes(key: bytes) -> None:
    for ask in (lambda: chain_digests(key, ROOT, [1] * 4, 0, 1, 4), lambda: keyed_digest(key, [])):
        with pytest.raises(OptionError, match=f"a key of {len(key)} bytes"):
            ask()


# ---- tokens ---------------------------------------------------------------------------------------------------------


@given(token_ids=st.lists(ids, max_size=40), data=st.data())
def test_tokens_are_packed_as_u32_little_endian(token_ids: list[int], data: st.DataObject) -> None:
    stop = data.draw(st.integers(0, len(token_ids)))
    start = data.draw(st.integers(0, stop))
    expected = b"".join(little(token) for token in token_ids[start:stop])
    assert pack_tokens(token_ids, start, stop) == pack_tokens(tuple(token_ids), start, stop) == expected


def test_tokens_that_do_not_exist_are_not_packed() -> None:
    for start, stop in ((0, 4), (-1, 2), (2, 1)):
        with pytest.raises(OptionError, match=f"tokens {start} to {stop} are asked for, of 3"):
            pack_tokens([1, 2, 3], start, stop)
    with pytest.raises(OptionError, match="token id -5 at place 1 "):
        pack_tokens([1, -5, 3], 0, 3)


# ---- without the extension ------------------------------------------------------------------------------------------


def test_without_the_extension_the_twin_gives_the_same_digests() -> None:
    code = f"""
import sys
sys.modules["kvfolio.cache._digest"] = None
from kvfolio.cache import digest
assert not digest.NATIVE
print(*(one.hex() for one in digest.chain_digests({KEY!r}, {ROOT!r}, list(range(64)), 0, 4, 16)))
"""
    source = str(Path(digest.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([source, os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [one.hex() for one in chain_digests(KEY, ROOT, list(range(64)), 0, 4, 16)]
