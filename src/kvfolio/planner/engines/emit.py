"""The command line of vLLM, SGLang or llama.cpp that realises a plan, with what the engine cannot do as comments.

Knows nothing of how an engine is installed or started. Flags are those of vLLM 0.33 (config/cache.py), SGLang 0.5
(server_arguments.md) and llama.cpp's llama-server (tools/server/README.md), read in autumn 2026.
"""

from dataclasses import replace
from pathlib import Path

from kvfolio.errors import BudgetError, OptionError
from kvfolio.planner import sizes
from kvfolio.planner.engines.job import Job, check_heads, make_job, model_name, written
from kvfolio.planner.memory import DEFAULT_BLOCK_TOKENS
from kvfolio.planner.options import PlanOptions
from kvfolio.spec.layers import RecurrentState, parts_of
from kvfolio.spec.model import ModelSpec

ENGINES = ("vllm", "sglang", "llama.cpp")

# kvfolio's format → the engine's name for the same bytes
_VLLM_FORMATS = {
    "fp8": "fp8",
    "fp8-scaled": "fp8_per_token_head",
    "int8": "int8_per_token_head",
    "int4": "int4_per_token_head",
    "int4-head": "int4_per_token_head",
    "fp8-mla": "fp8_ds_mla",
}
_VLLM_ACCEPTS = "auto, bf16, f16, fp8, fp8-scaled, int8, int4, int4-head"
# v1/attention/backends/mla: those of the backends for dense latents, and of the sparse ones.
_VLLM_LATENTS = "auto, bf16, f16, fp8 (its fp8-mla is for latent layers with an index)"
_VLLM_INDEXED = "auto, bf16, fp8, fp8-mla for latent layers with an index"
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
_LLAMA_SLOTS = 256  # LLAMA_MAX_SEQ of src/llama-cparams.h: it starts with no more


def engine_flags(spec: ModelSpec, options: PlanOptions, engine: str, source: str) -> str:
    """The command line, one flag a line, behind ``#`` lines that say what it was computed from.

    For one context and the users asked for, if more than one, else those that fit: each with its whole context set
    aside, or at ``mean_tokens`` where that is given. ``source``: what the model was called. Raises OptionError for an
    unknown engine, for several contexts, for weights that are not known and for what the engine does not take,
    BudgetError for a plan that does not fit.
    """
    if engine not in ENGINES:
        raise OptionError(f"unknown engine {engine!r}; accepted: {', '.join(ENGINES)}")
    if len(options.contexts) > 1:
        raise OptionError(f"--emit takes one --context; {len(options.contexts)} were given")
    if engine == "llama.cpp":
        return _llama_cpp(spec, options, source)
    check_heads(spec, options.devices, "vLLM" if engine == "vllm" else "SGLang")
    job = make_job(spec, options, source)
    if engine == "vllm":
        _vllm(job)
        return written(job, ("vllm", "serve", model_name(job)))
    _sglang(job)
    return written(job, ("python", "-m", "sglang.launch_server"))


def _format_name(options: PlanOptions) -> str:
    return "auto" if options.kv_format == "auto" else options.cache_format.name


def _refused(engine: str, format_name: str, accepted: str) -> OptionError:
    return OptionError(f"{engine} stores no cache in {format_name}; --kv-format for it: {accepted}")


def _format_flag(job: Job, name: str) -> None:
    job.flag("--kv-cache-dtype", name)
    if name == "auto":
        job.say(
            "auto follows the checkpoint: one that asks for an fp8 cache gets it, and takes half of what is counted"
        )


def _block_flag(job: Job, name: str, engine: str) -> None:
    """The size of a block, where another than kvfolio's own was asked for and the engine has it."""
    block = job.options.block_tokens
    if block is None or block == DEFAULT_BLOCK_TOKENS:
        return
    if job.has("recurrent"):
        job.say(f"blocks of {block} tokens: {engine} sizes the blocks of models with states itself; left to it")
    elif engine == "vLLM" and block % 16:
        job.say(f"blocks of {block} tokens: vLLM's attention takes multiples of 16; left at its own size")
    else:
        job.flag(name, block)


def _parallel_flags(job: Job, tensor: str, pipeline: str) -> None:
    for name, count in ((tensor, job.options.devices), (pipeline, job.options.pipeline)):
        if count > 1:
            job.flag(name, count)


# ---- vLLM -----------------------------------------------------------------------------------------------------------


def _vllm(job: Job) -> None:
    options = job.options
    job.flag("--max-model-len", job.context)
    _parallel_flags(job, "--tensor-parallel-size", "--pipeline-parallel-size")
    job.flag("--gpu-memory-utilization", job.fraction())
    if job.is_least_memory:
        job.flag("--kv-cache-memory-bytes", job.memory)
        job.say("--kv-cache-memory-bytes fixes the cache as planned; without it vLLM takes what its activations leave")
    else:
        job.say(
            "a pipeline stage has less room, so no --kv-cache-memory-bytes: vLLM takes what activations leave on each"
        )
    _format_flag(job, _vllm_format(job))
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
    _say_what_starts(job)


def _say_what_starts(job: Job) -> None:
    """Where vLLM counts more for a request than the plan does, by windows widened for the tokens in flight."""
    options = job.options
    counted = sizes.vllm_bytes_at(
        job.share.spec, job.context, options.cache_format, options.chosen_block_tokens, options.in_flight
    )
    told = f"vLLM counts {counted:,} B for a request of {job.context:,} tokens"
    if counted > job.memory:
        raise BudgetError(
            f"{told} and refuses to start with {job.memory:,} B; take a shorter context or fewer tokens --in-flight"
        )
    if job.memory < job.users * counted:
        started = f"{job.memory / counted:.2f} of them at once"
        job.say(f"{told}: it starts {started}, and preempts where more grow so long")


def _vllm_format(job: Job) -> str:
    name = _format_name(job.options)
    indexed, latent = job.has("latent_indexed"), job.has("latent", "compressed_sparse")
    if name == "auto" and indexed:
        job.say("auto would be fp8 here: vLLM stores latents with an index so; the plan counts 16 bits")
        return "bfloat16"
    if name in ("auto", job.spec.dtype) and name != "f32" and not indexed:
        return "auto"
    if name == "bf16" or (name == "f16" and not indexed):
        return _LONG_FORMATS[name]
    if indexed:
        allowed, accepted = {"fp8", "fp8-mla"}, _VLLM_INDEXED
    elif latent:
        allowed, accepted = {"fp8"}, _VLLM_LATENTS
    else:
        allowed, accepted = {"fp8", "fp8-scaled", "int8", "int4", "int4-head"}, _VLLM_ACCEPTS
    if name not in allowed:
        raise _refused("vLLM", job.options.kv_format, accepted)
    if _VLLM_FORMATS[name].endswith("per_token_head"):
        job.say(f"{_VLLM_FORMATS[name]} runs on vLLM's Triton attention alone")
    if name == "int4":
        job.say("vLLM has one scale of 4 B for each vector of 4 bits: --kv-format int4-head counts that")
    if name == "fp8" and indexed:
        job.say("vLLM stores latents with an index as fp8-mla, 656 B a token: --kv-format fp8-mla counts that")
    return _VLLM_FORMATS[name]


# ---- SGLang ---------------------------------------------------------------------------------------------------------


def _sglang(job: Job) -> None:
    options = job.options
    job.flag("--model-path", model_name(job))
    job.flag("--context-length", job.context)
    _parallel_flags(job, "--tp-size", "--pp-size")
    job.flag("--mem-fraction-static", job.fraction())
    job.say("--mem-fraction-static holds weights and caches; what remains is for activations and CUDA graphs")
    _format_flag(job, _sglang_format(job))
    _block_flag(job, "--page-size", "SGLang")
    job.flag("--max-running-requests", job.users)
    job.flag("--chunked-prefill-size", options.in_flight)
    window = job.window()
    if window is not None and window < job.context and job.has("full"):
        # One pool for all window layers: every user's window, and the chunk that is being read.
        in_windows = job.users * min(window, job.each) + options.in_flight
        in_full = job.users * job.each - (job.users - 1) * job.prefix
        held = min(1000, -(-1000 * in_windows // in_full))
        job.flag("--swa-full-tokens-ratio", f"{held / 1000:g}")
        job.say(f"window layers get {held / 1000:g} of the tokens of full ones: {window:,} a user, and one chunk")
        job.say("where SGLang keeps a model's windows whole, fewer users fit: read its log with --log")
    if job.beyond_model:
        job.say("SGLang refuses that unless SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1 is set")


def _sglang_format(job: Job) -> str:
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
    job = make_job(spec, replace(options, kv_format=exact, prefix_tokens=0), source, _LLAMA_PAD)
    if exact != "/".join(names):
        job.say("counted as llama.cpp stores it: q8_0 is 34 B and q4_0 18 B for 32 numbers")
    _llama_flags(job, names)
    if options.prefix_tokens:
        job.say("llama.cpp stores a common prefix once in each slot: sharing it saves nothing here")
    return written(job, ("llama-server",))


def _llama_flags(job: Job, names: tuple[str, str]) -> None:
    options = job.options
    if job.source.endswith(".gguf"):
        job.flag("-m", f"./{job.source}" if job.source.startswith("-") else job.source)
    elif "gguf" in job.source.lower() and "/" in job.source and not Path(job.source).exists():
        job.flag("-hf", job.source)
    else:
        job.flag("-m", "model.gguf")
        job.say(f"model.gguf: {job.source} as a GGUF file; {job.plan.weights_bytes:,} B of weights were counted")
    paged = options.mean_tokens is not None
    slots = min(job.users, _LLAMA_SLOTS)
    if slots < job.users:
        job.say(f"llama.cpp has at most {slots} slots: the plan has {job.users:,} users, the others wait for one")
    job.flag("--ctx-size", max(job.context, slots * job.each))
    job.flag("--parallel", slots)
    job.flag("--kv-unified" if paged else "--no-kv-unified")
    job.say(f"--ctx-size is that of all slots together, {'shared' if paged else 'cut evenly'}: {slots}")
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
    if options.block_tokens not in (None, DEFAULT_BLOCK_TOKENS):
        job.say(f"blocks of {options.block_tokens} tokens: llama.cpp keeps single cells")
    if job.window() is not None:
        job.say("windows are kept short (no --swa-full): a prompt that is cut back is read again")
    if job.beyond_model:
        job.say("beyond its training the model needs --rope-scaling yarn or another")
    if any(isinstance(part, RecurrentState) for kind in job.spec.layers for part in parts_of(kind)):
        job.say("llama.cpp keeps states in f32; the plan counts them as the model's config says")
