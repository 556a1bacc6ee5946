"""Folders of gpt-oss whose experts are published as MXFP4 are read as transformers decodes them.

Knows nothing of what the network does with its weights.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from doubles import Session
from safetensors.torch import load_file, save_file
from tiny import TinyModel, some_tokens
from torch import Tensor
from transformers import GptOssForCausalLM, Mxfp4Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from kvfolio.errors import BrokenModelError, UnknownModelError
from kvfolio.models.build import build_model
from kvfolio.models.mxfp4 import decode_mxfp4
from kvfolio.models.weights import open_weights
from kvfolio.spec.source import open_model

TinyModels = Callable[[str], TinyModel]
Change = Callable[[dict[str, Tensor]], None]
CPU = torch.device("cpu")
FIRST = "model.layers.0.mlp.experts.gate_up_proj"
DECODED = Mxfp4Config(dequantize=True)
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}


def random_codes(*shape: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """(blocks [*shape, 16], scales [*shape]) uint8: every code, and scales around one."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
    return blocks, torch.randint(118, 126, shape, dtype=torch.uint8, generator=generator)


def nothing(tensors: dict[str, Tensor]) -> None:
    """Changes no tensor."""


def packed(model: TinyModel, folder: Path, change: Change = nothing) -> Path:
    """A folder with ``model``'s tensors, but experts of random codes."""
    tensors = load_file(model.folder / "model.safetensors")
    for seed, name in enumerate(sorted(name for name in tensors if name.endswith(("gate_up_proj", "down_proj")))):
        count, width, rows = tensors.pop(name).shape
        blocks, scales = random_codes(count, rows, width // 32, seed=seed)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((model.folder / "config.json").read_text())
    del config["dtype"]  # as published
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": MXFP4}))
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_codes_are_decoded_as_transformers_decodes_them(dtype: torch.dtype) -> None:
    blocks, scales = random_codes(3, 10, 4)
    blocks[0, :4] = torch.arange(256, dtype=torch.uint8).view(4, 4, 16)  # every byte
    out = torch.empty(3, 10, 128, dtype=dtype)
    decode_mxfp4(blocks, scales, out, "here")
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=dtype)  # [3, 128, 10]: turned, as their network wants it
    assert torch.equal(out, theirs.transpose(1, 2))


def test_every_scale_is_exact() -> None:
    blocks = torch.full((1, 1, 255, 16), 0x21, dtype=torch.uint8)  # 0.5, then 1
    out = torch.empty(1, 1, 255 * 32)
    decode_mxfp4(blocks, torch.arange(255, dtype=torch.uint8)[None, None], out, "here")
    assert out[0, 0, 1::32].tolist() == [2.0**exponent for exponent in range(-127, 128)]
    assert out[0, 0, 0::32].tolist() == [2.0**exponent for exponent in range(-128, 127)]


def test_a_folder_of_mxfp4_gives_the_logits_of_transformers_with_decoded_experts(
    tiny_model: TinyModels, tmp_path: Path
) -> None:
    model = tiny_model("gpt-oss")
    source = open_model(packed(model, tmp_path))
    assert source.spec.dtype == "bf16"
    assert any("dtype is absent: bfloat16 assumed" in line for line in source.spec.assumptions)
    theirs = GptOssForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, quantization_config=DECODED).eval()
    calls: list[tuple[int, int]] = []
    weights = open_weights(source, torch.float32, CPU, lambda done, total: calls.append((done, total)))
    ours = build_model(source.spec, weights)
    prompt = some_tokens(33)
    with torch.inference_mode():
        expected = theirs(torch.tensor([prompt])).logits[0]
    torch.testing.assert_close(Session(ours).step({0: prompt})[0], expected, atol=1e-4, rtol=0)
    assert ours.weight_bytes == 4 * source.spec.num_params  # as decoded
    total = sum(tensor.nbytes for tensor in load_file(tmp_path / "model.safetensors").values())
    assert calls[-1] == (total, total)  # as stored
    assert [call[0] for call in calls] == sorted(call[0] for call in calls)


def remove_scales(tensors: dict[str, Tensor]) -> None:
    del tensors[f"{FIRST}_scales"]


def cut_scales(tensors: dict[str, Tensor]) -> None:
    tensors[f"{FIRST}_scales"] = tensors[f"{FIRST}_scales"][:, :, :1].contiguous()


def widen_blocks(tensors: dict[str, Tensor]) -> None:
    tensors[f"{FIRST}_blocks"] = tensors[f"{FIRST}_blocks"].repeat(1, 1, 1, 2)


def retype_scales(tensors: dict[str, Tensor]) -> None:
    tensors[f"{FIRST}_scales"] = tensors[f"{FIRST}_scales"].to(torch.float16)


def break_a_scale(tensors: dict[str, Tensor]) -> None:
    tensors[f"{FIRST}_scales"][4, 3, 1] = 255


def remove_experts(tensors: dict[str, Tensor]) -> None:
    for part in ("_blocks", "_scales"):
        tensors[FIRST + part] = tensors[FIRST + part][:4].contiguous()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (remove_scales, r"gate_up_proj_blocks' is \[5, 192, 2, 16\] U8, its scales are none"),
        (cut_scales, r"its scales are \[5, 192, 1\] U8; accepted: \[count, rows, groups, 16\] U8"),
        (widen_blocks, r"gate_up_proj_blocks' is \[5, 192, 2, 32\] U8"),
        (retype_scales, r"its scales are \[5, 192, 2\] F16"),
        (break_a_scale, r"gate_up_proj_scales' holds a scale of 255, which stands for no number"),
        (remove_experts, r"gate_up_proj' has shape \[4, 192, 64\], and the configuration needs \[5, 192, 64\]"),
    ],
)
def test_codes_and_scales_that_do_not_fit_are_refused(
    change: Change, message: str, tiny_model: TinyModels, tmp_path: Path
) -> None:
    source = open_model(packed(tiny_model("gpt-oss"), tmp_path, change))
    with pytest.raises(BrokenModelError, match=message):
        build_model(source.spec, open_weights(source, torch.float32, CPU))


def test_codes_of_a_family_that_is_not_published_so_are_refused(tiny_model: TinyModels, tmp_path: Path) -> None:
    model, name = tiny_model("llama"), "model.layers.0.mlp.down_proj.weight"
    tensors = load_file(model.folder / "model.safetensors")
    tensors[name] = tensors[name].to(torch.uint8)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((model.folder / "config.json").read_bytes())
    source = open_model(tmp_path)
    with pytest.raises(UnknownModelError, match="is stored as U8; known: F32, F16, BF16"):
        build_model(source.spec, open_weights(source, torch.float32, CPU))
