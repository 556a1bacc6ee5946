"""The command lines for vLLM, SGLang and llama.cpp: their numbers are the plan's, and what cannot be said is refused.

Knows nothing of running engines: flags are held against the lists that each engine's documentation gives.
"""

import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from kvfolio.errors import BudgetError, OptionError
from kvfolio.planner.engines.emit import ENGINES, engine_flags
from kvfolio.planner.options import read_options
from kvfolio.planner.report import make_plan
from kvfolio.planner.sizes import vllm_bytes_at
from kvfolio.spec.formats import F32, CacheFormat, parse_format
from kvfolio.spec.layers import FullAttention, LatentAttention, LayerKind, NoCache, RecurrentState, SlidingWindow
from kvfolio.spec.model import ModelSpec, WeightCount

# The flags in use, as vLLM 0.33 (EngineArgs), SGLang 0.5 (server arguments) and llama-server (README) list them.
KNOWN = {
    "vllm": {
        *("--max-model-len", "--tensor-parallel-size", "--pipeline-parallel-size", "--gpu-memory-utilization"),
        *("--kv-cache-memory-bytes", "--kv-cache-dtype", "--block-size", "--max-num-seqs", "--max-num-batched-tokens"),
        "--enable-prefix-caching",
    },
    "sglang": {
        *("-m", "--model-path", "--context-length", "--tp-size", "--pp-size", "--mem-fraction-static"),
        *("--kv-cache-dtype", "--page-size", "--max-running-requests", "--chunked-prefill-size"),
        "--swa-full-tokens-ratio",
    },
    "llama.cpp": {
        *("-m", "-hf", "--ctx-size", "--parallel", "--kv-unified", "--no-kv-unified", "--cache-type-k"),
        *("--cache-type-v", "--flash-attn", "--n-gpu-layers", "--split-mode"),
    },
}
LLAMA = (FullAttention(8, 128, 128),) * 32
WINDOWS = (SlidingWindow(8, 128, 128, 1024),) * 25 + (FullAttention(8, 128, 128),) * 5
LATENTS = (LatentAttention(512, 64, 128, 192, 128),) * 61
INDEXED = (LatentAttention(512, 64, 128, 192, 128, index_width=128, top_k=2048),) * 61
STATES = (RecurrentState("mamba2", 100_000, F32, 0, F32),) * 8 + (FullAttention(8, 128, 128),) * 8


def spec_of(layers: tuple[LayerKind, ...] = LLAMA, dtype: str = "bf16", max_context: int = 131072) -> ModelSpec:
    weights = WeightCount(8_030_261_248, 8_030_261_248, 16_060_522_496, "config")
    return ModelSpec("toy", "toy", layers, max_context, dtype, 4096, 32, weights, ())


def flags_of(text: str) -> dict[str, str]:
    words = shlex.split(text, comments=True)
    starts = [index for index, word in enumerate(words) if word.startswith("-") and not word[1:].isdigit()]
    return {words[at]: words[at + 1] if at + 1 < len(words) and at + 1 not in starts else "" for at in starts}


def comments_of(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if line.startswith("#"))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("layers", [LLAMA, WINDOWS, STATES], ids=["full", "windows", "states"])
@pytest.mark.parametrize("more", [{}, {"devices": 4, "mean_tokens": 900, "prefix_tokens": 512, "block_tokens": 64}])
def test_every_flag_is_one_that_the_engine_has(
    engine: str, layers: tuple[LayerKind, ...], more: dict[str, int]
) -> None:
    text = engine_flags(spec_of(layers), read_options(context="8k", **more), engine, "org/model")  # type: ignore[arg-type]
    assert flags_of(text).keys() <= KNOWN[engine]


def test_vllm_is_given_the_plans_bytes_context_and_users() -> None:
    options = read_options(context="8k", devices=2)
    plan, flags = make_plan(spec_of(), options), flags_of(engine_flags(spec_of(), options, "vllm", "org/model"))
    assert int(flags["--kv-cache-memory-bytes"]) * 2 == plan.kv_memory_bytes
    assert (flags["--max-model-len"], flags["--tensor-parallel-size"]) == ("8192", "2")
    assert int(flags["--max-num-seqs"]) == plan.users.reserved


def test_users_are_those_asked_for_or_else_those_that_fit() -> None:
    def users(**given: int) -> int:
        text = engine_flags(spec_of(), read_options(context="8k", **given), "vllm", "m")  # type: ignore[arg-type]
        return int(flags_of(text)["--max-num-seqs"])

    plan = make_plan(spec_of(), read_options(context="8k", mean_tokens=1000))
    assert users() == plan.users.reserved
    assert users(mean_tokens=1000) == plan.users.paged != plan.users.reserved
    assert users(users=3) == 3


def test_a_reserve_becomes_a_smaller_share_and_is_never_rounded_up() -> None:
    options = read_options(device_memory=80 << 30, reserve=3 << 30, bandwidth="3TB", context="8k")
    for engine, name in (("vllm", "--gpu-memory-utilization"), ("sglang", "--mem-fraction-static")):
        share = float(flags_of(engine_flags(spec_of(), options, engine, "m"))[name])
        assert 0.9 - 3 / 80 - 0.0001 < share <= 0.9 - 3 / 80


@pytest.mark.parametrize(
    ("engine", "name"), [("vllm", "--gpu-memory-utilization"), ("sglang", "--mem-fraction-static")]
)
def test_a_share_without_a_reserve_is_the_one_asked_for_and_none_is_0(engine: str, name: str) -> None:
    def share(**given: object) -> str:
        options = read_options(**({"context": 64, "weights_bytes": 1000} | given))  # type: ignore[arg-type]
        return flags_of(engine_flags(spec_of((FullAttention(1, 1, 1),)), options, engine, "m"))[name]

    for asked in (0.9, 0.95, 0.123456, 1.0):
        assert float(share(utilisation=asked)) == asked
    total = read_options().device.memory_bytes or 0
    left = 50_000
    tiny = share(utilisation=1.0, reserve=total - left, users=2)
    assert 0 < float(tiny) <= left / total
    assert "e" not in tiny


def test_users_of_one_prefix_are_counted_with_it_held_once() -> None:
    options = read_options(context="8k", mean_tokens="2k", prefix_tokens="2k")
    text = engine_flags(spec_of(), options, "vllm", "m")
    assert int(flags_of(text)["--max-num-seqs"]) == make_plan(spec_of(), options).users.paged
    assert int(flags_of(text)["--max-num-seqs"]) > 10_000  # a block of 16 tokens each
    assert "2,048 tokens, 2,032 of them one prefix of all, held once" in comments_of(text)


def test_a_window_pool_is_a_share_of_tokens_that_count_a_prefix_once() -> None:
    options = read_options(context="32k", users=10, in_flight=4096, mean_tokens=8192, prefix_tokens=4096)
    ratio = float(flags_of(engine_flags(spec_of(WINDOWS), options, "sglang", "m"))["--swa-full-tokens-ratio"])
    tokens = 10 * 8192 - 9 * 4096
    assert (10 * 1024 + 4096) / tokens <= ratio < (10 * 1024 + 4096) / tokens + 0.001


@pytest.mark.parametrize("engine", ENGINES)
def test_a_model_without_a_cache_takes_the_users_that_are_named(engine: str) -> None:
    options = read_options(context="8k", users=7, mean_tokens=100, prefix_tokens=50)
    text = engine_flags(spec_of((NoCache(),) * 4), options, engine, "m")
    assert "7" in flags_of(text).values()
    assert "no cache bounds the number of users" in comments_of(text)


def test_the_room_of_unequal_stages_is_passed_on_only_where_each_has_it() -> None:
    uneven = (*(FullAttention(8, 128, 128),) * 11, *(SlidingWindow(8, 128, 128, 64),) * 22)
    fits = read_options(context="32k", pipeline=3)
    flags = flags_of(engine_flags(spec_of(uneven), fits, "vllm", "m"))
    assert int(flags["--kv-cache-memory-bytes"]) == make_plan(spec_of(uneven), fits).device.kv_memory_bytes
    # The stage of full layers has a layer fewer than others, and so more room than they have.
    text = engine_flags(spec_of((*uneven[11:], SlidingWindow(8, 128, 128, 64), *uneven[:11])), fits, "vllm", "m")
    assert "--kv-cache-memory-bytes" not in flags_of(text)
    assert "a pipeline stage has less room" in comments_of(text)


def test_llama_cpp_is_given_all_slots_together() -> None:
    flags = flags_of(engine_flags(spec_of(), read_options(context="8k", users=5), "llama.cpp", "m.gguf"))
    assert (flags["--ctx-size"], flags["--parallel"], flags["-m"]) == (str(5 * 8192), "5", "m.gguf")
    assert "--no-kv-unified" in flags
    shared = flags_of(
        engine_flags(spec_of(), read_options(context="8k", users=50, mean_tokens=1000), "llama.cpp", "m.gguf")
    )
    assert (shared["--ctx-size"], "--kv-unified" in shared) == ("50000", True)


def test_llama_cpp_has_no_more_than_256_slots() -> None:
    options = read_options(context=1024, mean_tokens=512)
    plan, text = make_plan(spec_of(), options), engine_flags(spec_of(), options, "llama.cpp", "m.gguf")
    assert plan.users.paged is not None and plan.users.paged > 256
    assert (flags_of(text)["--parallel"], flags_of(text)["--ctx-size"]) == ("256", str(256 * 512))
    assert f"llama.cpp has at most 256 slots: the plan has {plan.users.paged:,} users" in comments_of(text)
    assert "at most" not in engine_flags(spec_of(), read_options(context=1024, users=256), "llama.cpp", "m.gguf")


def test_llama_cpp_rounds_a_context_up_and_the_plan_with_it() -> None:
    text = engine_flags(spec_of(), read_options(context=1000, users=4), "llama.cpp", "m.gguf")
    assert flags_of(text)["--ctx-size"] == "4096"
    assert "1,000 tokens became 1,024" in comments_of(text)


def test_llama_cpps_quantised_cache_is_counted_as_it_stores_it() -> None:
    options = read_options(context="8k", kv_format="k8v4")
    flags = flags_of(engine_flags(spec_of(), options, "llama.cpp", "m.gguf"))
    exact = make_plan(spec_of(), read_options(context="8k", kv_format="int8-g32/int4-g32"))
    assert (flags["--cache-type-k"], flags["--cache-type-v"]) == ("q8_0", "q4_0")
    assert int(flags["--parallel"]) == exact.users.reserved
    fmt = CacheFormat(parse_format("int8-g32"), parse_format("int4-g32"))
    assert (fmt.k.vector_bytes(32), fmt.v.vector_bytes(32)) == (34, 18)  # bytes of a q8_0 and a q4_0 block of ggml


@pytest.mark.parametrize(
    ("engine", "asked", "flag"),
    [
        ("vllm", "auto", "auto"),
        ("vllm", "bf16", "auto"),
        ("vllm", "f16", "float16"),
        ("vllm", "fp8", "fp8"),
        ("vllm", "fp8-scaled", "fp8_per_token_head"),
        ("vllm", "int8", "int8_per_token_head"),
        ("vllm", "int4", "int4_per_token_head"),
        ("vllm", "int4-head", "int4_per_token_head"),
        ("sglang", "auto", "auto"),
        ("sglang", "fp8", "fp8_e4m3"),
    ],
)
def test_a_format_is_called_as_the_engine_calls_it(engine: str, asked: str, flag: str) -> None:
    text = engine_flags(spec_of(), read_options(context="8k", kv_format=asked), engine, "org/model")
    assert flags_of(text)["--kv-cache-dtype"] == flag


@pytest.mark.parametrize(
    ("engine", "asked"),
    [
        *(("vllm", name) for name in ("f32", "int6", "k8v4", "int4-g64")),
        *(("sglang", name) for name in ("f32", "f16", "int8", "int4", "bf16/fp8")),
        *(("llama.cpp", name) for name in ("fp8", "int6", "int8-g64", "fp8-mla")),
    ],
)
def test_a_format_that_the_engine_has_not_is_refused_with_those_it_has(engine: str, asked: str) -> None:
    with pytest.raises(OptionError, match=r"stores no cache in .*; --kv-format for it: auto"):
        engine_flags(spec_of(), read_options(context="8k", kv_format=asked), engine, "org/model")


def test_latents_with_an_index_are_fp8_to_vllm_unless_it_is_told() -> None:
    def flag(engine: str, **given: str) -> str:
        text = engine_flags(spec_of(INDEXED), read_options(context="8k", **given), engine, "m")  # type: ignore[arg-type]
        return flags_of(text)["--kv-cache-dtype"]

    assert flag("vllm") == flag("vllm", kv_format="bf16") == "bfloat16"
    assert flag("vllm", kv_format="fp8-mla") == "fp8_ds_mla"
    assert flag("sglang", kv_format="fp8-mla") == "fp8_e4m3"
    for name in ("int8", "f16"):
        with pytest.raises(OptionError, match="auto, bf16, fp8, fp8-mla for latent layers with an index"):
            flag("vllm", kv_format=name)


def test_latents_without_an_index_have_no_format_of_their_own() -> None:
    def text(engine: str, kv_format: str) -> str:
        return engine_flags(spec_of(LATENTS), read_options(context="8k", kv_format=kv_format), engine, "m")

    assert flags_of(text("vllm", "auto"))["--kv-cache-dtype"] == "auto"
    assert flags_of(text("vllm", "fp8"))["--kv-cache-dtype"] == "fp8"
    with pytest.raises(OptionError, match=r"in fp8-mla; --kv-format for it: auto, bf16, f16, fp8 \(its fp8-mla is"):
        text("vllm", "fp8-mla")
    with pytest.raises(OptionError, match="SGLang stores no cache in fp8-mla"):
        text("sglang", "fp8-mla")
    with pytest.raises(OptionError, match="vLLM stores no cache in int8"):
        text("vllm", "int8")


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_auto_is_said_to_follow_the_checkpoint(engine: str) -> None:
    assert "auto follows the checkpoint" in comments_of(
        engine_flags(spec_of(), read_options(context="8k"), engine, "m")
    )
    told = engine_flags(spec_of(), read_options(context="8k", kv_format="fp8"), engine, "m")
    assert "auto follows" not in told


@pytest.mark.parametrize(
    ("num_q_heads", "kv_heads", "devices", "told"),
    [
        (32, (8,), 3, "32 attention heads cannot be cut into 3; vLLM takes 1, 2, 4, 8, 16 or 32"),
        (12, (4,), 3, "12 attention heads with 4 key/value heads cannot be cut into 3; vLLM takes 1, 2, 4 or 12"),
        (48, (8, 6), 4, "48 attention heads with 6 and 8 key/value heads cannot be cut into 4; vLLM takes 1, 2, 24 or"),
        (9, (3,), 2, "9 attention heads cannot be cut into 2; vLLM takes 1, 3 or 9"),
        (1, (1,), 2, "1 attention heads cannot be cut into 2; vLLM takes 1"),
    ],
)
def test_heads_that_an_engine_cannot_cut_are_refused_with_the_counts_it_takes(
    num_q_heads: int, kv_heads: tuple[int, ...], devices: int, told: str
) -> None:
    spec = replace(spec_of(tuple(FullAttention(heads, 128, 128) for heads in kv_heads)), num_q_heads=num_q_heads)
    for engine, name in (("vllm", "vLLM"), ("sglang", "SGLang")):
        with pytest.raises(OptionError, match=re.escape(told.replace("vLLM", name))):
            engine_flags(spec, read_options(context="8k", devices=devices), engine, "m")


def test_heads_that_are_copied_evenly_are_not_refused() -> None:
    for layers in (LLAMA, LATENTS, STATES):
        text = engine_flags(spec_of(layers), read_options(context="8k", devices=16), "vllm", "m")
        assert flags_of(text)["--tensor-parallel-size"] == "16"


@pytest.mark.parametrize("engine", ENGINES)
def test_weights_that_are_not_known_must_be_given(engine: str) -> None:
    unknown = replace(spec_of(), weights=WeightCount(0, 0, 0, "config"))
    with pytest.raises(OptionError, match=r"weights are not known.*give --weights-bytes"):
        engine_flags(unknown, read_options(context="8k"), engine, "m")
    assert engine_flags(unknown, read_options(context="8k", weights_bytes="16GB"), engine, "m")


@pytest.mark.parametrize("engine", ENGINES)
def test_one_context_is_taken_and_one_that_nobody_gave_is_named(engine: str) -> None:
    with pytest.raises(OptionError, match="--emit takes one --context; 2 were given"):
        engine_flags(spec_of(), read_options(context="4k,8k"), engine, "m")
    told = "no --context was given: 4,096 tokens are planned; --context says else"
    assert told in comments_of(engine_flags(spec_of(), read_options(), engine, "m"))
    assert "no --context" not in engine_flags(spec_of(), read_options(context="4k"), engine, "m")


def test_vllm_says_how_many_whole_requests_it_starts_where_it_widens_windows() -> None:
    options = read_options(context="32k", users=200, mean_tokens=2000)
    text = engine_flags(spec_of(WINDOWS), options, "vllm", "m")
    request = vllm_bytes_at(spec_of(WINDOWS), 32768, options.cache_format, 16, options.in_flight)
    assert f"vLLM counts {request:,} B for a request of 32,768 tokens" in comments_of(text)
    assert "vLLM counts" not in comments_of(engine_flags(spec_of(), read_options(context="32k"), "vllm", "m"))


def test_a_request_for_which_vllm_would_not_start_is_refused() -> None:
    narrow = (SlidingWindow(8, 128, 128, 64),) * 32
    options = read_options(device_memory=18 << 30, bandwidth="1TB", context="32k", in_flight=16384)
    assert engine_flags(spec_of(narrow), options, "sglang", "m")
    with pytest.raises(BudgetError, match=r"for a request of 32,768 tokens and refuses to start with .* --in-flight"):
        engine_flags(spec_of(narrow), options, "vllm", "m")


def test_sglangs_window_pool_holds_every_users_window_and_one_chunk() -> None:
    options = read_options(context="32k", users=10, in_flight=4096)
    ratio = float(flags_of(engine_flags(spec_of(WINDOWS), options, "sglang", "m"))["--swa-full-tokens-ratio"])
    assert (10 * 1024 + 4096) / (10 * 32768) <= ratio < (10 * 1024 + 4096) / (10 * 32768) + 0.001
    short = read_options(context="32k", users=10, mean_tokens=1024)
    assert flags_of(engine_flags(spec_of(WINDOWS), short, "sglang", "m"))["--swa-full-tokens-ratio"] == "1"


def test_a_block_size_is_passed_on_only_where_the_engine_can_have_it() -> None:
    def text(engine: str, tokens: int, layers: tuple[LayerKind, ...] = LLAMA) -> str:
        return engine_flags(spec_of(layers), read_options(context="8k", block_tokens=tokens), engine, "m")

    assert flags_of(text("vllm", 32))["--block-size"] == "32"
    assert flags_of(text("sglang", 4))["--page-size"] == "4"
    for left in (text("vllm", 8), text("vllm", 64, STATES), text("llama.cpp", 64)):
        assert "--block-size" not in flags_of(left)
        assert "blocks of" in comments_of(left)
    assert "--block-size" not in flags_of(text("vllm", 16))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_plan_that_does_not_fit_is_refused_with_its_numbers(engine: str) -> None:
    small = read_options(device_memory=16 << 30, bandwidth="1TB", context="8k")
    with pytest.raises(BudgetError, match=r"weights do not fit: 14\.96 GiB a device, short by"):
        engine_flags(spec_of(), small, engine, "m")
    with pytest.raises(BudgetError, match=r"500 sequences of 8,192 tokens do not fit: 57 do in 57\.04 GiB"):
        engine_flags(spec_of(), read_options(context="8k", users=500), engine, "m")
    for mean in (None, 1000):  # one of them must fit whole, however short the others are
        with pytest.raises(BudgetError, match=r"no sequence fits in 57\.04 GiB .*: one of 1,048,576 tokens takes 128"):
            engine_flags(spec_of(), read_options(context="1M", mean_tokens=mean), engine, "m")  # type: ignore[arg-type]


def test_an_unknown_engine_is_refused_with_those_there_are() -> None:
    with pytest.raises(OptionError, match=r"unknown engine 'tgi'; accepted: vllm, sglang, llama\.cpp"):
        engine_flags(spec_of(), read_options(), "tgi", "m")


def test_llama_cpp_cannot_split_both_ways() -> None:
    options = read_options(context="8k", devices=2, pipeline=2)
    with pytest.raises(OptionError, match="tensors or layers, not both"):
        engine_flags(spec_of(), options, "llama.cpp", "m.gguf")
    assert flags_of(engine_flags(spec_of(), options, "sglang", "m"))["--pp-size"] == "2"


def test_a_context_of_no_tokens_is_refused() -> None:
    with pytest.raises(OptionError, match="0 tokens cannot be served"):
        engine_flags(spec_of(), read_options(context=0), "vllm", "m")


def test_a_model_of_the_catalogue_is_called_by_its_repository() -> None:
    text = engine_flags(spec_of(), read_options(context="8k"), "vllm", "llama-3.1-8b")
    assert shlex.split(text, comments=True)[:3] == ["vllm", "serve", "meta-llama/Llama-3.1-8B"]


def test_a_config_stands_for_its_folder_and_a_path_is_quoted(tmp_path: Path) -> None:
    folder = tmp_path / "my model; rm -rf"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    text = engine_flags(spec_of(), read_options(context="8k"), "vllm", str(folder / "config.json"))
    assert shlex.split(text, comments=True)[:3] == ["vllm", "serve", str(folder)]


def test_a_name_cannot_leave_its_comment() -> None:
    spec = ModelSpec("toy\nrm x", "toy", LLAMA, 8192, "bf16", 4096, 32, spec_of().weights, ())
    for engine in ENGINES:
        text = engine_flags(spec, read_options(context="4k"), engine, "no such\nmodel")
        command = [line for line in text.splitlines() if not line.startswith("#")]
        assert not any(line.startswith("rm") for line in text.splitlines())
        assert command[0].split()[0] in ("vllm", "python", "llama-server")


def test_a_context_beyond_the_model_is_named() -> None:
    for engine, hint in (("vllm", "VLLM_ALLOW_LONG"), ("sglang", "SGLANG_ALLOW_OVERWRITE"), ("llama.cpp", "yarn")):
        text = engine_flags(spec_of(max_context=4096), read_options(context="8k"), engine, "m")
        assert "more than the 4,096 that the model was made for" in comments_of(text)
        assert hint in comments_of(text)


def test_a_hub_repository_of_gguf_files_is_downloaded_and_others_must_be_converted() -> None:
    gguf = engine_flags(spec_of(), read_options(context="8k"), "llama.cpp", "org/model-GGUF:Q4_K_M")
    assert flags_of(gguf)["-hf"] == "org/model-GGUF:Q4_K_M"
    other = engine_flags(spec_of(), read_options(context="8k"), "llama.cpp", "org/model")
    assert flags_of(other)["-m"] == "model.gguf"
    assert "org/model as a GGUF file" in comments_of(other)
