"""The account of a run as lines of text, and completions as JSON fields.

Knows nothing of how anything was counted.
"""

import dataclasses
import sys
from typing import TYPE_CHECKING, Any

from kvfolio.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from kvfolio.engine.account import Account, KvAccount, PreemptionAccount, ReuseAccount
    from kvfolio.engine.answer import Completion

SLOW_SHARE = 0.2  # of the decode limit; below it something else than the memory holds us up


def completion_fields(completion: "Completion") -> dict[str, Any]:
    return {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "usage": dataclasses.asdict(completion.usage),
        "cache": dataclasses.asdict(completion.cache),
        **({} if completion.logprobs is None else {"logprobs": list(completion.logprobs)}),
        **({} if completion.prompt_logprobs is None else {"prompt_logprobs": list(completion.prompt_logprobs)}),
        **({} if completion.prompt_top_logprobs is None else {"prompt_top_logprobs": completion.prompt_top_logprobs}),
        **({} if completion.top_logprobs is None else {"top_logprobs": completion.top_logprobs}),
    }


def _print_rows(rows: list[tuple[str, str]]) -> None:
    print(file=sys.stderr)
    for name, value in rows:
        print(f"{name:<12} {value}", file=sys.stderr)


def _layers(kv: "KvAccount") -> str:
    """The groups of layers; a sink group is told with the group before it, whose layers it has."""
    told: list[str] = []
    for layer in kv.layers:
        if layer.num_sinks:
            blocks = "block" if layer.num_sinks == 1 else f"{layer.num_sinks} blocks"
            told[-1] += f", the first {blocks} in {layer.format}, too"
            continue
        heads = "" if layer.kind == "latent" else f"{layer.num_kv_heads} kv heads × "
        told.append(
            f"{layer.num_layers} {layer.kind.replace('_', ' ')} × {heads}{layer.head_dim}"
            + (f", window {layer.window}" if layer.window else "")
            + (f", {layer.format}" if layer.format != kv.format else "")
        )
    return "; ".join(told)


def print_account(account: "Account", completions: list["Completion"]) -> None:
    kv, speed = account.kv, account.speed
    num_prompt = sum(completion.usage.prompt_tokens for completion in completions)
    num_new = sum(completion.usage.completion_tokens for completion in completions)
    wasted = kv.wasted_bytes / kv.used_bytes if kv.used_bytes else 0.0
    count = f"{kv.num_blocks:,} " if len(kv.layers) == 1 else ""  # groups that share a budget could each fill it alone
    shared = f", shared by {len(kv.layers)} groups of layers" if len(kv.layers) > 1 else ""
    rows = [
        ("tokens", f"{num_prompt:,} prompt + {num_new:,} generated, {account.num_steps:,} steps"),
        ("cache", f"{kv.bytes_per_token:,} B a token planned ({_layers(kv)}; {kv.format})"),
        (
            "pool",
            f"{format_bytes(kv.allocated_bytes)} allocated, {format_bytes(kv.planned_bytes)} planned: "
            f"{count}blocks of {kv.block_tokens} tokens{shared}",
        ),
        (
            "used",
            f"{kv.num_blocks_used:,} blocks, {format_bytes(kv.used_bytes)} at the peak, {wasted:.1%} of it not filled; "
            f"{kv.num_blocks_held} held now, {kv.num_blocks_cached} cached",
        ),
        (
            "first token",
            f"{format_seconds(speed.ttft_s)}"
            + (" on average" if len(completions) > 1 else "")
            + f"; loading took {format_seconds(account.load_s)}",
        ),
    ]
    if speed.decode_tokens_per_s is not None and speed.limit_tokens_per_s is not None:
        share = speed.decode_tokens_per_s / speed.limit_tokens_per_s
        rows.append(
            (
                "decode",
                f"{speed.decode_tokens_per_s:.1f} tokens/s; limit {speed.limit_tokens_per_s:.1f} ({share:.0%} of it): "
                f"{format_bytes(speed.bytes_read_per_token or 0)} a token "
                f"at {speed.bandwidth_bytes_per_s / 1e9:.1f} GB/s, measured now",
            )
        )
        if share < SLOW_SHARE:
            rows.append(("", "slow: do other processes hold the cores? fewer --threads may be quicker"))
    rows.append(("kernels", f"{account.kernels}, {account.dtype}, {account.threads} threads"))
    rows += _reuse_rows(account.reuse) if len(completions) > 1 or account.reuse.hit_tokens else []
    rows += _preemption_rows(account.preemption)
    _print_rows(rows)


def _reuse_rows(reuse: "ReuseAccount") -> list[tuple[str, str]]:
    """What the prefix cache found, and why not more."""
    share = reuse.hit_tokens / max(1, reuse.prompt_tokens)
    misses = ", ".join(f"{count} {reason}" for reason, count in sorted(reuse.misses.items()))
    rows = [
        (
            "reused",
            f"{reuse.hit_tokens:,} of {reuse.prompt_tokens:,} prompt tokens ({share:.0%})"
            + (f"; first misses: {misses}" if misses else "")
            + (f"; {reuse.num_waits} waited for another to compute theirs" if reuse.num_waits else "")
            + (f"; {reuse.num_evicted:,} blocks evicted" if reuse.num_evicted else ""),
        )
    ]
    if reuse.num_quarantined:
        rows.append(("damaged", f"{reuse.num_quarantined} blocks put out of use: a bug of kvfolio, please report it"))
    return rows


def _preemption_rows(preemption: "PreemptionAccount") -> list[tuple[str, str]]:
    """What running out of memory took."""
    rows = []
    if preemption.host_planned_bytes:
        costs = preemption.costs
        rates = (
            ""
            if costs is None
            else (f"; {costs.copy_bytes_per_s / 1e9:.1f} GB/s of copies against {costs.flops_per_s / 1e9:.0f} GFLOP/s")
        )
        rows.append(("host pool", f"{format_bytes(preemption.host_allocated_bytes)} for swapping{rates}"))
    if preemption.num_preemptions:
        refused = f", {preemption.num_swaps_refused} found the host pool full" if preemption.num_swaps_refused else ""
        rows.append(
            (
                "preemptions",
                f"{preemption.num_preemptions}: {preemption.num_swaps} swapped, "
                f"{preemption.num_tokens_lost:,} cached tokens given up{refused}; more --kv-memory avoids it",
            )
        )
    return rows
