"""The torch wall: spec, planner, cache, sched, sim and the CLI work where torch and its like cannot be imported."""

import os
import subprocess
import sys

from rules import SRC, TORCH_FREE_FILES, TORCH_FREE_ROOMS, module_name, python_files

BLOCK_TORCH = """
import sys
from importlib.abc import MetaPathFinder

BLOCKED = {"torch", "numpy", "transformers", "tokenizers", "safetensors", "gguf", "jinja2", "huggingface_hub"}

class Wall(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"{name} stands behind the torch wall", name=name)
        return None

sys.meta_path.insert(0, Wall())
"""


def run_without_torch(code: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a fresh interpreter in which torch and everything that comes with it cannot be imported."""
    path = os.pathsep.join([str(SRC), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-c", BLOCK_TORCH + code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def torch_free_modules() -> list[str]:
    """The package itself, floor 0, the torch-free rooms and files, and the CLI, as far as they exist."""
    names = [module_name(path) for path in python_files()]
    chosen = [
        name
        for name in names
        if name.split(".")[1] in TORCH_FREE_ROOMS | {"__init__", "cli"} or name in TORCH_FREE_FILES
    ]
    return [name.removesuffix(".__init__") for name in chosen]


def test_the_wall_holds_torch_back() -> None:
    for package in ("torch", "numpy", "transformers"):
        done = run_without_torch(f"import {package}")
        assert done.returncode == 1
        assert "torch wall" in done.stderr


def test_the_torch_free_rooms_import_without_torch() -> None:
    modules = torch_free_modules()
    assert {"kvfolio.errors", "kvfolio.units", "kvfolio.spec.model"} <= set(modules)
    done = run_without_torch("\n".join(f"import {name}" for name in modules))
    assert done.returncode == 0, done.stderr


def test_a_model_can_be_priced_without_torch() -> None:
    done = run_without_torch("""
from kvfolio.spec.formats import find_cache_format
from kvfolio.spec.layers import FullAttention
from kvfolio.spec.model import LayerGroup

group = LayerGroup(FullAttention(num_kv_heads=3, k_width=64, v_width=64), tuple(range(30)))  # SmolLM2-135M
print(group.num_layers * group.layer_bytes_per_token(find_cache_format("bf16")))
""")
    assert (done.returncode, done.stdout) == (0, "23040\n"), done.stderr


def test_the_help_is_printed_without_torch() -> None:
    done = run_without_torch("""
from typer.main import get_command
from typer.testing import CliRunner

from kvfolio.cli import make_app

for words in [[], *([verb] for verb in get_command(make_app()).commands)]:
    result = CliRunner().invoke(make_app(), [*words, "--help"])
    print(result.output)
    assert result.exit_code == 0, (words, result.exception)
""")
    assert done.returncode == 0, done.stderr
    assert "run" in done.stdout
    assert "compare" in done.stdout
