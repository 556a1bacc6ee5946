"""Builds the transformers model of a config on torch's meta device, runs one forward and measures the cache it leaves.

Nothing is allocated and nothing computed: a meta tensor has a shape and a dtype only, so full-size models take
seconds. Knows nothing of the plan that the result is held against.
"""

import contextlib
import copy
import inspect
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import transformers
from transformers.activations import ACT2FN
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from kvfolio.engine.measured import MeasuredCache, MeasuredLayer, MeasuredTensor
from kvfolio.engine.meta_values import NoValues
from kvfolio.errors import OptionError, UnknownModelError
from kvfolio.kernels.codec import TORCH_DTYPES
from kvfolio.spec.formats import COMPUTE_FORMATS, format_of_dtype

ENCODER_TOKENS = 50  # given to an encoder whose length is free

_DECODERS = (modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING, modeling_auto.MODEL_MAPPING)
_WHOLE = (
    modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
    modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING,
)
_CACHE_NAMES = ("cache", "past_key_values", "cache_params", "state")
_SAME_CLASS = {"minimax_text_01": "minimax"}  # published with code of their own, later taken up by transformers
_NO_SDPA = "does not support an attention implementation"
_ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function")
_QUANTISATION = ("quantization_config", "compression_config")
_NOT_THE_MODEL = ("auto_map", "dtype", "torch_dtype", "_attn_implementation", "transformers_version", "use_cache")


def measure_cache(config: Mapping[str, object], num_tokens: int) -> MeasuredCache:
    """Measure the cache that transformers' own class leaves after one forward of ``num_tokens`` tokens, batch 1.

    The model is made in the dtype that ``config`` names, bf16 where it names none. Raises UnknownModelError where
    transformers has no class for ``config``, or none whose forward runs without values; OptionError for less than one
    token.
    """
    if num_tokens < 1:
        raise OptionError(f"num_tokens is {num_tokens}; at least 1 token must pass")
    dtype = _dtype(config)
    failures = []
    with _quiet():
        for model_class, model_config in _candidates(load_config(config)):
            for attention in ("sdpa", "eager"):
                try:
                    return _measure(_build(model_class, model_config, attention, dtype), attention, num_tokens)
                except Exception as error:  # whatever a foreign model raises, the next way may work
                    failures.append(f"{model_class.__name__}/{attention}: {type(error).__name__}: {_first_line(error)}")
    known = [failure for failure in failures if _NO_SDPA not in failure] or failures
    reason = known[0] if known else "no class that writes text"
    raise UnknownModelError(f"transformers {transformers.__version__} cannot run {_type_of(config)} on meta: {reason}")


def load_config(config: Mapping[str, object]) -> Any:
    """The transformers config object of a ``config.json``, without its quantisation and without remote code.

    Raises UnknownModelError where transformers has no class for it, or where the class refuses the values.
    """
    values = {
        name: _without_marks(value) for name, value in config.items() if name not in (*_QUANTISATION, *_NOT_THE_MODEL)
    }
    config_class = _config_class(values)
    text = config.get("text_config")
    if config_class is None and isinstance(text, Mapping):
        return load_config(text)
    if config_class is None:
        raise UnknownModelError(f"transformers {transformers.__version__} has no class for {_type_of(config)}")
    # The class's own word: a model may name itself anew and still use the class of another.
    values["model_type"] = config_class.model_type
    if "attn_type_list" in values:  # MiniMax as published: 1 is softmax attention, 0 lightning
        names = ("linear_attention", "full_attention")
        values["layer_types"] = [names[kind == 1] for kind in _as_list(values.pop("attn_type_list"))]
    for name in _ACTIVATIONS:  # one that transformers lacks: no cache depends on it
        if name in values and values[name] not in ACT2FN:
            values[name] = "silu"
    try:
        return config_class.from_dict(copy.deepcopy(values))
    except Exception as error:
        raise UnknownModelError(
            f"transformers {transformers.__version__} does not read this {_type_of(config)} config: "
            f"{type(error).__name__}: {_first_line(error)}"
        ) from error


def _config_class(values: Mapping[str, object]) -> Any:
    model_type = str(values.get("model_type"))
    model_type = _SAME_CLASS.get(model_type, model_type)
    if model_type in CONFIG_MAPPING:
        return CONFIG_MAPPING[model_type]
    for name in _as_list(values.get("architectures")):
        config_class = getattr(getattr(transformers, str(name), None), "config_class", None)
        if config_class is not None:
            return config_class
    return None


def _without_marks(value: Any) -> Any:
    """``{"__float__": "Infinity"}`` is how transformers writes what JSON has no number for."""
    if isinstance(value, Mapping):
        if set(value) == {"__float__"}:
            return float(value["__float__"])
        return {name: _without_marks(item) for name, item in value.items()}
    return [_without_marks(item) for item in value] if isinstance(value, list) else value


def _dtype(config: Mapping[str, object]) -> torch.dtype:
    text = config.get("text_config")
    for part in (config, text if isinstance(text, Mapping) else {}):
        name = part.get("dtype", part.get("torch_dtype"))
        fmt = format_of_dtype(name) if isinstance(name, str) else None
        if fmt is not None and fmt.name in COMPUTE_FORMATS:
            return TORCH_DTYPES[fmt.name]
    return torch.bfloat16


def _as_list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _type_of(config: Mapping[str, object]) -> str:
    return f"model_type {config.get('model_type')!r}"


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines)[:160] if lines else "no message"


def _candidates(whole: Any) -> Iterator[tuple[Any, Any]]:
    """(model class, its config), the smallest that holds the whole text cache first."""
    if getattr(whole, "is_encoder_decoder", False):
        yield from _classes(_WHOLE, whole)
    thinker = getattr(whole, "thinker_config", None)  # of a model that also speaks
    if thinker is not None:
        yield from _candidates(thinker)
    text = _text_part(whole)
    if text is not whole and not getattr(whole, "is_encoder_decoder", False):
        yield from _classes(_DECODERS, text)
    yield from _classes((*_DECODERS[:1], *_WHOLE, *_DECODERS[1:]), whole)


def _text_part(config: Any) -> Any:
    try:
        return config.get_text_config(decoder=True)
    except ValueError:  # several parts may be meant: the model as a whole, then
        return config


def _classes(mappings: tuple[Any, ...], config: Any) -> Iterator[tuple[Any, Any]]:
    text = _text_part(config)
    for mapping in mappings:
        found: Any = None
        with contextlib.suppress(ValueError):  # a mapping may name a class that is not there
            found = mapping.get(type(config), None)
        model_class = found[0] if isinstance(found, tuple) else found
        if model_class is not None:
            # The mapping may name a class that takes the text part alone.
            alone = type(text) is model_class.config_class and type(config) is not model_class.config_class
            yield model_class, text if alone else config


def _measure(model: Any, attention: str, num_tokens: int) -> MeasuredCache:
    before = _module_tensors(model)
    with torch.no_grad(), torch.device("meta"), NoValues():
        inputs = _inputs(model, num_tokens)
        outputs = model(**inputs, use_cache=True, return_dict=True)
        cache = next((outputs[name] for name in _CACHE_NAMES if outputs.get(name) is not None), None)
        if cache is None and "cache" in inspect.signature(model.forward).parameters:  # it returns none of its own
            cache = transformers.DynamicCache(config=model.config)
            model(**inputs, use_cache=True, cache=cache)
    places = _Places()
    if "cross_attention_states" in inputs:
        places.encoder_tokens = ENCODER_TOKENS
    if cache is not None:
        places.add_cache(cache)
    for (index, kind, name), tensor in _module_tensors(model).items():  # states that a model keeps on its modules
        if tensor is not before.get((index, kind, name)):
            places.add_values(index, kind, tensor, name)
    return MeasuredCache(
        class_name=type(model).__name__,
        attention=attention,
        transformers_version=transformers.__version__,
        num_tokens=num_tokens,
        encoder_tokens=places.encoder_tokens,
        layers=places.layers(),
    )


def _build(model_class: Any, config: Any, attention: str, dtype: torch.dtype) -> Any:
    config = copy.deepcopy(config)
    with torch.device("meta"), NoValues():
        build = getattr(model_class, "_from_config", None) or model_class
        # Experts one by one: none is chosen, so none is run.
        model = build(config, attn_implementation=attention, experts_implementation="eager", dtype=dtype)
    return model.eval()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No advice on a model that is never run in earnest, and no checks of values that are not there."""
    level, checks = transformers.logging.get_verbosity(), torch.distributions.Distribution._validate_args
    transformers.logging.set_verbosity_error()
    torch.distributions.Distribution.set_default_validate_args(False)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.set_verbosity(level)
        torch.distributions.Distribution.set_default_validate_args(checks)


def _inputs(model: Any, num_tokens: int) -> dict[str, torch.Tensor]:
    accepted = inspect.signature(model.forward).parameters
    config = model.config
    ids = torch.zeros(1, num_tokens, dtype=torch.long)
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in accepted:
        return {**_encoder_input(model, accepted), "decoder_input_ids": ids}
    inputs = {"input_ids": ids}
    if "cross_attention_states" in accepted:  # an image, as Llama 3.2 Vision sees it
        inputs["cross_attention_states"] = torch.zeros(1, ENCODER_TOKENS, config.hidden_size, dtype=model.dtype)
    return inputs


def _encoder_input(model: Any, accepted: Mapping[str, object]) -> dict[str, torch.Tensor]:
    config = model.config
    if "input_features" in accepted:  # a spectrogram; Whisper's convolution halves its length
        frames = 2 * getattr(config, "max_source_positions", ENCODER_TOKENS)
        parts = (config, getattr(config, "encoder_config", None), getattr(config, "audio_config", None))
        names = ("num_mel_bins", "input_feat_per_channel")
        bins = next((getattr(part, name) for part in parts for name in names if hasattr(part, name)), 80)
        shape = (1, bins, frames) if "whisper" in config.model_type else (1, frames, bins)
        return {"input_features": torch.zeros(shape, dtype=model.dtype)}
    if "pixel_values" in accepted and "input_ids" not in accepted:
        size = getattr(getattr(config, "encoder", config), "image_size", 224)
        height, width = size if isinstance(size, list | tuple) else (size, size)
        return {"pixel_values": torch.zeros(1, 3, height, width, dtype=model.dtype)}
    return {"input_ids": torch.zeros(1, ENCODER_TOKENS, dtype=torch.long)}


def _module_tensors(model: Any) -> dict[tuple[int, str, str], torch.Tensor]:
    """Tensors that are plain attributes of a numbered layer's modules, by (layer, class, attribute)."""
    found = {}
    for path, module in model.named_modules():
        digits = [int(part) for part in path.split(".") if part.isdigit()]
        for attribute, value in vars(module).items() if digits else ():
            if isinstance(value, torch.Tensor):
                found[digits[0], type(module).__name__, attribute] = value
    return found


class _Places:
    """Tensors found so far, by layer; each storage once."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[str, list[MeasuredTensor]]] = {}
        self._seen: set[int] = set()
        self._kept: list[torch.Tensor] = []  # ids stay those of living objects
        self.encoder_tokens = 0

    def layers(self) -> tuple[MeasuredLayer, ...]:
        return tuple(MeasuredLayer(index, kind, tuple(found)) for index, (kind, found) in sorted(self._found.items()))

    def add_cache(self, cache: Any) -> None:
        """Every float tensor of a cache object, whatever its class."""
        if hasattr(cache, "self_attention_cache"):
            self.add_cache(cache.self_attention_cache)
            for index, layer in enumerate(cache.cross_attention_cache.layers):
                self.add_values(index, type(layer).__name__, vars(layer), "cross.")
                if getattr(layer, "keys", None) is not None:
                    self.encoder_tokens = layer.keys.shape[-2]
            return
        for index, layer in enumerate(getattr(cache, "layers", ())):
            self.add_values(index, type(layer).__name__, vars(layer), "")
        if isinstance(cache, list | tuple):  # RWKV: five tensors [1, hidden, layers], the first two the last inputs
            for place, tensor in enumerate(cache):
                for index in range(tensor.shape[-1]):
                    self.add_values(index, "list", tensor[..., index], f"{'conv' if place < 2 else 'state'}.{place}")
            return
        for name, value in vars(cache).items():  # kept beside ``layers``: one entry a layer
            if name in ("layers", "config"):
                continue
            entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
            for index, entry in entries:
                self.add_values(index, type(cache).__name__, entry, name)

    def add_values(self, index: int, kind: str, value: Any, prefix: str) -> None:
        """Every float tensor below ``value``, as held by layer ``index``."""
        _, found = self._found.setdefault(index, (kind, []))
        for name, tensor in _tensors(value, prefix):
            if id(tensor) in self._seen or not tensor.is_floating_point() or tensor.numel() == 0:
                continue
            self._seen.add(id(tensor))
            self._kept.append(tensor)
            found.append(MeasuredTensor(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")))


def _tensors(value: Any, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor below ``value`` with its place: attributes, entries of dicts, items of lists."""
    if isinstance(value, torch.Tensor):
        yield prefix.strip("."), value
        return
    if isinstance(value, dict):
        items: Any = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    else:
        return
    for name, item in items:
        yield from _tensors(item, f"{prefix}{'' if prefix.endswith('.') or not prefix else '.'}{name}")
