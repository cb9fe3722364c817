"""Which names a config may give the program to import: ``_target_`` and ``model.loss``. Torch-free.

The launcher checks the names as text before anything starts; for this package's own modules it
reads what their source defines. A rank checks again, and ``targets`` then checks the object itself.
"""

import ast
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from ddp_runner.config.schema import Config
from ddp_runner.errors import UserError, nearest

PACKAGE = Path(__file__).resolve().parents[1]
# Modules of this package that a config may name parts of, and what a part is in each.
OWN: Mapping[str, tuple[type[ast.stmt], ...]] = {
    "ddp_runner.models": (ast.ClassDef, ast.FunctionDef),
    "ddp_runner.data.sources": (ast.ClassDef,),
    "ddp_runner.data.augmentation": (ast.ClassDef,),
    "ddp_runner.parallelism": (ast.ClassDef,),
    "ddp_runner.train.schedules": (ast.FunctionDef,),
    "ddp_runner.train.losses": (ast.FunctionDef,),
}
# Of torch only these modules, and in each only the subclasses of one class: see `targets`. Other
# modules load files (torch.load, torch.hub), run commands (torch.utils) or compile code.
TORCH = ("torch.nn", "torch.optim", "torch.optim.lr_scheduler")
LOSSES, TORCH_LOSSES = "ddp_runner.train.losses", "torch.nn.functional"
TORCH_LOSS_NAMES = (
    "binary_cross_entropy", "binary_cross_entropy_with_logits", "cross_entropy", "huber_loss",
    "kl_div", "l1_loss", "mse_loss", "multi_margin_loss", "multilabel_margin_loss", "nll_loss",
    "multilabel_soft_margin_loss", "poisson_nll_loss", "smooth_l1_loss", "soft_margin_loss",
)  # fmt: skip


def validate_targets(config: Config) -> None:
    """Refuse a config that names something it may not: importing it could run any code.

    Raises:
        UserError: a name is not allowed or does not exist, or a text would be resolved again.
    """
    for key, value in values(asdict(config)):
        if isinstance(value, str) and "${" in value:
            # Written to the run's config, it would be resolved when the run is resumed.
            raise UserError(
                f"{key} still holds an interpolation (${{) after the config was resolved; write it "
                "without a backslash before the $, or leave it out"
            )
    for key, name in target_names(asdict(config)):
        validate_name(name, key=key, allowed=config.allowed_targets)


def validate_name(name: object, *, key: str, allowed: Collection[str]) -> None:
    """Refuse a name that a config may not use.

    Args:
        name: the dotted name.
        key: the config's key; ``model.loss`` may name only loss functions.
        allowed: the user's own packages: ``allowed_targets`` of this command.

    Raises:
        UserError: it is not allowed, or it is ours and does not exist.
    """
    is_loss = key == "model.loss"
    if not isinstance(name, str) or not _is_dotted(name):
        fix = _nearest_losses(name) if is_loss else "one such as ddp_runner.models.convnet.ConvNet"
        raise UserError(f"{key} ({name}) is not a dotted name; write {fix}")
    if is_allowed(name, allowed):
        return
    module, _, last = name.rpartition(".")
    if is_loss:
        if module == LOSSES and last in _defined(module):
            return
        if module == TORCH_LOSSES and last in TORCH_LOSS_NAMES:
            return
        own = "" if _is_builtin(name) else f"; if it is your own, add {_allowing(name)}"
        raise UserError(
            f"{key} ({name}) is not a loss function that a config may name; write "
            f"{_nearest_losses(name)}{own}"
        )
    if module in TORCH and not last.startswith("_"):
        return
    if _holds_parts(module):
        if last in _defined(module):
            return
        known = [f"{one}.{part}" for one in _modules() for part in _defined(one)]
        meant = nearest(name, known, cutoff=0.0)
        raise UserError(f"{key} ({name}) is not a part of ddp_runner; did you mean {meant}?")
    raise UserError(
        f"{key} ({name}) is not a part that a config may name; these are the parts in "
        f"{', '.join(OWN)}, and the classes of {', '.join(TORCH)}; if you trust it, add "
        f"{_allowing(name)}"
    )


def is_allowed(name: str, allowed: Collection[str]) -> bool:
    """Return whether a name is an allowed package or module, or is inside one."""
    return any(f"{name}.".startswith(f"{one.rstrip('.')}.") for one in allowed)


def target_names(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each dotted key of a nested config that names something to import, with the name."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            if key == "_target_" or f"{prefix}{key}" == "model.loss":
                yield f"{prefix}{key}", value
            else:
                yield from target_names(value, f"{prefix}{key}.")
    elif isinstance(tree, list):
        for index, value in enumerate(tree):
            yield from target_names(value, f"{prefix}{index}.")


def values(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys of a nested config and their values, each item of a list by itself."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from values(value, f"{prefix}{key}.")
    elif isinstance(tree, list):
        for index, value in enumerate(tree):
            yield from values(value, f"{prefix}{index}.")
    else:
        yield prefix.removesuffix("."), tree


def _is_dotted(name: str) -> bool:
    first, *others = name.split(".")
    parts = [first, *others]
    return bool(others) and all(one.isidentifier() and one[:2] != "__" for one in parts)


def _holds_parts(module: str) -> bool:
    return any(f"{module}.".startswith(f"{one}.") for one in OWN)


def _modules() -> list[str]:
    """Return the modules of this package that a config may name parts of."""
    paths = (path.relative_to(PACKAGE.parent).with_suffix("") for path in PACKAGE.rglob("*.py"))
    names = (".".join(path.parts) for path in sorted(paths))
    return [name.removesuffix(".__init__") for name in names if _holds_parts(name)]


@cache
def _defined(module: str) -> frozenset[str]:
    """Return the public parts that a module of this package defines itself."""
    path = PACKAGE.parent.joinpath(*module.split("."))
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not source.is_file():
        return frozenset()
    kinds = next(kinds for one, kinds in OWN.items() if f"{module}.".startswith(f"{one}."))
    return frozenset(
        node.name
        for node in ast.parse(source.read_bytes()).body
        if isinstance(node, ast.ClassDef | ast.FunctionDef)
        and isinstance(node, kinds)
        and not node.name.startswith("_")
    )


def _nearest_losses(name: object) -> str:
    """Return our loss that a name such as CrossEntropyLoss means, else all of our losses."""
    known = {one.replace("_", ""): f"{LOSSES}.{one}" for one in sorted(_defined(LOSSES))}
    word = str(name).rpartition(".")[2].replace("_", "").lower().removesuffix("loss")
    meant = nearest(word, known)
    return known[meant] if meant else " or ".join(known.values())


def _allowing(name: str) -> str:
    return f"allowed_targets=[{name if _is_builtin(name) else name.partition('.')[0]}]"


def _is_builtin(name: str) -> bool:
    return name.partition(".")[0] in ("ddp_runner", "torch")
