"""Fetches the description of a model from the Hugging Face hub: its config, and what its weight files say of sizes.

Knows nothing of layers, and downloads no weights. The package ``huggingface_hub`` does the transfer, with its cache,
its settings and the user's token; it is imported when a hub id is asked for.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from kvfolio.errors import BrokenModelError, UnknownModelError
from kvfolio.spec.safetensors import INDEX, SINGLE, SafetensorsHeader, StoredTensor, read_index

_SITE = "https://huggingface.co"
_CONFIG = "config.json"
_REQUEST_S = 3.0  # until a request that gets no answer is given up
_TOTAL_S = 9.0  # for everything: name look-ups and transfers have no limit of their own
_WAY_OUT = "give a local folder, a config.json or a name of the catalogue (see: kvfolio models)"

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class HubModel:
    """What the hub, or its cache on this machine, says of one model."""

    repo: str
    config: dict[str, object]
    weights: SafetensorsHeader | None  # None: no safetensors files, or they could not be read
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Hub:
    """One repository, and how it is asked for."""

    repo: str
    endpoint: str | None
    cache_dir: Path | None
    client: Any  # the module huggingface_hub

    def download(self, filename: str) -> Path:
        """The file, from the hub or as the cache holds it, should it be the newest; raises what the library raises.

        The library repeats a failing request for half a minute, unless it is asked for the file's metadata alone.
        """
        url = self.client.hf_hub_url(self.repo, filename, endpoint=self.endpoint)
        self.client.get_hf_file_metadata(url, timeout=_REQUEST_S)
        path = self.client.hf_hub_download(
            self.repo, filename, endpoint=self.endpoint, cache_dir=self.cache_dir, etag_timeout=_REQUEST_S
        )
        return Path(path)

    def cached(self, filename: str) -> Path | None:
        path = self.client.try_to_load_from_cache(self.repo, filename, cache_dir=self.cache_dir)
        return Path(path) if isinstance(path, str) else None


def fetch_model(
    repo: str, *, endpoint: str | None = None, cache_dir: Path | None = None, total_s: float = _TOTAL_S
) -> HubModel:
    """The model ``repo`` (``organisation/name``) of the hub; from the local cache when the hub cannot be reached.

    ``endpoint`` and ``cache_dir``: None, the settings of huggingface_hub. Gives up after ``total_s`` seconds. Raises
    UnknownModelError for a repository that is not there, BrokenModelError for one that cannot be read.
    """
    try:
        library = import_module("huggingface_hub")
    except ImportError:
        raise BrokenModelError(
            f"{repo} is no local path, and to ask the hub huggingface_hub is needed: pip install 'kvfolio[hub]', "
            f"or download its config.json and give that, or {_WAY_OUT}"
        ) from None
    hub = _Hub(repo, endpoint, cache_dir, library)
    with _quiet():  # around the wait, not in the thread: one that is left behind must not decide about all bars
        fetched = _within(total_s, lambda: _fetch(hub))
    if fetched is not None:
        return fetched
    if (kept := _from_cache(hub)) is None:
        raise _unreachable(repo, f"no answer within {total_s:g} s")
    return kept


def _fetch(hub: _Hub) -> HubModel:
    try:
        config = hub.download(_CONFIG)
    except Exception as error:  # whatever the transfer raises
        refusal = _refusal(hub.repo, error)
        kept = _from_cache(hub) if isinstance(refusal, BrokenModelError) else None
        if kept is None:
            raise refusal from None
        return kept
    weights, notes = None, []
    try:
        weights = _read_weights(hub)
    except Exception as error:  # sizes are welcome, not needed
        notes.append(f"sizes of the weight files could not be read ({_first_line(error)})")
    return _model(hub, config, weights, tuple(notes))


def _from_cache(hub: _Hub) -> HubModel | None:
    """The model as the cache holds it, where the hub does not answer."""
    config, index = hub.cached(_CONFIG), hub.cached(INDEX)
    if config is None:
        return None
    weights = None if index is None else _indexed(hub, index)
    return _model(hub, config, weights, ("the hub did not answer: read from the local cache",))


def _model(hub: _Hub, config: Path, weights: SafetensorsHeader | None, notes: tuple[str, ...]) -> HubModel:
    try:
        content: object = json.loads(config.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise BrokenModelError(
            f"{hub.repo}: its config.json cannot be read ({error}); remove {config} and try again"
        ) from error
    if not isinstance(content, dict):
        raise BrokenModelError(
            f"{hub.repo}: its config.json holds {type(content).__name__}, not a JSON object; {_WAY_OUT}"
        )
    return HubModel(hub.repo, content, weights, notes)


def _refusal(repo: str, error: Exception) -> BrokenModelError | UnknownModelError:
    """What to tell of a config that could not be downloaded: an UnknownModelError where there is none."""
    errors = import_module("huggingface_hub.errors")
    page, status = f"{_SITE}/{repo}", getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.HFValidationError):
        return UnknownModelError(f"{repo!r} cannot be the name of a repository; {_WAY_OUT}")
    if isinstance(error, errors.GatedRepoError) or status == 403:
        return BrokenModelError(
            f"{repo} is gated: accept the licence at {page} and log in (hf auth login), or give a local "
            f"config.json{_nearest(repo)}"
        )
    if isinstance(error, errors.RepositoryNotFoundError) or status == 401:
        return UnknownModelError(
            f"{page} does not exist, or is private and needs a login (hf auth login); check the name{_nearest(repo)}"
        )
    if isinstance(error, errors.LocalEntryNotFoundError) or status is None:  # no answer that could be used
        return _unreachable(repo, _first_line(error))
    if isinstance(error, errors.EntryNotFoundError):
        return UnknownModelError(
            f"{page} has no config.json; if it holds .gguf files, download one and give that, or {_WAY_OUT}"
        )
    return BrokenModelError(f"{page}: the hub answered {status}; try again later, or {_WAY_OUT}")


def _read_weights(hub: _Hub) -> SafetensorsHeader | None:
    """Total bytes from the index of shards, else the header of the only file by ranged reads; None without either."""
    errors = import_module("huggingface_hub.errors")
    try:
        return _indexed(hub, hub.download(INDEX))
    except errors.EntryNotFoundError:
        pass
    try:
        found = hub.client.HfApi(endpoint=hub.endpoint).parse_safetensors_file_metadata(
            hub.repo, SINGLE, timeout=_REQUEST_S
        )
    except (errors.EntryNotFoundError, errors.NotASafetensorsRepoError):
        return None
    tensors = {
        name: StoredTensor(info.dtype, tuple(info.shape), info.data_offsets[1] - info.data_offsets[0])
        for name, info in found.tensors.items()
    }
    return SafetensorsHeader(f"{_SITE}/{hub.repo}", tensors)


def _indexed(hub: _Hub, index: Path) -> SafetensorsHeader | None:
    _, total_bytes = read_index(index.read_bytes(), f"{hub.repo}: {INDEX}")
    if total_bytes is None:
        return None
    return SafetensorsHeader(f"{_SITE}/{hub.repo}", {}, stated_bytes=total_bytes)


def _within(seconds: float, work: Callable[[], _Result]) -> _Result | None:
    """What ``work`` returns or raises; None when it takes longer, and then it is left behind."""
    from threading import Thread

    results: list[_Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = Thread(target=run, name="kvfolio-hub", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    return results[0] if results else None


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars for files of a few kilobytes."""
    bars = import_module("huggingface_hub.utils")
    if bars.are_progress_bars_disabled():
        yield
        return
    bars.disable_progress_bars()
    try:
        yield
    finally:
        bars.enable_progress_bars()


def _first_line(error: Exception) -> str:
    line = str(error).strip().partition("\n")[0]
    return (line or type(error).__name__)[:120]


def _unreachable(repo: str, reason: str) -> BrokenModelError:
    return BrokenModelError(
        f"{repo} is no local path, the hub cannot be reached ({reason}) and its cache does not hold it; connect, or "
        f"{_WAY_OUT}{_nearest(repo)}"
    )


def _nearest(repo: str) -> str:
    from kvfolio.spec.catalogue import nearest_names

    names = nearest_names(repo)
    return f"; nearest in the catalogue: {', '.join(names)}" if names else ""
