"""Paged attention: a naive loop, the torch reference and every table of C++ kernels give one answer and the same bytes.

Knows nothing of models or schedulers.
"""

import itertools

import pytest
import torch
from paged import PoisonedCache, Step, Text, geometry_of, grant_chunk, layout_for, random_steps, step_of, text_of
from torch import Tensor

from kvfolio.cache.holding import SequenceId
from kvfolio.cache.ledger import Ledger
from kvfolio.errors import OptionError
from kvfolio.kernels.codec import decode, encode
from kvfolio.kernels.reference import ReferenceOps
from kvfolio.kernels.shapes import ChunkBlocks, LayerGeometry, LayerMemory
from kvfolio.spec.formats import Format, find_cache_format

native = pytest.importorskip(
    "kvfolio.kernels.native", reason="the C++ kernels are not built here", exc_type=ImportError
)

FORMATS = [
    ("f32", "f32"),
    ("bf16", "bf16"),
    ("f16", "f16"),
    ("int8", "f32"),
    ("int8", "bf16"),
    ("int8", "f16"),
    ("bf16/int8", "bf16"),
    ("int8/f16", "f32"),
    ("fp8", "bf16"),
    ("fp8-scaled", "f32"),
    ("fp8-e5m2/fp8-scaled", "f16"),
    ("int6", "f32"),
    ("int5", "bf16"),
    ("int4", "bf16"),
    ("int3", "f32"),
    ("int2", "f16"),
    ("int4-rotated/int6-token", "f32"),
    ("int5-token/int3-token", "bf16"),
    ("k8v4", "bf16"),
    ("int4/f16", "f32"),
    ("int8-channel", "bf16"),
]
WIDTHS = [20, 64, 80, 96, 128, 256]
BLOCK_TOKENS = [4, 16, 32, 256]
WINDOWS = [None, 1, 5, None, 100, 300, 16]
HEADS = [(4, 2), (3, 3), (8, 1), (9, 3), (30, 1), (5, 1)]  # query and kv heads: GQA, MHA, MQA, more than a tile's rows
LATENT_WIDTHS = [(24, 20), (80, 64), (112, 96), (576, 512)]  # of keys, and of the values they begin with
LATENT_HEADS = [(4, 1), (16, 1), (30, 1), (1, 1)]
# Heads and widths for the laws: grouped heads, and latents.
SHAPES = {"heads": ((6, 2), (24, 20), False), "latent": ((6, 1), (36, 24), True)}


def least_tokens(stored: str) -> int:
    """Tokens of the smallest blocks that can be stored so."""
    return max(4, find_cache_format(stored).least_block_tokens)


# Both compute in f32 and round the output once: values reach 30, sums are ordered differently, the last bit may differ.
TOLERANCES = {"f32": (1e-4, 1e-5), "bf16": (1e-4, 2.0**-7), "f16": (1e-4, 2.0**-10)}  # absolute, relative


def assert_close(found: Tensor, expected: Tensor, exact: str) -> None:
    atol, rtol = TOLERANCES[exact]
    torch.testing.assert_close(found, expected, atol=atol, rtol=rtol)


# ---- the definition -------------------------------------------------------------------------------------------------


def stored_form(x: Tensor, fmt: Format, tokens: int) -> Tensor:
    """x [num_tokens, heads, width] as it comes back from the cache, f64; only whole blocks are ever stored."""
    blocks = x[: len(x) // tokens * tokens].unflatten(0, (-1, tokens)).transpose(1, 2)  # [n, heads, tokens, width]
    found = [decode(*encode(block, fmt), fmt) for block in blocks]
    return torch.cat([block.transpose(0, 1).double() for block in found] + [x[:0].double()])


def naive(geometry: LayerGeometry, text: Text, position: int) -> Tensor:
    """[num_q_heads, v_width] f64 of one query, token by token: own block exactly, all before it as stored."""
    tokens = geometry.block_tokens
    own = position // tokens * tokens
    first = 0 if geometry.window is None else max(0, position - geometry.window + 1)
    own_k = text.k[:, :, geometry.k_width - geometry.own_k_width :]
    k_stored, v_stored = stored_form(own_k, geometry.stored.k, tokens), stored_form(text.v, geometry.stored.v, tokens)
    if geometry.v_is_prefix_of_k:
        k_stored = torch.cat((v_stored, k_stored), dim=-1)
    group = geometry.num_q_heads // geometry.num_kv_heads
    out = torch.zeros(geometry.num_q_heads, geometry.v_width, dtype=torch.float64)
    for head in range(geometry.num_q_heads):
        scores, values = [], []
        for token in range(first, position + 1):
            is_own = token >= own
            k = (text.k if is_own else k_stored)[token, head // group].double()
            scores.append(float((text.q[position, head].double() * k).sum()) * geometry.k_width**-0.5)
            values.append((text.v if is_own else v_stored)[token, head // group].double())
        weights = torch.softmax(torch.tensor(scores, dtype=torch.float64), dim=0)
        out[head] = (weights[:, None] * torch.stack(values)).sum(dim=0)
    return out


@pytest.mark.parametrize(
    ("stored", "exact"),
    [("f32", "f32"), ("int8", "f32"), ("bf16/int8", "bf16"), ("int4", "f32"), ("k5v3", "bf16"), ("fp8", "f32")],
)
@pytest.mark.parametrize(
    ("heads", "window", "latent"), [((4, 2), None, False), ((4, 2), 7, False), ((4, 1), None, True)]
)
def test_a_query_reads_its_own_block_exactly_and_every_earlier_one_as_stored(
    stored: str, exact: str, heads: tuple[int, int], window: int | None, latent: bool
) -> None:
    tokens = least_tokens(stored)
    geometry = geometry_of(stored, exact, heads, (16, 12), tokens, window, latent)
    sizes = (6, 1, 9, 7) if tokens == 4 else (6, 1, 30, 20)
    text = text_of(geometry, sum(sizes), seed=1)
    for ops in (ReferenceOps(), native.NativeOps(1)):
        ledger = Ledger(layout_for(geometry, 6, 1))
        ledger.admit(SequenceId(0))
        cache = PoisonedCache(ops, geometry, 6, 1)
        for num_tokens in sizes:
            chunk = grant_chunk(ledger, SequenceId(0), num_tokens)
            out = cache.attend(step_of([(chunk, text)]))
            ledger.commit(SequenceId(0))
            for row in range(num_tokens):
                expected = naive(geometry, text, chunk.start + row)
                assert_close(out[row].double(), expected, exact)


# ---- two implementations, one answer --------------------------------------------------------------------------------


def cases() -> list[LayerGeometry]:
    """Every format with every width and block size; windows and heads take turns, with strides that pair them all."""
    chosen = []
    for number, ((stored, exact), width, tokens) in enumerate(itertools.product(FORMATS, WIDTHS, BLOCK_TOKENS)):
        if tokens < least_tokens(stored):
            continue
        window, heads = WINDOWS[number % len(WINDOWS)], HEADS[(number // 2) % len(HEADS)]
        v_width = {20: 36, 64: 32}.get(width, width)
        chosen.append(geometry_of(stored, exact, heads, (width, v_width), tokens, window))
    return chosen


def latent_cases() -> list[LayerGeometry]:
    """Every format with every width of latents; heads and block sizes take turns."""
    chosen = []
    for number, ((stored, exact), widths) in enumerate(itertools.product(FORMATS, LATENT_WIDTHS)):
        heads = LATENT_HEADS[(number + number // 4) % len(LATENT_HEADS)]
        tokens = max(BLOCK_TOKENS[(number + number // 3) % len(BLOCK_TOKENS)], least_tokens(stored))
        chosen.append(geometry_of(stored, exact, heads, widths, tokens, latent=True))
    return chosen


def spelled(geometry: LayerGeometry) -> str:
    heads, widths = (f"{geometry.num_q_heads}+{geometry.num_kv_heads}", f"{geometry.k_width}+{geometry.v_width}")
    formats = f"{geometry.stored.name}-{geometry.exact.name}"
    return f"{formats}-{widths}-{geometry.block_tokens}-{geometry.window}-{heads}"


@pytest.mark.parametrize("geometry", [*cases(), *latent_cases()], ids=spelled)
def test_every_table_of_kernels_agrees_with_the_reference_and_writes_the_same_bytes(geometry: LayerGeometry) -> None:
    block_tokens, exact = geometry.block_tokens, geometry.exact.name
    num_blocks = max(4, 240 // block_tokens)
    layout = layout_for(geometry, num_blocks, 3)
    reference = PoisonedCache(ReferenceOps(), geometry, num_blocks, 3)
    tables = [
        PoisonedCache(native.NativeOps(1, instruction_set=name), geometry, num_blocks, 3)
        for name in native.instruction_sets()
    ]
    for step in random_steps(
        geometry, layout, seed=geometry.k_width + block_tokens, num_steps=3 if block_tokens == 256 else 5
    ):
        expected = reference.attend(step)
        assert bool(expected.isfinite().all())
        for table in tables:
            assert_close(table.attend(step), expected, exact)
            assert torch.equal(table.sealed, reference.sealed)
            assert torch.equal(table.open, reference.open)
    half = reference.sealed.shape[1] // 2
    assert bool((reference.sealed[:, :half] == 0xFF).all())  # the other layer's bytes are untouched
    assert bool((reference.sealed[:, half:] != 0xFF).any())


def test_a_long_text_is_read_over_many_runs() -> None:
    geometry = geometry_of("int8", "bf16", (4, 1), (64, 64), block_tokens=16)
    text = text_of(geometry, 1500, seed=5)
    ledger = Ledger(layout_for(geometry, 100, 1))
    ledger.admit(SequenceId(0))
    caches = [PoisonedCache(ops, geometry, 100, 1) for ops in (ReferenceOps(), native.NativeOps(2))]
    for num_tokens in (700, 1, 799):
        step = step_of([(grant_chunk(ledger, SequenceId(0), num_tokens), text)])
        expected, found = (cache.attend(step) for cache in caches)
        ledger.commit(SequenceId(0))
        assert_close(found, expected, "bf16")


def test_partials_beyond_one_wave_are_merged_like_any_others() -> None:
    # 256 heads of width 256 make 64 K floats a partial: a wave holds 253 of them, and 300 queries take two.
    geometry = geometry_of(heads=(256, 1), widths=(4, 256), block_tokens=32)
    text = text_of(geometry, 300, seed=6)
    ledger = Ledger(layout_for(geometry, 10, 1))
    ledger.admit(SequenceId(0))
    step = step_of([(grant_chunk(ledger, SequenceId(0), 300), text)])
    caches = [PoisonedCache(ops, geometry, 10, 1) for ops in (ReferenceOps(), native.NativeOps(2))]
    plan = native.NativeOps(1).plan(geometry, step.chunks)
    assert plan.attention.describe()["num_waves"] == 2
    expected, found = (cache.attend(step) for cache in caches)
    assert_close(found, expected, "f32")


def test_rows_may_be_strided() -> None:
    geometry = geometry_of()
    text = text_of(geometry, 10, seed=7)
    ledger = Ledger(layout_for(geometry, 4, 1))
    ledger.admit(SequenceId(0))
    step = step_of([(grant_chunk(ledger, SequenceId(0), 10), text)])
    # q, k and v as slices of one product's rows, as a network makes them.
    stacked = torch.cat([part.flatten(1) for part in (step.q, step.k, step.v)], dim=1)
    q, k, v = (part.unflatten(1, (-1, 16)) for part in torch.split(stacked, [4 * 16, 2 * 16, 2 * 16], dim=1))
    for ops in (ReferenceOps(), native.NativeOps(1)):
        dense, strided = (PoisonedCache(ops, geometry, 4, 1) for _ in range(2))
        assert torch.equal(dense.attend(step), strided.attend(Step(step.chunks, q, k, v)))
        assert torch.equal(dense.sealed, strided.sealed)


# ---- law 2: what a query gets depends on its position alone ---------------------------------------------------------


def chunked(cache: PoisonedCache, text: Text, sizes: list[int]) -> Tensor:
    """The output of a lone sequence computed in chunks of these sizes."""
    total = sum(sizes)
    ledger = Ledger(layout_for(cache.geometry, cache.sealed.shape[0], cache.open.shape[0]))
    ledger.admit(SequenceId(0))
    out = []
    for size in sizes:
        out.append(cache.attend(step_of([(grant_chunk(ledger, SequenceId(0), size), text)])))
        ledger.commit(SequenceId(0))
    assert ledger.num_tokens(SequenceId(0)) == total
    return torch.cat(out)


DETERMINISTIC = [*(f"native-{name}" for name in native.instruction_sets()), "reference"]


def deterministic_ops(name: str) -> "native.NativeOps | ReferenceOps":
    if name == "reference":
        return ReferenceOps(deterministic=True)
    return native.NativeOps(1, deterministic=True, instruction_set=name.removeprefix("native-"))


@pytest.mark.parametrize("ops_name", DETERMINISTIC)
@pytest.mark.parametrize(("stored", "exact"), FORMATS)
@pytest.mark.parametrize(("shape", "window"), [("heads", None), ("heads", 40), ("latent", None)])
def test_no_chunking_changes_a_single_bit(
    ops_name: str, stored: str, exact: str, shape: str, window: int | None
) -> None:
    heads, widths, latent = SHAPES[shape]
    geometry = geometry_of(stored, exact, heads, widths, 16, window, latent)
    text = text_of(geometry, 280, seed=8)  # over the edge of a run at 256

    def run(sizes: list[int]) -> tuple[Tensor, Tensor]:
        cache = PoisonedCache(deterministic_ops(ops_name), geometry, 18, 1)
        return chunked(cache, text, sizes), cache.sealed

    expected, sealed = run([280])
    for sizes in ([7] * 40, [255, 1, 1, 23], [16] * 17 + [8]):
        out, pool = run(sizes)
        assert torch.equal(out, expected), sizes
        if window is None:  # with a window, passed blocks are used again, by chunk
            assert torch.equal(pool, sealed), sizes


@pytest.mark.parametrize("ops_name", DETERMINISTIC)
@pytest.mark.parametrize(("stored", "exact"), FORMATS)
@pytest.mark.parametrize(("shape", "window"), [("heads", None), ("heads", 9), ("latent", None)])
def test_no_company_in_the_batch_changes_a_single_bit(
    ops_name: str, stored: str, exact: str, shape: str, window: int | None
) -> None:
    heads, widths, latent = SHAPES[shape]
    geometry = geometry_of(stored, exact, heads, widths, least_tokens(stored), window, latent)
    layout = layout_for(geometry, 60, 3)
    cache = PoisonedCache(deterministic_ops(ops_name), geometry, 60, 3)
    outputs: list[tuple[SequenceId, int, Tensor]] = []  # sequence, start, rows
    ledger = Ledger(layout)
    sizes = {SequenceId(0): [9, 1, 30, 10], SequenceId(1): [1, 20, 1, 11], SequenceId(2): [13, 1, 1, 6]}
    texts = {sequence: text_of(geometry, sum(chunks), seed=100 + sequence) for sequence, chunks in sizes.items()}
    for sequence in sizes:
        assert ledger.admit(sequence) is not None
    for turn in range(4):
        order = [SequenceId((turn + place) % 3) for place in range(3)]
        chunks = [grant_chunk(ledger, sequence, sizes[sequence][turn]) for sequence in order]
        out = cache.attend(step_of([(chunk, texts[sequence]) for chunk, sequence in zip(chunks, order, strict=True)]))
        rows = torch.split(out, [chunk.num_tokens for chunk in chunks])
        outputs += [(sequence, chunk.start, part) for sequence, chunk, part in zip(order, chunks, rows, strict=True)]
        for sequence in order:
            ledger.commit(sequence)
    for sequence, text in texts.items():
        alone = chunked(PoisonedCache(cache.ops, geometry, 60, 3), text, [sum(sizes[sequence])])
        for owner, start, part in outputs:
            if owner == sequence:
                assert torch.equal(part, alone[start : start + len(part)])


@pytest.mark.parametrize("ops_name", DETERMINISTIC)
@pytest.mark.parametrize(("stored", "exact"), FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_sharing_the_blocks_of_a_prefix_changes_no_bit(ops_name: str, stored: str, exact: str, shape: str) -> None:
    # Blocks 0 … 9 hold common tokens; three sequences go on from there, each into blocks of its own.
    tokens = least_tokens(stored)
    heads, widths, latent = SHAPES[shape]
    geometry = geometry_of(stored, exact, heads, widths, tokens, None, latent)
    cache = PoisonedCache(deterministic_ops(ops_name), geometry, 20, 3)
    prefix, edge = tuple(range(10)), 10 * tokens
    cache.attend(step_of([(ChunkBlocks(0, edge, 0, prefix, 0), text_of(geometry, edge, seed=1))]))
    chunks = [
        ChunkBlocks(edge, 1, 0, prefix, 0),
        ChunkBlocks(edge, 2 * tokens + 1, 0, (*prefix, 12, 11), 1),
        ChunkBlocks(edge - tokens, tokens + 2, 0, (*prefix[:9], 15), 2),  # its own tenth block
    ]
    parts = [(chunk, text_of(geometry, 15 * tokens, seed=2 + number)) for number, chunk in enumerate(chunks)]
    sealed, open_blocks = cache.sealed.clone(), cache.open.clone()
    rows = torch.split(cache.attend(step_of(parts)), [chunk.num_tokens for chunk in chunks])
    for part, found in zip(parts, rows, strict=True):
        cache.sealed.copy_(sealed)
        cache.open.copy_(open_blocks)
        assert torch.equal(cache.attend(step_of([part])), found)


@pytest.mark.parametrize(
    "geometry",
    [
        geometry_of("int8", "bf16", (9, 3), (64, 64), block_tokens=16),
        geometry_of("int4", "bf16", (9, 1), (80, 64), block_tokens=16, latent=True),
    ],
    ids=spelled,
)
def test_no_number_of_threads_changes_a_single_bit(geometry: LayerGeometry) -> None:
    text = text_of(geometry, 400, seed=9)
    outputs = [
        chunked(PoisonedCache(native.NativeOps(threads), geometry, 25, 1), text, [300, 1, 99]) for threads in (1, 2, 5)
    ]
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


# ---- the door -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", ["q", "k", "v"])
def test_a_tensor_of_another_shape_or_dtype_is_refused_by_name(wrong: str) -> None:
    geometry = geometry_of()
    text = text_of(geometry, 5, seed=3)
    ledger = Ledger(layout_for(geometry, 4, 1))
    ledger.admit(SequenceId(0))
    step = step_of([(grant_chunk(ledger, SequenceId(0), 5), text)])
    ops = native.NativeOps(1)
    memory = LayerMemory(torch.zeros(4, 512, dtype=torch.uint8), 0, torch.zeros(1, 512, dtype=torch.uint8), 0)
    parts = {"q": step.q, "k": step.k, "v": step.v}
    for bad in (parts[wrong][:4], parts[wrong].bfloat16(), parts[wrong][:, :, :8], parts[wrong].transpose(1, 2)):
        with pytest.raises(OptionError, match=f"attend: {wrong} is"):
            ops.attend(ops.plan(geometry, step.chunks), memory, **(parts | {wrong: bad}), scale=1.0)


def test_an_unknown_instruction_set_is_refused_with_those_there_are() -> None:
    with pytest.raises(OptionError, match=r"'sse' is not available here; available: .*plain"):
        native.NativeOps(1, instruction_set="sse")
