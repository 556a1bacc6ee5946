"""The command line of vLLM, SGLang or llama.cpp that realises a plan, with what the engine cannot do as comments.

Knows nothing of how an engine is installed or started. Flags are those of vLLM 0.33 (config/cache.py), SGLang 0.5
(server_arguments.md) and llama.cpp's llama-server (tools/server/README.md), read in autumn 2026.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path

from kvfolio.errors import BudgetError, OptionError
from kvfolio.planner import sizes
from kvfolio.planner.memory import DEFAULT_BLOCK_TOKENS
from kvfolio.planner.options import PlanOptions
from kvfolio.planner.parallel import DeviceShare, device_share
from kvfolio.planner.report import Plan, make_plan
from kvfolio.spec.layers import RecurrentState
from kvfolio.spec.model import ModelSpec
from kvfolio.units import format_bytes

ENGINES = ("vllm", "sglang", "llama.cpp")

# kvfolio's format → the engine's name for the same bytes
_VLLM_FORMATS = {
    "fp8": "fp8",
    "fp8-scaled": "fp8_per_token_head",
    "int8": "int8_per_token_head",
    "int4": "int4_per_token_head",
    "fp8-mla": "fp8_ds_mla",
}
_VLLM_ACCEPTS = "auto, bf16, f16, fp8, fp8-scaled, int8, int4, and for latent layers auto, bf16, f16, fp8, fp8-mla"
_SGLANG_ACCEPTS = "auto, bf16, fp8, and fp8-mla for latent layers with an index"
_LLAMA_FORMATS = {
    "f32": "f32",
    "bf16": "bf16",
    "f16": "f16",
    "int8": "q8_0",
    "int8-g32": "q8_0",
    "int4": "q4_0",
    "int4-g32": "q4_0",
}
_LLAMA_ACCEPTS = "auto, f32, bf16, f16, int8 (q8_0), int4 (q4_0), keys/values of these, k8v4"
_LONG_FORMATS = {"bf16": "bfloat16", "f16": "float16"}
_LLAMA_PAD = 256  # llama.cpp rounds the context of a slot up to this


@dataclass(frozen=True, slots=True)
class _Job:
    """One command line while it is written."""

    spec: ModelSpec
    options: PlanOptions
    plan: Plan
    share: DeviceShare
    context: int
    users: int
    source: str
    beyond_model: bool  # the context asked for is more than the model was made for
    flags: list[tuple[str, ...]] = field(default_factory=list)
    comments: list[str] = field(default_factory=list)

    def flag(self, *words: str | int) -> None:
        self.flags.append(tuple(str(word) for word in words))

    def say(self, comment: str) -> None:
        self.comments.append(comment)

    @property
    def memory(self) -> int:
        """Bytes for caches on one device."""
        return self.plan.kv_memory_bytes // self.plan.device.num_devices

    @property
    def usable(self) -> int:
        """Bytes of one device that weights and caches may take."""
        return int(self.plan.device.memory_bytes * self.options.utilisation) - self.options.reserve

    def fraction(self) -> str:
        """``usable`` as a share of the device's memory, rounded down: what a reserve comes to in a fraction."""
        return f"{self.usable * 1000 // self.plan.device.memory_bytes / 1000:.3g}"

    def has(self, *kinds: str) -> bool:
        return any(part.kind in kinds for kind in self.spec.layers for part in sizes.parts_of(kind))

    def window(self) -> int | None:
        """The widest window; None where no layer has one."""
        parts = (part for kind in self.spec.layers for part in sizes.parts_of(kind))
        return max((part.window for part in parts if part.window is not None and part.horizon()), default=None)


def engine_flags(spec: ModelSpec, options: PlanOptions, engine: str, source: str) -> str:
    """The command line, one flag a line, behind ``#`` lines that say what it was computed from.

    For the first context and the users asked for, if more than one, else those that fit: each with its whole context
    set aside, or at ``mean_tokens`` where that is given. ``source``: what the model was called. Raises OptionError for
    an unknown engine and for what it has no flag for, BudgetError for a plan that does not fit.
    """
    if engine not in ENGINES:
        raise OptionError(f"unknown engine {engine!r}; accepted: {', '.join(ENGINES)}")
    if engine == "llama.cpp":
        return _llama_cpp(spec, options, source)
    job = _job(spec, options, source)
    if engine == "vllm":
        _vllm(job)
        return _written(job, ("vllm", "serve", _model(job)))
    _sglang(job)
    return _written(job, ("python", "-m", "sglang.launch_server"))


def _job(spec: ModelSpec, options: PlanOptions, source: str, pad: int = 1) -> _Job:
    """The plan behind the flags, with its numbers as the first comments; BudgetError where it does not fit.

    ``pad``: the engine rounds a context up to a multiple of this, so the plan is made for that many tokens.
    """
    plan = make_plan(spec, options)
    asked = plan.contexts[0]
    if asked.context < 1:
        raise OptionError("a context of 0 tokens cannot be served; give --context, such as 4096 or 32k")
    context = sizes.rounded_up(asked.context, pad)
    if context != asked.context:
        plan = make_plan(spec, replace(options, contexts=(context,)))
    share = device_share(spec, plan.weights_bytes, options.devices, options.pipeline)
    if plan.short_bytes:
        raise BudgetError(
            f"the weights do not fit: {format_bytes(share.weights_bytes)} a device, short by "
            f"{format_bytes(plan.short_bytes)}; take more --devices, a larger device or a smaller checkpoint"
        )
    job = _Job(spec, options, plan, share, context, _users(options, plan), source, asked.beyond_model)
    _say_numbers(job)
    if context != asked.context:
        job.say(f"{asked.context:,} tokens became {context:,}: the engine rounds a context up to {pad}")
    return job


def _users(options: PlanOptions, plan: Plan) -> int:
    row = plan.contexts[0]
    paged = options.mean_tokens is not None
    fit = plan.users.paged if paged else plan.users.reserved
    each = f"{plan.users.mean_tokens if paged else row.context:,} tokens"
    if fit is None:
        return options.users
    if fit < max(1, options.users):
        have = plan.kv_memory_bytes // plan.device.num_devices
        raise BudgetError(
            f"{options.users:,} sequences of {each} do not fit: {fit:,} do in {format_bytes(have)} of cache memory a "
            f"device, and one of {row.context:,} tokens takes {format_bytes(row.device_bytes)}; take fewer users, a "
            "shorter context, more --devices or a smaller --kv-format"
        )
    return options.users if options.users > 1 else fit


def _say_numbers(job: _Job) -> None:
    plan, options = job.plan, job.options
    held = "at a mean of" if options.mean_tokens is not None else "each set aside whole:"
    tokens = plan.users.mean_tokens if options.mean_tokens is not None else job.context
    reserve = f" - reserve {format_bytes(options.reserve)}" if options.reserve else ""
    each = plan.contexts[0].device_bytes
    job.say(f"{job.spec.name} on {plan.device.name}, cache in {plan.kv.format}")
    job.say(
        f"for caches {job.memory:,} B a device = {options.utilisation:g} * {format_bytes(plan.device.memory_bytes)}"
        f"{reserve} - weights {format_bytes(job.share.weights_bytes)}"
    )
    job.say(f"users: {job.users:,}, {held} {tokens:,} tokens; {each:,} B a device at {job.context:,} tokens")
    if options.weights_bytes is not None:
        job.say(f"the weights were given as {options.weights_bytes:,} B: name the checkpoint that has them")
    if job.beyond_model:
        job.say(f"{job.context:,} tokens is more than the {plan.model.max_context:,} that the model was made for")


def _written(job: _Job, start: tuple[str, ...]) -> str:
    from shlex import quote

    comments = ["# " + " ".join(comment.split()) for comment in job.comments]
    lines = [" ".join(map(quote, words)) for words in (start, *job.flags)]
    return "\n".join([*comments, " \\\n  ".join(lines)])


def _model(job: _Job) -> str:
    """What the engine is to call the model: a path, or its repository on the hub."""
    source = job.source
    path = Path(source)
    if path.exists():
        folder = path.parent if path.name == "config.json" else path
        return f"./{folder}" if str(folder).startswith("-") else str(folder)
    if "/" in source:
        return source
    from kvfolio.spec.catalogue import find_entry

    entry = find_entry(source)
    if entry is not None and entry.repo is not None:
        return entry.repo
    job.say(f"{source} has no repository that kvfolio knows: put the path of its weights in its place")
    return source


def _format_name(options: PlanOptions) -> str:
    return "auto" if options.kv_format == "auto" else options.cache_format.name


def _refused(engine: str, format_name: str, accepted: str) -> OptionError:
    return OptionError(f"{engine} stores no cache in {format_name}; --kv-format for it: {accepted}")


def _block_flag(job: _Job, name: str, engine: str) -> None:
    """The size of a block, where another than kvfolio's own was asked for and the engine has it."""
    block = job.options.block_tokens
    if block == DEFAULT_BLOCK_TOKENS:
        return
    if job.has("recurrent"):
        job.say(f"blocks of {block} tokens: {engine} sizes the blocks of models with states itself; left to it")
    elif engine == "vLLM" and block % 16:
        job.say(f"blocks of {block} tokens: vLLM's attention takes multiples of 16; left at its own size")
    else:
        job.flag(name, block)


def _parallel_flags(job: _Job, tensor: str, pipeline: str) -> None:
    for name, count in ((tensor, job.options.devices), (pipeline, job.options.pipeline)):
        if count > 1:
            job.flag(name, count)


# ---- vLLM -----------------------------------------------------------------------------------------------------------


def _vllm(job: _Job) -> None:
    options = job.options
    job.flag("--max-model-len", job.context)
    _parallel_flags(job, "--tensor-parallel-size", "--pipeline-parallel-size")
    job.flag("--gpu-memory-utilization", job.fraction())
    job.flag("--kv-cache-memory-bytes", job.memory)
    job.say("--kv-cache-memory-bytes fixes the cache as planned; without it vLLM takes what its activations leave")
    job.flag("--kv-cache-dtype", _vllm_format(job))
    _block_flag(job, "--block-size", "vLLM")
    batched = max(options.in_flight, job.users)
    job.flag("--max-num-seqs", job.users)
    job.flag("--max-num-batched-tokens", batched)
    if batched > options.in_flight:
        job.say(f"{options.in_flight:,} tokens in flight are fewer than the sequences: vLLM wants one each")
    if options.prefix_tokens:
        job.flag("--enable-prefix-caching")
    if job.beyond_model:
        job.say("vLLM refuses that unless VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 is set")
    if job.source.endswith(".gguf"):
        job.say("vLLM reads GGUF files only as an experiment, and one file a model")
    reserved = sizes.vllm_bytes_at(
        job.share.spec, job.context, options.cache_format, options.block_tokens, options.in_flight
    )
    if reserved and job.memory < job.users * reserved:
        job.say(
            f"vLLM counts {reserved:,} B for a request of {job.context:,} tokens: it starts "
            f"{job.memory / reserved:.2f} of them at once, and preempts where more grow so long"
        )


def _vllm_format(job: _Job) -> str:
    name = _format_name(job.options)
    indexed, latent = job.has("latent_indexed"), job.has("latent", "latent_indexed")
    if name == "auto" and indexed:
        job.say("auto would be fp8 here: vLLM stores latents with an index so; the plan counts 16 bits")
        return "bfloat16"
    if name in ("auto", job.spec.dtype) and name != "f32" and not indexed:
        return "auto"
    if name in _LONG_FORMATS:
        return _LONG_FORMATS[name]
    allowed = ("fp8", "fp8-mla") if latent else tuple(key for key in _VLLM_FORMATS if key != "fp8-mla")
    if name not in allowed:
        raise _refused("vLLM", job.options.kv_format, _VLLM_ACCEPTS)
    if _VLLM_FORMATS[name].endswith("per_token_head"):
        job.say(f"{_VLLM_FORMATS[name]} runs on vLLM's Triton attention alone")
    if name == "fp8" and indexed:
        job.say("vLLM stores latents with an index as fp8-mla, 656 B a token: --kv-format fp8-mla counts that")
    return _VLLM_FORMATS[name]


# ---- SGLang ---------------------------------------------------------------------------------------------------------


def _sglang(job: _Job) -> None:
    options = job.options
    job.flag("--model-path", _model(job))
    job.flag("--context-length", job.context)
    _parallel_flags(job, "--tp-size", "--pp-size")
    job.flag("--mem-fraction-static", job.fraction())
    job.say("--mem-fraction-static holds weights and caches; what remains is for activations and CUDA graphs")
    job.flag("--kv-cache-dtype", _sglang_format(job))
    _block_flag(job, "--page-size", "SGLang")
    job.flag("--max-running-requests", job.users)
    job.flag("--chunked-prefill-size", options.in_flight)
    window = job.window()
    if window is not None and window < job.context and job.has("full"):
        # One pool for all window layers: every user's window, and the chunk that is being read.
        each = job.context if options.mean_tokens is None else options.mean_tokens
        in_windows = job.users * min(window, each) + options.in_flight
        held = min(1000, -(-1000 * in_windows // (job.users * each)))
        job.flag("--swa-full-tokens-ratio", f"{held / 1000:g}")
        job.say(f"window layers get {held / 1000:g} of the tokens of full ones: {window:,} a user, and one chunk")
        job.say("where SGLang keeps a model's windows whole, fewer users fit: read its log with --log")
    if job.beyond_model:
        job.say("SGLang refuses that unless SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1 is set")


def _sglang_format(job: _Job) -> str:
    name = _format_name(job.options)
    if name in ("auto", job.spec.dtype) and name != "f32":
        return "auto"
    if name == "bf16":
        return "bf16"
    indexed = job.has("latent_indexed")
    if name == "fp8" and indexed:
        job.say("SGLang stores latents with an index in 656 B a token: --kv-format fp8-mla counts that")
    if name == "fp8" or (name == "fp8-mla" and indexed):
        return "fp8_e4m3"
    raise _refused("SGLang", name, _SGLANG_ACCEPTS)


# ---- llama.cpp ------------------------------------------------------------------------------------------------------


def _llama_cpp(spec: ModelSpec, options: PlanOptions, source: str) -> str:
    fmt = options.cache_format
    names = ("f16", "f16") if options.kv_format == "auto" else (fmt.k.name, fmt.v.name)
    if fmt.rope is not None or not all(name in _LLAMA_FORMATS for name in names):
        raise _refused("llama.cpp", options.kv_format, _LLAMA_ACCEPTS)
    if options.devices > 1 and options.pipeline > 1:
        raise OptionError("llama.cpp splits tensors or layers, not both; give --devices or --pipeline alone")
    # q8_0 and q4_0 are one f16 scale for 32 numbers: the plan is made again with these bytes.
    exact = "/".join(f"{name}-g32" if name in ("int8", "int4") else name for name in names)
    # A prefix is stored again in every slot.
    job = _job(spec, replace(options, kv_format=exact, prefix_tokens=0), source, _LLAMA_PAD)
    if exact != "/".join(names):
        job.say("counted as llama.cpp stores it: q8_0 is 34 B and q4_0 18 B for 32 numbers")
    _llama_flags(job, names)
    if options.prefix_tokens:
        job.say("llama.cpp stores a common prefix once in each slot: sharing it saves nothing here")
    return _written(job, ("llama-server",))


def _llama_flags(job: _Job, names: tuple[str, str]) -> None:
    options = job.options
    if job.source.endswith(".gguf"):
        job.flag("-m", f"./{job.source}" if job.source.startswith("-") else job.source)
    elif "gguf" in job.source.lower() and "/" in job.source and not Path(job.source).exists():
        job.flag("-hf", job.source)
    else:
        job.flag("-m", "model.gguf")
        job.say(f"model.gguf: {job.source} as a GGUF file; {job.plan.weights_bytes:,} B of weights were counted")
    paged = options.mean_tokens is not None
    each = job.context if options.mean_tokens is None else options.mean_tokens
    job.flag("--ctx-size", max(job.context, job.users * each))
    job.flag("--parallel", job.users)
    job.flag("--kv-unified" if paged else "--no-kv-unified")
    job.say(f"--ctx-size is that of all {job.users:,} slots together, {'shared' if paged else 'cut evenly'}")
    job.flag("--cache-type-k", _LLAMA_FORMATS[names[0]])
    job.flag("--cache-type-v", _LLAMA_FORMATS[names[1]])
    job.flag("--flash-attn", "on")
    job.flag("--n-gpu-layers", "all")
    if options.devices > 1:
        job.flag("--split-mode", "tensor")
        job.say("--split-mode tensor is called experimental; --pipeline splits by layers, as llama.cpp usually does")
    elif options.pipeline > 1:
        job.flag("--split-mode", "layer")
    job.say("llama.cpp has no share of memory to set: it takes what these flags need, the plan says that it fits")
    if options.block_tokens != DEFAULT_BLOCK_TOKENS:
        job.say(f"blocks of {options.block_tokens} tokens: llama.cpp keeps single cells")
    if job.window() is not None:
        job.say("windows are kept short (no --swa-full): a prompt that is cut back is read again")
    if job.beyond_model:
        job.say("beyond its training the model needs --rope-scaling yarn or another")
    if any(isinstance(part, RecurrentState) for kind in job.spec.layers for part in sizes.parts_of(kind)):
        job.say("llama.cpp keeps states in f32; the plan counts them as the model's config says")
