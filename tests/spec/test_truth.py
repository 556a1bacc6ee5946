"""Real configs give the bytes that were measured or computed for them elsewhere.

Knows nothing of how they were; the folder lies beside the checkout, and without it there is nothing to run.
"""

import json
from pathlib import Path

import pytest

from kvfolio.errors import UnknownModelError
from kvfolio.spec.config.families import spec_from_config
from kvfolio.spec.formats import BF16, CacheFormat

CONFIGS = Path(__file__).resolve().parents[3] / "shared" / "configs"
TRUTH = CONFIGS / "truth.json"
FACTS = json.loads(TRUTH.read_bytes()) if TRUTH.is_file() else {}
NAMES = sorted(name for name in FACTS if (CONFIGS / f"{name}.json").is_file())
BYTES16 = CacheFormat(BF16, BF16)

pytestmark = pytest.mark.skipif(not NAMES, reason="no folder of configs beside the checkout")


@pytest.mark.parametrize("name", NAMES)
def test_a_real_config_takes_its_bytes(name: str) -> None:
    config, facts = json.loads((CONFIGS / f"{name}.json").read_bytes()), FACTS[name]
    if not facts.get("ideal"):
        with pytest.raises(UnknownModelError, match="encoder-only: no KV cache"):
            spec_from_config(config, name)
        return
    layers = spec_from_config(config, name).layers
    for length, num_bytes in facts["ideal"].items():
        assert sum(layer.bytes_at(int(length), BYTES16) for layer in layers) == num_bytes
    naive = sum(layer.naive_token_bytes(BYTES16) for layer in layers)
    assert {length: naive * int(length) for length in facts["naive"]} == facts["naive"]


@pytest.mark.parametrize("name", NAMES)
def test_a_real_context_is_the_one_it_was_trained_for(name: str) -> None:
    trained = FACTS[name].get("trained_context")
    if not FACTS[name].get("ideal") or trained is None:
        pytest.skip("no context is known for it")
    assert spec_from_config(json.loads((CONFIGS / f"{name}.json").read_bytes()), name).max_context == trained
