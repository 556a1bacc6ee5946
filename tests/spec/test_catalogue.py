"""The catalogue: complete, sorted, found by every name, and each parameter count what its config implies.

Knows nothing of how a config is mapped; the numbers here were published.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvfolio.spec import catalogue as module
from kvfolio.spec.catalogue import CatalogueEntry, catalogue, find_entry, nearest_names, spec_of_entry
from kvfolio.spec.config.families import spec_from_config
from kvfolio.spec.formats import COMPUTE_FORMATS, parse_cache_format

ENTRIES = pytest.mark.parametrize("entry", catalogue().values(), ids=lambda entry: entry.name)
BF16 = parse_cache_format("bf16")


@ENTRIES
def test_the_parameters_stated_are_those_that_the_config_implies(entry: CatalogueEntry) -> None:
    counted = spec_from_config(entry.config, entry.name).weights
    tolerance = 0.002 if entry.name == "palm-540b-mha" else 1e-4  # its paper rounds to 540e9
    assert counted.num_params == pytest.approx(entry.num_params, rel=tolerance)
    assert counted.num_active_params == pytest.approx(entry.num_active_params, rel=0.002)


@ENTRIES
def test_every_entry_is_a_model_with_a_source(entry: CatalogueEntry) -> None:
    spec = spec_of_entry(entry)
    assert (spec.name, spec.weights.source) == (entry.name, "catalogue")
    assert (spec.weights.num_params, spec.weights.num_active_params) == (entry.num_params, entry.num_active_params)
    assert spec.max_context is not None or entry.name == "mamba-2.8b"  # which has no positions at all
    assert 0 < entry.num_active_params <= entry.num_params
    assert entry.source


def test_names_are_sorted_and_lead_to_one_model_each() -> None:
    lines = json.loads(Path(module.__file__).with_name("catalogue.json").read_text())
    assert list(lines) == sorted(lines) == list(catalogue())
    owners: dict[str, str] = {}
    for entry in catalogue().values():
        assert entry.name == entry.name.casefold()
        for name in {
            entry.name,
            *(name.casefold() for name in (*entry.aliases, *([entry.repo] if entry.repo else []))),
        }:
            assert owners.setdefault(name, entry.name) == entry.name, f"{name} is {owners[name]} and {entry.name}"
        assert find_entry(entry.name) is entry


@pytest.mark.parametrize(
    "name",
    [
        "llama-3.1-8b",
        "LLAMA-3.1-8B",
        "meta-llama/Llama-3.1-8B",
        "meta-llama/llama-3.1-8b-instruct",
        "Llama-3.1-8B-Instruct",
    ],
)
def test_a_model_is_found_by_name_hub_id_and_in_any_case(name: str) -> None:
    entry = find_entry(name)
    assert entry is not None
    assert (entry.name, entry.num_params) == ("llama-3.1-8b", 8_030_261_248)


def test_a_name_that_is_not_there_is_not_guessed() -> None:
    assert find_entry("llama-3.1-9b") is None
    assert find_entry("someone-else/llama-3.1-8b") is None
    assert find_entry("") is None
    assert nearest_names("llama-3.1-9b")[0].startswith("llama-3.1-")
    assert nearest_names("Qwen/Qwen3-7B")[0].startswith("qwen3-")
    assert nearest_names("xyzzy") == ()


def test_the_cache_of_palm_540b_is_that_of_its_paper() -> None:
    # arXiv 2211.05102, section 3.3: batch 512 of 2,048 tokens, multihead attention: 3 TB.
    entry = find_entry("palm-540b-mha")
    assert entry is not None
    num_bytes = 512 * sum(layer.bytes_at(2048, BF16) for layer in spec_of_entry(entry).layers)
    assert num_bytes == 512 * 2048 * 118 * 2 * 48 * 128 * 2 == pytest.approx(3.04e12, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "token_bytes"),
    [  # bytes at 16 bits that one more token adds, behind every window
        ("deepseek-v3", 61 * 576 * 2),
        ("deepseek-v3.2", 61 * (576 + 128) * 2),
        ("falcon-40b", 60 * 2 * 8 * 64 * 2),
        ("gemma-3-27b", 10 * 2 * 16 * 128 * 2),
        ("gpt-oss-120b", 18 * 2 * 8 * 64 * 2),
        ("gpt3-175b", 96 * 2 * 96 * 128 * 2),
        ("llama-4-scout", 12 * 2 * 8 * 128 * 2),
        ("mamba-2.8b", 0),
        ("mistral-7b-v0.1", 0),
        ("mistral-7b-v0.3", 32 * 2 * 8 * 128 * 2),
        ("qwen3-next-80b-a3b", 12 * 2 * 2 * 256 * 2),
    ],
)
def test_trimming_a_config_kept_what_decides_its_cache(name: str, token_bytes: int) -> None:
    entry = find_entry(name)
    assert entry is not None
    assert sum(layer.growth(BF16) for layer in spec_of_entry(entry).layers) == token_bytes


def test_an_encoder_of_images_is_among_the_weights_and_not_among_the_active_ones() -> None:
    entry = find_entry("gemma-3-27b")
    assert entry is not None
    weights = spec_of_entry(entry).weights
    assert weights.num_bytes == 2 * 27_432_406_640
    assert weights.num_params - weights.num_active_params == pytest.approx(423e6, rel=0.01)


@pytest.mark.parametrize(
    ("name", "gigabytes"),
    [("llama-3.1-8b", 16.06), ("gpt-oss-120b", 65.25), ("gpt-oss-20b", 13.76), ("deepseek-v3", 673)],
)
def test_quantised_weights_take_their_published_bytes(name: str, gigabytes: float) -> None:
    entry = find_entry(name)
    assert entry is not None
    assert spec_of_entry(entry).weights.num_bytes == pytest.approx(gigabytes * 1e9, rel=0.01)


@ENTRIES
def test_bytes_of_experts_are_a_part_of_all_bytes(entry: CatalogueEntry) -> None:
    spec = spec_of_entry(entry)
    weights = spec.weights
    assert 0 <= weights.expert_bytes < weights.num_bytes
    assert (weights.expert_bytes > 0) == (weights.expert_params > 0)
    texts = (entry.config, entry.config.get("text_config"))
    if not any(isinstance(text, dict) and "quantization_config" in text for text in texts):
        assert weights.expert_bytes == COMPUTE_FORMATS[spec.dtype].value_bytes * weights.expert_params


@pytest.mark.parametrize(
    ("name", "bits", "rest"),
    [  # of one number in the experts, and in all else
        ("deepseek-v3", 8.002, 8.92),
        ("deepseek-v4-flash", 4.25, 9.25),
        ("deepseek-v4-pro", 4.25, 8.66),
        ("gpt-oss-120b", 4.254, 16),
        ("gpt-oss-20b", 4.254, 16),
        ("kimi-k2", 8.002, 9.72),
        ("kimi-k3", 4.25, 16),
        ("minimax-m2.5", 8.002, 10.55),
        ("qwen3-235b-a22b", 16, 16),
    ],
)
def test_experts_and_the_rest_each_have_their_published_width(name: str, bits: float, rest: float) -> None:
    entry = find_entry(name)
    assert entry is not None
    weights = spec_of_entry(entry).weights
    assert 8 * weights.expert_bytes / weights.expert_params == pytest.approx(bits, rel=1e-3)
    others = weights.num_params - weights.expert_params
    assert 8 * (weights.num_bytes - weights.expert_bytes) / others == pytest.approx(rest, rel=0.01)


def test_the_catalogue_is_read_in_no_time() -> None:
    path = Path(module.__file__).with_name("catalogue.json")
    times = []
    for _ in range(5):
        started = time.perf_counter()
        json.loads(path.read_bytes())
        times.append(time.perf_counter() - started)
    assert min(times) < 0.003


def test_suggestions_load_nothing_until_they_are_needed() -> None:
    code = (
        "import sys; from kvfolio.spec.catalogue import find_entry; find_entry('gpt2'); print('difflib' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"
