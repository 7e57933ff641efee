"""The floors hold: imports point down, nothing crosses a bar, the core is pure.

The table is DESIGN.md's, "Floors". Imports are read from the source, so that a module is judged
without being run, and imports inside functions count too.
"""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HOUSES = ("benchmarks", "engine", "kvtransfer", "protos", "services")

# Module prefix -> (floor, column). The longest prefix decides. On one floor, imports stay inside
# a column; a lower floor may be reached from any column that CROSSINGS does not forbid.
FLOORS = {
    "benchmarks": (7, "benchmarks"),
    "services.cli": (6, "edge"),
    "services.launch": (5, "launch"),
    "services.router": (4, "router"),
    "services.worker": (4, "worker"),
    "services.prefill": (4, "worker"),
    "services.decode": (4, "worker"),
    "services.runtime": (3, "runtime"),
    "services": (3, "runtime"),
    "engine": (1, "engine"),
    "engine.core": (2, "engine"),
    "engine.loop": (2, "engine"),
    "engine.runner": (2, "engine"),
    "engine.errors": (0, "engine"),
    "engine.config": (0, "engine"),
    "engine.request": (0, "engine"),
    "engine.plan": (0, "engine"),
    "engine.scheduler": (0, "engine"),
    "engine.admission": (0, "engine"),
    "engine.composer": (0, "engine"),
    "engine.beam_steps": (0, "engine"),
    "engine.beams": (0, "engine"),
    "engine.flight": (0, "engine"),
    "engine.roster": (0, "engine"),
    "engine.order": (0, "engine"),
    "engine.pace": (0, "engine"),
    "engine.recipe": (0, "engine"),
    "engine.kv.journal": (0, "engine"),
    "engine.kv.pool": (0, "engine"),
    "engine.kv.prefix": (0, "engine"),
    "engine.kv.manager": (0, "engine"),
    "kvtransfer": (1, "kvtransfer"),
    "kvtransfer.source": (2, "kvtransfer"),
    "kvtransfer.target": (2, "kvtransfer"),
    "kvtransfer.errors": (0, "kvtransfer"),
    "kvtransfer.layout": (0, "kvtransfer"),
    "kvtransfer.wire": (0, "kvtransfer"),
    "kvtransfer.handoff": (0, "kvtransfer"),
    "protos": (0, "protos"),
}
# The one word that engine and kvtransfer share.
SHARED = "kvtransfer.layout"
# What floor 0 may not touch: tensors, I/O, clocks and randomness of its own.
IMPURE = {
    *("torch", "triton", "grpc", "fastapi", "uvicorn", "asyncio", "threading", "multiprocessing"),
    *("socket", "subprocess", "os", "io", "pathlib", "tempfile"),
    *("time", "datetime", "random", "secrets", "uuid"),
}
# A module with the name of a library shadows it.
LIBRARIES = {
    *("fastapi", "gguf", "grpc", "http", "jinja2", "numpy", "openai", "prometheus_client"),
    *("pydantic", "ray", "rich", "safetensors", "tokenizers", "torch", "transformers", "triton"),
    *("typer", "uvicorn"),
}
MAX_LINES = 400


def is_generated(path: Path) -> bool:
    return "_pb2" in path.name


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def sources() -> dict[str, Path]:
    """Every module of the project but the generated ones."""
    paths = [path for house in HOUSES for path in (ROOT / house).rglob("*.py")]
    return {module_name(path): path for path in paths if not is_generated(path)}


@cache
def imported_by(module: str) -> frozenset[str]:
    """Dotted names that a module's source imports, wherever in it the import stands."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(sources()[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import; say the full name"
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            found.update(name if name in sources() else str(node.module) for name in full)
    return frozenset(found)


def floor_of(module: str) -> tuple[int, str]:
    prefix = module
    while prefix not in FLOORS:
        prefix, _, _ = prefix.rpartition(".")
        assert prefix, f"{module}: not on any floor; add it to FLOORS"
    return FLOORS[prefix]


def objection(importer: str, imported: str) -> str | None:
    """Why ``importer`` may not import ``imported``; None when it may."""
    if imported.partition(".")[0] not in HOUSES:
        if floor_of(importer)[0] == 0 and imported.partition(".")[0] in IMPURE:
            return f"{importer} (floor 0) imports {imported}: no tensors, I/O, clock or randomness"
        return None
    (above, column), (below, other) = floor_of(importer), floor_of(imported)
    if below > above:
        return f"{importer} (floor {above}) imports {imported} (floor {below}): imports point down"
    if below == above and column != other and imported != SHARED and other != "protos":
        return f"{importer} ({column}) imports {imported} ({other}) across a bar"
    if {column, other} == {"engine", "kvtransfer"} and imported != SHARED:
        return f"{importer} imports {imported}: engine and kvtransfer share only {SHARED}"
    return None


@pytest.mark.parametrize(
    ("importer", "imported", "allowed"),
    [
        ("services.cli.main", "services.launch.local", True),
        ("services.worker.app", "services.prefill.service", True),
        ("engine.config", "kvtransfer.layout", True),
        ("engine.errors", "engine.runner", False),
        ("services.runtime.settings", "services.router.app", False),
        ("services.router.app", "services.worker.app", False),
        ("engine.runner", "kvtransfer.wire", False),
        ("kvtransfer.source", "engine.kv.pool", False),
        ("engine.scheduler", "time", False),
        ("kvtransfer.wire", "torch", False),
        ("engine.runner", "torch", True),
    ],
)
def test_the_rule(importer: str, imported: str, allowed: bool) -> None:
    assert (objection(importer, imported) is None) is allowed


def test_imports_point_down() -> None:
    found = [
        reason
        for module in sorted(sources())
        for imported in sorted(imported_by(module))
        if (reason := objection(module, imported))
    ]
    assert not found, "\n".join(found)


def find_cycle(edges: dict[str, frozenset[str]]) -> list[str]:
    """One import cycle as a path of modules, or an empty list."""
    done: set[str] = set()

    def walk(module: str, path: list[str]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return []
        for following in sorted(edges.get(module, frozenset())):
            if cycle := walk(following, [*path, module]):
                return cycle
        done.add(module)
        return []

    return next((cycle for module in sorted(edges) if (cycle := walk(module, []))), [])


def test_find_cycle() -> None:
    chain = {"a": frozenset("b"), "b": frozenset("c"), "c": frozenset("x")}
    assert find_cycle(chain) == []
    assert find_cycle(chain | {"c": frozenset("b")}) == ["b", "c", "b"]


def test_no_import_cycles() -> None:
    edges = {module: imported_by(module) & sources().keys() for module in sources()}
    cycle = find_cycle(edges)
    assert not cycle, " -> ".join(cycle)


def test_files_stay_readable() -> None:
    paths = [*sources().values(), *(ROOT / "tests").rglob("*.py")]
    long = {
        str(path.relative_to(ROOT)): count
        for path in paths
        if (count := len(path.read_text(encoding="utf-8").splitlines())) > MAX_LINES
    }
    assert not long, f"over {MAX_LINES} lines, split along a seam that has a name: {long}"


def test_module_names() -> None:
    stems = {module: module.rpartition(".")[2] for module in sources()}
    shadows = sorted(module for module, stem in stems.items() if stem in LIBRARIES)
    assert not shadows, f"named after a library: {shadows}"
    grab_bags = sorted(
        module for module, stem in stems.items() if stem in {"utils", "util", "common", "helpers"}
    )
    assert not grab_bags, f"a name that says nothing: {grab_bags}"


def test_package_files_are_empty() -> None:
    filled = [
        module
        for module, path in sources().items()
        if path.name == "__init__.py" and path.stat().st_size
    ]
    assert not filled


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("services.router.app", {"torch", "triton", "ray", "transformers"}),
        ("services.cli.main", {"torch", "ray", "fastapi", "grpc", "numpy"}),
    ],
)
def test_what_importing_does_not_load(module: str, unwanted: set[str]) -> None:
    """The router's image carries no torch; the command line starts at once."""
    code = f"import sys, {module}; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert not unwanted & set(loaded.stdout.split())
