"""The cache's account after a run: what was planned, allocated and used, and speed beside its limit. Plain data.

Knows nothing of how it is printed; field names are the stable keys of ``--json``.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvfolio.cache.costs import MachineCosts
from kvfolio.engine.answer import Completion
from kvfolio.engine.llm import LLM
from kvfolio.kernels.profile import read_bandwidth


@dataclass(frozen=True, slots=True)
class LayerAccount:
    """One group of equal layers. One with ``num_sinks`` has the layers of the group before it."""

    kind: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    window: int | None
    format: str
    num_sinks: int | None  # the group holds the first blocks of each sequence only, exact; None: all that are needed
    block_bytes: int
    peak_blocks_used: int


@dataclass(frozen=True, slots=True)
class KvAccount:
    """The pools. ``used`` and ``wasted`` are of the step that used the most."""

    bytes_per_token: int
    planned_bytes: int
    allocated_bytes: int
    used_bytes: int
    wasted_bytes: int  # room for tokens in open blocks that were not there yet
    num_blocks: int  # sealed and open; sealed blocks of several groups share one budget
    num_blocks_used: int
    num_blocks_held: int  # now, after the run: 0
    num_blocks_cached: int  # now: nobody holds them, the next request may hit them
    block_tokens: int
    format: str  # of sealed blocks; several where layers differ
    layers: tuple[LayerAccount, ...]


@dataclass(frozen=True, slots=True)
class ReuseAccount:
    """The prefix cache: what requests found, and why they did not find more."""

    prompt_tokens: int  # of all requests that started
    hit_tokens: int  # of these, not computed
    misses: dict[str, int]  # requests by the reason for their first miss: cache.lookup.MISS_REASONS
    num_waits: int  # requests that waited for blocks another was computing
    num_evicted: int  # blocks
    num_quarantined: int  # blocks out of use: 0, or kvfolio has a bug


@dataclass(frozen=True, slots=True)
class PreemptionAccount:
    """What running out of memory took."""

    num_preemptions: int
    num_swaps: int  # of these, to the host pool; the others are computed again
    num_swaps_refused: int  # the host pool was full
    num_tokens_lost: int  # cached tokens given up
    host_planned_bytes: int
    host_allocated_bytes: int
    costs: MachineCosts | None  # what swapping and computing were predicted from, if they were compared


@dataclass(frozen=True, slots=True)
class SpeedAccount:
    """Decode speed over the steps that only decoded, beside what memory bandwidth allows for the bytes they read."""

    ttft_s: float  # mean over the requests
    decode_tokens_per_s: float | None  # None: nothing was decoded behind a first token
    limit_tokens_per_s: float | None
    bandwidth_bytes_per_s: float  # measured now
    decode_tokens: int
    bytes_read_per_token: int | None


@dataclass(frozen=True, slots=True)
class Account:
    """Everything ``kvfolio run`` says about a run beside the text."""

    kv: KvAccount
    speed: SpeedAccount
    reuse: ReuseAccount
    preemption: PreemptionAccount
    num_steps: int
    kernels: str
    dtype: str
    threads: int
    load_s: float  # seconds from opening the model to its first possible request


def kv_account(llm: LLM) -> KvAccount:
    """The pools of ``llm``, planned, allocated and used."""
    layout, snapshot = llm.layout, llm.snapshot()
    layers = tuple(
        LayerAccount(
            kind=group.group.kind.kind,
            num_layers=group.group.num_layers,
            num_kv_heads=group.group.kind.num_kv_heads,
            head_dim=group.group.kind.k_width,
            window=group.group.kind.window,
            format=group.fmt.name,
            num_sinks=group.num_sinks,
            block_bytes=group.block_bytes,
            peak_blocks_used=used,
        )
        for group, used in zip(layout.groups, snapshot.peak.sealed_by_group, strict=True)
    )
    return KvAccount(
        bytes_per_token=llm.bytes_per_token,
        planned_bytes=snapshot.planned_bytes,
        allocated_bytes=snapshot.allocated_bytes,
        used_bytes=snapshot.peak.used_bytes,
        wasted_bytes=snapshot.peak.wasted_bytes,
        num_blocks=sum(group.num_blocks + (0 if group.is_sinks else group.num_open_blocks) for group in layout.groups),
        num_blocks_used=snapshot.peak.num_blocks_used,
        num_blocks_held=snapshot.usage.num_blocks_used,
        num_blocks_cached=sum(snapshot.usage.cached_by_group),
        block_tokens=layout.block_tokens,
        format=layout.format_name,
        layers=layers,
    )


def make_account(llm: LLM, completions: Sequence[Completion]) -> Account:
    """The account of everything ``llm`` has run so far; measures the machine's bandwidth on the way (0.2 s)."""
    meter, bandwidth = llm.engine.decode_meter, read_bandwidth(llm.device)
    measured = meter.num_tokens > 0
    snapshot = llm.snapshot()
    counters = snapshot.counters
    return Account(
        kv=kv_account(llm),
        speed=SpeedAccount(
            ttft_s=sum(completion.ttft_s for completion in completions) / max(1, len(completions)),
            decode_tokens_per_s=meter.num_tokens / meter.time_s if measured else None,
            limit_tokens_per_s=meter.num_tokens * bandwidth / meter.bytes_read if measured else None,
            bandwidth_bytes_per_s=bandwidth,
            decode_tokens=meter.num_tokens,
            bytes_read_per_token=meter.bytes_read // meter.num_tokens if measured else None,
        ),
        reuse=ReuseAccount(
            counters.num_prompt_tokens,
            counters.num_hit_tokens,
            dict(counters.misses),
            counters.num_waits,
            snapshot.usage.num_evicted,
            snapshot.usage.num_quarantined,
        ),
        preemption=PreemptionAccount(
            counters.num_preemptions,
            counters.num_swaps,
            counters.num_swaps_refused,
            counters.num_tokens_lost,
            snapshot.host_planned_bytes,
            snapshot.host_allocated_bytes,
            llm.engine.ledger.options.costs,
        ),
        num_steps=counters.num_steps,
        kernels=llm.ops_name,
        dtype=llm.dtype,
        threads=llm.threads,
        load_s=llm.load_s,
    )
