"""Which names a config may give the program to import. Torch-free.

The launcher validates the names as text before anything starts; for this package's own modules it
reads what their source defines. A rank does so again, and ``instantiate`` validates the object.
"""

import ast
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from functools import cache
from typing import Any

from omegaconf import DictConfig, OmegaConf

from ddp_runner.config.fields import plain
from ddp_runner.config.identity import is_inside, leaves
from ddp_runner.config.schema import PACKAGE, Config, has_own_loop
from ddp_runner.errors import UserError, nearest

# Modules of this package that a config may name parts of, and what a part is in each.
OWN: Mapping[str, tuple[type[ast.ClassDef | ast.FunctionDef], ...]] = {
    "ddp_runner.models": (ast.ClassDef, ast.FunctionDef),
    "ddp_runner.data.sources": (ast.ClassDef,),
    "ddp_runner.data.pictures": (ast.ClassDef, ast.FunctionDef),
    "ddp_runner.parallelism": (ast.ClassDef,),
    "ddp_runner.train.schedules": (ast.FunctionDef,),
    "ddp_runner.train.losses": (ast.FunctionDef,),
    "ddp_runner.train.step": (ast.FunctionDef,),
    "ddp_runner.metrics": (ast.ClassDef,),
    "ddp_runner.tracking.trackers.mlflow": (ast.ClassDef,),
    "ddp_runner.tracking.trackers.wandb": (ast.ClassDef,),
}
# Of torch and torchvision only these modules, and in each only the subclasses of one class of it:
# none takes a command, a file to read, or the name of a thing to import. Other modules load files
# (torch.load, torch.hub), run commands (torch.utils) or compile code.
TORCH: Mapping[str, str] = {
    "torch.nn": "Module",
    "torch.optim": "Optimizer",
    "torch.optim.lr_scheduler": "LRScheduler",
    "torchvision.transforms.v2": "Transform",
}
# Of torchvision's datasets those of our YAMLs. They read pictures, plain data, or tensors without
# code, and unpickle only what has the published MD5.
DATASETS = ("MNIST", "FashionMNIST", "CIFAR10", "CIFAR100", "ImageFolder")
FUNCTIONS = ("model.loss", "train.step")  # keys whose plain value is such a name, too
LOSSES, TORCH_LOSSES = "ddp_runner.train.losses", "torch.nn.functional"
TORCH_LOSS_NAMES = (
    "binary_cross_entropy", "binary_cross_entropy_with_logits", "cross_entropy", "huber_loss",
    "kl_div", "l1_loss", "mse_loss", "multi_margin_loss", "multilabel_margin_loss", "nll_loss",
    "multilabel_soft_margin_loss", "poisson_nll_loss", "smooth_l1_loss", "soft_margin_loss",
)  # fmt: skip


def validate_targets(config: Config) -> None:
    """Reject a config that names something it may not: importing it could run any code.

    Raises:
        UserError: a name is not allowed or does not exist, or a text would be resolved again.
    """
    tree = plain(config)
    for key, value in leaves(tree):
        if isinstance(value, str | list) and "${" in str(value):
            # Written to the run's config, it would be resolved when the run is resumed.
            raise UserError(
                f"{key} still holds an interpolation (${{) after the config was resolved; write it "
                "without a backslash before the $, or leave it out"
            )
    named = list(_named(tree))
    needed = [package_of(name) for _, name in named if _is_foreign(name)]
    for key, name in named:
        validate_name(name, key=key, allowed=config.allowed_targets, needed=needed)


def given_targets(given: DictConfig) -> list[str]:
    """Return the names of foreign code that this command itself gives: its words and its YAMLs.

    They are the user's own, who may run anything. A config that comes with a run is not among
    them: see ``allowed_targets``.
    """
    tree: Any = OmegaConf.to_container(given, resolve=False)
    found = dict[str, None]()
    for key, written in _named(tree):
        with suppress(Exception):  # an interpolation; whatever is wrong with it is reported later
            name = str(OmegaConf.select(given, key) if "${" in str(written) else written)
            is_of_torch = name.startswith("torch.") and key not in (*FUNCTIONS, "task")
            if _is_foreign(name) or (is_of_torch and name.rpartition(".")[0] not in TORCH):
                found[name] = None
    return list(found)


def given_packages(given: DictConfig) -> list[str]:
    """Return what to write as ``allowed_targets`` where only a run's own config has these names."""
    if not given.allowed_targets:
        return []  # ``with_resumed`` has put into it what this command names
    own = given_targets(given)
    packages = [one for one in given.allowed_targets if one not in own]
    packages += [
        package_of(one) if _is_foreign(one) else one for one in own if not is_inside(one, packages)
    ]
    return list(dict.fromkeys(packages))


def foreign_targets(tree: Mapping[str, Any]) -> dict[str, str]:
    """Return the keys of a config that name code of neither this package nor torch, with it."""
    return {key: str(name) for key, name in _named(tree) if _is_foreign(name)}


def _named(tree: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the keys of a config that name code, with the names."""
    for key, value in leaves(tree):
        is_function = key in FUNCTIONS and value is not None
        if "_target_" in key.split(".") or is_function or (key == "task" and has_own_loop(value)):
            yield key, value


def _is_foreign(name: Any) -> bool:
    return "." in str(name) and package_of(name) not in ("ddp_runner", "torch")


def package_of(name: Any) -> str:
    """Return the first word of a dotted name."""
    return str(name).partition(".")[0]


def validate_name(
    name: Any, *, key: str, allowed: Collection[str], needed: Collection[str] = ()
) -> None:
    """Reject a dotted name that a config may not use.

    The key ``model.loss`` may name loss functions only, and ``task`` no part of ours or torch. In
    the packages of `allowed`, the user's own that this command gives, any name is accepted. The
    message lists these and the `needed` packages, which replace them on the command line.

    Raises:
        UserError: it is not allowed, or it is ours and does not exist.
    """
    is_loss, parts = key == "model.loss", str(name).split(".")
    if len(parts) == 1 or not all(one.isidentifier() and one[:2] != "__" for one in parts):
        example = "train.step.supervised" if key == "train.step" else "models.convnet.ConvNet"
        fix = _nearest_losses(name) if is_loss else f"one such as ddp_runner.{example}"
        fix = "PACKAGE.MODULE.FUNCTION" if key == "task" else fix
        raise UserError(f"{key} ({name}) is not a dotted name; write {fix}")
    if is_inside(name, allowed):
        return
    module, _, last = name.rpartition(".")
    is_foreign = _is_foreign(name)
    wanted = dict.fromkeys([parts[0] if is_foreign else name, *needed])
    wanted = dict.fromkeys([*(one for one in allowed if not is_inside(one, wanted)), *wanted])
    fix = f"add allowed_targets=[{','.join(wanted)}]"
    if key == "task":
        raise UserError(
            f"task ({name}) is no task of ddp_runner; if it is a function of your own, {fix}"
        )
    if is_loss:
        if (module == LOSSES and last in _defined(module)) or (
            module == TORCH_LOSSES and last in TORCH_LOSS_NAMES
        ):
            return
        raise UserError(
            f"{key} ({name}) is not a loss function that a config may name; write "
            f"{_nearest_losses(name)}{f'; if it is your own, {fix}' if is_foreign else ''}"
        )
    if module in TORCH and not last.startswith("_"):
        return
    if module == "torchvision.datasets" and last in DATASETS:
        return
    if not is_inside(module, OWN):
        raise UserError(
            f"{key} ({name}) is not a part that a config may name: this command does not name it, "
            f"and SECURITY.md does not list it; if you trust it, {fix}"
        )
    if last not in _defined(module):
        meant = nearest(name, _parts(), cutoff=0.0)
        raise UserError(f"{key} ({name}) is not a part of ddp_runner; did you mean {meant}?")


def _parts() -> list[str]:
    """Return the dotted names of all parts of this package."""
    paths = [path.relative_to(PACKAGE.parent).with_suffix("") for path in PACKAGE.rglob("*.py")]
    modules = [".".join(path.parts).removesuffix(".__init__") for path in paths]
    return [f"{one}.{part}" for one in modules if is_inside(one, OWN) for part in _defined(one)]


@cache
def _defined(module: str) -> frozenset[str]:
    """Return the public parts that a module of this package defines itself."""
    path = PACKAGE.parent.joinpath(*module.split("."))
    source = path / "__init__.py"
    if not source.is_file():  # an update may leave the folder of a former package
        source = path.with_suffix(".py")
    if not source.is_file():
        return frozenset()
    kinds = next(kinds for package, kinds in OWN.items() if is_inside(module, [package]))
    nodes = [node for node in ast.parse(source.read_bytes()).body if isinstance(node, kinds)]
    return frozenset(node.name for node in nodes if not node.name.startswith("_"))


def _nearest_losses(name: object) -> str:
    """Return our loss that a name such as CrossEntropyLoss means, else all of our losses."""
    known = {one.replace("_", ""): f"{LOSSES}.{one}" for one in sorted(_defined(LOSSES))}
    word = str(name).rpartition(".")[2].replace("_", "").lower().removesuffix("loss")
    meant = nearest(word, known)
    return known[meant] if meant else " or ".join(known.values())
