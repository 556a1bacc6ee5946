"""kvfolio compare: the same text with and without the cache, side by side.

Knows nothing of how the two ways are run.
"""

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvfolio.cli.options import (
    BlockTokens,
    Device,
    Dtype,
    Json,
    KvFormat,
    KvLayers,
    KvMemory,
    Model,
    SinkBlocks,
    Threads,
    load,
)
from kvfolio.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from kvfolio.engine.compare import Comparison
    from kvfolio.engine.llm import LLM


def compare(
    model: Model = None,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of the prompt, P.")] = 128,
    tokens: Annotated[int, typer.Option(help="Tokens to decode, G; the prompt's own pass yields the first.")] = 32,
    kv_memory: KvMemory = None,
    kv_format: KvFormat = "auto",
    kv_layers: KvLayers = "",
    sink_blocks: SinkBlocks = 0,
    block_tokens: BlockTokens = None,
    dtype: Dtype = "auto",
    device: Device = "cpu",
    threads: Threads = None,
    deterministic: Annotated[
        bool, typer.Option(help="Fixed rounding, so that equal tokens are a promise and not luck.")
    ] = True,
    as_json: Json = False,
) -> None:
    """Decode the same text with and without the cache: the same tokens, at what cost?"""
    llm = load(
        model,
        kv_memory=kv_memory,
        kv_format=kv_format,
        kv_layers=kv_layers,
        sink_blocks=sink_blocks,
        block_tokens=block_tokens,
        dtype=dtype,
        device=device,
        threads=threads,
        deterministic=deterministic,
    )
    from kvfolio.engine.compare import compare as compare_ways

    _print_comparison(llm, compare_ways(llm, prompt_tokens, tokens), as_json)


def _print_comparison(llm: "LLM", result: "Comparison", as_json: bool) -> None:
    ways = {"with_cache": result.with_cache, "without_cache": result.without_cache}
    if as_json:
        fields: dict[str, Any] = {name: dataclasses.asdict(way) for name, way in ways.items()}
        fields["identical"] = result.identical
        fields["divergence"] = dataclasses.asdict(result.divergence) if result.divergence else None
        fields["ratio"] = {
            "time": result.time_ratio,
            "flops_decode_only": result.flops.ratio_decode_only,
            "flops_with_prefill": result.flops.ratio_with_prefill,
        }
        fields["textbook_flops"] = {
            "with_cache": result.textbook_with_cache,
            "without_cache": result.textbook_without_cache,
        }
        fields["prompt_tokens"], fields["tokens"], fields["text"] = result.prompt_tokens, result.tokens, result.text
        print(json.dumps(fields))
        return
    same = "the same tokens" if result.identical else "DIFFERENT tokens"
    basis = "deterministic" if llm.options.deterministic else "not deterministic: rounding may differ"
    how = f"{llm.dtype}, cache {llm.layout.format_name}, {basis}"
    print(f"{result.tokens} tokens behind a prompt of {result.prompt_tokens}: {same} ({how})")
    if result.divergence is not None:
        place = result.divergence
        print(
            f"  first difference at token {place.index}: {place.with_cache} with, {place.without_cache} without; "
            f"the two best were {place.logprob_gap:.2g} apart in log-probability"
        )
    from rich.console import Console
    from rich.table import Table

    table = Table("decode only", "time", "FLOPs", "2N·G formula", "bytes read a step", box=None, pad_edge=False)
    textbook = (result.textbook_with_cache, result.textbook_without_cache)
    for (name, way), formula in zip(ways.items(), textbook, strict=True):
        table.add_row(
            name.replace("_", " "),
            format_seconds(way.time_s),
            format_count(way.flops),
            format_count(formula),
            format_bytes(way.bytes_read_per_step),
        )
    table.add_row(
        "ratio",
        f"{result.time_ratio:.1f}",
        f"{result.flops.ratio_decode_only:.1f}",
        f"{textbook[1] / textbook[0]:.1f}",
        f"{result.without_cache.bytes_read_per_step / result.with_cache.bytes_read_per_step:.1f}",
    )
    Console(highlight=False).print(table)
    prefill = f"{format_seconds(result.prefill_s)}, {format_count(result.flops.prefill)}FLOPs"
    print(f"with the prompt's pass included ({prefill}) the FLOPs ratio is {result.flops.ratio_with_prefill:.1f}")
