"""The planner's front door: ``kvfolio.plan`` and ``kvfolio.fleet``.

Knows nothing that its rooms do not: it reads the model and the options as people give them.
"""

from pathlib import Path
from typing import Unpack

from kvfolio.planner.fleet import Fleet, FleetOptions, make_fleet
from kvfolio.planner.options import PlanArguments, read_options
from kvfolio.planner.report import Plan, make_plan
from kvfolio.spec.model import ModelSpec
from kvfolio.spec.source import read_model
from kvfolio.units import parse_bytes

DEFAULT_FLEET_CONTEXT = 8192  # tokens set aside for one conversation


def plan(model: str | Path | ModelSpec, **options: Unpack[PlanArguments]) -> Plan:
    """What the cache of ``model`` costs on a device, and what that allows.

    ``model``: a known name, folder, config.json, GGUF or hub id, or what ``read_model`` gave. Options, as on the
    command line: context, users, device, device_memory, bandwidth, flops, utilisation, reserve, devices, pipeline,
    kv_format, block_tokens, weights_bytes, mean_tokens, prefix_tokens, prompt_tokens, tokens, in_flight,
    encoder_tokens; sizes may be text ("80GB"), contexts a number, a list or text ("4096,128k"). Raises a KvfolioError
    for what cannot be planned.
    """
    return make_plan(_spec(model), read_options(**options))


def fleet(
    model: str | Path | ModelSpec,
    conversations: int,
    *,
    kv_memory: int | str | None = None,
    tokens_per_s: float | None = None,
    price_per_hour: float | None = None,
    **options: Unpack[PlanArguments],
) -> Fleet:
    """The devices that ``conversations`` held at once need.

    ``kv_memory``: bytes for caches on each device, None: what the weights leave. ``tokens_per_s``: promised to every
    user. ``price_per_hour``: of one device. ``mean_tokens`` counts blocks at the mean, else ``context`` (8,192 when
    left out) is set aside for each. Other options as in ``plan``. Raises a KvfolioError where one conversation does
    not fit.
    """
    if options.get("context") is None:
        options["context"] = DEFAULT_FLEET_CONTEXT
    memory = None if kv_memory is None else parse_bytes(kv_memory)
    asked = FleetOptions(read_options(**options), conversations, memory, tokens_per_s, price_per_hour)
    return make_fleet(_spec(model), asked)


def _spec(model: str | Path | ModelSpec) -> ModelSpec:
    return model if isinstance(model, ModelSpec) else read_model(model)
