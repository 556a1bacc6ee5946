"""Gives a model another number of key/value heads: fewer are the means of those they replace, more are copies.

Knows nothing of how files are written, nor of how well the model answers afterwards.
"""

import json
import re
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

import torch
from torch import Tensor

from kvfolio.errors import OptionError, UnknownModelError
from kvfolio.models.build import build_model
from kvfolio.models.rewrite import CONFIG, FolderCopy, free_place
from kvfolio.models.weights import Progress, open_weights
from kvfolio.spec.config.runnable import runnable_from_config
from kvfolio.spec.formats import find_cache_format
from kvfolio.spec.layers import LatentAttention
from kvfolio.spec.model import RunnableSpec
from kvfolio.spec.source import ModelSource, open_model

FIELD = "num_key_value_heads"
_STATED = re.compile(rb'"num_key_value_heads"\s*:\s*(\d+|null)')
_NEIGHBOUR = re.compile(rb'(\s*)"num_attention_heads"(\s*:\s*)\d+')  # behind which an absent field is put
_KV = re.compile(r"model\.layers\.\d+\.self_attn\.[kv]_proj\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class Heads:
    """A number of key/value heads, and what it costs."""

    num_kv_heads: int
    cache_bytes_per_token: int  # of all layers, in the model's own dtype
    weights_bytes: int  # of all tensors, as stored


@dataclass(frozen=True, slots=True)
class Conversion:
    """What was written."""

    model: str
    out: str
    dtype: str  # f32, bf16 or f16
    num_q_heads: int
    before: Heads
    after: Heads

    @property
    def needs_training(self) -> bool:
        """Whether heads were joined: the model then computes something else than before."""
        return self.after.num_kv_heads < self.before.num_kv_heads


def convert(model: str | Path, out: str | Path, num_kv_heads: int, on_progress: Progress | None = None) -> Conversion:
    """Write the model of the folder ``model`` to the new folder ``out``, with ``num_kv_heads`` heads in every layer.

    Fewer heads than before must divide their number: those that lie side by side are joined to their mean (mean
    pooling, GQA: arXiv 2305.13245 sec. 2.1). Expect no useful answers of that model before it is trained further; the
    paper does so for 5 % of the pre-training steps. More heads, up to one for each query head, are copies and change no
    answer; as many as before give a copy of the model. ``on_progress``: told the bytes written so far, and all.

    ``out`` appears when it is whole, or not at all. Raises OptionError for a number that does not fit and for an
    ``out`` that cannot be written, UnknownModelError for a model that cannot be expressed so, BrokenModelError for
    files that are broken.
    """
    source = _open(model)
    spec, folder = source.spec, source.path
    num_old = _num_kv_heads(spec)
    _check_number(spec, num_old, num_kv_heads)
    _check_weights(source)
    new_spec, config = spec, (folder / CONFIG).read_bytes()
    if num_kv_heads != num_old:
        config = config_with(config, num_kv_heads)
        new_spec = _spec_with(config, spec, num_kv_heads)
    target = free_place(out)

    def growth(name: str) -> Fraction:
        return Fraction(num_kv_heads, num_old) if _KV.fullmatch(name) else Fraction(1)

    copy = FolderCopy(folder, config, growth)
    copy.write(
        target,
        change=lambda values: regroup(values, num_old, num_kv_heads),
        check=lambda written: _check_weights(open_model(written)),
        on_progress=on_progress,
    )
    before = Heads(num_old, _token_bytes(spec), copy.old_bytes)
    after = Heads(num_kv_heads, _token_bytes(new_spec), copy.new_bytes)
    return Conversion(str(folder), str(target), spec.dtype, spec.num_q_heads, before, after)


def regroup(rows: Tensor, num_heads: int, num_new: int) -> Tensor:
    """The rows of a key or value projection (or its bias) for ``num_new`` heads in place of ``num_heads``.

    rows [num_heads * head_width, ...] → [num_new * head_width, ...], or all their numbers in one axis. Fewer: the mean
    of heads side by side, computed in f32, rounded to the dtype of ``rows``. More: each one repeated. One number
    divides the other. Query head h, of num_q, reads new head h // (num_q / num_new): what it read before, or its mean.
    """
    if num_new >= num_heads:
        heads = rows.reshape(num_heads, -1)  # [num_heads, numbers of a head]
        return heads.repeat_interleave(num_new // num_heads, dim=0).reshape(-1, *rows.shape[1:])
    groups = rows.reshape(num_new, num_heads // num_new, -1)  # [num_new, heads that are joined, numbers of a head]
    return groups.mean(dim=1, dtype=torch.float32).to(rows.dtype).reshape(-1, *rows.shape[1:])


def config_with(text: bytes, num_kv_heads: int) -> bytes:
    """``text``, a config.json, with another ``num_key_value_heads``; all else stays as it is written, where it can."""
    wanted = json.loads(text) | {FIELD: num_kv_heads}
    number = str(num_kv_heads).encode()
    tries = [text[: found.start(1)] + number + text[found.end(1) :] for found in _STATED.finditer(text)]
    for found in _NEIGHBOUR.finditer(text):
        addition = b',%b"%b"%b%b' % (found[1], FIELD.encode(), found[2], number)
        tries.append(text[: found.end()] + addition + text[found.end() :])
    usual = json.dumps(wanted, indent=2, ensure_ascii=False).encode() + b"\n"
    return next((changed for changed in tries if json.loads(changed) == wanted), usual)


# ---- what is refused ------------------------------------------------------------------------------------------------


_NOT_CONVERTED = {  # family: why
    "gpt2": "whose format has a key/value head for each query head and no field for another number",
    "falcon": "whose format has queries, keys and values in one matrix, in an order that the number of heads decides",
    "deepseek": "whose heads share one latent already",
}


def _open(model: str | Path) -> ModelSource:
    """The folder ``model``, if its format can say how many key/value heads there are."""
    source = open_model(model)
    folder = source.path
    if source.kind == "gguf":
        raise UnknownModelError(
            f"{folder} is a GGUF file, whose weights are rounded already and would be a second time; "
            "give the Hugging Face folder that it was made from"
        )
    if not Path(model).expanduser().is_dir():
        raise OptionError(f"{model} is a file; give the folder that holds config.json and the weights")
    why = _NOT_CONVERTED.get(source.spec.family)
    if why is not None:
        raise UnknownModelError(
            f"{source.spec.name} is of model_type {source.spec.model_type}, {why}; accepted: model_type llama, "
            "mistral, mixtral, qwen2, qwen3 (with experts, too), gemma3_text, gpt_oss"
        )
    if (folder / "adapter_config.json").is_file():
        raise UnknownModelError(
            f"{folder} holds an adapter (adapter_config.json), made for the heads as they are; merge it into the "
            "weights first, or take its files out of the folder"
        )
    return source


def _num_kv_heads(spec: RunnableSpec) -> int:
    numbers = sorted({layer.num_kv_heads for layer in spec.layers})
    if len(numbers) > 1:
        raise UnknownModelError(
            f"{spec.name} has layers of {', '.join(map(str, numbers))} key/value heads; only a model with the same "
            "number in every layer can be converted"
        )
    return numbers[0]


def _check_number(spec: RunnableSpec, num_old: int, num_new: int) -> None:
    num_q = spec.num_q_heads
    fewer = [count for count in range(1, num_old + 1) if num_old % count == 0]
    more = [count for count in range(2 * num_old, num_q + 1, num_old) if num_q % count == 0]
    if num_new in (*fewer, *more):
        return
    copies = f"; {', '.join(map(str, more))} (copies)" if more else ""
    raise OptionError(
        f"--kv-heads is {num_new}; {spec.name} has {num_q} query heads and {num_old} key/value heads, so accepted: "
        f"{', '.join(map(str, fewer))} (means, or as it is){copies}"
    )


def _check_weights(source: ModelSource) -> None:
    """Raise as the engine would if the weights do not fit the config. Reads headers: the meta device holds nothing."""
    build_model(source.spec, open_weights(source, torch.float32, torch.device("meta")))


def _spec_with(config: bytes, spec: RunnableSpec, num_kv_heads: int) -> RunnableSpec:
    """The model that ``config`` describes: ``spec`` with other heads, or an error if another field decides them."""
    found = runnable_from_config(json.loads(config), spec.name)
    if found.layers != tuple(
        replace(layer, num_kv_heads=num_kv_heads) for layer in spec.layers if not isinstance(layer, LatentAttention)
    ):
        raise UnknownModelError(
            f"{spec.name}: another field than {FIELD} decides how many key/value heads a layer has; write that number "
            f"into {FIELD}, for all layers, and remove the other field"
        )
    return found


def _token_bytes(spec: RunnableSpec) -> int:
    """Bytes of cache that one token takes in all layers, in the dtype of the model."""
    fmt = find_cache_format(spec.dtype)
    return sum(layer.token_bytes(fmt) for layer in spec.layers)
