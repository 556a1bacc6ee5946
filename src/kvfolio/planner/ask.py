"""The planner's front door: ``kvfolio.plan`` and ``kvfolio.fleet``.

Knows nothing that its rooms do not: it reads the model and the options as people give them.
"""

from pathlib import Path
from typing import Unpack

from kvfolio.errors import OptionError
from kvfolio.planner.fleet import Fleet, FleetOptions, make_fleet
from kvfolio.planner.options import PlanArguments, read_options, whole_number
from kvfolio.planner.report import Plan, make_plan
from kvfolio.spec.model import ModelSpec
from kvfolio.spec.source import read_model
from kvfolio.units import parse_bytes

_NOT_OF_A_FLEET = {"users", "prompt_tokens", "tokens", "in_flight"}
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
    for name in _NOT_OF_A_FLEET & options.keys():
        raise OptionError(f"{name} has no meaning for a fleet; leave it out")
    if options.get("context") is None:  # with a mean, no context is set aside
        options["context"] = options.get("mean_tokens") or DEFAULT_FLEET_CONTEXT
    plan_options = read_options(**options)
    memory = kv_memory if kv_memory is None or isinstance(kv_memory, str) else whole_number("kv_memory", kv_memory)
    asked = FleetOptions(
        plan_options,
        whole_number("conversations", conversations),
        None if memory is None else parse_bytes(memory),
        tokens_per_s,
        price_per_hour,
    )
    return make_fleet(_spec(model), asked)


def _spec(model: str | Path | ModelSpec) -> ModelSpec:
    if not isinstance(model, str | Path | ModelSpec):
        raise OptionError(f"model is {model!r}; accepted: a name, a path or a ModelSpec")
    return model if isinstance(model, ModelSpec) else read_model(model)
