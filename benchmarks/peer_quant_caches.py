"""Another engine's quantised KV cache under the same tokens; run by an interpreter that has it, needs no kvfolio.

    python peer_quant_caches.py list
    python peer_quant_caches.py run FOLDER IDS KIND OUT --chunk 128 --first 128

`list` prints as JSON the kinds that this interpreter can run. `run` feeds the token ids of the JSON file IDS to the
model in FOLDER (a Hugging Face folder; an export of optimum-intel for the openvino kinds) in chunks, f32, with a cache
of KIND, writes the logits from position `first` on to OUT (raw f32) and prints what the cache holds as JSON.
"""

import argparse
import contextlib
import importlib.metadata
import json
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

QUANTISED = {  # name: backend, arguments of QuantizedCache
    "hqq8": ("hqq", {"nbits": 8, "axis_key": 1, "axis_value": 1}),
    "hqq4": ("hqq", {"nbits": 4, "axis_key": 1, "axis_value": 1}),
    "quanto4": ("quanto", {"nbits": 4, "axis_key": 0, "axis_value": 0}),
    "quanto2": ("quanto", {"nbits": 2, "axis_key": 0, "axis_value": 0}),
    "fp8": ("fp8", {}),
}
NEEDS = {"hqq8": "hqq", "hqq4": "hqq", "quanto4": "optimum.quanto", "quanto2": "optimum.quanto", "fp8": "transformers"}
OPENVINO = {"openvino-f32": "f32", "openvino-u8": "u8", "openvino-u4": "u4"}
PACKAGES = ("transformers", "torch", "optimum-quanto", "hqq", "openvino")


def is_here(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of its parent
        return False


def kinds() -> list[str]:
    """What can run here, the exact caches first."""
    found = []
    if is_here("transformers"):
        found = ["exact", *(kind for kind, module in NEEDS.items() if is_here(module))]
    return found + (list(OPENVINO) if is_here("openvino") else [])


def versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def tensor_bytes(held: Any) -> int:
    """Bytes of every tensor in ``held``: tuples, dicts and tensors that are made of tensors are walked."""
    import torch

    if isinstance(held, torch.Tensor):
        if hasattr(held, "__tensor_flatten__") and type(held) is not torch.Tensor:
            return sum(tensor_bytes(getattr(held, name)) for name in held.__tensor_flatten__()[0])
        return held.untyped_storage().nbytes()
    if isinstance(held, dict):
        return sum(map(tensor_bytes, held.values()))
    return sum(map(tensor_bytes, held)) if isinstance(held, tuple | list) else 0


def bits_of(layer: Any, num_numbers: int) -> float:
    """Bits a number of what ``layer`` holds quantised."""
    held = tensor_bytes(layer._quantized_keys) + tensor_bytes(layer._quantized_values)
    return held * 8 / num_numbers


def exact_tokens(layer: Any) -> int:
    """How many tokens ``layer`` holds as they are, not quantised."""
    return layer.keys.shape[-2] if layer.keys.dim() == 4 else 0


def make_cache(kind: str, config: Any, residual: int) -> Any:
    """``residual``: as many new tokens stay exact before all that is held is quantised anew; 128 by default there."""
    from transformers import DynamicCache, QuantizedCache

    if kind == "exact":
        return DynamicCache(config=config)
    backend, arguments = QUANTISED[kind]
    if backend != "fp8":  # which has no residual window
        arguments = arguments | {"residual_length": residual}
    return QuantizedCache(backend, config, **arguments)


def probe(kind: str, config: Any, residual: int) -> dict[str, Any]:
    """Stored bits a number when the model computes in f32 and in bf16, and the tokens exact after each decoded one."""
    import torch

    found: dict[str, Any] = {}
    heads, width = config.num_key_value_heads, config.head_dim or config.hidden_size // config.num_attention_heads
    draw = torch.Generator().manual_seed(0)
    for name, dtype in (("bits_f32", torch.float32), ("bits_bf16", torch.bfloat16)):
        layer = make_cache(kind, config, residual).layers[0]
        prompt = torch.randn(1, heads, 4096, width, generator=draw).to(dtype)
        layer.update(prompt, prompt)
        found[name] = bits_of(layer, 2 * prompt.numel())
    layer, one, held = make_cache(kind, config, residual).layers[0], prompt[:, :, :1], []
    layer.update(prompt[:, :, :128], prompt[:, :, :128])
    for _ in range(256):
        layer.update(one, one)
        held.append(exact_tokens(layer))
    return found | {"decode_exact_mean": sum(held) / len(held), "decode_exact_max": max(held)}


def transformers_logits(args: argparse.Namespace, ids: list[int], told: dict[str, Any]) -> Iterator[Any]:
    """Logits [tokens, vocab] of each chunk; afterwards ``told`` has what the cache holds."""
    import torch
    from transformers import AutoModelForCausalLM

    if args.threads:
        torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(args.folder, dtype=torch.float32).eval()
    cache = make_cache(args.kind, model.config, args.chunk)
    left = []
    with torch.inference_mode():
        for start in range(0, len(ids), args.chunk):
            chunk = torch.tensor([ids[start : start + args.chunk]])
            yield model(input_ids=chunk, past_key_values=cache, use_cache=True).logits[0].numpy()
            left.append(exact_tokens(cache.layers[0]) if args.kind != "exact" else start + chunk.shape[1])
        told["exact_after_chunk_max"] = max(left)
        if args.kind != "exact":
            told |= probe(args.kind, model.config, args.chunk)


def openvino_logits(args: argparse.Namespace, ids: list[int], told: dict[str, Any]) -> Iterator[Any]:
    """The same by the stateful model of an OpenVINO export."""
    import numpy as np
    import openvino as ov

    core = ov.Core()
    model = core.read_model(Path(args.folder) / "openvino_model.xml")
    precision = {"KV_CACHE_PRECISION": getattr(ov.Type, OPENVINO[args.kind]), "INFERENCE_PRECISION_HINT": ov.Type.f32}
    if args.threads:
        precision["INFERENCE_NUM_THREADS"] = args.threads
    compiled = core.compile_model(model, "CPU", precision)
    for name in ("KV_CACHE_PRECISION", "KEY_CACHE_PRECISION", "VALUE_CACHE_PRECISION", "INFERENCE_PRECISION_HINT"):
        told[name] = str(compiled.get_property(name))
    for name in ("KEY_CACHE_GROUP_SIZE", "VALUE_CACHE_GROUP_SIZE"):
        with contextlib.suppress(RuntimeError):
            told[name] = int(compiled.get_property(name))
    request = compiled.create_infer_request()
    request.reset_state()
    accepted = {name for port in compiled.inputs for name in port.names}
    for start in range(0, len(ids), args.chunk):
        chunk = np.array([ids[start : start + args.chunk]], dtype=np.int64)
        end = start + chunk.shape[1]
        given = {
            "input_ids": chunk,
            "attention_mask": np.ones((1, end), dtype=np.int64),
            "position_ids": np.arange(start, end, dtype=np.int64)[None],
            "beam_idx": np.zeros(1, dtype=np.int32),
        }
        yield np.array(request.infer({k: v for k, v in given.items() if k in accepted})["logits"][0], dtype=np.float32)


def run(args: argparse.Namespace) -> dict[str, Any]:
    ids: list[int] = json.loads(Path(args.ids).read_text())
    told: dict[str, Any] = {"versions": versions()}
    logits = (openvino_logits if args.kind in OPENVINO else transformers_logits)(args, ids, told)
    start = 0
    with open(args.out, "wb") as out:
        for chunk in logits:
            chunk[max(args.first - start, 0) :].tofile(out)
            start += len(chunk)
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("list")
    job = verbs.add_parser("run")
    for name in ("folder", "ids", "kind", "out"):
        job.add_argument(name)
    job.add_argument("--chunk", type=int, default=128)
    job.add_argument("--first", type=int, default=128)
    job.add_argument("--threads", type=int, default=0, help="0: the engine's own choice")
    args = parser.parse_args()
    if args.verb == "run" and args.kind not in kinds():
        sys.exit(f"{args.kind} cannot run here; what can: {', '.join(kinds()) or 'nothing'}")
    print(json.dumps(kinds() if args.verb == "list" else run(args)))


if __name__ == "__main__":
    main()
