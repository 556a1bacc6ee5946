"""The blocks of all layer groups under one byte budget: taken, shared, given back, found again, evicted.

Knows nothing of sequences: it is told which blocks and which cards.
"""

import functools
import itertools
import logging
from collections.abc import Sequence

from kvfolio.cache.blocks import BlockId, BlockPool
from kvfolio.cache.costs import MachineCosts
from kvfolio.cache.eviction import EvictionQueue, Facts, find_policy
from kvfolio.cache.index import Card, PrefixIndex
from kvfolio.cache.moves import Move, Poison, ReturnMemory
from kvfolio.errors import InvariantError
from kvfolio.spec.layout import CacheLayout

logger = logging.getLogger("kvfolio")

REMEMBERED = 4  # evicted digests that are remembered, for each block there is ...
REMEMBERED_LEAST = 1_000  # ... and at the least


class BlockBudget:
    """Pools, index cards and the bytes they may take together."""

    def __init__(self, layout: CacheLayout, eviction: str, costs: MachineCosts | None, debug: bool) -> None:
        self.layout = layout
        num_blocks = sum(group.num_blocks for group in layout.groups)
        policy, clock = find_policy(eviction, num_blocks), itertools.count().__next__  # shared: ranks compare
        self.pools = [BlockPool(group.num_blocks, EvictionQueue(policy, clock)) for group in layout.groups]
        self.index = PrefixIndex(len(layout.groups), max(REMEMBERED * num_blocks, REMEMBERED_LEAST))
        self.now_s = 0.0
        self.held_bytes = 0
        self.touched_bytes = 0  # held, cached and warm blocks: memory the pools occupy
        self.num_evicted = 0
        self.num_quarantined = 0
        self._is_debug = debug
        self._num_sinks = layout.num_sinks
        self._costs = costs
        self._unknown = [Facts(0, False, 1.0, group.block_bytes) for group in layout.groups]
        self._ranks = not policy.ranks_all_equal  # else nobody looks at the facts of a block

    @property
    def free_bytes(self) -> int:
        """Bytes of the budget that nobody holds."""
        return self.layout.budget_bytes - self.held_bytes

    def has_room(self, counts: Sequence[int]) -> bool:
        """Whether so many more blocks of each group could be held beside what is held now."""
        groups = list(zip(counts, self.pools, self.layout.groups, strict=True))
        num_bytes = sum(count * group.block_bytes for count, _, group in groups)
        return num_bytes <= self.free_bytes and all(count <= pool.num_free for count, pool, _ in groups)

    def rows_free(self, first: int) -> int:
        """How many blocks of one sequence could be held from its block ``first`` on, in every group that holds them."""
        layout, pools, num_bytes = self.layout, self.pools, self.free_bytes
        num_sinks = max(0, self._num_sinks - first)  # of these blocks, those that lie in sink groups, too
        most = min(pool.num_free for pool, group in zip(pools, layout.groups, strict=True) if not group.is_sinks)
        if num_sinks:
            sinks = min(pool.num_free for pool, group in zip(pools, layout.groups, strict=True) if group.is_sinks)
            fitting = min(num_bytes // layout.first_row_bytes, sinks)
            if fitting < num_sinks:
                return min(fitting, most)
            num_bytes -= num_sinks * layout.first_row_bytes
        return min(num_sinks + num_bytes // layout.row_bytes, most)

    def take(self, group: int, count: int, moves: list[Move]) -> list[BlockId]:
        """Hold ``count`` more blocks of a group. The caller has seen to it that so many, and their bytes, are free."""
        pool, size = self.pools[group], self.layout.groups[group].block_bytes
        num_cold = count - pool.num_warm  # of the blocks taken, if there is room for them
        if num_cold <= 0 or (
            num_cold <= pool.num_cold and self.touched_bytes + num_cold * size <= self.layout.budget_bytes
        ):
            self.touched_bytes += max(0, num_cold) * size
            taken = pool.take(count)
        else:
            taken = []
            for _ in range(count):
                if pool.num_warm == 0:
                    self._make_room(group, moves)
                taken += pool.take()
        self.held_bytes += count * size
        if self._is_debug:
            moves += [Poison(group, block) for block in taken]
        return taken

    def share(self, group: int, blocks: Sequence[BlockId]) -> None:
        """One more holder of each block."""
        self.held_bytes += self.pools[group].share(blocks) * self.layout.groups[group].block_bytes

    def give(self, group: int, blocks: Sequence[BlockId], owner: object) -> None:
        """One holder less of each block, which are cached in this order, or free."""
        damaged: list[BlockId] = []
        facts_of = functools.partial(self._facts_of, group) if self._ranks else None
        num_left = self.pools[group].give(blocks, facts_of, None if self._is_debug else damaged.append)
        self.held_bytes -= num_left * self.layout.groups[group].block_bytes
        for block in damaged:
            self.quarantine(group, block, f"{owner} gave it back but nobody held it")

    def file(self, cards: Sequence[Card], group: int, blocks: list[BlockId]) -> None:
        """Written blocks get their cards. Where a card has a block already, that one takes the place in ``blocks``."""
        pool_cards = self.pools[group].cards
        for place, (card, block) in enumerate(zip(cards, blocks, strict=True)):
            known = card.blocks[group]
            if known is None:
                card.blocks[group] = block
                pool_cards[block] = card
            elif known != block:
                blocks[place] = BlockId(known)
                self.share(group, [BlockId(known)])
                self.give(group, [block], "a block that is there already")

    def reprioritise(self, card: Card) -> None:
        """The card's priority has changed."""
        for pool, block in zip(self.pools, card.blocks, strict=True):
            if block is not None and block in pool.queue:
                pool.queue.reprioritise(block, card.priority)

    def _make_room(self, group: int, moves: list[Move]) -> None:
        """See to it that the pool of ``group``, which has no warm block, can give one within the budget."""
        pool, size = self.pools[group], self.layout.groups[group].block_bytes
        if pool.num_cold == 0:
            self._evict(group)
            return
        while self.touched_bytes + size > self.layout.budget_bytes:
            warm = next((other for other, one in enumerate(self.pools) if one.num_warm), None)
            if warm is None:
                self._evict(self._first_to_evict())
                if pool.num_warm:
                    return
                continue
            moves.append(ReturnMemory(warm, self.pools[warm].cool()))
            self.touched_bytes -= self.layout.groups[warm].block_bytes
        self.touched_bytes += size

    def _first_to_evict(self) -> int:
        """The group whose first cached block goes before those of the others."""
        firsts = [(first, group) for group, pool in enumerate(self.pools) if (first := pool.queue.first()) is not None]
        if not firsts:
            raise InvariantError(f"nothing to evict: {self.held_bytes} of {self.layout.budget_bytes} bytes are held")
        return min(firsts)[1]

    def _evict(self, group: int) -> None:
        self.pools[group].evict(lambda card: self.index.forget_block(card, group, self.now_s))
        self.num_evicted += 1

    def _facts_of(self, group: int, block: BlockId) -> Facts:
        card = self.pools[group].cards[block]
        if card is None:
            return self._unknown[group]
        tokens = self.layout.block_tokens
        cost = 1.0 if self._costs is None else self._costs.compute_s(card.block * tokens, (card.block + 1) * tokens)
        return Facts(card.uses, card.was_evicted, cost, self.layout.groups[group].block_bytes)

    # ---- damage -----------------------------------------------------------------------------------------------------

    def quarantine(self, group: int, block: BlockId, what: str) -> None:
        """Put a block out of use for good, and say so; nobody finds it any more."""
        pool = self.pools[group]
        if not 0 <= block < pool.num_blocks:
            logger.error("block %d of group %d does not exist, please report this: %s", block, group, what)
            return
        if pool.is_quarantined(block):
            return
        logger.error("block %d of group %d is put out of use, please report this: %s", block, group, what)
        pool.quarantine(block)
        own, pool.cards[block] = pool.cards[block], None
        for card in [*self.index.cards.values(), own]:  # any may name it: the two need not agree any more
            if card is not None and card.blocks[group] == block:
                self.index.forget_block(card, group, self.now_s)
        self.num_quarantined += 1
        self.recount()

    def recount(self) -> None:
        """Count the bytes anew from the pools. A quarantined block takes its bytes for good."""
        pairs = list(zip(self.pools, self.layout.groups, strict=True))
        self.held_bytes = sum((pool.num_held + pool.num_quarantined) * group.block_bytes for pool, group in pairs)
        self.touched_bytes = sum(pool.num_touched * group.block_bytes for pool, group in pairs)
