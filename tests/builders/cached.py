"""One ledger and the few steps that most claims about sharing need: a text that is written, another that is looked up.

Knows nothing of the claims. Texts are lists of token ids; blocks have four tokens.
"""

from collections.abc import Sequence

from kvfolio.cache.holding import SequenceId
from kvfolio.cache.ledger import Ledger
from kvfolio.cache.lookup import Hit, Miss
from kvfolio.cache.moves import Move
from kvfolio.cache.prefix import Scope, TokenChain
from kvfolio.cache.retention import KeepRange

SCOPE = Scope(b"model")
A, B, C, D, E = map(SequenceId, range(5))


def text(start: int, num_tokens: int) -> list[int]:
    """Tokens start, start + 1, …: texts of different hundreds have none in common."""
    return list(range(start, start + num_tokens))


def chain_of(tokens: Sequence[int], scope: Scope | None = SCOPE) -> TokenChain:
    return TokenChain(tokens, scope, 4)


def look_up(ledger: Ledger, tokens: Sequence[int], scope: Scope = SCOPE) -> Hit:
    """As a scheduler does: the last token is always computed."""
    return ledger.lookup(chain_of(tokens, scope), len(tokens) - 1)


def miss_of(ledger: Ledger, tokens: Sequence[int], scope: Scope = SCOPE) -> Miss | None:
    chain, limit = chain_of(tokens, scope), len(tokens) - 1
    return ledger.why_missed(chain, limit, ledger.lookup(chain, limit))


def begin(
    ledger: Ledger,
    sequence: SequenceId,
    tokens: Sequence[int],
    scope: Scope | None = SCOPE,
    keep: tuple[KeepRange, ...] = (),
) -> tuple[Move, ...]:
    """Look up and admit; an open slot must be free."""
    chain = chain_of(tokens, scope)
    moves = ledger.admit(sequence, chain, ledger.lookup(chain, len(tokens) - 1), keep)
    assert moves is not None
    ledger.check()
    return moves


def grow(ledger: Ledger, sequence: SequenceId, num_tokens: int) -> tuple[Move, ...]:
    """Extend to ``num_tokens`` in all and commit; it must be granted."""
    grant = ledger.extend(sequence, num_tokens - ledger.num_tokens(sequence))
    assert grant is not None
    ledger.check()
    ledger.commit(sequence)
    ledger.check()
    return grant.moves


def write(
    ledger: Ledger,
    sequence: SequenceId,
    tokens: Sequence[int],
    scope: Scope | None = SCOPE,
    keep: tuple[KeepRange, ...] = (),
) -> int:
    """Begin and compute all of ``tokens``; returns how many were there already."""
    begin(ledger, sequence, tokens, scope, keep)
    num_hit = ledger.num_tokens(sequence)
    grow(ledger, sequence, len(tokens))
    return num_hit


def leave(ledger: Ledger, *sequences: SequenceId) -> None:
    for sequence in sequences:
        ledger.release(sequence)
        ledger.check()


def pass_by(ledger: Ledger, sequence: SequenceId, tokens: Sequence[int], keep: tuple[KeepRange, ...] = ()) -> None:
    """Written and left: what it computed is cached."""
    write(ledger, sequence, tokens, keep=keep)
    leave(ledger, sequence)


def blocks(ledger: Ledger, sequence: SequenceId, group: int = 0) -> list[int]:
    """The sealed blocks that ``sequence`` holds."""
    return list(table_of(ledger, sequence, group).sealed)


def table_of(ledger: Ledger, sequence: SequenceId, group: int = 0):  # type: ignore[no-untyped-def]
    grant = ledger.extend(sequence, 0)
    assert grant is not None and grant.moves == ()
    return grant.tables[group]


def refs(ledger: Ledger, group: int = 0) -> list[int]:
    """Holders of each block of a pool."""
    return list(ledger._budget.pools[group].refs)
