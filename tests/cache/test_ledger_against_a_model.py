"""The ledger of private sequences against a brute-force model of sets: conservation after every operation.

The model knows nothing of warm and cold lists: it marks bytes and forgets what no later query reads, token by token.
"""

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from small import layout_of, layouts

from kvfolio.cache.holding import Grant, SequenceId
from kvfolio.cache.ledger import Ledger
from kvfolio.cache.moves import ReturnMemory
from kvfolio.spec.layout import CacheLayout


class Model:
    """What a ledger must do, by sets: which blocks of each sequence are held, which memory was ever written."""

    def __init__(self, layout: CacheLayout) -> None:
        self.layout = layout
        self.tokens: dict[SequenceId, int] = {}
        self.slots: dict[SequenceId, int] = {}
        self.held: dict[SequenceId, list[dict[int, int]]] = {}  # a group each: block of the sequence → id
        self.touched: list[set[int]] = [set() for _ in layout.groups]

    def ids_held(self, index: int) -> list[int]:
        return [block for groups in self.held.values() for block in groups[index].values()]

    def bytes_held(self) -> int:
        return sum(len(self.ids_held(index)) * group.block_bytes for index, group in enumerate(self.layout.groups))

    def rows_for(self, sequence: SequenceId, num_new: int) -> int:
        tokens = self.layout.block_tokens
        return sum(
            (position + 1) % tokens == 0 for position in range(self.tokens[sequence], self.tokens[sequence] + num_new)
        )

    def new_blocks(self, sequence: SequenceId, rows: int) -> list[list[int]]:
        """Of the next ``rows`` blocks of a sequence those that each group holds: of a sink group, the first ones."""
        before = self.tokens[sequence] // self.layout.block_tokens
        return [
            [place for place in range(before, before + rows) if group.num_sinks is None or place < group.num_sinks]
            for group in self.layout.groups
        ]

    def fits(self, sequence: SequenceId, rows: int) -> bool:
        new = self.new_blocks(sequence, rows)
        if not rows:
            return True
        has_blocks = all(
            len(self.ids_held(index)) + len(more) <= group.num_blocks
            for index, (group, more) in enumerate(zip(self.layout.groups, new, strict=True))
        )
        num_bytes = sum(group.block_bytes * len(more) for group, more in zip(self.layout.groups, new, strict=True))
        return has_blocks and self.bytes_held() + num_bytes <= self.layout.budget_bytes

    def extend(self, sequence: SequenceId, num_new: int, grant: Grant) -> None:
        """Check a grant against what was free before, and book it."""
        expected = self.new_blocks(sequence, self.rows_for(sequence, num_new))
        for move in grant.moves:  # carried out before anything is written
            assert isinstance(move, ReturnMemory)
            assert move.block in self.touched[move.group]
            assert move.block not in self.ids_held(move.group)
            self.touched[move.group].remove(move.block)
        for index, (table, group) in enumerate(zip(grant.tables, self.layout.groups, strict=True)):
            assert table.open_slot == self.slots[sequence]
            held = self.held[sequence][index]
            shown = {table.first_block + place: block for place, block in enumerate(table.sealed)}
            new = {place: block for place, block in shown.items() if place not in held}
            assert {place: block for place, block in shown.items() if place in held} == held
            assert sorted(new) == expected[index]
            taken = set(self.ids_held(index))
            assert all(0 <= block < group.num_blocks and block not in taken for block in new.values())
            held.update(new)
            self.touched[index].update(new.values())
        self.tokens[sequence] += num_new
        assert self.bytes_touched() <= self.layout.budget_bytes

    def bytes_touched(self) -> int:
        return sum(len(ids) * group.block_bytes for ids, group in zip(self.touched, self.layout.groups, strict=True))

    def commit(self, sequence: SequenceId) -> None:
        """Forget each block none of whose tokens any later query reads."""
        tokens, position = self.layout.block_tokens, self.tokens[sequence]
        for held, group in zip(self.held[sequence], self.layout.groups, strict=True):
            first = group.group.kind.first_token_needed(position)
            for place in [
                place for place in held if all(t < first for t in range(place * tokens, (place + 1) * tokens))
            ]:
                del held[place]

    def compare(self, ledger: Ledger) -> None:
        ledger.check()
        usage = ledger.usage()
        assert usage.sealed_by_group == tuple(len(self.ids_held(index)) for index in range(len(self.layout.groups)))
        assert usage.free_bytes == ledger.free_bytes == self.layout.budget_bytes - self.bytes_held() >= 0
        assert usage.num_open_used == len(self.slots) == len(set(self.slots.values()))
        assert ledger.num_open_free == self.layout.num_open_blocks - len(self.slots)
        assert ledger._budget.touched_bytes == self.bytes_touched()
        tokens = self.layout.block_tokens
        empty = sum(tokens - count % tokens for count in self.tokens.values())
        assert usage.wasted_bytes == empty * self.layout.bytes_per_token  # sealed blocks are as exact as open ones here
        for sequence, groups in self.held.items():
            assert ledger.blocks_held(sequence) == [len(held) for held in groups]
            assert ledger.num_tokens(sequence) == self.tokens[sequence]


class Walk:
    """One ledger and its model, side by side."""

    def __init__(self, layout: CacheLayout) -> None:
        self.ledger, self.model = Ledger(layout), Model(layout)
        self.uncommitted: set[SequenceId] = set()
        self.next_id = 0

    def admit(self) -> None:
        sequence = SequenceId(self.next_id)
        self.next_id += 1
        if self.ledger.admit(sequence) is not None:
            assert len(self.model.slots) < self.model.layout.num_open_blocks
            self.model.tokens[sequence] = 0
            self.model.held[sequence] = [{} for _ in self.model.layout.groups]
            self.model.slots[sequence] = self.ledger._holdings[sequence].open_slot
        else:
            assert len(self.model.slots) == self.model.layout.num_open_blocks

    def extend(self, sequence: SequenceId, num_new: int) -> None:
        fits = self.model.fits(sequence, self.model.rows_for(sequence, num_new))
        assert (self.ledger.largest_extension(sequence, num_new) == num_new) is fits
        grant = self.ledger.extend(sequence, num_new)
        assert (grant is not None) is fits
        if grant is not None:
            self.model.extend(sequence, num_new, grant)
            self.uncommitted.add(sequence)

    def commit(self, sequence: SequenceId) -> None:
        self.ledger.commit(sequence)
        self.model.commit(sequence)
        self.uncommitted.discard(sequence)

    def release(self, sequence: SequenceId) -> None:
        self.ledger.release(sequence)
        self.uncommitted.discard(sequence)
        for part in (self.model.tokens, self.model.held, self.model.slots):
            del part[sequence]


class LedgerAgainstModel(RuleBasedStateMachine):
    """admit → (extend → commit)* → release, of any sequences in any order, on any small layout."""

    @initialize(layout=layouts())
    def start(self, layout: CacheLayout) -> None:
        self.walk = Walk(layout)

    def pick(self, data: st.DataObject) -> SequenceId:
        return data.draw(st.sampled_from(sorted(self.walk.model.tokens)))

    @rule()
    def admit(self) -> None:
        self.walk.admit()

    @precondition(lambda self: self.walk.model.tokens)
    @rule(data=st.data(), num_new=st.integers(1, 40), is_committed=st.booleans())
    def extend(self, data: st.DataObject, num_new: int, is_committed: bool) -> None:
        sequence = self.pick(data)
        self.walk.extend(sequence, num_new)
        if is_committed:
            self.walk.commit(sequence)

    @precondition(lambda self: self.walk.uncommitted)
    @rule()
    def commit_all(self) -> None:
        for sequence in sorted(self.walk.uncommitted):
            self.walk.commit(sequence)

    @precondition(lambda self: self.walk.model.tokens)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.walk.release(self.pick(data))

    @invariant()
    def ledger_and_model_agree(self) -> None:
        if hasattr(self, "walk"):
            self.walk.model.compare(self.walk.ledger)

    def teardown(self) -> None:
        if not hasattr(self, "walk"):
            return
        for sequence in sorted(self.walk.model.tokens):
            self.walk.release(sequence)
        self.walk.model.compare(self.walk.ledger)
        assert self.walk.ledger.free_bytes == self.walk.model.layout.budget_bytes


TestLedgerAgainstModel = LedgerAgainstModel.TestCase
TestLedgerAgainstModel.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)


def test_a_hundred_thousand_operations_lose_no_block_and_hand_none_out_twice() -> None:
    # ME-06. Conservation is checked every 50 operations, at the end everything is free.
    draw = random.Random(6)
    layout = layout_of((None, 2), (9, 3), (20, 1), budget_bytes=40 * 192 + 77, num_open=8)
    ledger = Ledger(layout)
    alive: list[SequenceId] = []
    counts = {"admit": 0, "extend": 0, "refuse": 0, "move": 0, "release": 0}
    for operation in range(100_000):
        choice = draw.random()
        if choice < 0.15:
            if ledger.admit(SequenceId(operation)) is not None:
                alive.append(SequenceId(operation))
                counts["admit"] += 1
        elif alive and choice < 0.9:
            sequence = draw.choice(alive)
            grant = ledger.extend(sequence, draw.choice((1, 1, 1, 2, 5, 17)))
            counts["extend" if grant else "refuse"] += 1
            if grant is not None:
                counts["move"] += len(grant.moves)
                ledger.commit(sequence)
        elif alive:
            ledger.release(alive.pop(draw.randrange(len(alive))))
            counts["release"] += 1
        if operation % 50 == 0:
            ledger.check()
    for sequence in alive:
        ledger.release(sequence)
    ledger.check()
    assert ledger.free_bytes == layout.budget_bytes
    assert ledger.num_open_free == 8
    assert min(counts.values()) > 500, counts  # every kind of operation had its share
