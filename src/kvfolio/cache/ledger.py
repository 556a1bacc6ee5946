"""The ledger: which sequence holds which blocks, under one byte budget for all layer groups.

The only face of the room. Knows nothing of tensors, time, requests or text. A grant that does not fit is None.

The life of a sequence:  lookup → admit → (extend → commit)* → release.   On its way: … → swap_out → swap_in → …
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvfolio.cache.audit import Fault, find_faults
from kvfolio.cache.blocks import BlockId, OpenSlots
from kvfolio.cache.budget import BlockBudget
from kvfolio.cache.costs import MachineCosts
from kvfolio.cache.holding import Grant, Holding, OpenTexts, SequenceId, Usage
from kvfolio.cache.host import HostPool, Swapped
from kvfolio.cache.index import Card
from kvfolio.cache.lookup import Hit, Miss, find_hit, why_missed
from kvfolio.cache.moves import CopyOpen, CopyToOpen, Move, PoisonOpen, SwapIn, SwapOpenIn
from kvfolio.cache.prefix import TokenChain
from kvfolio.cache.retention import KeepRange, Retention, highest
from kvfolio.errors import InvariantError
from kvfolio.spec.layout import CacheLayout


@dataclass(frozen=True, slots=True)
class LedgerOptions:
    """What a user chooses about sharing and eviction."""

    eviction: str = "lru"  # a name of eviction.POLICIES
    host: CacheLayout | None = None  # the host pool for swapping; None: there is none
    costs: MachineCosts | None = None  # for policies that weigh what a block costs to compute
    debug: bool = False  # broken invariants raise, and blocks are poisoned before they are written anew


class Ledger:
    """Grants blocks from one byte budget to the groups of all sequences, and lets sequences of equal tokens share."""

    def __init__(self, layout: CacheLayout, options: LedgerOptions | None = None) -> None:
        self.layout = layout
        self.options = options or LedgerOptions()
        self._budget = BlockBudget(layout, self.options.eviction, self.options.costs, self.options.debug)
        self._slots = OpenSlots(layout.num_open_blocks)
        self._holdings: dict[SequenceId, Holding] = {}
        self._open_texts = OpenTexts()
        self._retention = Retention()
        self._host = None if self.options.host is None else HostPool(self.options.host)
        self._swapped: dict[SequenceId, Swapped] = {}
        self._generation = 0  # changes whenever blocks change hands

    # ---- questions: nothing changes ---------------------------------------------------------------------------------

    @property
    def free_bytes(self) -> int:
        """Bytes of the budget that nobody holds."""
        return self._budget.free_bytes

    @property
    def num_open_free(self) -> int:
        """How many more sequences can be admitted."""
        return self._slots.num_free

    def num_tokens(self, sequence: SequenceId) -> int:
        """Tokens of ``sequence`` that are written or granted."""
        return self._holdings[sequence].num_tokens

    def num_written(self, sequence: SequenceId) -> int:
        """Tokens of ``sequence`` that are written."""
        return self._holdings[sequence].num_written

    def blocks_held(self, sequence: SequenceId) -> list[int]:
        """Sealed blocks that ``sequence`` holds in each group now, those it shares included."""
        return [len(blocks) for blocks in self._holdings[sequence].sealed]

    def has_room(self, counts: Sequence[int]) -> bool:
        """Whether so many more blocks of each group could be held beside what is held now."""
        return self._budget.has_room(counts)

    def lookup(self, chain: TokenChain, limit: int) -> Hit:
        """The longest usable hit of at most ``limit`` tokens of ``chain``. Good until the ledger changes."""
        if chain.scope is None or limit <= 0:
            return Hit(0, [], None, (0,) * len(self.layout.groups), generation=self._generation)
        hit = find_hit(self.layout, self._budget.index, chain, limit, self._open_texts.by_parent)
        hit.generation = self._generation
        return hit

    def why_missed(self, chain: TokenChain, limit: int, hit: Hit) -> Miss | None:
        """Why ``hit`` has fewer than ``limit`` tokens of a chain that is not private; None when it has them all."""
        return why_missed(self.layout, self._budget.index, chain, limit, hit)

    def blocks_shared(self, hit: Hit) -> list[int]:
        """Blocks of ``hit`` in each group that others hold already: admitting with it takes no room for these."""
        return [
            sum(pool.refs[block] > 0 for block in hit.blocks(self.layout, place)[1])
            for place, pool in enumerate(self._budget.pools)
        ]

    def largest_extension(self, sequence: SequenceId, limit: int) -> int:
        """How many more tokens, at most ``limit``, ``extend`` would grant now."""
        tokens = self.layout.block_tokens
        block, in_open = divmod(self._holdings[sequence].num_tokens, tokens)
        if in_open + limit < tokens:
            return limit  # no block fills
        return min(limit, (self._budget.rows_free(block) + 1) * tokens - 1 - in_open)

    def tokens_written(self) -> int:
        """Tokens written, over all sequences that hold blocks."""
        return sum(holding.num_written for holding in self._holdings.values())

    def usage(self) -> Usage:
        """What is held now."""
        pools = self._budget.pools
        sealed = tuple(pool.num_held for pool in pools)
        num_open = self._slots.num_slots - self._slots.num_free
        tokens = self.layout.block_tokens
        open_bytes = sum(group.open_block_bytes for group in self.layout.groups)
        empty = sum(tokens - holding.num_tokens % tokens for holding in self._holdings.values())
        return Usage(
            num_blocks_used=sum(sealed) + num_open * sum(not group.is_sinks for group in self.layout.groups),
            used_bytes=self._budget.held_bytes + num_open * open_bytes,
            wasted_bytes=empty * open_bytes // tokens,
            free_bytes=self.free_bytes,
            sealed_by_group=sealed,
            num_open_used=num_open,
            cached_by_group=tuple(pool.num_cached for pool in pools),
            num_evicted=self._budget.num_evicted,
            num_quarantined=self._budget.num_quarantined,
            host_bytes=0 if self._host is None else self._host.used_bytes,
        )

    # ---- the life of a sequence -------------------------------------------------------------------------------------

    def admit(
        self,
        sequence: SequenceId,
        chain: TokenChain | None = None,
        hit: Hit | None = None,
        keep: tuple[KeepRange, ...] = (),
    ) -> tuple[Move, ...] | None:
        """Start a sequence: it takes an open block in every group and shares the blocks of ``hit``.

        Returns the moves that fill its open block; None, and nothing changed, when no open block is free. ``hit`` is a
        fresh answer of ``lookup``; without ``chain`` the sequence is private.
        """
        if sequence in self._holdings or sequence in self._swapped:
            raise InvariantError(f"sequence {sequence} is admitted twice")
        if hit is not None and hit.generation != self._generation:
            raise InvariantError(f"sequence {sequence} is admitted with an old answer: look it up again")
        slot = self._slots.take()
        if slot is None:
            return None
        chain = chain or TokenChain((), None, self.layout.block_tokens)
        hit = hit or self.lookup(chain, 0)
        self._generation += 1
        tokens = self.layout.block_tokens
        holding = self._holdings[sequence] = Holding(chain, slot, keep, hit.num_tokens, hit.num_tokens)
        holding.num_filed = hit.num_tokens // tokens
        for place in range(len(self.layout.groups)):
            first, blocks = hit.blocks(self.layout, place)
            self._budget.share(place, blocks)
            holding.sealed.append(blocks)
            holding.first_block.append(first)
        for card in hit.cards:
            card.uses += 1
            if keep:
                self._ask_to_keep(card, keep)
        if chain.scope is not None:
            self._budget.index.remember_scope(chain.scope)
            self._open_texts.add(holding)
        return self._fill_open(hit, slot)

    def extend(self, sequence: SequenceId, num_new: int) -> Grant | None:
        """Grant room for the next ``num_new`` tokens: a sealed block, for each they fill, in every group that holds it.

        None, and nothing changed, when the budget does not allow it. The tokens count as unwritten until ``commit``.
        """
        if self.largest_extension(sequence, num_new) < num_new:
            return None
        holding = self._holdings[sequence]
        tokens = self.layout.block_tokens
        first, last = holding.num_tokens // tokens, (holding.num_tokens + num_new) // tokens
        moves: list[Move] = []
        if first < last:
            self._generation += 1
            for place, (group, sealed) in enumerate(zip(self.layout.groups, holding.sealed, strict=True)):
                sealed += self._budget.take(place, group.num_held(first, last), moves)
            holding.changed()
        holding.num_tokens += num_new
        return Grant(holding.tables(), tuple(moves))

    def commit(self, sequence: SequenceId) -> None:
        """The granted tokens are written: full blocks can be found by others from now on.

        Window layers give back the blocks that no later query reads.
        """
        self._generation += 1
        holding = self._holdings[sequence]
        holding.num_written = holding.num_tokens
        if holding.chain.scope is not None and holding.num_written // self.layout.block_tokens > holding.num_filed:
            self._file(holding)
            self._open_texts.add(holding)
            holding.changed()
        for index, group in enumerate(self.layout.groups):
            if group.group.kind.window is None:
                continue
            needed = group.group.kind.first_token_needed(holding.num_tokens) // self.layout.block_tokens
            passed = min(needed - holding.first_block[index], len(holding.sealed[index]))
            if passed > 0:
                self._budget.give(index, holding.sealed[index][:passed], sequence)
                del holding.sealed[index][:passed]
                holding.first_block[index] += passed
                holding.changed()

    def release(self, sequence: SequenceId) -> None:
        """End a sequence: blocks that nobody else holds are cached if they can be found, else free.

        The last ones are evicted first. The tokens of its open block can be copied until the slot is needed. A sequence
        that is swapped out leaves the host pool.
        """
        self._generation += 1
        swapped = self._swapped.pop(sequence, None)
        if swapped is not None and self._host is not None:
            self._host.give(swapped)
            return
        holding = self._holdings.pop(sequence)
        if holding.keep and holding.chain.scope is not None:  # their time counts from now
            for card, _ in self._touched(holding.chain, holding.keep):
                self._ask_to_keep(card, holding.keep)
        for index, blocks in enumerate(holding.sealed):
            self._budget.give(index, blocks[::-1], sequence)
        holding.sealed = []
        holding.is_running = False
        is_whole = holding.num_tokens == holding.num_written  # else a step may have written over it
        if is_whole and holding.parent is not None and holding.num_written % self.layout.block_tokens:
            self._slots.give(holding.open_slot, lambda: self._open_texts.remove(holding))
        else:
            self._open_texts.remove(holding)
            self._slots.give(holding.open_slot)

    def _fill_open(self, hit: Hit, slot: int) -> tuple[Move, ...]:
        """The moves that bring the tokens behind the last whole block into ``slot``."""
        moves: list[Move] = [PoisonOpen(slot)] if self.options.debug else []
        if isinstance(hit.partial, Card):
            hit.partial.uses += 1
            return tuple(
                CopyToOpen(group, BlockId(block), slot)
                for group, block in enumerate(hit.partial.blocks)
                if block is not None
            )
        if hit.partial is None:
            return tuple(moves)
        # The slot may be the very one: it was kept for its content, and was the only one left.
        return () if hit.partial.open_slot == slot else (CopyOpen(hit.partial.open_slot, slot),)

    def _file(self, holding: Holding) -> None:
        """Make cards for the blocks of ``holding`` that were written since; equal blocks become one."""
        tokens, chain = self.layout.block_tokens, holding.chain
        first, last = holding.num_filed, holding.num_written // tokens
        packed = chain.packed(first * tokens, last * tokens)
        cards = self._budget.index.write(chain.digests(last)[first:last], chain.parent(first), packed, first)
        for group, sealed in enumerate(holding.sealed):
            begin = max(first, holding.first_block[group])  # the window has passed others
            place = begin - holding.first_block[group]
            blocks = sealed[place:]
            self._budget.file(cards[begin - first : begin - first + len(blocks)], group, blocks)
            sealed[place:] = blocks
        if holding.keep:
            for card in cards:
                self._ask_to_keep(card, holding.keep)
        holding.num_filed = last

    # ---- retention --------------------------------------------------------------------------------------------------

    def _ask_to_keep(self, card: Card, keep: tuple[KeepRange, ...]) -> None:
        tokens, before = self.layout.block_tokens, card.priority
        self._retention.ask(card, keep, card.block * tokens, (card.block + 1) * tokens, self._budget.now_s)
        if card.priority != before:
            self._budget.reprioritise(card)

    def tick(self, now_s: float) -> None:
        """It is ``now_s``: what was to be kept until then is no longer."""
        self._budget.now_s = now_s
        self._retention.expire(now_s, self._budget.reprioritise)

    def retain(self, chain: TokenChain, keep: Sequence[KeepRange]) -> None:
        """Set how long the written blocks of a text are kept from now on, whatever was asked for before."""
        for card, kept in self._touched(chain, keep):
            self._retention.put(card, kept, self._budget.now_s)
            self._budget.reprioritise(card)

    def num_kept(self, chain: TokenChain, keep: Sequence[KeepRange]) -> int:
        """How many written blocks of a text ``retain`` would concern."""
        return len(self._touched(chain, keep))

    def _touched(self, chain: TokenChain, keep: Sequence[KeepRange]) -> list[tuple[Card, KeepRange]]:
        """The cards of a text that ranges touch, each with the range that counts."""
        tokens, cards = self.layout.block_tokens, self._budget.index.cards
        found = map(cards.get, chain.digests(len(chain.token_ids) // tokens))
        ranges = ((card, highest(keep, block * tokens, (block + 1) * tokens)) for block, card in enumerate(found))
        return [(card, kept) for card, kept in ranges if card is not None and kept is not None]

    # ---- swapping ---------------------------------------------------------------------------------------------------

    @property
    def has_host_pool(self) -> bool:
        """Whether anything can be swapped out at all."""
        return self._host is not None

    def is_swapped(self, sequence: SequenceId) -> bool:
        """Whether its blocks lie in the host pool."""
        return sequence in self._swapped

    def bytes_to_swap(self, sequence: SequenceId) -> int | None:
        """Bytes that ``swap_out`` would copy; None when the host pool has no room for them, or is not there."""
        return None if self._host is None else self._host.bytes_for(self._holdings[sequence])

    def swap_out(self, sequence: SequenceId) -> tuple[Move, ...]:
        """Move what ``sequence`` has written to the host pool; on the device it then holds nothing.

        The caller has asked ``bytes_to_swap``. Tokens granted but not written are given up.
        """
        assert self._host is not None
        swapped, moves = self._host.take(self._holdings[sequence])
        self.release(sequence)
        self._swapped[sequence] = swapped
        return moves

    def swap_in(self, sequence: SequenceId) -> tuple[Move, ...] | None:
        """Bring a swapped sequence back: blocks that are still there are shared, the others copied.

        None, and nothing changed, when it does not fit.
        """
        swapped, budget = self._swapped[sequence], self._budget
        assert self._host is not None
        found = [self._still_there(swapped, group) for group in range(len(self.layout.groups))]
        counts = [
            sum(block is None or not pool.refs[block] for block in there)
            for pool, there in zip(self._budget.pools, found, strict=True)
        ]
        if self._slots.num_free == 0 or not self.has_room(counts):
            return None
        slot = self._slots.take()
        assert slot is not None
        self._generation += 1
        del self._swapped[sequence]
        holding = self._holdings[sequence] = Holding(
            swapped.chain, slot, swapped.keep, swapped.num_tokens, swapped.num_tokens
        )
        holding.first_block = list(swapped.first_block)
        holding.num_filed = min(holding.first_block)  # with the next commit, when the copies are there, all get cards
        for group, there in enumerate(found):  # shared first: room for copies must not be made of these
            budget.share(group, [block for block in there if block is not None])
        moves: list[Move] = [SwapOpenIn(swapped.host_slot, slot)]
        for group, there in enumerate(found):
            new = iter(budget.take(group, there.count(None), moves))
            sealed = [next(new) if block is None else block for block in there]
            pairs = zip(swapped.blocks[group], sealed, there, strict=True)
            moves += [SwapIn(group, source, block) for source, block, shared in pairs if shared is None]
            holding.sealed.append(sealed)
        self._host.give(swapped)
        self._open_texts.add(holding)
        return tuple(moves)

    def _still_there(self, swapped: Swapped, group: int) -> list[BlockId | None]:
        """Of one group, the sequence's blocks that can still be found on the device."""
        num_blocks, first = len(swapped.blocks[group]), swapped.first_block[group]
        if swapped.chain.scope is None:
            return [None] * num_blocks
        cards = map(self._budget.index.cards.get, swapped.chain.digests(first + num_blocks)[first : first + num_blocks])
        return [None if card is None else card.blocks[group] for card in cards]  # type: ignore[misc]

    # ---- integrity --------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Verify every law of conservation; raises InvariantError that names each broken one."""
        faults = self._faults()
        if faults:
            raise InvariantError("; ".join(str(fault) for fault in faults[:5]))

    def audit(self) -> tuple[Fault, ...]:
        """What ``check`` would raise for. The blocks it concerns are quarantined, everything else goes on."""
        faults = self._faults()
        for fault in faults:
            if fault.group is not None and fault.block is not None:
                self._budget.quarantine(fault.group, fault.block, fault.what)
        if faults:
            self._budget.recount()
        return faults

    def _faults(self) -> tuple[Fault, ...]:
        host = [] if self._host is None else self._host.faults(list(self._swapped.values()))
        return find_faults(self._budget, self._slots, self._holdings, self._open_texts) + tuple(map(Fault, host))
