"""What a GGUF header says of layers is read once: the planner counts the layers that the engine runs, or it refuses.

Knows nothing of what the layers are; those of single keys stand in test_gguf_layers.py.
"""

from pathlib import Path

import pytest
from gguf_bytes import I32, STRING, Items, Tensor, gguf
from gguf_headers import Metadata, booleans, model, numbers
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfolio.errors import BrokenModelError, KvfolioError, UnknownModelError
from kvfolio.spec.gguf.header import read_header, read_part
from kvfolio.spec.gguf.layers import spec_from_gguf
from kvfolio.spec.gguf.runnable import FAMILIES, runnable_from_header
from kvfolio.spec.model import ModelSpec, RunnableSpec

LATENT = {"attention__kv_lora_rank": 12, "rope__dimension_count": 4}
EXPANDED = {"attention__key_length_mla": 24, "attention__value_length_mla": 16}
YARN = {"rope__scaling__type": "yarn"}


def runnable(architecture: str, **changes: object) -> Metadata:
    """A small model that the engine runs, varied by ``changes`` as in ``gguf_headers.model``."""
    network: dict[str, object] = {"feed_forward_length": 192, "attention__layer_norm_epsilon": 1e-5, "vocab_size": 9}
    if architecture == "gemma3":
        network["attention__sliding_window"] = 64
    if architecture == "gpt2":
        network["attention__head_count_kv"] = None
    return model(architecture, **(network | changes))


def written(folder: Path, metadata: Metadata, *tensors: Tensor) -> Path:
    path = folder / "toy.gguf"
    path.write_bytes(gguf(metadata, tensors))
    return path


def planned(path: Path) -> ModelSpec:
    return spec_from_gguf(read_part(path))


def run(path: Path) -> RunnableSpec:
    return runnable_from_header(read_header(path))


def assert_the_same(plan: ModelSpec, run: RunnableSpec) -> None:
    assert plan.layers == run.layers
    assert plan.max_context == run.max_context
    assert (plan.dtype, plan.hidden_size, plan.num_q_heads) == (run.dtype, run.hidden_size, run.num_q_heads)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_family_is_planned_as_it_runs(tmp_path: Path, architecture: str) -> None:
    path = written(tmp_path, runnable(architecture))
    assert_the_same(planned(path), run(path))
    assert len(run(path).layers) == 6


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("llama", {"attention__key_length": 24, "attention__value_length": 24}),
        ("llama", {"attention__head_count_kv": None}),
        ("qwen2", {"attention__head_count_kv": numbers(*(4,) * 6)}),
        ("qwen3", {"attention__head_count": numbers(*(8,) * 6), "feed_forward_length": numbers(*(96,) * 6)}),
        ("qwen3", EXPANDED),  # without a latent they mean nothing
        ("llama", {"attention__key_length_swa": 32}),  # without a window, too
        ("gemma3", {"attention__sliding_window": 0, "attention__key_length_swa": 32}),
        ("gemma3", {"attention__sliding_window_pattern": 0}),
        ("gemma3", {"attention__sliding_window_pattern": 1}),
        ("gemma3", {"attention__sliding_window_pattern": 2}),
        ("gemma3", {"attention__sliding_window_pattern": booleans(True, False, False, True, True, True)}),
        ("gemma3", {"attention__sliding_window_pattern": Items(I32, (1, 0, 0, 1, 1, 1))}),
        (
            "gemma3",
            {
                "attention__sliding_window_pattern": 0,
                "attention__key_length_swa": 32,
                "attention__value_length_swa": 32,
            },
        ),
        ("llama", {"nextn_predict_layers": 0, "attention__shared_kv_layers": 0, "attention__sliding_window": 0}),
        ("llama", {**YARN, "rope__scaling__factor": 4.0}),
        ("llama", {**YARN, "rope__scale_linear": 4.0}),
        ("llama", {**YARN, "rope__scaling__factor": 4.0, "rope__scaling__original_context_length": 250}),
        ("qwen2", {"rope__scaling__type": "linear", "rope__scaling__factor": 4.0}),
    ],
)
def test_a_key_that_decides_layers_decides_them_for_both(
    tmp_path: Path, architecture: str, changes: dict[str, object]
) -> None:
    path = written(tmp_path, runnable(architecture, **changes))
    assert_the_same(planned(path), run(path))


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("llama", {"nextn_predict_layers": 1}, "nextn_predict_layers is 1: layers that only draft tokens"),
        ("gemma3", {"attention__key_length_swa": 32, "attention__value_length_swa": 32}, "values of 16/16 and 32/32"),
        ("qwen3", {**LATENT, **EXPANDED}, "kv_lora_rank is 12: latent attention"),
        ("qwen3", LATENT, "kv_lora_rank is 12: latent attention"),
        ("gemma3", {"attention__shared_kv_layers": 1, "attention__sliding_window_pattern": 2}, "shared_kv_layers is 1"),
        ("llama", {"attention__head_count_kv": numbers(2, 2, 4, 2, 2, 2)}, r"head_count_kv differs .*\[2, 4\]"),
        ("llama", {"attention__head_count_kv": numbers(2, 2, 0, 2, 2, 2)}, r"head_count_kv differs .*\[2, 0\]"),
        ("llama", {"feed_forward_length": numbers(9, 9, 0, 9, 9, 9)}, r"feed_forward_length differs .*\[9, 0\]"),
        ("qwen2", {"attention__sliding_window": 64}, "sliding_window is 64: the header does not say which layers"),
        ("llama", {"expert_count": 8, "expert_used_count": 2}, "expert_count is 8: mixtures of experts"),
    ],
)
def test_what_the_planner_counts_and_no_network_computes_is_refused_by_the_engine(
    tmp_path: Path, architecture: str, changes: dict[str, object], message: str
) -> None:
    path = written(tmp_path, runnable(architecture, **changes))
    assert planned(path).layers
    with pytest.raises(UnknownModelError, match=message) as raised:
        run(path)
    assert any(way in str(raised.value) for way in ("kvfolio plan counts", "use the Hugging Face folder"))


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("llama", {"attention__group_size": 7}, "attention.group_size is 7: not known here"),
        ("llama", {"attention__indexer__key_length": 8, "attention__indexer__top_k": 4}, "without a latent cache"),
        ("llama", {"ssm__conv_kernel": 4}, "llama is not known to keep states"),
        ("llama", {"num_loops": 2}, "num_loops is 2"),
        ("llama", {"attention__causal": False}, "attention.causal is false"),
        ("llama", {"nextn_predict_layers": 6}, "nextn_predict_layers is 6"),
        ("gemma3", {"attention__sliding_window": None}, "sliding_window is missing"),
        ("gemma3", {"attention__sliding_window_pattern": booleans(True)}, "one value, or 6 of them"),
        ("gemma3", {"attention__sliding_window_pattern": Items(STRING, ("a",) * 6)}, "true or false for each layer"),
        ("gemma3", {"attention__sliding_window_pattern": "two"}, "sliding_window_pattern is 'two'"),
        ("gemma3", {"attention__key_length_swa": 0}, "key_length_swa is 0"),
        ("qwen3", {"attention__head_count_kv": 3}, "8 query heads cannot share 3"),
        ("qwen3", {"attention__head_count_kv": 0}, "head_count_kv is 0"),
        ("qwen3", {"embedding_length": 130}, "130 does not divide into 8 heads"),
        ("qwen3", {"block_count": 10_001}, "a whole number from 1 to 10,000"),
    ],
)
def test_what_the_planner_refuses_the_engine_refuses_too(
    tmp_path: Path, architecture: str, changes: dict[str, object], message: str
) -> None:
    path = written(tmp_path, runnable(architecture, **changes))
    for read in (planned, run):
        with pytest.raises((BrokenModelError, UnknownModelError), match=message):
            read(path)


def test_a_matrix_of_any_layer_that_contradicts_the_keys_is_refused_by_both(tmp_path: Path) -> None:
    path = written(tmp_path, runnable("llama"), Tensor("blk.4.attn_k.weight", (48, 128)))
    for read in (planned, run):
        with pytest.raises(BrokenModelError, match=r"'blk.4.attn_k.weight' is \[48, 128\], the metadata says 32 rows"):
            read(path)


_SMALL = st.sampled_from([0, 1, 2, 4, 6, 8, 16, 32])
_PER_LAYER = _SMALL | st.lists(st.sampled_from([0, 1, 2, 8]), min_size=6, max_size=6).map(lambda list_: numbers(*list_))
_DECIDING = {
    "block_count": st.just(6) | _SMALL,
    "embedding_length": st.sampled_from([64, 128, 130]),
    "attention__head_count": _PER_LAYER,
    "attention__head_count_kv": _PER_LAYER | st.none(),
    "attention__key_length": _SMALL,
    "attention__value_length": _SMALL,
    "attention__key_length_swa": _SMALL,
    "attention__value_length_swa": _SMALL,
    "attention__key_length_mla": _SMALL,
    "attention__value_length_mla": _SMALL,
    "attention__kv_lora_rank": _SMALL,
    "attention__shared_kv_layers": _SMALL,
    "attention__sliding_window": _SMALL | st.none(),
    "attention__sliding_window_pattern": _SMALL
    | st.lists(st.booleans(), min_size=6, max_size=6).map(lambda flags: booleans(*flags)),
    "nextn_predict_layers": _SMALL,
    "rope__dimension_count": _SMALL,
    "rope__scaling__type": st.sampled_from(["none", "linear", "yarn"]),
    "rope__scaling__factor": st.sampled_from([0.0, 1.0, 2.5]),
    "rope__scaling__original_context_length": st.sampled_from([250, 1000]),
}


@settings(max_examples=400, deadline=None)
@given(architecture=st.sampled_from(sorted(FAMILIES)), data=st.data())
def test_whatever_the_keys_say_the_engine_runs_what_is_planned_or_refuses(
    tmp_path_factory: pytest.TempPathFactory, architecture: str, data: st.DataObject
) -> None:
    keys = data.draw(st.lists(st.sampled_from(sorted(_DECIDING)), unique=True, max_size=5))
    changes = {key: data.draw(_DECIDING[key], key) for key in keys}
    path = written(tmp_path_factory.getbasetemp(), runnable(architecture, **changes))
    try:
        runs = run(path)
    except KvfolioError:
        return
    assert_the_same(planned(path), runs)
