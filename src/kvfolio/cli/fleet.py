"""kvfolio fleet: how many devices a number of conversations needs.

Knows nothing of arithmetic: ``planner.fleet`` does it.
"""

import dataclasses
import json
from typing import Annotated

import typer

from kvfolio.cli.devices import device_of
from kvfolio.cli.options import BlockTokens, Json
from kvfolio.cli.plan_options import (
    Bandwidth,
    DeviceMemory,
    DeviceName,
    Devices,
    EncoderTokens,
    Flops,
    MeanTokens,
    Pipeline,
    PlannedFormat,
    PrefixTokens,
    Reserve,
    Utilisation,
    WeightsBytes,
)
from kvfolio.planner import ask
from kvfolio.planner.fleet import Fleet
from kvfolio.planner.options import DEFAULT_UTILISATION
from kvfolio.units import format_bytes


def fleet(
    model: Annotated[str, typer.Argument(help="A known name, folder, config.json, GGUF, or hub id.")],
    conversations: Annotated[int, typer.Option("--conversations", "--users", help="Conversations held at once.")],
    context: Annotated[
        str | None, typer.Option(help="Tokens set aside for each conversation. Left out: the mean, or 8192.")
    ] = None,
    mean_tokens: MeanTokens = None,
    kv_memory: Annotated[
        str | None, typer.Option(help="Memory for caches on each device: 60GiB. Left out: what the weights leave.")
    ] = None,
    tokens_per_s: Annotated[float | None, typer.Option(help="Speed promised to every user.")] = None,
    price_per_hour: Annotated[float | None, typer.Option(help="Price of one device for an hour.")] = None,
    device: DeviceName = None,
    device_memory: DeviceMemory = None,
    bandwidth: Bandwidth = None,
    flops: Flops = None,
    utilisation: Utilisation = DEFAULT_UTILISATION,
    reserve: Reserve = "0",
    devices: Devices = 1,
    pipeline: Pipeline = 1,
    kv_format: PlannedFormat = "auto",
    block_tokens: BlockTokens = None,
    weights_bytes: WeightsBytes = None,
    prefix_tokens: PrefixTokens = "0",
    encoder_tokens: EncoderTokens = "0",
    as_json: Json = False,
) -> None:
    """How many devices do that many conversations with MODEL need?"""
    given = {
        name: value
        for name, value in locals().items()
        if name not in ("model", "conversations", "kv_memory", "tokens_per_s", "price_per_hour", "as_json")
    } | {"device": device_of(device)}
    result = ask.fleet(
        model,
        conversations,
        kv_memory=kv_memory,
        tokens_per_s=tokens_per_s,
        price_per_hour=price_per_hour,
        **given,
    )
    if as_json:
        print(json.dumps(dataclasses.asdict(result), ensure_ascii=False, allow_nan=False))
    else:
        _show(result)


def _show(fleet: Fleet) -> None:
    how = "set aside" if fleet.reserved else "on average, in blocks"
    each = f"{fleet.tokens_per_conversation:,} tokens {how}, {format_bytes(fleet.bytes_per_conversation)}"
    print(f"{fleet.conversations:,} conversations with {fleet.model}, each {each}")
    replica = f", a replica on {fleet.devices_per_replica}" if fleet.devices_per_replica > 1 else ""
    print(
        f"{fleet.num_devices:,} × {fleet.device}{replica}: {fleet.conversations_per_replica:,} conversations in "
        f"{format_bytes(fleet.kv_memory_bytes)} for caches a device; {fleet.limit} is what bounds them"
    )
    if fleet.tokens_per_s_per_user is not None:
        total = fleet.tokens_per_s_total or 0
        print(f"{fleet.tokens_per_s_per_user:,.1f} tokens/s for each, {total:,.0f} in all, at best")
    if fleet.price_per_hour is not None:
        tokens = fleet.price_per_million_tokens
        print(f"{fleet.price_per_hour:,.2f} an hour" + (f", {tokens:.3f} a million tokens" if tokens else ""))
    for sentence in fleet.assumptions:
        print(f"  · {sentence}")
