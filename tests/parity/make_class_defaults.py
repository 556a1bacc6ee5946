"""Writes spec/config/class_defaults.json: what the configuration classes of transformers assume for an absent key.

Knows nothing of models or caches: a fact is copied when its name may decide the size of the cache, a state or the
weights. Run with transformers installed: ``python tests/parity/make_class_defaults.py``.

An entry has ``usual`` (field → default; null for a number of key/value heads: one for each query head); ``pattern``
where the class makes its layers' kinds itself (those that a default config of any length gets, or of the one length
``only``); ``window`` where the class has a sliding window. A class with a language model inside has ``text``, the
model_type of that, ``inner``, what it changes in that one's defaults, and ``cross`` where the decoder reads an
encoder's tokens.
"""

import dataclasses
import json
import logging
import re
import warnings
from collections.abc import Sequence
from pathlib import Path

FILE = Path(__file__).resolve().parents[2] / "src" / "kvfolio" / "spec" / "config" / "class_defaults.json"

_KEPT = re.compile(
    "hidden_size|n_embd|n_embed|d_model|layer|head|kv|window|chunk|lora|index|compress|mamba|ssm|state|conv|expand"
    "|linear_|lru|d_ff|max_pos|n_positions|n_ctx|max_s|max_t|multi_query|interval|pattern|period|offset|cla_|_cla"
    "|attn|attention|latent|qk_|block_types|n_groups|n_group|tie_|vocab_size|intermediate|ffn|n_inner|inner|expert|moe"
    "|time_step_rank|seq_len|decoder|encoder|decay|gate|mtp|nextn|mlp_|_mlp|parallel|new_decoder|first_k_dense"
)
_DROPPED = re.compile(
    "token|dropout|drop|init|eps|loss|jitter|theta|scal|clamp|limit|floor|act|init_|bias|norm|use_cache|router|kernels"
    "|_plan|is_encoder|residual|prediction|gradient|output_|_multiplier|rms|type_vocab|image|vision|audio|adapter|alpha"
    "|label|impl|min|_std|decoder_start|proj_size|mask|logit|top_p|return|chunk_size_feed|quant|bucket|distance|style"
    "|decoder_hidden|time_step_max|rescale|rope|pos_emb"
)
# A kept word wins over a dropped one inside it.
_ALWAYS = {
    "activation_function": False,
    "attention_chunk_size": True,
    "tie_word_embeddings": True,
    "qk_rope_head_dim": True,
    "is_decoder": True,
    "is_encoder_decoder": True,
}
_KV_HEADS = ("num_key_value_heads", "num_kv_heads")
_LENGTHS = (23, 30, 37, 44)
# What a class takes out of its keyword arguments instead of declaring it as a field; read in its __post_init__.
_UNDECLARED: dict[str, dict[str, object]] = {
    "gemma4_text": {"global_head_dim": 512},
    "gemma4_unified_text": {"global_head_dim": 512},
    "hy_v4": {"index_topk_freq": 4, "index_skip_topk_offset": 2},
    "hy_v4_vl_text": {"index_topk_freq": 4, "index_skip_topk_offset": 2},
    "mimo_v2_flash": {"swa_num_key_value_heads": 8},
    "mllama_text_model": {"cross_attention_layers": [3, 8, 13, 18, 23, 28, 33, 38]},
}


def make() -> dict[str, dict[str, object]]:
    """All entries, by model_type."""
    from transformers.models.auto import modeling_auto as auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    logging.disable(logging.ERROR)
    warnings.simplefilter("ignore")
    names: set[str] = set()
    for mapping in (
        auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    ):
        names |= set(mapping)
    found: dict[str, dict[str, object]] = {}
    for name in sorted(names):
        if name in CONFIG_MAPPING:
            _add(found, name, CONFIG_MAPPING[name])
    return dict(sorted(found.items()))


def _add(found: dict[str, dict[str, object]], name: str, cls: type) -> None:
    text = _text_class(cls)
    if text is not None:
        entry: dict[str, object] = {"text": text.model_type}
        inner = _inner(cls)
        if inner:
            entry["inner"] = inner
        if getattr(cls(), "is_encoder_decoder", False):
            entry["cross"] = True
        found.setdefault(name, entry)
        if text.model_type != name and text.model_type not in found:
            _add(found, text.model_type, text)
        return
    entry = {"usual": _usual(cls) | _nested(cls) | _dense_head(cls) | _UNDECLARED.get(name, {})}
    if "sliding_window" in {field.name for field in dataclasses.fields(cls)}:
        entry["window"] = True
    pattern = _pattern(cls)
    if pattern is not None:
        entry["pattern"] = pattern
    found[name] = entry


def _text_class(cls: type) -> type | None:
    """The class of the language model inside; None when ``cls`` describes it itself."""
    try:
        inner = cls().get_text_config(decoder=True)
    except Exception:  # a class that has no default config of its own
        return None
    return type(inner) if type(inner) is not cls else None


def _usual(cls: type) -> dict[str, object]:
    defaults = {field.name: field.default for field in dataclasses.fields(cls)}
    one_each = {name: None for name in _KV_HEADS if defaults.get(name, 0) is None}
    return _kept(defaults) | one_each


def _nested(cls: type) -> dict[str, object]:
    """The defaults of the mappings in which DBRX and MPT describe a layer."""
    inner = {
        name: sub for name, sub in getattr(cls, "sub_configs", {}).items() if name in ("attn_config", "ffn_config")
    }
    decides = re.compile("^(kv_|moe_|ffn_hidden|attn_type)")
    found = {name: {key: v for key, v in _usual(sub).items() if decides.search(key)} for name, sub in inner.items()}
    return {name: values for name, values in found.items() if values}


def _dense_head(cls: type) -> dict[str, object]:
    """How many first layers have no experts, where a class writes a list of that instead of the number."""
    try:
        kinds = getattr(cls(num_hidden_layers=_LENGTHS[0]), "mlp_layer_types", None)
    except Exception:  # a class whose lists do not follow the number of layers
        return {}
    kinds = list(kinds or ())
    head = kinds.index("sparse") if "sparse" in kinds else 0
    dense_only_there = kinds == ["dense"] * head + ["sparse"] * (len(kinds) - head)
    declared = any("dense" in field.name for field in dataclasses.fields(cls) if isinstance(field.default, int))
    return {"first_k_dense_replace": head} if head and dense_only_there and not declared else {}


def _inner(cls: type) -> dict[str, object]:
    """Where the language model in a default config of ``cls`` differs from a default one of its own class."""
    text = cls().get_text_config(decoder=True)
    named, usual = vars(text), vars(type(text)())
    names = [field.name for field in dataclasses.fields(type(text))]
    specs = getattr(cls, "sub_configs_defaults", {}).values()
    given = {name for spec in specs if getattr(spec, "model_type", "") == text.model_type for name in spec.init_kwargs}
    changed = {name: named.get(name) for name in names if name in given or named.get(name) != usual.get(name)}
    return {name: value for name, value in _kept(changed).items() if not isinstance(value, list)}


def _kept(values: dict[str, object]) -> dict[str, object]:
    kept = {}
    for name, value in values.items():
        if not _is_kept(name):
            continue
        if isinstance(value, bool | int | str) or (isinstance(value, list | tuple) and value):
            kept[name] = list(value) if isinstance(value, tuple) else value
    return kept


def _is_kept(name: str) -> bool:
    if name in _ALWAYS:
        return _ALWAYS[name]
    return bool(_KEPT.search(name)) and not _DROPPED.search(name)


def _pattern(cls: type) -> dict[str, object] | None:
    """The kinds of layers of a default config, as far as one rule fits every length."""
    lists = []
    for length in _LENGTHS:
        try:
            kinds = _kinds(cls(num_hidden_layers=length))
        except Exception:  # a class whose list does not follow the number of layers
            kinds = []
        if kinds is None:
            return None
        if len(kinds) != length:
            return _only_pattern(cls)
        lists.append(kinds)
    for head in range(5):
        for cycle in range(1, 13):
            for last in (False, True):
                rule: dict[str, object] = {"cycle": lists[0][head : head + cycle]}
                if head:
                    rule["head"] = lists[0][:head]
                if last:
                    rule["last"] = lists[0][-1]
                if all(spread(rule, len(kinds)) == kinds for kinds in lists):
                    return rule
    for cycle in range(2, 13):
        rule = {"cycle": lists[0][::-1][:cycle], "from_end": True}
        if all(spread(rule, len(kinds)) == kinds for kinds in lists):
            return rule
    return None


def _only_pattern(cls: type) -> dict[str, object] | None:
    """The list of a default config, where it has one for each of its layers."""
    try:
        config = cls()
    except Exception:  # no default config
        return None
    kinds, length = _kinds(config), vars(config).get("num_hidden_layers")
    return {"cycle": kinds, "only": length} if kinds and len(kinds) == length else None


def _kinds(config: object) -> list[str] | None:
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    return None if kinds is None else list(kinds)


def spread(rule: dict[str, object], length: int) -> list[str]:
    """The kinds that ``rule`` gives to ``length`` layers."""
    head, cycle = _words(rule.get("head")), _words(rule["cycle"])
    kinds = [*head, *(cycle[index % len(cycle)] for index in range(length - len(head)))][:length]
    if rule.get("from_end"):
        kinds.reverse()
    if "last" in rule:
        kinds[-1] = str(rule["last"])
    return kinds


def _words(value: object) -> Sequence[str]:
    return value if isinstance(value, list) else ()


def text_of(entries: dict[str, dict[str, object]]) -> str:
    """The file's text: one model_type a line."""
    lines = [f'"{name}": {json.dumps(entry, sort_keys=True, separators=(",", ":"))}' for name, entry in entries.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    FILE.write_text(text_of(make()), encoding="utf-8")
