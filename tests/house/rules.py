"""The house rules as functions: source text in, broken rules out, one line of text each.

Knows nothing of pytest. The tests beside this file run every rule on src/ and on a snippet that breaks it.
"""

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SRC = ROOT / "src"

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 8


# ---- the files ------------------------------------------------------------------------------------------------------


def python_files() -> list[Path]:
    """Every Python file of the package."""
    return sorted((SRC / "kvfolio").rglob("*.py"))


def native_files() -> list[Path]:
    """Every C++ file of the package, tables of included code too."""
    suffixes = {".cpp", ".cc", ".c", ".cu", ".h", ".hpp", ".inc"}
    return sorted(path for path in (SRC / "kvfolio").rglob("*") if path.suffix in suffixes)


def module_name(path: Path) -> str:
    """``kvfolio.cache.ledger``; a package's own file keeps its name: ``kvfolio.cache.__init__``."""
    return ".".join(path.relative_to(SRC).with_suffix("").parts)


# ---- floors: who may import whom (as docs/structure.md has it) -------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Room:
    """One row of the table: a floor, the rooms below that may be imported, the packages of other people."""

    floor: int
    rooms: frozenset[str] = frozenset()  # a room, or one module of it: "spec.formats"; floor 0 goes without saying
    packages: frozenset[str] = frozenset()


def _room(floor: int, rooms: str = "", packages: str = "") -> Room:
    return Room(floor, frozenset(rooms.split()), frozenset(packages.split()))


_ALL = "server engine sim sched store planner cache kernels models spec"
FLOORS = {
    "__main__": _room(8, "cli"),
    "cli": _room(7, f"__init__ {_ALL}", "typer rich"),
    "__init__": _room(6, _ALL),  # the public names; the CLI calls them, so they stand just below it
    "server": _room(5, "engine sched planner", "fastapi uvicorn prometheus_client"),
    "engine": _room(4, "sched cache store models kernels planner spec", "torch transformers tokenizers numpy"),
    "sim": _room(4, "sched cache planner spec"),
    "sched": _room(3, "cache"),
    "store": _room(3, "kernels cache spec", "torch numpy"),
    "planner": _room(2, "spec"),
    "cache": _room(2, "spec"),
    "kernels": _room(2, "spec.formats", "torch numpy"),
    "models": _room(2, "spec", "torch numpy safetensors gguf"),
    "spec": _room(1),
    "units": _room(0, "errors"),  # the one step along a floor: a size that cannot be parsed is an OptionError
    "errors": _room(0),
}
GROUND = frozenset({"errors", "units"})

# Where one file of a room may take more, or must take less, than its room.
MORE_PACKAGES = {
    "kvfolio.planner.page.figures": frozenset({"plotly"}),
    "kvfolio.planner.page.picture": frozenset({"PIL"}),
    "kvfolio.sim.sweep": frozenset({"ray"}),
    "kvfolio.spec.hub": frozenset({"huggingface_hub"}),
}
TORCH_FREE_FILES = frozenset({"kvfolio.store.disk"})

TORCH_ROOMS = frozenset({"server", "engine", "store", "models", "kernels"})
TORCH_FREE_ROOMS = frozenset({"spec", "planner", "cache", "sched", "sim", "errors", "units"})
NATIVE = {"kvfolio.kernels._native": "kernels", "kvfolio.cache._digest": "cache"}  # an extension, its one room


@dataclass(frozen=True, slots=True)
class Import:
    """One imported name, written out in full."""

    name: str  # "kvfolio.spec.model.Rope", "torch.nn"
    line: int
    at_start: bool  # runs when the module is imported: not in a function, not for the type checker only


def find_imports(module: str, source: str) -> list[Import]:
    """Every import of ``source``: in functions, for the type checker and by ``import_module("…")`` as well."""
    return list(_imports_below(ast.parse(source, module), module, at_start=True))


def _imports_below(node: ast.AST, module: str, at_start: bool) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield Import(alias.name, node.lineno, at_start)
    elif isinstance(node, ast.ImportFrom):
        # module "a.b.c", level 1 → "a.b"; a package's own file is named "a.b.__init__", so the same cut fits it.
        base = module.split(".")[: -node.level] if node.level else []
        stem = ".".join([*base, *([node.module] if node.module else [])])
        for alias in node.names:
            yield Import(f"{stem}.{alias.name}", node.lineno, at_start)
    elif isinstance(node, ast.Call) and _called_name(node) in {"import_module", "__import__"}:
        for name in node.args[:1]:
            yield Import(str(getattr(name, "value", "")), node.lineno, at_start)

    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        at_start = False
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        at_start = False
    for child in ast.iter_child_nodes(node):
        yield from _imports_below(child, module, at_start)


def _called_name(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def room_of(name: str) -> str:
    """The room that an imported name lies in; ``__init__`` for the public names of the package itself."""
    word = name.split(".")[1] if "." in name else "__init__"
    place = SRC / "kvfolio" / word
    return word if word in FLOORS or place.is_dir() or place.with_suffix(".py").is_file() else "__init__"


def floor_violations(module: str, source: str) -> list[str]:
    """Imports that the table of floors does not allow."""
    room = module.split(".")[1]
    if room not in FLOORS:
        return [f"{module}: the room {room!r} is not in the table of floors"]
    found = []
    for imported in find_imports(module, source):
        reason = (
            _own_reason(module, room, imported) if _is_own(imported.name) else _foreign_reason(module, room, imported)
        )
        if reason is not None:
            found.append(f"{module}:{imported.line}: {imported.name}: {reason}")
    return found


def _is_own(name: str) -> bool:
    return name.split(".")[0] == "kvfolio"


def _own_reason(module: str, room: str, imported: Import) -> str | None:
    target = room_of(imported.name)
    for extension, owner in NATIVE.items():
        if f"{imported.name}.".startswith(f"{extension}.") and room != owner:
            return f"only {owner} may import the extension"
    if target == room:
        return None
    allowed = FLOORS[room].rooms | (GROUND if FLOORS[room].floor > 0 else frozenset())
    # The package's own names have no room in their path: "kvfolio.LLM".
    place = "kvfolio.__init__." if target == "__init__" else f"{imported.name}."
    if not any(place.startswith(f"kvfolio.{room_or_file}.") for room_or_file in allowed):
        return f"{room} may import {', '.join(sorted(allowed)) or 'nothing'}"
    if room in {"cli", "__init__"} and target in TORCH_ROOMS and imported.at_start:
        return f"{room} imports rooms with torch inside functions only"
    return None


def _foreign_reason(module: str, room: str, imported: Import) -> str | None:
    package = imported.name.split(".")[0]
    if package in sys.stdlib_module_names:
        return None
    allowed = FLOORS[room].packages | MORE_PACKAGES.get(module, frozenset())
    if module in TORCH_FREE_FILES:
        allowed = frozenset()
    if package in allowed:
        return None
    return f"{module} may use {', '.join(sorted(allowed)) or 'the standard library only'}"


def table_violations() -> list[str]:
    """Rows of the table that look sideways or up themselves."""
    return [
        f"{name} (floor {room.floor}) may import {other} (floor {FLOORS[other.split('.')[0]].floor})"
        for name, room in FLOORS.items()
        for other in sorted(room.rooms)
        if FLOORS[other.split(".")[0]].floor >= room.floor and (name, other) != ("units", "errors")
    ]


def find_cycle(sources: dict[str, str]) -> list[str]:
    """Modules that import each other in a ring, imports inside functions included; empty when there is none.

    ``sources``: module name → text.
    """
    edges: dict[str, set[str]] = {}
    for module, source in sources.items():
        targets = {_nearest_module(imported.name, sources) for imported in find_imports(module, source)}
        edges[module] = {target for target in targets if target is not None and target != module}

    finished: set[str] = set()

    def visit(module: str, path: list[str]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in finished:
            return []
        for target in sorted(edges[module]):
            ring = visit(target, [*path, module])
            if ring:
                return ring
        finished.add(module)
        return []

    return next((ring for module in sorted(edges) if (ring := visit(module, []))), [])


def _nearest_module(name: str, sources: dict[str, str]) -> str | None:
    """The module that ``name`` is, or lies in."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        stem = ".".join(parts[:end])
        for candidate in (stem, f"{stem}.__init__"):
            if candidate in sources:
                return candidate
    return None


# ---- sizes ----------------------------------------------------------------------------------------------------------


def length_violations(name: str, text: str) -> list[str]:
    """A file of more lines than the ceiling."""
    num_lines = len(text.splitlines())
    return [f"{name}: {num_lines} lines, at most {MAX_FILE_LINES}"] if num_lines > MAX_FILE_LINES else []


def function_violations(name: str, source: str) -> list[str]:
    """Functions too long or with too many parameters; ``self`` and ``cls`` are not counted.

    A verb of the command line (a public function in ``cli``) has a parameter for each option, of a few lines each:
    of verbs the body alone is measured.
    """
    found = []
    for node in ast.walk(ast.parse(source, name)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        is_verb = name.startswith("kvfolio.cli") and not node.name.startswith("_")
        first_line = node.body[0].lineno if is_verb else node.lineno
        num_lines = (node.end_lineno or node.lineno) - first_line + 1
        if num_lines > MAX_FUNCTION_LINES:
            found.append(f"{name}:{node.lineno}: {node.name} has {num_lines} lines, at most {MAX_FUNCTION_LINES}")
        given = node.args
        parameters = [
            arg for arg in (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg) if arg
        ]
        num_parameters = sum(arg.arg not in {"self", "cls"} for arg in parameters)
        if num_parameters > MAX_PARAMETERS and not is_verb:
            found.append(f"{name}:{node.lineno}: {node.name} has {num_parameters} parameters, at most {MAX_PARAMETERS}")
    return found


# ---- words ----------------------------------------------------------------------------------------------------------

EMPTY_WORDS = frozenset({"manager", "helper", "util", "common", "base", "impl", "handler", "context"})
PICKLES = frozenset({"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"})
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|raise NotImplementedError)\b")  # other people's may be caught


def _empty_words_in(name: str) -> list[str]:
    words = (word.lower() for word in _WORD.findall(name))
    return [word for word in words if word in EMPTY_WORDS or word.removesuffix("s") in EMPTY_WORDS]


def name_violations(name: str, source: str) -> list[str]:
    """Files and classes whose name says nothing."""
    found = [f"{name}: {word!r} in a file's path says nothing" for word in _empty_words_in(name)]
    for node in ast.walk(ast.parse(source, name)):
        if isinstance(node, ast.ClassDef):
            found += [
                f"{name}:{node.lineno}: {word!r} in {node.name} says nothing" for word in _empty_words_in(node.name)
            ]
    return found


def unfinished_violations(name: str, text: str) -> list[str]:
    """Notes of work left undone; they belong in the issues."""
    return [
        f"{name}:{number}: {match.group()}"
        for number, line in enumerate(text.splitlines(), start=1)
        if (match := _UNFINISHED.search(line))
    ]


def opening_violations(name: str, source: str) -> list[str]:
    """A Python file opens by saying what it does and what it does not know; a package's own file needs one line."""
    docstring = ast.get_docstring(ast.parse(source, name)) or ""
    return _opening_violations(name, docstring, num_needed=1 if name.endswith("__init__") else 2)


def native_opening_violations(name: str, text: str) -> list[str]:
    """A C++ file opens with a comment that says what it does."""
    comment = re.match(r"(#pragma once|\s|//[^\n]*\n|/\*.*?\*/)*", text, re.DOTALL)
    said = re.sub(r"#pragma once|^\s*(//|/\*|\*/?)|\*/$", "", comment.group() if comment else "", flags=re.MULTILINE)
    return _opening_violations(name, said, num_needed=1)


def _opening_violations(name: str, said: str, num_needed: int) -> list[str]:
    num_lines = sum(bool(line.strip()) for line in said.splitlines())
    num_said = max(num_lines, len(re.findall(r"[.!?](?:\s|$)", said)))
    if num_said >= num_needed:
        return []
    return [f"{name}: opens with {num_said} of {num_needed} lines (what it does, what it does not know)"]


def pickle_violations(module: str, source: str) -> list[str]:
    """Anything that reads or writes pickles: such a file runs code when it is opened."""
    found = [
        f"{module}:{imported.line}: imports {imported.name}"
        for imported in find_imports(module, source)
        if imported.name.split(".")[0] in PICKLES
    ]
    for node in ast.walk(ast.parse(source, module)):
        if isinstance(node, ast.Call):
            if ast.unparse(node.func) in {"torch.load", "torch.save"}:
                found.append(f"{module}:{node.lineno}: {ast.unparse(node.func)} pickles")
            found += [
                f"{module}:{node.lineno}: allow_pickle" for keyword in node.keywords if keyword.arg == "allow_pickle"
            ]
    return found


def environment_violations(module: str, source: str) -> list[str]:
    """Environment variables read or written anywhere but in the room ``cli``."""
    if module.startswith("kvfolio.cli"):
        return []
    names = {"environ", "environb", "getenv", "putenv", "unsetenv"}
    found = [
        f"{module}:{one.line}: {one.name}"
        for one in find_imports(module, source)
        if one.name in {f"os.{n}" for n in names}
    ]
    for node in ast.walk(ast.parse(source, module)):
        if isinstance(node, ast.Attribute) and node.attr in names and ast.unparse(node.value) == "os":
            found.append(f"{module}:{node.lineno}: os.{node.attr}")
    return found


def global_violations(module: str, source: str) -> list[str]:
    """``global`` statements: state of the whole process."""
    return [
        f"{module}:{node.lineno}: global {', '.join(node.names)}"
        for node in ast.walk(ast.parse(source, module))
        if isinstance(node, ast.Global)
    ]
