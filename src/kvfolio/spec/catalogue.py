"""The built-in catalogue: well-known models by name, as plain data, so that planning needs no file and no network.

Knows nothing of where a model is downloaded from. ``catalogue.json`` holds, for each, the fields of its published
config that decide something, its parameters, and where both come from.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvfolio.spec.formats import parse_format
from kvfolio.spec.model import ModelSpec


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """One model of the catalogue."""

    name: str  # lower case, such as llama-3.1-8b
    repo: str | None  # on the hub; None: never published
    aliases: tuple[str, ...]  # other names and repositories of the same shape and weight format
    config: Mapping[str, object]
    num_params: int  # all of them, those of an encoder of images too
    num_active_params: int  # what one token of text passes through
    source: str  # where the facts come from


@cache
def catalogue() -> Mapping[str, CatalogueEntry]:
    """Every entry by its name, in order of names."""
    lines = json.loads(Path(__file__).with_name("catalogue.json").read_bytes())
    return MappingProxyType({name: _entry(name, line) for name, line in lines.items()})


def find_entry(name: str) -> CatalogueEntry | None:
    """The entry called ``name``: its own name, an alias, or its hub id with or without the organisation; any case."""
    return _by_any_name().get(name.casefold())


def nearest_names(name: str, count: int = 3) -> tuple[str, ...]:
    """The names of the catalogue that look most like ``name``, the best first; empty when none does."""
    from difflib import get_close_matches

    wanted = name.casefold().rpartition("/")[2]
    found = get_close_matches(wanted, _by_any_name(), n=4 * count, cutoff=0.5)
    return tuple(dict.fromkeys(_by_any_name()[match].name for match in found))[:count]


def spec_of_entry(entry: CatalogueEntry) -> ModelSpec:
    """The model of ``entry``, with the parameters that the catalogue states."""
    from kvfolio.spec.config.families import spec_from_config  # 20 ms that a look at the names need not take

    spec = spec_from_config(entry.config, entry.name)
    counted = spec.weights
    # Where both counts differ, it is by small tensors (biases of routers), which are not quantised and in no expert.
    uncounted_bytes = parse_format(spec.dtype).vector_bytes(1) * (entry.num_params - counted.num_params)
    weights = replace(
        counted,
        num_params=entry.num_params,
        num_active_params=entry.num_active_params,
        num_bytes=counted.num_bytes + uncounted_bytes,
        source="catalogue",
    )
    return replace(spec, weights=weights)


def _entry(name: str, line: dict[str, Any]) -> CatalogueEntry:
    # The file is part of the package and held to this form by its tests.
    return CatalogueEntry(
        name,
        line["repo"],
        tuple(line["aliases"]),
        line["config"],
        line["num_parameters"],
        line["num_active_parameters"],
        line["source"],
    )


@cache
def _by_any_name() -> Mapping[str, CatalogueEntry]:
    entries = catalogue().values()
    hub_ids = {hub_id: entry for entry in entries for hub_id in (*entry.aliases, *([entry.repo] if entry.repo else []))}
    names = {hub_id.rpartition("/")[2].casefold(): entry for hub_id, entry in hub_ids.items()}
    names |= {hub_id.casefold(): entry for hub_id, entry in hub_ids.items()}
    return MappingProxyType(names | {entry.name: entry for entry in entries})
