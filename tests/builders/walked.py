"""A ledger beside a brute-force model of it: sets of holders, texts in place of digests, memory that is really written.

Knows nothing of how a ledger keeps its books. After every operation ``compare`` says whether the two agree.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from contents import Contents, Text

from kvfolio.cache.holding import Grant, SequenceId
from kvfolio.cache.ledger import Ledger, LedgerOptions
from kvfolio.cache.lookup import Hit
from kvfolio.cache.moves import CopyOpen, CopyToOpen, Move, Poison, ReturnMemory, SwapIn, SwapOut
from kvfolio.cache.prefix import Scope, TokenChain
from kvfolio.cache.retention import PIN, KeepRange
from kvfolio.spec.layout import CacheLayout


@dataclass(eq=False)
class Sequence:
    """One sequence as its user sees it."""

    name: SequenceId
    chain: TokenChain
    owner: object
    num_tokens: int = 0
    num_written: int = 0
    slot: int | None = None  # on the device
    held: list[dict[int, int]] = field(default_factory=list)  # a group each: block of the text → id
    host_blocks: int = 0  # when it is swapped

    def text(self, num_tokens: int) -> Text:
        return Text(self.owner, tuple(self.chain.token_ids[:num_tokens]))

    @property
    def written(self) -> Text:
        return self.text(self.num_written)

    @property
    def known(self) -> int:
        return len(self.chain.token_ids)


class Walk:
    """The ledger, the model, and what has been seen to happen."""

    def __init__(self, layout: CacheLayout, options: LedgerOptions) -> None:
        self.layout, self.options = layout, options
        self.size = layout.block_tokens
        self.kinds = [group.group.kind for group in layout.groups]
        self.sinks = [group.num_sinks for group in layout.groups]
        self.ledger, self.contents = Ledger(layout, options), Contents(layout, options.host)
        self.running: dict[SequenceId, Sequence] = {}
        self.swapped: dict[SequenceId, Sequence] = {}
        self.kept: dict[int, Text] = {}  # slot → the end of a text that nobody writes any more
        self.filed: list[dict[Text, int]] = [{} for _ in layout.groups]  # what can be found, and where
        self.touched: list[set[int]] = [set() for _ in layout.groups]
        self.now_s = 0.0
        self.next_id = 0
        self.seen: dict[str, int] = {}

    def note(self, *events: str) -> None:
        for event in events:
            self.seen[event] = self.seen.get(event, 0) + 1

    # ---- the model --------------------------------------------------------------------------------------------------

    def holders(self, group: int) -> dict[int, set[SequenceId]]:
        found: dict[int, set[SequenceId]] = {}
        for sequence in self.running.values():
            for block in sequence.held[group].values():
                found.setdefault(block, set()).add(sequence.name)
        return found

    def fits(self, counts: list[int]) -> bool:
        """Whether so many more blocks of each group can be held."""
        held = [len(self.holders(group)) for group in range(len(self.kinds))]
        sizes = [group.block_bytes for group in self.layout.groups]
        num_bytes = sum((one + more) * size for one, more, size in zip(held, counts, sizes, strict=True))
        return num_bytes <= self.layout.budget_bytes and all(
            one + more <= group.num_blocks for one, more, group in zip(held, counts, self.layout.groups, strict=True)
        )

    def needed(self, kind_index: int, position: int) -> range:
        """The full blocks that a query at ``position`` reads in one group."""
        blocks = range(self.kinds[kind_index].first_token_needed(position) // self.size, position // self.size)
        return self.of_group(kind_index, blocks)

    def of_group(self, group: int, blocks: range) -> range:
        """Those of ``blocks`` that a group holds: of a sink group, none behind the first ones."""
        limit = self.sinks[group]
        return range(blocks.start, blocks.stop if limit is None else max(blocks.start, min(blocks.stop, limit)))

    def whole_hit(self, text: Text) -> int:
        """The longest edge behind which every group has what a query reads."""
        for edge in range(len(text.tokens) // self.size, -1, -1):
            if all(
                text.until((block + 1) * self.size) in filed
                for group, filed in enumerate(self.filed)
                for block in self.needed(group, edge * self.size)
            ):
                return edge * self.size
        raise AssertionError

    def open_texts(self) -> Iterator[Text]:
        """Beginnings of blocks that can be copied from open slots."""
        yield from self.kept.values()
        for sequence in self.running.values():
            if sequence.chain.scope is not None:
                yield sequence.written

    def expected_hit(self, text: Text) -> int:
        """The longest hit, looked for by trying everything."""
        start = self.whole_hit(text)
        best, stop = start, min(start + self.size, len(text.tokens))
        candidates = [one for one in self.open_texts() if len(one.tokens) // self.size * self.size == start]
        if self.layout.is_lossless:
            candidates += [
                one for one in self.filed[0] if len(one.tokens) == start + self.size and self.is_everywhere(one)
            ]
        for one in candidates:
            common = start
            while common < min(stop, len(one.tokens)) and one.until(common + 1) == text.until(common + 1):
                common += 1
            if one.until(start) == text.until(start):
                best = max(best, common)
        return best

    def is_everywhere(self, text: Text) -> bool:
        return all(text in filed for filed in self.filed)

    def forget(self, group: int, block: int) -> None:
        """The block was evicted."""
        for text in [text for text, there in self.filed[group].items() if there == block]:
            del self.filed[group][text]
            self.note("evict")

    def take(self, group: int, blocks: list[int]) -> None:
        """The ledger has granted ``blocks``: nobody may have held any of those."""
        held = self.holders(group)
        assert len(set(blocks)) == len(blocks) and not set(blocks) & set(held), "a held block is handed out"
        assert all(0 <= block < self.layout.groups[group].num_blocks for block in blocks)
        for block in blocks:
            self.forget(group, block)
        self.touched[group].update(blocks)

    def carry(self, moves: tuple[Move, ...]) -> None:
        for move in moves:
            if isinstance(move, ReturnMemory):
                assert move.block not in self.holders(move.group), "a held block's memory is returned"
                assert move.block in self.touched[move.group]
                self.forget(move.group, move.block)
                self.touched[move.group].remove(move.block)
            self.note(type(move).__name__)
        assert self.options.debug or not any(isinstance(move, Poison) for move in moves)
        self.contents.carry(moves)

    # ---- operations -------------------------------------------------------------------------------------------------

    def admit(self, tokens: list[int], scope: Scope | None, limit: int, keep: tuple[KeepRange, ...] = ()) -> None:
        name, self.next_id = SequenceId(self.next_id), self.next_id + 1
        chain = TokenChain(tokens, scope, self.size)
        sequence = Sequence(name, chain, ("private", name) if scope is None else scope)
        hit = self.ledger.lookup(chain, limit)
        if scope is None:
            assert hit.num_tokens == 0
        else:
            self.check_hit(sequence, hit, limit)
        shared = self.ledger.blocks_shared(hit)
        moves = self.ledger.admit(name, chain, hit, keep)
        if moves is None:
            assert len(self.running) == self.layout.num_open_blocks
            return self.note("no slot")
        self.note("admit", *(["hit"] if hit.cards else []))
        sequence.num_tokens = sequence.num_written = hit.num_tokens
        self.start(sequence)
        if not self.options.debug and not moves and not (hit.partial is not None and hit.num_tokens % self.size):
            self.contents.spoil_open(self.slot_of(sequence))
        self.carry(moves)
        assert [sum(len(h) > 1 for b, h in self.holders(g).items() if b in one.values())
                for g, one in enumerate(sequence.held)] == shared  # fmt: skip
        for group, held in enumerate(sequence.held):
            blocks = self.needed(group, hit.num_tokens)
            there = [self.filed[group][sequence.text((block + 1) * self.size)] for block in blocks]
            assert held == dict(zip(blocks, there, strict=True)), (
                "other blocks are shared than those that hold the text"
            )
        if moves and isinstance(moves[-1], CopyOpen | CopyToOpen):
            assert all(isinstance(move, CopyOpen | CopyToOpen) for move in moves)
        elif hit.num_tokens % self.size:
            self.note("same slot")
        return None

    def check_hit(self, sequence: Sequence, hit: Hit, limit: int) -> None:
        assert hit.num_tokens == self.expected_hit(sequence.text(limit)), (
            f"hit of {hit.num_tokens}, expected {self.expected_hit(sequence.text(limit))}"
        )
        miss = self.ledger.why_missed(sequence.chain, limit, hit)
        assert (miss is None) is (hit.num_tokens >= limit)
        if miss is not None:
            assert miss.position == hit.num_tokens
            self.note(miss.reason)
        others = [other for other in self.running.values() if other.chain.scope is not None]
        start = self.whole_hit(sequence.text(limit))
        coming = max([0, *(self.coming(other, sequence.text(limit), start) for other in others)])
        assert hit.num_computing == (coming if coming > hit.num_tokens - start else 0)
        assert (hit.computing is not None) is (hit.num_computing > 0)
        if hit.computing is not None:
            self.note("wait")

    def coming(self, other: Sequence, text: Text, start: int) -> int:
        """How many tokens of ``text`` behind ``start`` could be had from ``other`` once it has computed its text."""
        if other.num_written // self.size * self.size != start or other.text(start) != text.until(start):
            return 0
        if other.known - other.num_written < 2:
            return 0  # it decodes
        common = start
        while common < min(start + self.size, len(text.tokens), other.known) and (
            other.text(common + 1) == text.until(common + 1)
        ):
            common += 1
        is_sealed = other.known >= start + self.size
        if is_sealed and common < start + self.size and not self.layout.is_lossless:
            return 0
        return common - start if common > other.num_written else 0

    def start(self, sequence: Sequence) -> None:
        """Take over the tables that the ledger shows for one that has just begun to run."""
        tables = self.tables(sequence)
        sequence.slot = tables[0].open_slot
        assert sequence.slot not in [other.slot for other in self.running.values()]
        self.kept.pop(sequence.slot, None)
        sequence.held = [dict(enumerate(table.sealed, table.first_block)) for table in tables]
        self.running[sequence.name] = sequence

    def tables(self, sequence: Sequence) -> tuple:  # type: ignore[type-arg]
        """An extension by nothing is always granted, and shows what is held."""
        grant = self.ledger.extend(sequence.name, 0)
        assert grant is not None and grant.moves == ()
        return grant.tables

    def slot_of(self, sequence: Sequence) -> int:
        assert sequence.slot is not None
        return sequence.slot

    def extend(self, sequence: Sequence, num_new: int) -> Grant | None:
        num_new = min(num_new, sequence.known - sequence.num_tokens)
        stop = sequence.num_tokens + num_new
        blocks = range(sequence.num_tokens // self.size, stop // self.size)
        own = [self.of_group(group, blocks) for group in range(len(self.kinds))]
        fits = self.fits([len(one) for one in own]) or not blocks
        assert (self.ledger.largest_extension(sequence.name, num_new) == num_new) is fits
        grant = self.ledger.extend(sequence.name, num_new)
        assert (grant is not None) is fits
        if grant is None:
            self.note("refuse")
            return None
        self.note("extend")
        tables = grant.tables
        new = [
            [table.sealed[block - table.first_block] for block in one] for one, table in zip(own, tables, strict=True)
        ]
        self.carry(grant.moves)
        for group, (table, taken) in enumerate(zip(tables, new, strict=True)):
            assert taken == [] or not self.options.debug or self.contents.sealed[group][taken[0]] is None
            self.take(group, taken)
            self.contents.spoil(group, taken)
            sequence.held[group].update(zip(own[group], taken, strict=True))
            assert dict(enumerate(table.sealed, table.first_block)) == sequence.held[group]
        sequence.num_tokens = stop
        return grant

    def commit(self, sequence: Sequence) -> None:
        """The step is over: its writes are made, then the ledger is told, and others can find them."""
        if sequence.num_tokens > sequence.num_written:
            self.contents.write(sequence.text(sequence.num_tokens), sequence.num_written, self.tables(sequence))
        self.ledger.commit(sequence.name)
        sequence.num_written = sequence.num_tokens
        for group, held in enumerate(sequence.held):
            for block in sorted(held):
                text = sequence.text((block + 1) * self.size)
                if sequence.chain.scope is not None:
                    there = self.filed[group].setdefault(text, held[block])
                    if there != held[block]:
                        self.note("deduplicate")
                    held[block] = there
            first = self.kinds[group].first_token_needed(sequence.num_tokens)
            for block in [block for block in held if (block + 1) * self.size <= first]:
                del held[block]

    def release(self, sequence: Sequence) -> None:
        self.ledger.release(sequence.name)
        if sequence.name in self.swapped:
            del self.swapped[sequence.name]
            return
        self.leave(sequence)

    def leave(self, sequence: Sequence) -> None:
        """It holds nothing on the device any more; the end of its text is kept if a step cannot have spoilt it."""
        del self.running[sequence.name]
        slot = self.slot_of(sequence)
        if sequence.num_tokens != sequence.num_written:
            self.contents.spoil_open(slot)
        elif sequence.chain.scope is not None and sequence.num_written % self.size:
            self.kept[slot] = sequence.written

    def swap_out(self, sequence: Sequence) -> bool:
        num_bytes = self.ledger.bytes_to_swap(sequence.name)
        if num_bytes is None:
            self.note("host full")
            return False
        moves = self.ledger.swap_out(sequence.name)
        assert sum(isinstance(move, SwapOut) for move in moves) == sum(
            (block + 1) * self.size <= sequence.num_written for held in sequence.held for block in held
        )
        self.carry(moves)
        self.leave(sequence)
        sequence.num_tokens = sequence.num_written
        self.swapped[sequence.name] = sequence
        return True

    def swap_in(self, sequence: Sequence) -> bool:
        last = sequence.num_written // self.size
        swapped, counts = self.ledger._swapped[sequence.name], []
        for group, first in enumerate(swapped.first_block):
            held, filed = self.holders(group), self.filed[group]
            texts = [sequence.text((block + 1) * self.size) for block in self.of_group(group, range(first, last))]
            counts.append(sum(filed.get(text) not in held for text in texts))
        fits = self.fits(counts) and len(self.running) < self.layout.num_open_blocks
        moves = self.ledger.swap_in(sequence.name)
        assert (moves is not None) is fits
        if moves is None:
            self.note("no way back")
            return False
        del self.swapped[sequence.name]
        copied: list[list[int]] = [[] for _ in self.kinds]
        for move in moves:
            if isinstance(move, SwapIn):
                copied[move.group].append(move.block)
        self.carry(moves)
        for group, blocks in enumerate(copied):
            self.take(group, blocks)
        self.start(sequence)
        for group, (blocks, held) in enumerate(zip(copied, sequence.held, strict=True)):
            for block, there in held.items():
                text = sequence.text((block + 1) * self.size)
                assert there in blocks or self.filed[group][text] == there
            self.note(*["found again"] * (len(held) - len(blocks)))
        return True

    def tick(self, seconds: float) -> None:
        self.now_s += seconds
        self.ledger.tick(self.now_s)

    # ---- agreement --------------------------------------------------------------------------------------------------

    def compare(self) -> None:
        """Everything the ledger says, against everything the model knows."""
        self.ledger.check()
        usage, held_bytes, touched_bytes = self.ledger.usage(), 0, 0
        for group, (layout, filed) in enumerate(zip(self.layout.groups, self.filed, strict=True)):
            held, pool = self.holders(group), self.ledger._budget.pools[group]
            cached = set(filed.values()) - set(held)
            assert usage.sealed_by_group[group] == len(held)
            assert usage.cached_by_group[group] == len(cached) == len(set(pool.queue))
            assert pool.num_touched == len(self.touched[group])
            assert len(held) + len(cached) + pool.num_warm + pool.num_cold == layout.num_blocks
            assert {block: pool.refs[block] for block in held} == {block: len(who) for block, who in held.items()}
            assert set(held) | cached <= self.touched[group]
            held_bytes += len(held) * layout.block_bytes
            touched_bytes += len(self.touched[group]) * layout.block_bytes
            for text, block in filed.items():
                assert self.contents.sealed[group][block] == text, f"block {block} can be found as {text} but is not"
        assert usage.free_bytes == self.layout.budget_bytes - held_bytes >= 0
        assert held_bytes <= touched_bytes <= self.layout.budget_bytes
        assert usage.num_open_used == len(self.running) == self.layout.num_open_blocks - self.ledger.num_open_free
        for sequence in self.running.values():
            tables = self.tables(sequence)
            assert [dict(enumerate(one.sealed, one.first_block)) for one in tables] == sequence.held
            assert self.ledger.num_tokens(sequence.name) == sequence.num_tokens
            assert self.ledger.num_written(sequence.name) == sequence.num_written
            assert self.ledger.blocks_held(sequence.name) == [len(held) for held in sequence.held]
            self.contents.verify(sequence.written, tables)
        for name, sequence in self.swapped.items():
            there = self.ledger._swapped[name]
            assert self.ledger.is_swapped(name)
            self.contents.verify_host(sequence.written, there.first_block, there.blocks, there.host_slot)
        assert (usage.host_bytes > 0) is bool(self.swapped)

    def finish(self) -> None:
        """Everything is released: nothing is held, and what is cached can be told from what is free."""
        for sequence in [*self.running.values(), *self.swapped.values()]:
            self.release(sequence)
        self.compare()
        usage = self.ledger.usage()
        assert usage.free_bytes == self.layout.budget_bytes
        assert (usage.num_open_used, usage.host_bytes, sum(usage.sealed_by_group)) == (0, 0, 0)


# ---- a random life --------------------------------------------------------------------------------------------------

SCOPES = (Scope(b"model"), Scope(b"model"), Scope(b"model"), Scope(b"model", "tenant"), None)
KEEPS = ((), (), (KeepRange(80, 5.0),), (KeepRange(10, None, 4, 9), KeepRange(PIN, 2.0, 0, 4)), (KeepRange(0),))


def random_text(walk: Walk, draw: random.Random, longest: int) -> tuple[list[int], Scope | None]:
    """Tokens 0, 1 and 2; three times of four what another sequence has, cut somewhere and gone on with."""
    scope = draw.choice(SCOPES)
    tokens: list[int] = []
    alive = [*walk.running.values(), *walk.swapped.values()]
    if alive and draw.random() < 0.75:
        other = draw.choice(alive)
        tokens = other.chain.token_ids[: draw.randint(0, other.known)]
        scope = other.chain.scope if draw.random() < 0.9 else scope
    wanted = draw.randint(1, longest)
    tokens = [*tokens, *(draw.choice((0, 0, 1, 2)) for _ in range(draw.choice((0, 1, 3, wanted))))][:longest]
    return tokens or [0], scope


def random_operation(walk: Walk, draw: random.Random, longest: int = 40) -> None:
    """One thing that a scheduler could do, or an aborted request could bring about, at any moment."""
    running, choice = list(walk.running.values()), draw.random()
    if not running or choice < 0.12:
        tokens, scope = random_text(walk, draw, longest)
        walk.admit(tokens, scope, draw.choice((len(tokens) - 1, draw.randint(0, len(tokens) - 1))), draw.choice(KEEPS))
        return
    sequence = draw.choice(running)
    if choice < 0.52:
        if walk.extend(sequence, draw.choice((1, 1, 2, 3, 4, 5, 9, longest))) is not None and draw.random() < 0.6:
            walk.commit(sequence)
    elif choice < 0.68:
        walk.commit(sequence)
    elif choice < 0.80:
        if sequence.known < longest and sequence.known == sequence.num_tokens:
            sequence.chain.append(draw.choice((0, 1, 2)))
    elif choice < 0.88:
        walk.release(draw.choice(running + list(walk.swapped.values())))
    elif choice < 0.91:  # a rollback: its text is taken up again from somewhere before its end
        walk.release(sequence)
        tokens = sequence.chain.token_ids[: draw.randint(1, sequence.known)]
        walk.admit(tokens, sequence.chain.scope, len(tokens) - 1)
    elif choice < 0.94:
        if walk.ledger.has_host_pool:
            walk.swap_out(sequence)
    elif choice < 0.97:
        if walk.swapped:
            walk.swap_in(draw.choice(list(walk.swapped.values())))
    elif choice < 0.98:
        if sequence.chain.scope is not None:
            walk.ledger.retain(sequence.chain, draw.choice(KEEPS))
    else:
        walk.tick(draw.choice((0.5, 1.0, 3.0)))
