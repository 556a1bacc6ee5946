"""kvfolio plan: what a model's cache costs on a device, and what that allows.

Knows nothing of arithmetic: the planner makes the numbers, ``plan_table`` and the other faces show them.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvfolio import __version__
from kvfolio.cli.devices import device_of
from kvfolio.cli.options import BlockTokens, Json
from kvfolio.cli.plan_options import (
    Bandwidth,
    Context,
    DeviceMemory,
    DeviceName,
    Devices,
    EncoderTokens,
    Flops,
    MeanTokens,
    Models,
    Pipeline,
    PlannedFormat,
    PrefixTokens,
    Reserve,
    Utilisation,
    WeightsBytes,
)
from kvfolio.errors import OptionError
from kvfolio.planner.options import DEFAULT_UTILISATION, PlanArguments, PlanOptions, command_line, read_options
from kvfolio.planner.report import make_plan
from kvfolio.planner.sizes import DEFAULT_IN_FLIGHT
from kvfolio.spec.source import read_model

if TYPE_CHECKING:
    from kvfolio.spec.model import ModelSpec

WIDE_CONTEXTS = "1k,4k,16k,32k,128k,1M"  # of the table of several models


def plan(
    models: Models,
    context: Context = None,
    users: Annotated[int, typer.Option(help="Sequences in one decode step.")] = 1,
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
    mean_tokens: MeanTokens = None,
    prefix_tokens: PrefixTokens = "0",
    prompt_tokens: Annotated[str, typer.Option(help="Prompt, for FLOPs with and without a cache.")] = "1000",
    tokens: Annotated[str, typer.Option(help="Answer, for FLOPs with and without a cache.")] = "500",
    in_flight: Annotated[str, typer.Option(help="Tokens in one step of vLLM, by which it widens its windows.")] = str(
        DEFAULT_IN_FLIGHT
    ),
    encoder_tokens: EncoderTokens = "0",
    what_if: Annotated[
        bool, typer.Option("--what-if", help="The same body as MHA, GQA, MQA, MLA; 16 to 4 bits.")
    ] = False,
    html: Annotated[Path | None, typer.Option(help="Write a page with interactive plots to this file.")] = None,
    csv: Annotated[bool, typer.Option("--csv", help="Print one row a model and context.")] = False,
    as_json: Json = False,
    emit: Annotated[str | None, typer.Option(help="Print the flags of vllm, sglang or llama.cpp that do this.")] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Build the cache of the model's class and compare.")] = False,
    log: Annotated[
        Path | None, typer.Option(help="Explain the start-up log of vLLM or SGLang against the plan.")
    ] = None,
) -> None:
    """What will the cache of MODEL cost, how many users fit, how fast can it go?"""
    given = dict(locals())
    face = _face(given)
    options = _options(given)
    specs = [read_model(name) for name in models]
    if what_if:
        _show_what_if(specs, options, as_json)
    elif html is not None:
        from kvfolio.planner.page.page import write_page

        write_page(specs, options, html, models, __version__)
        print(f"wrote {html}: open it in a browser", file=sys.stderr)
    elif emit is not None:
        from kvfolio.planner.engines.emit import engine_flags

        for spec, name in zip(specs, models, strict=True):
            print(engine_flags(spec, options, emit, name))
    elif log is not None:
        from kvfolio.cli.plan_checks import show_log

        if len(specs) > 1:
            raise OptionError(f"--log explains one model's log; {len(specs)} models were given")
        show_log(specs[0], options, log, as_json)
    elif verify:
        from kvfolio.cli.plan_checks import show_verification

        agree = [show_verification(name, spec, options, as_json) for name, spec in zip(models, specs, strict=True)]
        if not all(agree):
            raise typer.Exit(1)
    else:
        _show_plans(models, specs, options, face)


def _face(given: Mapping[str, Any]) -> str:
    """The one way of showing that was asked for; two at once are refused, except JSON of a face that has it."""
    asked = [name for name in ("what_if", "html", "csv", "emit", "verify", "log") if given[name]]
    if len(asked) > 1:
        names = " and ".join("--" + name.replace("_", "-") for name in asked)
        raise OptionError(f"{names} cannot be shown at once; give one of them")
    if given["as_json"] and asked and asked[0] in ("html", "csv", "emit"):
        raise OptionError(f"--json and --{asked[0]} cannot be shown at once; give one of them")
    return "json" if given["as_json"] else asked[0] if asked else "table"


def _options(given: dict[str, Any]) -> PlanOptions:
    values = {key: given[key] for key in PlanArguments.__annotations__}
    values["device"] = device_of(given["device"])
    several = len(given["models"]) > 1 and given["context"] is None
    return read_options(**(values | {"context": WIDE_CONTEXTS} if several else values))


def _show_plans(models: Sequence[str], specs: "Sequence[ModelSpec]", options: PlanOptions, face: str) -> None:
    plans = [make_plan(spec, options) for spec in specs]
    if face == "json":
        from kvfolio.cli.plan_data import as_json_text

        print(as_json_text(plans))
    elif face == "csv":
        from kvfolio.cli.plan_data import write_csv

        write_csv(plans, sys.stdout)
    else:
        from kvfolio.cli.plan_table import show_one, show_several

        if len(plans) > 1:
            show_several(plans)
            return
        from kvfolio.planner.advice import advise

        lengths = [row.context for row in plans[0].contexts]
        show_one(plans[0], advise(specs[0], options, plans[0]), command_line(models, options, lengths))


def _show_what_if(specs: "Sequence[ModelSpec]", options: PlanOptions, as_json: bool) -> None:
    from kvfolio.planner.whatif import what_if

    ladders = [what_if(spec, options) for spec in specs]
    if as_json:
        from kvfolio.cli.plan_data import ladders_as_json

        print(ladders_as_json(ladders))
        return
    from kvfolio.cli.plan_table import show_ladder

    for ladder in ladders:
        show_ladder(ladder)
