"""Start-up logs of vLLM and SGLang against the plan: real lines, shortened, whose numbers the arithmetic must give.

Knows nothing of running engines. Each log names where its numbers were published.
"""

import json
from pathlib import Path

import pytest

from kvfolio.planner.engines.logs import LogLine, LogReport, explain_log
from kvfolio.planner.options import PlanOptions, read_options
from kvfolio.spec.formats import BF16, F32
from kvfolio.spec.layers import FullAttention, LatentAttention, LayerKind, RecurrentState, SlidingWindow
from kvfolio.spec.model import ModelSpec, WeightCount

SHARED = Path(__file__).resolve().parents[3] / "shared"
GIB = 1 << 30

# vllm-project/vllm issue 10517: Llama-3.1-8B-Instruct on an RTX 3090
V0_LOG = """\
INFO 12-02 Initializing an LLM engine (v0.6.4) with config: model='m', dtype=torch.bfloat16, max_seq_len=20000, \
tensor_parallel_size=1, kv_cache_dtype=auto, quantization=None
INFO 12-02 model_runner.py:1077] Loading model weights took 14.9888 GB
INFO 12-02 Memory profiling results: total_gpu_memory=23.58GiB initial_memory_usage=15.34GiB \
peak_torch_memory=17.06GiB non_torch_memory=0.35GiB kv_cache_size=3.81GiB gpu_memory_utilization=0.90
INFO 12-02 # GPU blocks: 1952, # CPU blocks: 2048
INFO 12-02 Maximum concurrency for 20000 tokens per request: 1.56x
"""
# An A100 of 40 GB with Llama-3.1-8B in bf16, vLLM's V1 engine
V1_LOG = """\
\x1b[36m(EngineCore_DP0 pid=1)\x1b[0;0m INFO Initializing a V1 LLM engine (v0.19.0) with config: max_seq_len=32768,
(EngineCore_DP0 pid=1) INFO [gpu_model_runner.py:4879] Model loading took 14.99 GiB memory and 4.1 seconds
(EngineCore_DP0 pid=1) INFO [gpu_worker.py:440] Available KV cache memory: 19.92 GiB
(EngineCore_DP0 pid=1) INFO [kv_cache_utils.py:1319] GPU KV cache size: 163,168 tokens
(EngineCore_DP0 pid=1) INFO [kv_cache_utils.py:1324] Maximum concurrency for 32,768 tokens per request: 4.98x
"""


def spec_of(*layers: LayerKind, num_bytes: int = 16_060_522_496) -> ModelSpec:
    return ModelSpec("toy", "toy", layers, 131072, "bf16", 64, 32, WeightCount(100, 100, num_bytes, "config"), ())


LLAMA_8B = spec_of(*(FullAttention(8, 128, 128),) * 32)
QWEN3_235B = spec_of(*(FullAttention(4, 128, 128),) * 94, num_bytes=235_000_000_000)
GEMMA3_4B = spec_of(
    *(SlidingWindow(4, 256, 256, 1024),) * 29, *(FullAttention(4, 256, 256),) * 5, num_bytes=8_600_158_944
)
GEMMA3_27B = spec_of(*(SlidingWindow(16, 128, 128, 1024),) * 52, *(FullAttention(16, 128, 128),) * 10)
GEMMA4_26B = spec_of(*(SlidingWindow(8, 256, 256, 1024),) * 25, *(FullAttention(2, 512, 512),) * 5)
GEMMA4_31B = spec_of(*(SlidingWindow(16, 256, 256, 1024),) * 50, *(FullAttention(4, 512, 512),) * 10)
QWEN35_27B = spec_of(
    *(RecurrentState("gated_delta_net", 786_432, F32, 30_720, BF16),) * 48, *(FullAttention(4, 256, 256),) * 16
)
MIMO = spec_of(*(FullAttention(4, 192, 128),) * 9, *(SlidingWindow(8, 192, 128, 128),) * 39)
DEEPSEEK_V3 = spec_of(*(LatentAttention(512, 64, 128, 192, 128),) * 61)
DEEPSEEK_V32 = spec_of(*(LatentAttention(512, 64, 128, 192, 128, 128, 2048),) * 61)


def options(**given: object) -> PlanOptions:
    return read_options(**({"device": "a100-sxm-40gb"} | given))  # type: ignore[arg-type]


def line_of(report: LogReport, quantity: str) -> LogLine:
    (line,) = [line for line in report.lines if line.quantity == quantity]
    return line


def assert_reproduced(report: LogReport, *quantities: str) -> None:
    for quantity in quantities:
        line = line_of(report, quantity)
        assert line.ratio == pytest.approx(1, abs=0.01), line
    assert all(line.is_reproduced is not False for line in report.lines)
    assert not report.unexplained


# ---- vLLM -----------------------------------------------------------------------------------------------------------


def test_vllms_first_engine_is_understood() -> None:
    report = explain_log(V0_LOG, LLAMA_8B, options())
    assert (report.engine, report.version) == ("vllm", "0.6.4")
    assert report.settings == {
        "max_model_len": 20000,
        "tensor_parallel": 1,
        "kv_dtype": "auto",
        "gpu_memory_utilization": 0.9,
    }
    assert_reproduced(report, "weights", "blocks", "concurrency")
    assert line_of(report, "blocks").logged == 1952
    # the device's memory is the log's 23.58 GiB, not that of the plan's A100
    memory = line_of(report, "KV cache memory")
    assert memory.planned == int(int(23.58 * GIB) * 0.9) - 16_060_522_496
    assert "less than planned" in memory.explanation


def test_vllms_second_engine_is_understood() -> None:
    report = explain_log(V1_LOG, LLAMA_8B, options())
    assert (report.engine, report.version) == ("vllm", "0.19.0")
    assert_reproduced(report, "weights", "KV cache tokens", "concurrency")
    assert line_of(report, "KV cache tokens").planned == int(19.92 * GIB / 131072)
    assert "2 of 2 numbers" in report.verdict


def test_the_measured_run_on_an_rtx_4090_has_the_tokens_that_its_memory_holds() -> None:
    # vLLM 0.19: 2,588 blocks of 16 tokens at 0.9 of 25,250,627,584 B (LLMServingSim, bench/examples)
    text = "GPU KV cache size: 41,408 tokens\n# GPU blocks: 2588, # CPU blocks: 0\n"
    report = explain_log(text, LLAMA_8B, options(device="rtx-4090", device_memory=25_250_627_584))
    room = 25_250_627_584 * 9 // 10 - 16_060_522_496
    assert line_of(report, "KV cache tokens").planned == room // 131072
    assert line_of(report, "blocks").ratio == pytest.approx(2588 * 16 * 131072 / room)
    assert "5.05 GiB (a token of all layers)" in line_of(report, "blocks").explanation
    assert "81% of the memory" in report.verdict


def test_the_numbers_of_the_measured_run_are_those_of_its_file() -> None:
    path = SHARED / "data/measured/llmservingsim_vllm_runs/RTX4090_Llama-3.1-8B.meta.json"
    if not path.exists():
        pytest.skip("the measured runs are not here")
    meta = json.loads(path.read_text())
    assert (meta["kv_cache"]["num_gpu_blocks"], meta["kv_cache"]["num_kv_tokens"]) == (2588, 41408)
    assert meta["hardware"]["device_total_memory_bytes"] == 25_250_627_584


def test_older_vllm_counts_tokens_of_a_window_model_by_padded_groups_and_requests_by_widened_windows() -> None:
    # ovg-project/kvcached issue 215: gemma-3-4b-it on an A100, vLLM 0.11
    text = (
        "(EngineCore_DP0 pid=6302) WARNING Add 1 padding layers, may waste at most 3.45% KV cache memory\n"
        "(EngineCore_DP0 pid=6302) INFO GPU KV cache size: 317,136 tokens\n"
        "(EngineCore_DP0 pid=6302) INFO Maximum concurrency for 3,072 tokens per request: 102.78x\n"
    )
    report = explain_log(text, GEMMA3_4B, options())
    concurrency = line_of(report, "concurrency")
    assert concurrency.ratio == pytest.approx(1, abs=1e-4)
    assert "143,360 B" in concurrency.explanation  # 35 layers with the padding one, 4,096 B each
    assert "tokens in flight" in concurrency.explanation


def test_a_wider_page_is_found_where_heads_differ() -> None:
    # alvarobartt/hf-mem pull 61: gemma-4-31B-it, each of 60 layers with the page of the widest
    text = "Available KV cache memory: 24.54 GiB\nGPU KV cache size: 26,800 tokens\n"
    report = explain_log(text, GEMMA4_31B, options())
    assert_reproduced(report, "KV cache tokens")
    assert "page of the widest" in line_of(report, "KV cache tokens").explanation
    assert "983,040 B" in line_of(report, "KV cache tokens").explanation


@pytest.mark.parametrize(
    ("in_flight", "length", "request_bytes"),
    [(2048, 131072, 12_255_419_003), (8192, 131072, 15_275_363_964), (2048, 32768, 4_202_232_441)],
)
def test_the_widening_of_windows_is_told_from_the_number(in_flight: int, length: int, request_bytes: int) -> None:
    # bytes a request of gemma-3-27b by vLLM 0.33's own planner
    memory = 60 * GIB
    text = (
        f"Available KV cache memory: 60.00 GiB\nMaximum concurrency for {length:,} tokens per request: "
        f"{memory / request_bytes:.2f}x\nGPU KV cache size: {int(memory / request_bytes * length):,} tokens\n"
    )
    report = explain_log(text, GEMMA3_27B, options(in_flight=4096))
    assert f"windows widened by {in_flight:,} tokens" in line_of(report, "concurrency").explanation
    text += "max_seq_len=" + str(length)
    assert_reproduced(explain_log(text + " engine args", GEMMA3_27B, options()), "concurrency", "KV cache tokens")


def test_states_that_vllm_keeps_in_pages_of_tokens_are_recognised() -> None:
    # vllm-project/vllm issue 40691: Qwen3.5-27B, vLLM 0.19
    text = (
        "Setting attention block size to 784 tokens to ensure that attention page size is >= mamba page size.\n"
        "GPU KV cache size: 290,864 tokens\nMaximum concurrency for 32,768 tokens per request: 33.04x\n"
    )
    report = explain_log(text, QWEN35_27B, options())
    assert_reproduced(report, "concurrency")
    assert "tokens * 262,144 B" in line_of(report, "concurrency").explanation  # 4,096 B in all 64 layers
    # A published start of a like model on 2 GPUs with the cache in fp8, vLLM 0.2x, prefix caching on
    text = (
        "--tensor-parallel-size 2 --kv-cache-dtype fp8 --max-model-len 131072\nAvailable KV cache memory: 4.99 GiB\n"
        "Setting attention block size to 1568 tokens\nGPU KV cache size: 302,921 tokens\n"
        "Maximum concurrency for 131,072 tokens per request: 2.31x\n"
    )
    report = explain_log(text, QWEN35_27B, options())
    assert_reproduced(report, "concurrency", "KV cache tokens")
    assert "states in whole pages of 1,568 tokens, 2 a request" in line_of(report, "KV cache tokens").explanation


def test_windows_that_vllm_holds_whole_are_counted_whole() -> None:
    length, each = 32768, 62 * 8192
    text = (
        "WARNING Hybrid KV cache manager is disabled for this hybrid model\nAvailable KV cache memory: 60.00 GiB\n"
        f"GPU KV cache size: {60 * GIB // each:,} tokens\n"
        f"Maximum concurrency for {length:,} tokens per request: {60 * GIB / each / length:.2f}x\n"
    )
    assert_reproduced(explain_log(text, GEMMA3_27B, options()), "KV cache tokens", "concurrency")


def test_a_refused_start_is_explained_by_the_bytes_of_one_request() -> None:
    text = (
        "ValueError: To serve at least one request with the models's max seq len (131072), (16.0 GiB KV cache is "
        "needed, which is larger than the available KV cache memory (4.0 GiB)."
    )
    report = explain_log(text, LLAMA_8B, options())
    assert_reproduced(report, "one request")
    assert line_of(report, "one request").planned == 131072 * 131072
    assert line_of(report, "KV cache memory").logged == 4 * GIB


def test_a_cache_without_room_is_said_to_have_none() -> None:
    report = explain_log("Available KV cache memory: -2.81 GiB", LLAMA_8B, options())
    line = line_of(report, "KV cache memory")
    assert line.logged == pytest.approx(-2.81 * GIB, rel=1e-6)
    assert line.ratio is None
    assert "the log's budget is negative" in line.explanation
    assert report.verdict == "the engine had no memory left for a cache"
    none = explain_log("Available KV cache memory: 0.0 GiB", LLAMA_8B, options())
    assert "nothing is left" in line_of(none, "KV cache memory").explanation


def test_of_several_ranks_the_one_with_the_least_room_counts() -> None:
    text = "".join(f"(TP{n}) Available KV cache memory: {size} GiB\n" for n, size in enumerate((8.2, 8.0, 8.1)))
    line = line_of(explain_log(text, LLAMA_8B, options()), "KV cache memory")
    assert line.logged == 8 * GIB
    assert "logged 3 times" in line.explanation


def test_settings_of_the_log_override_the_options() -> None:
    text = (
        "non-default args: {'tensor_parallel_size': 4, 'kv_cache_dtype': 'fp8', 'block_size': 32, "
        "'max_num_batched_tokens': 2048, 'gpu_memory_utilization': 0.5}\n"
        f"Available KV cache memory: 10.00 GiB\nGPU KV cache size: {10 * GIB // 16384:,} tokens\n"
    )
    report = explain_log(text, LLAMA_8B, options())
    assert_reproduced(report, "KV cache tokens")
    assert line_of(report, "KV cache memory").planned == 40 * GIB // 2 - 16_060_522_496 // 4
    for told in (
        "tensor_parallel is 4 in the log, 1 in the plan",
        "fp8 in the log, bf16 in the plan",
        "block_size is 32",
    ):
        assert told in report.verdict


def test_a_setting_given_as_a_flag_is_read_too() -> None:
    text = "vllm serve m --tensor-parallel-size 2 --max-model-len=4096 --kv-cache-dtype fp8\n" + V1_LOG
    settings = explain_log(text, LLAMA_8B, options()).settings
    assert (settings["tensor_parallel"], settings["kv_dtype"]) == (2, "fp8")
    assert settings["max_model_len"] == 32768  # what the engine came to


def test_a_storage_format_that_is_not_counted_is_named() -> None:
    report = explain_log("engine args: kv_cache_dtype=nvfp4\n" + V1_LOG, LLAMA_8B, options())
    assert "a cache in nvfp4 is not counted; bf16, the plan's, is taken" in report.verdict
    report = explain_log("vllm serve m --kv-cache-dtype zzz\n" + V1_LOG, LLAMA_8B, options())
    assert "a cache in zzz is not counted" in report.verdict


def test_planned_tokens_and_blocks_are_whole_ones() -> None:
    report = explain_log(V1_LOG + "# GPU blocks: 10198, # CPU blocks: 0\n", LLAMA_8B, options())
    assert line_of(report, "KV cache tokens").planned == 163_184  # 19.92 GiB hold 163,184.64
    assert line_of(report, "blocks").planned == 10_199  # and 10,199.04 of 16
    assert line_of(report, "KV cache tokens").ratio == pytest.approx(163_168 / (19.92 * GIB / 131072))


def test_one_token_is_not_called_tokens() -> None:
    for text in ("GPU KV cache size: 1 tokens", "KV Cache is allocated. #tokens: 1, K size: 0.01 GB, V size: 0.01 GB"):
        report = explain_log(text + "\nMaximum concurrency for 1 tokens per request: 1.00x", LLAMA_8B, options())
        assert not any(" 1 tokens" in f" {line.explanation}" for line in report.lines)


def test_a_number_that_nothing_gives_is_said_to_be_so_once_with_the_usual_reasons() -> None:
    # vllm-project/vllm issue 21348: one rank's memory, and the tokens that another rank allows
    text = "--tensor-parallel-size 4\nAvailable KV cache memory: 8.11 GiB\nGPU KV cache size: 178,880 tokens\n"
    report = explain_log(text, QWEN3_235B, options(device="h100-sxm"))
    tokens = line_of(report, "KV cache tokens")
    assert tokens.ratio == pytest.approx(178_880 / (8.11 * GIB / (94 * 512)))
    assert "another rank had less memory" in tokens.explanation
    assert tokens.is_reproduced is False
    assert not report.unexplained  # the line is shown already
    assert "0 of 1 numbers" in report.verdict


def test_lines_about_the_cache_that_are_not_understood_are_shown_once() -> None:
    text = V1_LOG + "".join(f"INFO KV cache of rank {n} sits on the moon\n" for n in range(3))
    assert explain_log(text, LLAMA_8B, options()).unexplained == ("INFO KV cache of rank 0 sits on the moon",)


def test_heavier_weights_are_named_as_one_reason_for_a_smaller_cache() -> None:
    text = "Model loading took 16.00 GiB\nAvailable KV cache memory: 15.00 GiB"
    report = explain_log(text, LLAMA_8B, options())
    assert "1.04 GiB more than the published bytes" in line_of(report, "weights").explanation
    assert "1.04 GiB of it heavier weights" in line_of(report, "KV cache memory").explanation


# ---- SGLang ---------------------------------------------------------------------------------------------------------


def test_sglangs_pool_of_keys_and_values_is_understood() -> None:
    # vllm-project/vllm issue 21348: Qwen3-235B-A22B on 4 GPUs; its GB are GiB
    text = "KV Cache is allocated. #tokens: 367404, K size: 8.23 GB, V size: 8.23 GB\nServerArgs(tp_size=4)\n"
    report = explain_log(text, QWEN3_235B, options(device="h100-sxm"))
    assert report.engine == "sglang"
    assert_reproduced(report, "KV cache memory")
    assert line_of(report, "KV cache memory").planned == 367_405 * 94 * 512


def test_sglangs_start_is_read_as_a_whole() -> None:
    text = (
        "server_args=ServerArgs(model_path='m', context_length=None, mem_fraction_static=0.85, tp_size=1, page_size=1,"
        " chunked_prefill_size=8192, kv_cache_dtype='auto')\n"
        "[TP0] Load weight end. elapsed=4 s, type=LlamaForCausalLM, avail mem=63.50 GB, mem usage=14.99 GB.\n"
        "[TP0] KV Cache is allocated. dtype: torch.bfloat16, #tokens: 443568, K size: 27.07 GB, V size: 27.07 GB\n"
        "[TP0] max_total_num_tokens=443568, chunked_prefill_size=8192, max_running_requests=2048, context_len=131072\n"
    )
    report = explain_log(text, LLAMA_8B, options())
    assert_reproduced(report, "weights", "KV cache memory", "KV cache tokens")
    assert report.settings["max_model_len"] == 131072
    assert (report.settings["max_num_batched_tokens"], report.settings["gpu_memory_utilization"]) == (8192, 0.85)


def test_the_latents_of_deepseek_v3_in_fp8_are_told_from_the_number() -> None:
    text = "[DP0 TP0 EP0] KV Cache is allocated. #tokens: 524288, KV size: 17.16 GB"
    report = explain_log(text, DEEPSEEK_V3, options())
    assert_reproduced(report, "KV cache memory")
    assert "cache in fp8, not bf16" in line_of(report, "KV cache memory").explanation


def test_the_index_keys_of_deepseek_v32_are_told_from_the_number() -> None:
    # sgl-project/sglang pull 11309, with and without
    with_index = explain_log("KV Cache is allocated. #tokens: 975424, KV size: 43.67 GB", DEEPSEEK_V32, options())
    without = explain_log("KV Cache is allocated. #tokens: 1462784, KV size: 54.52 GB", DEEPSEEK_V32, options())
    assert_reproduced(with_index, "KV cache memory")
    assert_reproduced(without, "KV cache memory")
    assert "index keys" not in line_of(with_index, "KV cache memory").explanation
    assert "index keys not counted" in line_of(without, "KV cache memory").explanation


def test_a_pool_of_window_layers_alone_is_recognised() -> None:
    # sgl-project/sglang pull 18039: MiMo-V2-Flash on 4 GPUs; every rank logs it
    rank = "KV Cache is allocated. #tokens: 300288, K size: 8.38 GB, V size: 5.59 GB\n"
    text = "sglang --tp-size 4 --page-size 64\n" + "".join(f"[TP{n}] {rank}" for n in range(4))
    report = explain_log(text, MIMO, options())
    assert_reproduced(report, "KV cache memory")
    assert "only the layers with a window" in line_of(report, "KV cache memory").explanation


def test_both_pools_of_a_model_with_windows_are_recognised() -> None:
    # A published start of a Gemma 4 26B, page size 256
    text = (
        "ServerArgs(page_size=256)\n"
        "KV Cache is allocated. dtype: torch.bfloat16, #tokens: 54016, K size: 5.18 GB, V size: 5.18 GB\n"
        "KV Cache is allocated. dtype: torch.bfloat16, #tokens: 67584, K size: 0.65 GB, V size: 0.65 GB\n"
        "max_total_num_tokens=67584, context_len=262144\n"
    )
    report = explain_log(text, GEMMA4_26B, options())
    windows, full = [line for line in report.lines if line.quantity == "KV cache memory"]
    assert "only the layers with a window" in windows.explanation
    assert "only the layers that keep every token" in full.explanation
    assert line_of(report, "KV cache tokens").ratio == 1
    assert not report.unexplained


def test_with_attention_in_data_parallel_every_rank_has_all_heads() -> None:
    slots = 100_001
    text = (
        f"ServerArgs(tp_size=4, dp_size=4, enable_dp_attention=True)\nKV Cache is allocated. #tokens: {slots - 1}, "
        f"K size: {slots * 65536 / GIB:.2f} GB, V size: {slots * 65536 / GIB:.2f} GB\n"
    )
    assert_reproduced(explain_log(text, LLAMA_8B, options()), "KV cache memory")
