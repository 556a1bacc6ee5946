"""What the start-up log of vLLM or SGLang says: numbers about the cache, and the settings they were made with.

Knows nothing of models or of what the numbers should be. Understood are lines of vLLM 0.4 to 0.33 and of SGLang 0.4
to 0.5. Both print GiB under the names GB and GiB.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

GIB = 1 << 30
LOOKED_FOR = (
    "of vLLM 'GPU KV cache size: … tokens', 'Available KV cache memory: … GiB', '# GPU blocks: …', 'Maximum "
    "concurrency for … tokens per request: …x' or 'Model loading took … GiB'; of SGLang 'KV Cache is allocated. "
    "#tokens: …', 'max_total_num_tokens=…' or 'Load weight end. … mem usage=… GB'"
)
_QUOTE = 160  # characters of a line that is shown
_LONGEST = 20_000  # characters of a line that is looked at
_MOST_UNKNOWN = 20
_MOST_LINES = 50_000  # that may say something; a start has hundreds, what follows are requests

_NUMBER = r"(-?\d[\d,]{0,20}(?:\.\d{1,9})?)"
_PATTERNS = tuple(
    (quantity, re.compile(pattern))
    for quantity, pattern in (
        ("weights", rf"(?:Model loading took|Loading model weights took|model weights take) {_NUMBER} ?Gi?B"),
        ("weights", rf"Load weight end\..*mem usage={_NUMBER} GB"),
        ("KV cache memory", rf"Available KV cache memory: {_NUMBER} GiB"),
        ("KV cache memory", rf"available KV cache memory \({_NUMBER} GiB\)"),
        ("KV cache memory", rf"reserved for KV Cache is {_NUMBER} ?GiB"),
        ("KV cache memory", rf"reserved {_NUMBER} GiB memory for KV Cache"),
        ("KV cache memory", rf"kv_cache_size={_NUMBER}GiB"),
        ("KV cache tokens", rf"GPU KV cache size: {_NUMBER} tokens"),
        ("KV cache tokens", rf"max_total_num_tokens={_NUMBER}"),
        ("KV cache tokens", rf"stored in KV cache \({_NUMBER}\)"),
        ("blocks", rf"(?:GPU|cuda|rocm|xpu) blocks: {_NUMBER}"),
        ("device memory", rf"total_gpu_memory ?[(=] ?{_NUMBER} ?GiB"),
    )
)
_IN_GIB = ("weights", "KV cache memory", "device memory")
_CONCURRENCY = re.compile(rf"Maximum concurrency for {_NUMBER} tokens per request: {_NUMBER}x")
_REQUEST = re.compile(rf"max seq len \({_NUMBER}\),? \({_NUMBER} GiB KV cache is needed")
_POOL = re.compile(rf"KV Cache is allocated\..*#tokens: {_NUMBER}, (?:K|KV)(?: size:)? {_NUMBER} GB")
_POOL_VALUES = re.compile(rf"\bV(?: size:)? {_NUMBER} GB")
_STATES = re.compile(rf"Mamba Cache is allocated\..*conv_state size: {_NUMBER} ?GB, *ssm_state size: {_NUMBER} ?GB")
_DTYPE = re.compile(r"KV Cache is allocated\. dtype: (torch\.\w{1,30})")
_WIDENED = re.compile(r"[Ss]etting attention block size to (\d{1,6}) tokens")
_DRAFT = re.compile(r"speculative[-_](?:config|algorithm|model)['\"]?[ =:]\s?(?!None)\S")
_VERSIONS = (
    re.compile(r"LLM engine \(v([^)\s]{1,60})\)"),
    re.compile(r"API server version:? v?(\d\S{0,60})"),
    re.compile(r"version (\d+\.\d+\.\d+\S{0,40})"),
    re.compile(r"sglang[ =:]+v?(\d[\w.+-]{1,60})", re.IGNORECASE),
)
_NAMES = {  # a setting in either log → its name here
    "max_seq_len": "max_model_len",
    "max_model_len": "max_model_len",
    "context_length": "max_model_len",
    "context_len": "max_model_len",
    "tensor_parallel_size": "tensor_parallel",
    "tensor_parallel": "tensor_parallel",
    "tp_size": "tensor_parallel",
    "tp": "tensor_parallel",
    "pipeline_parallel_size": "pipeline",
    "pp_size": "pipeline",
    "dp_size": "data_parallel",
    "dp": "data_parallel",
    "data_parallel_size": "data_parallel",
    "enable_dp_attention": "dp_attention",
    "kv_cache_dtype": "kv_dtype",
    "block_size": "block_size",
    "page_size": "block_size",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "chunked_prefill_size": "max_num_batched_tokens",
    "gpu_memory_utilization": "gpu_memory_utilization",
    "mem_fraction_static": "gpu_memory_utilization",
}
_FRACTIONS = ("gpu_memory_utilization",)
_TEXTS = ("kv_dtype", "dp_attention")
_ANY_NAME = "|".join(sorted((name.replace("_", "[-_]") for name in _NAMES), key=len, reverse=True))
_SETTING = re.compile(
    rf"--({_ANY_NAME})(?:[ =]+['\"]?([\w.+-]{{1,40}})|(?=\s|$))|\b({_ANY_NAME})['\"]?\s?[=:(]\s?['\"]?([\w.+-]{{1,40}})"
)
_COLOUR = re.compile(r"\x1b\[[0-9;]{0,20}m")
_ABOUT_CACHE = re.compile(r"kv[ _-]?cache|(?:GPU|cuda) blocks", re.IGNORECASE)
# Lines about the cache that say nothing a number could be checked with.
_TOLD = re.compile(
    r"padding layers|[Hh]ybrid (?:KV|kv) cache manager|config|[Aa]rgs|Using .* dtype|layout|transfer|dtype to store|"
    r"--|kv_cache_memory_bytes|KV cache allocation|Traceback|File \""
)
_WORTH = (
    *("KV", "kv", "blocks", "concurrency", "loading took", "weights t", "weight end", "Mamba Cache", "max_total_num"),
    *("total_gpu_memory", "LLM engine", "version", "Args", "args", "Chunked prefill", "block size", "--", "sliding"),
)


@dataclass(frozen=True, slots=True)
class Found:
    """One number as logged; memory in bytes. ``tokens``: those of a pool, or those a request is counted at."""

    quantity: str  # a pool of SGLang is "pool"
    value: float
    quote: str
    tokens: int = 0
    times: int = 1  # ranks and repeats that logged the quantity


@dataclass(frozen=True, slots=True)
class LogFacts:
    """Everything found in one log."""

    engine: str  # vllm or sglang
    version: str | None
    settings: Mapping[str, int | float | str]
    numbers: tuple[Found, ...]  # each quantity once: the least memory and the most weights of all ranks; every pool
    unknown: tuple[str, ...]  # lines about the cache that were not understood
    draft: bool  # the engine speculates with a draft model or draft layers
    windows_whole: bool  # vLLM said that it does not use windows to save memory
    device_memory: int | None
    cut: bool  # the text had more lines than were looked at


def read_lines(text: str) -> LogFacts:
    """What ``text`` says; with no number at all, ``numbers`` is empty."""
    numbers: dict[tuple[str, int, float], Found] = {}
    settings: dict[str, int | float | str] = {}
    unknown: dict[str, str] = {}
    version, whole, draft, widened = None, False, False, None
    seen: set[str] = set()
    for raw in text.splitlines():
        # Every few seconds a running engine logs how full its cache is: that is no start.
        if not any(word in raw for word in _WORTH) or "cache usage" in raw or raw in seen:
            continue
        if len(seen) >= _MOST_LINES:
            break
        seen.add(raw)
        line = _COLOUR.sub("", raw[:_LONGEST]).strip()
        found = list(_numbers_of(line))
        for one in found:
            _keep(numbers, one)
        settings.update(_settings_of(line))
        widening = _WIDENED.search(line)
        widened = int(widening[1]) if widening is not None else widened
        version = version or next((match[1] for match in (one.search(line) for one in _VERSIONS) if match), None)
        draft = draft or _DRAFT.search(line) is not None
        whole = whole or ("ybrid KV cache manager is disabled" in line)
        if not found and _ABOUT_CACHE.search(line) and not _TOLD.search(line) and len(unknown) < _MOST_UNKNOWN:
            unknown.setdefault(re.sub(r"\d+", "", line), _cut(line))
    if widened:
        settings["block_size"] = widened
    device = numbers.pop(("device memory", 0, 0.0), None)
    return LogFacts(
        engine="sglang" if _is_sglang(text) else "vllm",
        version=version,
        settings=settings,
        numbers=tuple(numbers.values()),
        unknown=tuple(unknown.values()),
        draft=draft,
        windows_whole=whole,
        device_memory=int(device.value) if device is not None else None,
        cut=len(seen) >= _MOST_LINES,
    )


def _is_sglang(text: str) -> bool:
    if any(word in text for word in ("KV Cache is allocated", "max_total_num_tokens=", "Load weight end")):
        return True
    return "sglang" in text and "vllm" not in text


def _numbers_of(line: str) -> Iterator[Found]:
    quote = _cut(line)
    pool = _POOL.search(line)
    if pool is not None:
        values = _POOL_VALUES.search(line, pool.end())
        gib = _number(pool[2]) + (_number(values[1]) if values is not None else 0)
        yield Found("pool", gib * GIB, quote, int(_number(pool[1])))
        return
    states = _STATES.search(line)
    if states is not None:
        yield Found("states", (_number(states[1]) + _number(states[2])) * GIB, quote)
    concurrency = _CONCURRENCY.search(line)
    if concurrency is not None and _number(concurrency[1]) >= 1:
        yield Found("concurrency", _number(concurrency[2]), quote, int(_number(concurrency[1])))
    request = _REQUEST.search(line)
    if request is not None and _number(request[1]) >= 1:
        yield Found("one request", _number(request[2]) * GIB, quote, int(_number(request[1])))
    seen = set()
    for quantity, pattern in _PATTERNS:
        match = pattern.search(line)
        if match is not None and quantity not in seen:
            seen.add(quantity)
            yield Found(quantity, _number(match[1]) * (GIB if quantity in _IN_GIB else 1), quote)


def _keep(numbers: dict[tuple[str, int, float], Found], new: Found) -> None:
    """Add ``new``; of what several ranks log, the number that decides: the least room, the most weights."""
    key = (new.quantity, new.tokens, new.value if new.quantity == "pool" else 0.0)
    old = numbers.get(key)
    if old is None:
        numbers[key] = new
        return
    decides = max if new.quantity in ("weights", "one request", "device memory") else min
    numbers[key] = replace(decides(old, new, key=lambda one: one.value), times=old.times + 1)


def _settings_of(line: str) -> Iterator[tuple[str, int | float | str]]:
    dtype = _DTYPE.search(line)
    if dtype is not None:
        yield "kv_dtype", dtype[1]
    for match in _SETTING.finditer(line):
        name = _NAMES[(match[1] or match[3]).replace("-", "_")]
        value = match[2] or match[4] or "True"
        if name in _TEXTS:
            if value not in ("None", "False"):
                yield name, value
            continue
        text = value.rstrip(".")
        try:
            number = float(text) if name in _FRACTIONS else int(text)
        except ValueError:
            continue
        if 0 < number <= (1 if name in _FRACTIONS else 10**12):
            yield name, number


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def _cut(line: str) -> str:
    return line if len(line) <= _QUOTE else line[: _QUOTE - 1] + "…"
