"""A model in memory: its weights in one dtype and its tokenizer, for any number of caches beside it.

Knows nothing of caches: a network holds weights alone, so that several ``LLM`` may share one.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from kvfolio.engine.machine import find_device
from kvfolio.engine.params import refusal
from kvfolio.engine.text import Tokenizer
from kvfolio.errors import OptionError
from kvfolio.kernels.codec import TORCH_DTYPES
from kvfolio.models.build import LanguageModel, build_model
from kvfolio.models.weights import Progress, open_weights
from kvfolio.spec.formats import COMPUTE_FORMATS
from kvfolio.spec.layers import LatentAttention
from kvfolio.spec.model import RunnableSpec
from kvfolio.spec.source import ModelSource, find_default_model, open_model

LATENT_FORMS = ("absorbed", "expanded")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """What ``LLM`` takes in place of a path."""

    source: ModelSource
    dtype: str  # f32, bf16 or f16: what it computes in
    device: torch.device
    network: LanguageModel
    tokenizer: Tokenizer

    @property
    def spec(self) -> RunnableSpec:
        return self.source.spec

    def check(self, dtype: str, device: torch.device) -> None:
        """Raise OptionError if an LLM of this dtype and device cannot use these weights."""
        if (dtype, device) != (self.dtype, self.device):
            raise OptionError(f"the model is loaded in {self.dtype} on {self.device}, not in {dtype} on {device}")


def find_source(model: str | Path | None) -> ModelSource:
    """The model at a path, None for the embedded one: what it is and where it lies; its weights stay there."""
    if model is not None and not isinstance(model, str | Path):
        raise refusal("model", model, "the path of a folder or GGUF file")
    return open_model(model if model is not None else find_default_model())


def resolve_dtype(asked: str, spec: RunnableSpec) -> str:
    """The compute dtype that ``asked`` means; ``auto`` is the model's own. Raises OptionError for any other word."""
    dtype = asked if asked != "auto" else spec.dtype
    if dtype not in COMPUTE_FORMATS:
        raise OptionError(f"dtype is {dtype!r}; accepted: {', '.join(COMPUTE_FORMATS)}, auto")
    return dtype


def check_latent_form(asked: str, spec: RunnableSpec, deterministic: bool) -> None:
    """Raise OptionError if latent layers cannot compute prompts so, or there are none."""
    if asked not in LATENT_FORMS:
        raise refusal("latent_form", asked, f"one of {', '.join(LATENT_FORMS)}")
    if asked == "absorbed":
        return
    if not any(isinstance(kind, LatentAttention) for kind in spec.layers):
        raise OptionError(f"latent_form is {asked!r}, and {spec.name} has no layers with latents: leave it out")
    if deterministic:
        raise OptionError(
            f"latent_form is {asked!r} and deterministic is on: in that form sums depend on how a prompt is cut; "
            "leave one of them out"
        )


def read_weights(
    source: ModelSource,
    dtype: str,
    device: torch.device,
    on_progress: Progress | None = None,
    tokenizer: Tokenizer | None = None,
) -> LoadedModel:
    """The model of ``source`` with its weights read, in a resolved ``dtype``; ``tokenizer``: its own, if at hand."""
    tokenizer = tokenizer or Tokenizer.load(source.path)  # first: it is quick to fail
    network = build_model(source.spec, open_weights(source, TORCH_DTYPES[dtype], device, on_progress))
    return LoadedModel(source, dtype, device, network, tokenizer)


def load_model(
    model: str | Path | None = None, dtype: str = "auto", device: str = "cpu", on_progress: Progress | None = None
) -> LoadedModel:
    """A model by its path, None for the embedded one, to be shared. Raises as LLM does."""
    source = find_source(model)
    return read_weights(source, resolve_dtype(dtype, source.spec), find_device(device), on_progress)
