"""The shape of the source: imports go down only, torch comes late, files stay short."""

import ast
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

import ddp_runner

PACKAGE = Path(ddp_runner.__file__).parent
FILES = sorted(path for path in PACKAGE.rglob("*.py") if "conf" not in path.parts)
MOST_LINES = 260
GROUND = {"errors", "files", "host", "metric_names", "seeds"}  # they import nothing of ours
# What each package, and each module of the top level, may import.
ALLOWED = {
    **{name: set[str]() for name in GROUND},
    "dist_env": GROUND,
    "config": {*GROUND, "dist_env"},
    "job": {"config"},
    "distributed": GROUND,
    "metrics": {*GROUND, "config", "data", "distributed"},
    "parallelism": {*GROUND, "dist_env", "job"},
    "models": set(),
    "data": {*GROUND, "config"},
    "tracking": {*GROUND, "config", "dist_env", "job"},
    "checkpoint": {*GROUND, "config", "distributed", "job", "tracking"},
    "rank": {
        *(*GROUND, "config", "dist_env", "distributed", "job", "parallelism"),
        "tracking",
    },
    "profiling": {*GROUND, "config"},
    "collectives": {*GROUND, "config", "distributed", "job", "rank", "tracking"},
    "train": {
        *(*GROUND, "checkpoint", "config", "data", "dist_env", "distributed", "metrics"),
        *("job", "parallelism", "profiling", "rank", "tracking"),
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
        "tracking",
    },
    "check": {
        *(*GROUND, "checkpoint", "config", "data", "dist_env", "distributed", "rank", "tracking"),
        *("job", "parallelism", "train"),
    },
    "worker": {
        *(*GROUND, "check", "collectives", "dist_env", "inference", "job", "own_loop", "rank"),
        "train",
    },
    "launch": {*GROUND, "config", "dist_env", "job", "rank", "tracking", "worker"},
    "compare": {*GROUND, "config", "job", "tracking"},
    "status": {*GROUND, "job", "sweep", "tracking"},
    "doctor": {*GROUND, "job", "tracking"},
    "sweep": {
        *(*GROUND, "compare", "config", "dist_env", "job", "launch", "rank"),
        "tracking",
    },
    "cli": {
        *(*GROUND, "checkpoint", "config", "data", "dist_env", "job", "launch", "sweep"),
        *("tracking", "worker"),
    },
    "new": {"errors"},
    "__main__": {"cli", "new"},
}
TORCH_FREE = {
    *GROUND,
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
LATE = {  # imported once ranks start
    "launch.machines",
    "launch.meeting",
    "launch.preload",
    "launch.reports",
    "launch.supervisor",
}
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


@pytest.mark.parametrize("path", [path for path in FILES if name_of(path)], ids=name_of)
def test_a_package_imports_what_it_may(path: Path) -> None:
    """Inside functions and under TYPE_CHECKING, too."""
    package = package_of(name_of(path))
    assert package in ALLOWED, f"{package} has no row in the table yet: give it one"
    others = {package_of(module) for module in own_imports(path)} - {package}
    assert others <= ALLOWED[package], f"{name_of(path)} imports {others - ALLOWED[package]}"


@pytest.mark.parametrize("graph", ["packages", "modules"])
def test_no_import_leads_back(graph: str) -> None:
    """Neither between packages, as the table allows, nor between modules, as the files import."""
    modules = {name_of(path): own_imports(path) for path in FILES}
    arrows = ALLOWED if graph == "packages" else modules
    assert not [name for name in arrows if name in reached(arrows, name)]


def test_the_top_level_stays_small() -> None:
    """Twelve modules and 20 packages: what is new has a subject, and goes to its package."""
    modules = {path.stem for path in FILES if path.parent == PACKAGE} - {"__init__"}
    packages = {path.parent.name for path in FILES if path.parent.parent == PACKAGE}
    assert len(modules) <= 12
    assert len(packages) <= 20
    assert modules | packages == set(ALLOWED)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_slow_libraries_are_imported_late(path: Path) -> None:
    """In no file's head, since every rank would wait for them; and models import torch only."""
    assert not libraries(path, whole=False) & SLOW
    if package_of(name_of(path)) == "models":
        wrapped = {"torch", "torchvision", "transformers"}
        assert libraries(path) <= {*wrapped, *sys.stdlib_module_names}


def test_the_launcher_needs_no_torch() -> None:
    """What the packages that must start at once import at their heads leads to no torch."""
    by_name = {name_of(path): path for path in FILES}
    heads = {name: own_imports(path, whole=False) for name, path in by_name.items()}
    for name in heads:
        if package_of(name) in TORCH_FREE and name not in LATE:
            for module in {name, *reached(heads, name)} & set(by_name):
                libs = libraries(by_name[module], whole=False)
                assert "torch" not in libs, f"{name} imports torch by way of {module}"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_files_stay_short_and_say_what_they_are(path: Path) -> None:
    """A file that grows past its length asks to be split; each opens with its responsibility."""
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MOST_LINES
    assert ast.get_docstring(ast.parse(text))


def test_modes_are_asked_for_by_name_in_their_own_folder_only() -> None:
    """No `if mode == "ddp"` outside parallelism/."""
    conf = PACKAGE.parent / "conf" / "parallelism"
    modes = {path.stem for path in conf.glob("*.yaml")}
    assert modes
    for path in FILES:
        if PACKAGE / "parallelism" in path.parents:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Compare):
                constants = {one.value for one in ast.walk(node) if isinstance(one, ast.Constant)}
                assert not constants & modes, f"{name_of(path)}: {ast.unparse(node)}"
