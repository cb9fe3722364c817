"""The shape of the source: imports go down only, torch comes late, files stay short."""

import ast
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

import ddp_runner

PACKAGE = Path(ddp_runner.__file__).parent
FILES = sorted(path for path in PACKAGE.rglob("*.py") if "conf" not in path.parts)
MOST_LINES = 300
GROUND = {"device", "errors", "files", "host", "metric_names", "seeds"}  # all may import them
# What each package, and each module of the top level, may import.
ALLOWED = {
    **{name: set[str]() for name in GROUND},
    "device": {"errors", "host"},
    "seeds": {"device"},
    "dist_env": GROUND,
    "config": {*GROUND, "dist_env"},
    "job": {"config", "host"},
    "distributed": GROUND,
    "metrics": {*GROUND, "config", "data", "distributed"},
    "parallelism": {*GROUND, "dist_env", "distributed", "job"},
    "models": set(),
    "data": {*GROUND, "config", "distributed"},
    "tracking": {*GROUND, "config", "dist_env", "job"},
    "checkpoint": {*GROUND, "config", "distributed", "job", "parallelism", "tracking"},
    "rank": {
        *(*GROUND, "checkpoint", "config", "dist_env", "distributed", "job", "parallelism"),
        "tracking",
    },
    "collectives": {*GROUND, "config", "distributed", "job", "rank", "tracking"},
    "train": {
        *(*GROUND, "checkpoint", "config", "data", "dist_env", "distributed", "metrics"),
        *("job", "parallelism", "rank", "tracking"),
    },
    "inference": {
        *(
            *GROUND,
            "checkpoint",
            "compare",
            "config",
            "data",
            "dist_env",
            "distributed",
            "job",
            "metrics",
        ),
        *("parallelism", "rank", "tracking", "train"),
    },
    "own_loop": {
        *(*GROUND, "checkpoint", "config", "data", "distributed", "job", "parallelism", "rank"),
        *("tracking", "train"),
    },
    "check": {
        *(*GROUND, "checkpoint", "config", "data", "dist_env", "distributed", "rank", "tracking"),
        *("job", "parallelism", "train"),
    },
    "planning": {
        *(*GROUND, "config", "data", "dist_env", "job", "parallelism", "rank", "tracking"),
        "train",
    },
    "worker": {
        *(*GROUND, "check", "collectives", "dist_env", "inference", "job", "own_loop"),
        *("planning", "rank", "train"),
    },
    "launch": {*GROUND, "config", "dist_env", "job", "rank", "tracking", "worker"},
    "compare": {*GROUND, "config", "job", "tracking"},
    "status": {*GROUND, "job", "sweep", "tracking"},
    "doctor": {*GROUND, "job", "tracking"},
    "sweep": {*(*GROUND, "compare", "config", "dist_env", "job", "launch", "rank"), "tracking"},
    "cli": {
        *(*GROUND, "checkpoint", "config", "data", "dist_env", "job", "launch", "sweep"),
        *("tracking", "worker"),
    },
    "new": {"errors"},
    "__main__": {"cli", "new"},
}
TORCH_FREE = {
    *GROUND - {"device", "seeds"},
    "cli",
    "compare",
    "dist_env",
    "doctor",
    "job",
    "launch",
    "new",
    "status",
    "sweep",
    "tracking",
}
LATE = {"launch.preload"}  # imported in the fork server
# Seconds at import: inside functions only.
SLOW = {"torchvision", "sklearn", "transformers", "datasets", "torchdata"}


def name_of(path: Path) -> str:
    """Return a file's module name below the package."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


@cache
def imports(path: Path, *, whole: bool = True) -> frozenset[str]:
    """Return the modules that a file imports: anywhere, or at its head alone.

    Anywhere means inside functions and under TYPE_CHECKING as well.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return frozenset(_imports(path, ast.walk(tree) if whole else tree.body))


def _imports(path: Path, nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write absolute imports"
            assert node.module is not None
            for alias in node.names:
                inside = PACKAGE.parent / node.module.replace(".", "/") / alias.name
                is_module = inside.is_dir() or inside.with_suffix(".py").exists()
                yield f"{node.module}.{alias.name}" if is_module else node.module


def own_imports(path: Path, *, whole: bool = True) -> set[str]:
    """Return the modules of this package that a file imports, by their names below it."""
    own = {name for name in imports(path, whole=whole) if name.startswith("ddp_runner.")}
    return {name.removeprefix("ddp_runner.") for name in own}


def libraries(path: Path, *, whole: bool = True) -> set[str]:
    """Return the top-level packages that a file imports."""
    return {name.partition(".")[0] for name in imports(path, whole=whole)}


def package_of(module: str) -> str:
    """Return the package of a module, or the module itself where it lies at the top."""
    return module.partition(".")[0]


def reached(graph: Mapping[str, set[str]], start: str) -> set[str]:
    """Return every node that some path from `start` leads to."""
    found, waiting = set[str](), [start]
    while waiting:
        new = graph.get(waiting.pop(), set()) - found
        found |= new
        waiting += new
    return found


def test_a_package_imports_what_it_may() -> None:
    """Inside functions and under TYPE_CHECKING, too."""
    wrong = []
    for name, path in ((name_of(path), path) for path in FILES if name_of(path)):
        package = package_of(name)
        if package not in ALLOWED:
            wrong.append(f"{package} has no row in the table yet: give it one")
            continue
        others = {package_of(module) for module in own_imports(path)} - {package}
        if others - ALLOWED[package]:
            wrong.append(f"{name} imports {sorted(others - ALLOWED[package])}")
    assert not wrong


@pytest.mark.parametrize("graph", ["packages", "modules"])
def test_no_import_leads_back(graph: str) -> None:
    """Neither between packages, as the table allows, nor between modules, as the files import."""
    modules = {name_of(path): own_imports(path) for path in FILES}
    arrows = ALLOWED if graph == "packages" else modules
    assert not [name for name in arrows if name in reached(arrows, name)]


def test_the_top_level_stays_small() -> None:
    """13 modules and 19 packages: new code goes into the package of its subject."""
    modules = {path.stem for path in FILES if path.parent == PACKAGE} - {"__init__"}
    packages = {path.parent.name for path in FILES if path.parent.parent == PACKAGE}
    assert len(modules) <= 13
    assert len(packages) <= 19
    assert modules | packages == set(ALLOWED)


def test_slow_libraries_are_imported_late() -> None:
    """In no file's head, since every rank would wait for them; and models import torch only."""
    slow = {name_of(path): libraries(path, whole=False) & SLOW for path in FILES}
    assert not {name: found for name, found in slow.items() if found}
    models = [path for path in FILES if package_of(name_of(path)) == "models"]
    may = {"torch", "torchvision", "transformers", *sys.stdlib_module_names}
    others = {name_of(path): libraries(path) - may for path in models}
    assert not {name: found for name, found in others.items() if found}


def test_the_launcher_needs_no_torch() -> None:
    """What the packages that must start at once import at their heads leads to no torch."""
    by_name = {name_of(path): path for path in FILES}
    heads = {name: own_imports(path, whole=False) for name, path in by_name.items()}
    with_torch = {name for name, path in by_name.items() if "torch" in libraries(path, whole=False)}
    wrong = [
        f"{name} imports torch by way of {module}"
        for name in heads
        if package_of(name) in TORCH_FREE and name not in LATE
        for module in sorted({name, *reached(heads, name)} & with_torch)
    ]
    assert not wrong


def test_files_stay_short_and_say_what_they_are() -> None:
    """A file that grows past its length asks to be split; each opens with its responsibility."""
    texts = {name_of(path): path.read_text(encoding="utf-8") for path in FILES}
    lengths = {name: len(text.splitlines()) for name, text in texts.items()}
    assert not {name: length for name, length in lengths.items() if length > MOST_LINES}
    assert not [name for name, text in texts.items() if not ast.get_docstring(ast.parse(text))]


def test_a_name_means_one_thing() -> None:
    """So that one search finds every use: no two modules or packages, and no two public classes."""
    modules = Counter(path.parent.name if path.stem == "__init__" else path.stem for path in FILES)
    modules -= Counter(dict.fromkeys(["__main__"], modules["__main__"]))
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in FILES]
    classes = Counter(
        node.name for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)
    )
    assert not [name for name, count in (modules + classes).items() if count > 1]


def test_modes_are_asked_for_by_name_in_their_own_folder_only() -> None:
    """There is no `if mode == "ddp"` outside parallelism/."""
    conf = PACKAGE.parent / "conf" / "parallelism"
    modes = {path.stem for path in conf.glob("*.yaml")}
    assert modes
    wrong = []
    for path in FILES:
        if PACKAGE / "parallelism" in path.parents:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Compare):
                parts = [part for part in ast.walk(node) if isinstance(part, ast.Constant)]
                if {part.value for part in parts} & modes:
                    wrong.append(f"{name_of(path)}: {ast.unparse(node)}")
    assert not wrong


def test_benchmarks_import_what_the_package_has() -> None:
    """No test runs most of them, so a rename could break them unnoticed."""
    modules = {f"ddp_runner.{name_of(path)}" for path in FILES}
    benchmarks = sorted((PACKAGE.parent / "benchmarks").glob("*.py"))
    imports = [
        (path.name, node.module, alias.name)
        for path in benchmarks
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("ddp_runner")
        for alias in node.names
    ]
    assert len(imports) > 20
    wrong = [
        (file, module, name)
        for file, module, name in imports
        if not hasattr(import_module(str(module)), name) and f"{module}.{name}" not in modules
    ]
    assert not wrong
