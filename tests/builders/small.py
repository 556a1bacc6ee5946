"""Small layouts, models and requests that the tests of several rooms share.

Knows nothing of the tests. One layer takes 8 bytes a token: one head, widths of 1, f32.
"""

import random
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import strategies as st

from kvfolio.sched.request import Request, RequestId
from kvfolio.spec.formats import F32, INT8, CacheFormat
from kvfolio.spec.layers import FullAttention, PagedLayer, SlidingWindow
from kvfolio.spec.layout import CacheLayout, GroupLayout
from kvfolio.spec.model import LayerGroup, Network, RunnableSpec, WeightCount

EXACT, LOSSY = CacheFormat(F32, F32), CacheFormat(INT8, INT8)
LAYER_BYTES = 8  # of one token in one layer

Shape = tuple[int | None, int]  # a layer group: its window or None, and its number of layers


def kind_of(window: int | None) -> PagedLayer:
    return FullAttention(1, 1, 1) if window is None else SlidingWindow(1, 1, 1, window)


def layout_of(
    *shapes: Shape,
    rows: int = 10,
    block_tokens: int = 4,
    num_open: int = 4,
    budget_bytes: int | None = None,
    counts: Sequence[int] | None = None,
    sinks: int = 0,
) -> CacheLayout:
    """A cache of ``shapes``, distinct windows each. Its budget holds ``rows`` blocks of every group, or is given.

    ``counts``: blocks of each pool; without it every pool has addresses for the whole budget, as on a CPU. ``sinks``:
    so many first blocks of every sequence lie in a sink group behind each group that reads all tokens; that is lossy.
    """
    groups: list[GroupLayout] = []
    first = 0
    for window, num_layers in shapes:
        group = LayerGroup(kind_of(window), tuple(range(first, first + num_layers)))
        size, has_sinks = group.block_bytes(block_tokens, EXACT), sinks > 0 and window is None
        groups.append(GroupLayout(group, LOSSY if has_sinks else EXACT, size, size, 0, num_open))
        if has_sinks:
            groups.append(GroupLayout(group, EXACT, size, 0, 0, num_open, sinks))
        first += num_layers
    budget = rows * sum(group.block_bytes for group in groups) if budget_bytes is None else budget_bytes
    blocks = counts or [budget // group.block_bytes for group in groups]
    layouts = tuple(replace(group, num_blocks=count) for group, count in zip(groups, blocks, strict=True))
    return CacheLayout(layouts, block_tokens, EXACT, EXACT, budget)


def lossy(layout: CacheLayout) -> CacheLayout:
    """The same blocks, said to store less than what was computed; sinks are exact."""
    groups = tuple(group if group.is_sinks else replace(group, fmt=LOSSY) for group in layout.groups)
    return replace(layout, groups=groups, fmt=LOSSY)


def shapes_of(layout: CacheLayout) -> list[Shape]:
    """The shapes that ``layout`` was made of."""
    return [(group.group.kind.window, group.group.num_layers) for group in layout.groups if not group.is_sinks]


def spec_of(*shapes: Shape, vocab_size: int = 11, max_context: int = 256, num_q_heads: int = 1) -> RunnableSpec:
    """A model with the layers of ``shapes``, one shape after the other."""
    layers = tuple(kind_of(window) for window, num_layers in shapes for _ in range(num_layers))
    network = Network(4, num_q_heads, 8, vocab_size, 1e-5, "silu", 1.0)
    return runnable(layers, network, max_context=max_context)


def runnable(
    layers: tuple[PagedLayer, ...], network: Network, *, max_context: int, dtype: str = "f32", num_params: int = 1000
) -> RunnableSpec:
    """A model of ``layers`` and ``network``, whatever its weights are said to number."""
    weights = WeightCount(num_params, num_params, 4 * num_params, "config")
    return RunnableSpec(
        "small",
        "llama",
        layers,
        max_context,
        dtype,
        network.hidden_size,
        network.num_q_heads,
        weights,
        (),
        "llama",
        network,
    )


def request_of(request_id: int, num_prompt: int, max_tokens: int, stops: frozenset[int] = frozenset()) -> Request:
    """A request whose prompt is told apart from every other's: request 3 has the tokens 3000, 3001, …"""
    prompt = tuple(range(1000 * request_id, 1000 * request_id + num_prompt))
    return Request(RequestId(request_id), prompt, max_tokens, stops)


def token_at(request_id: int, position: int, vocab_size: int = 11) -> int:
    """What the pretended model answers: a function of the request and the position alone."""
    return random.Random(request_id * 1_000_003 + position).randrange(vocab_size)


@st.composite
def shapes(draw: st.DrawFn) -> tuple[Shape, ...]:
    """One to three layer groups: with and without a full one, windows below, at and above a block's edge."""
    windows: list[int | None] = draw(
        st.lists(st.one_of(st.none(), st.integers(1, 20)), min_size=1, max_size=3, unique=True)
    )
    return tuple((window, draw(st.integers(1, 3))) for window in windows)


@st.composite
def layouts(draw: st.DrawFn, min_rows: int = 1, min_open: int = 1) -> CacheLayout:
    """Caches of a few blocks. The budget is rarely a whole number of rows; a third of them are split by group.

    Where a layer reads all tokens, three of five have sink groups, and then are not lossless.
    """
    chosen = draw(shapes())
    block_tokens = draw(st.sampled_from((4, 8)))
    sinks = draw(st.sampled_from((0, 0, 1, 2, 3)))
    sizes = []
    for window, num_layers in chosen:
        sizes += [num_layers * block_tokens * LAYER_BYTES] * (2 if sinks and window is None else 1)
    budget = draw(st.integers(min_rows * sum(sizes), 8 * sum(sizes)))
    counts = None
    if draw(st.integers(0, 2)) == 0:
        share = budget // len(sizes)
        counts = [draw(st.integers(1, max(1, share // size))) for size in sizes]
        budget = sum(count * size for count, size in zip(counts, sizes, strict=True))
    num_open = draw(st.integers(min_open, 4))
    return layout_of(
        *chosen, block_tokens=block_tokens, num_open=num_open, budget_bytes=budget, counts=counts, sinks=sinks
    )
