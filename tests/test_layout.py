"""The shape of the source: imports go down only, torch comes late, files stay short."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import ddp_runner

PACKAGE = Path(ddp_runner.__file__).parent
FILES = sorted(path for path in PACKAGE.rglob("*.py") if "conf" not in path.parts)
MOST_LINES = 260
# From the bottom up: a module imports from lower layers alone. Equals do not know each other.
LAYERS = (
    ("errors", "hardware", "pictures", "seeds", "signals", "children", "temp_folder"),
    ("text_files", "fork_server", "load"),
    (
        "environment",
        "config",
        "cuda",
        "record",
        "failures",
        *("saving", "staging"),
        "streams",
        "collective_ops",
        "losses",
        "manifest",
        "metrics",
        "pace",
        "plain_data",
        "schedules",
        "torch_errors",
        "models",
    ),
    ("collectives_config",),
    (
        *("checkpoint_rules", "batch_rules", "device_rules", "model_rules", "sweep_rules"),
        *("secret_values", "target_rules", "value_rules"),
    ),
    ("scheduler_rules",),
    ("rules", "folders", "job", "times", "blame", "logs"),
    ("parallelism", "data.source", "dashboard"),
    ("interrupts", "calibration", "stop", "identity", "agent_store", "loopback_store"),
    ("claims",),
    ("resuming",),
    ("ledger", "comparison", "distributed", "checkpoint", "tracking", "data"),
    ("compose", "compare", "sweep"),
    ("known_keys", "step", "weights", "checkpoint_writer", "collective_calls", "targets"),
    ("explain", "train"),
    ("state_checks", "parts"),
    ("agreement", "build", "delivery", "state", "report", "collective_timing", "serving"),
    ("session", "first_batch", "check_gradients", "check_samples", "check_state"),
    ("collectives", "check"),
    ("worker",),
    ("preload", "rendezvous"),
    ("supervisor",),
    ("launch",),
    ("execution",),
    ("slots",),
    ("multirun",),
    ("__main__",),
)
TORCH_FREE = (
    *("batch_rules", "checkpoint_rules", "collectives_config", "device_rules", "model_rules"),
    "target_rules",
    *("__main__", "compose", "config", "environment", "errors", "explain", "failures", "folders"),
    *(
        "hardware",
        "job",
        "launch",
        "ledger",
        "logs",
        "manifest",
        "record",
        "rules",
        "seeds",
        "stop",
        "sweep",
    ),
    *("calibration", "execution", "interrupts", "multirun", "slots", "sweep_rules"),
    *("text_files", "identity", "claims", "resuming", "secret_values"),
    *("value_rules", "known_keys", "scheduler_rules"),
    *("load", "saving", "times", "comparison.run", "comparison.doubts"),
    *("blame", "children", "fork_server", "signals", "streams", "temp_folder"),
    *("compare", "comparison", "comparison.runs", "comparison.settings", "comparison.figures"),
    *("comparison.scaling", "comparison.parity", "comparison.analysis", "comparison.columns"),
    *("comparison.rows", "comparison.prediction", "comparison.parts_plot", "comparison.series"),
    *("comparison.tables", "comparison.drawing", "comparison.plots", "comparison.tensorboard"),
)
SLOW = ("torchvision", "sklearn", "transformers")  # seconds at import: inside functions only


def name_of(path: Path) -> str:
    """Return a file's module name below the package."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def imports(path: Path, *, whole: bool) -> Iterator[str]:
    """Yield the modules that a file imports: at its top, or anywhere where `whole` is true.

    What only the type checker reads does not count.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typing = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree) if whole else tree.body:
        if id(node) in typing:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write absolute imports"
            assert node.module is not None
            inside = [PACKAGE.parent / node.module.replace(".", "/") / a.name for a in node.names]
            if all(one.is_dir() or one.with_suffix(".py").exists() for one in inside):
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
            else:
                yield node.module


def layer(module: str) -> tuple[int, str]:
    """Return the height of a module of the package, and the name that puts it there."""
    for height, names in reversed(list(enumerate(LAYERS))):
        for name in sorted(names, key=len, reverse=True):
            if module == name:
                return height, name
    parent = module.rpartition(".")[0]
    assert parent, f"{module} has no layer yet: give it one"
    return layer(parent)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_go_down_only(path: Path) -> None:
    """A module imports from lower layers, or from its own folder's; never from above."""
    module = name_of(path)
    if not module:
        return
    height, group = layer(module)
    for imported in imports(path, whole=True):
        if imported.startswith("ddp_runner."):
            other, other_group = layer(imported.removeprefix("ddp_runner."))
            assert other < height or other_group == group, f"{module} imports {imported}"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_slow_libraries_are_imported_late(path: Path) -> None:
    """Torch in no file that a launcher needs at once; what is slower still in no file's head."""
    module = name_of(path)
    packages = {name.partition(".")[0] for name in imports(path, whole=False)}
    assert not packages & set(SLOW)
    if module in TORCH_FREE:
        assert "torch" not in packages
        for name in imports(path, whole=False):
            if name.startswith("ddp_runner."):
                assert name.removeprefix("ddp_runner.") in TORCH_FREE
    if module.startswith("models."):
        assert packages <= {"torch", *sys.stdlib_module_names}, "models import torch only"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_files_stay_short_and_say_what_they_are(path: Path) -> None:
    """A file that grows past its length asks to be split; each opens with its responsibility."""
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MOST_LINES
    assert ast.get_docstring(ast.parse(text))


def test_modes_are_asked_for_by_name_in_their_own_folder_only() -> None:
    """No `if mode == "ddp"` outside parallelism/."""
    modes = {path.stem for path in (PACKAGE / "parallelism").glob("*.py")} - {"__init__"}
    for path in FILES:
        if path.parent.name == "parallelism":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Compare):
                constants = {one.value for one in ast.walk(node) if isinstance(one, ast.Constant)}
                assert not constants & modes, f"{name_of(path)}: {ast.unparse(node)}"
