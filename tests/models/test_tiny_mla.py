"""The small trained DeepSeek: it is what its card says, by transformers and by kvfolio, and stored latents cost little.

Knows nothing of how latents are kept. The folder is one of those that benchmarks/four_designs.py writes.
"""

import re
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open
from torch import Tensor
from torch.nn import functional

from kvfolio.engine.loaded import LoadedModel, load_model
from kvfolio.engine.logits import text_logits
from kvfolio.engine.text import Tokenizer

FOLDER = Path(__file__).parents[1] / "fixtures" / "tiny_mla"
WINDOW = 512  # bytes that it was trained to read
HELD_OUT = (FOLDER / "held_out.txt").read_text(encoding="utf-8")


def stated_loss() -> float:
    """Nats a byte on held_out.txt, as the card has it."""
    found = re.search(
        r"Loss on held_out\.txt, by transformers in f32: ([0-9.]+) nats", (FOLDER / "README.md").read_text()
    )
    assert found is not None
    return float(found[1])


def test_transformers_finds_the_stated_loss_on_text_that_it_was_not_trained_on() -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    assert type(model) is transformers.DeepseekV3ForCausalLM
    ids = torch.tensor(Tokenizer.load(FOLDER).encode(HELD_OUT))
    windows = ids[: len(ids) // WINDOW * WINDOW].view(-1, WINDOW)
    with torch.inference_mode():
        logits = model(windows).logits[:, :-1]
    loss = functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
    torch.testing.assert_close(float(loss), stated_loss(), atol=1e-4, rtol=0)


def test_it_predicts_far_better_than_counts_of_byte_pairs_do() -> None:
    text = torch.tensor(list(HELD_OUT.encode()))
    pairs = torch.zeros(256, 256).index_put((text[:-1], text[1:]), torch.ones(()), accumulate=True)
    rows = pairs[text[:-1]]  # counted on the very text that is predicted: no pair model can do better
    best = -(rows.gather(1, text[1:, None])[:, 0] / rows.sum(1)).log().mean()
    assert stated_loss() < float(best) - 0.3


def test_a_token_is_a_byte_in_both_tokenizers() -> None:
    text = "A “quote”, naïve 🙂\r\n\t"
    theirs = transformers.AutoTokenizer.from_pretrained(FOLDER)
    assert Tokenizer.load(FOLDER).encode(text) == theirs.encode(text) == list(text.encode())
    assert Tokenizer.load(FOLDER).decode(list(text.encode())) == theirs.decode(list(text.encode())) == text


def test_its_layers_hold_latents_and_no_experts() -> None:
    with safe_open(FOLDER / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert "model.layers.3.self_attn.kv_a_proj_with_mqa.weight" in names
    assert not [name for name in names if "expert" in name or "mlp.gate.weight" in name]


# ---- the same by kvfolio ------------------------------------------------------------------------------------------


def loss(loaded: LoadedModel, kv_format: str) -> float:
    """Nats a byte on held_out.txt by kvfolio, with a cache of this format: of each window's bytes but the first."""
    ids = list(HELD_OUT.encode())
    pieces = []
    for start in range(0, len(ids) // WINDOW * WINDOW, WINDOW):
        window = torch.tensor(ids[start : start + WINDOW])

        def score(at: int, logits: Tensor, window: Tensor = window) -> None:
            targets = window[at + 1 : at + 1 + len(logits)]
            pieces.append(functional.cross_entropy(logits.float(), targets, reduction="none"))

        text_logits(loaded, window.tolist(), score, kv_format=kv_format, kv_memory="16MiB")
    return float(torch.cat(pieces).mean())


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model(FOLDER, "f32")


def test_an_exact_cache_of_latents_has_the_loss_of_transformers(loaded: LoadedModel) -> None:
    assert loss(loaded, "f32") == pytest.approx(stated_loss(), abs=1e-4)


@pytest.mark.parametrize(("kv_format", "most"), [("bf16", 3e-4), ("int8", 1e-3), ("int4", 5e-3), ("int2", 0.2)])
def test_stored_latents_cost_little(loaded: LoadedModel, kv_format: str, most: float) -> None:
    assert abs(loss(loaded, kv_format) - loss(loaded, "f32")) < most
