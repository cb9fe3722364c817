"""The names of classes and functions that a config may import. Torch-free.

The launcher validates the names as text before anything starts. A rank does so again before it
imports them, and ``instantiate`` then validates the imported object.
"""

import ast
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from typing import Any

from omegaconf import DictConfig, OmegaConf

from ddp_runner.config.fields import plain
from ddp_runner.config.identity import is_inside, leaves
from ddp_runner.config.schema import PACKAGE, Config, has_own_loop
from ddp_runner.errors import UserError, nearest

# The modules of this package that a config may name, and the kinds of definitions in each.
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
# The modules of torch and torchvision that a config may name, and the base class of the allowed
# classes. They take no command, no file to read and no name to import. Other modules load files
# (torch.load, torch.hub), run commands (torch.utils) or compile code.
TORCH: Mapping[str, str] = {
    "torch.nn": "Module",
    "torch.optim": "Optimizer",
    "torch.optim.lr_scheduler": "LRScheduler",
    "torchvision.transforms.v2": "Transform",
}
# The torchvision datasets of our YAMLs. They read pictures, plain data, or tensors without code,
# and unpickle only files with the published MD5.
DATASETS = ("MNIST", "FashionMNIST", "CIFAR10", "CIFAR100", "ImageFolder")
FUNCTIONS = ("model.loss", "train.step")  # keys that may hold a dotted name as a plain value
LOSSES, TORCH_LOSSES = "ddp_runner.train.losses", "torch.nn.functional"
TORCH_LOSS_NAMES = (
    "binary_cross_entropy", "binary_cross_entropy_with_logits", "cross_entropy", "huber_loss",
    "kl_div", "l1_loss", "mse_loss", "multi_margin_loss", "multilabel_margin_loss", "nll_loss",
    "multilabel_soft_margin_loss", "poisson_nll_loss", "smooth_l1_loss", "soft_margin_loss",
)  # fmt: skip


def validate_targets(config: Config) -> None:
    """Reject a config that names code outside the allowed modules: an import can run anything."""
    tree = plain(config)
    for key, value in leaves(tree):
        if isinstance(value, str | list) and "${" in str(value):
            # A resumed run would resolve it from the frozen config.
            raise UserError(
                f"{key} still holds an interpolation (${{) after the config was resolved",
                "write it without a backslash before the $, or leave it out",
            )
    names = list(_code_names(tree))
    needed = [package_of(name) for _, name in names if _is_foreign(name)]
    for key, name in names:
        validate_name(name, key=key, allowed=config.allowed_targets, needed=needed)


def given_targets(given: DictConfig) -> list[str]:
    """Return the names of foreign code in the config that this command composes.

    They come from the user's own words and YAMLs, so they are allowed. Names in a resumed run's
    config are not among them: see ``allowed_targets``.
    """
    tree: Any = OmegaConf.to_container(given, resolve=False)
    names = dict[str, None]()
    for key, text in _code_names(tree):
        name = str(text)
        if "${" in name:  # a failing interpolation is reported when the config is resolved
            name = str(OmegaConf.select(given, key, throw_on_resolution_failure=False))
        is_of_torch = name.startswith("torch.") and key not in (*FUNCTIONS, "task")
        if _is_foreign(name) or (is_of_torch and name.rpartition(".")[0] not in TORCH):
            names[name] = None
    return list(names)


def given_packages(given: DictConfig) -> list[str]:
    """Return the value of ``allowed_targets`` that a command needs to resume this run."""
    if not given.allowed_targets:
        return []  # with_resumed has added the names of this command to it
    own = given_targets(given)
    packages = [name for name in given.allowed_targets if name not in own]
    packages += [
        package_of(name) if _is_foreign(name) else name
        for name in own
        if not is_inside(name, packages)
    ]
    return list(dict.fromkeys(packages))


def foreign_targets(tree: Mapping[str, Any]) -> dict[str, str]:
    """Return the keys of a config that name code outside this package and torch, with the names."""
    return {key: str(name) for key, name in _code_names(tree) if _is_foreign(name)}


def _code_names(tree: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
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

    The key ``model.loss`` may name only loss functions, and ``task`` only the user's own code. In
    the `allowed` packages, the user's own, any name is accepted. The fix in the message replaces
    `allowed`, so it lists these and the `needed` packages.
    """
    is_loss, parts = key == "model.loss", str(name).split(".")
    if len(parts) == 1 or not all(part.isidentifier() and part[:2] != "__" for part in parts):
        example = "train.step.supervised" if key == "train.step" else "models.convnet.ConvNet"
        fix = _nearest_losses(name) if is_loss else f"a name such as ddp_runner.{example}"
        fix = "PACKAGE.MODULE.FUNCTION" if key == "task" else fix
        raise UserError(f"{key} ({name}) is not a dotted name", f"write {fix}")
    if is_inside(name, allowed):
        return
    module, _, last = name.rpartition(".")
    is_foreign = _is_foreign(name)
    new = dict.fromkeys([parts[0] if is_foreign else name, *needed])
    kept = [package for package in allowed if not is_inside(package, new)]
    fix = f"add allowed_targets=[{','.join(dict.fromkeys([*kept, *new]))}]"
    if key == "task":
        raise UserError(
            f"task ({name}) is not a task of ddp_runner", f"if it is a function of your own, {fix}"
        )
    if is_loss:
        is_ours = module == LOSSES and last in _defined(module)
        if is_ours or (module == TORCH_LOSSES and last in TORCH_LOSS_NAMES):
            return
        raise UserError(
            f"{key} ({name}) is not a loss function that a config may name",
            f"write {_nearest_losses(name)}{f'; if it is your own, {fix}' if is_foreign else ''}",
        )
    if module in TORCH and not last.startswith("_"):
        return
    if module == "torchvision.datasets" and last in DATASETS:
        return
    if not is_inside(module, OWN):
        raise UserError(
            f"{key} ({name}) is not a part that a config may name: it is not on the list in "
            "SECURITY.md, and this command did not name it",
            f"if you trust it, {fix}",
        )
    if last not in _defined(module):
        match = nearest(name, _parts(), cutoff=0.0)
        raise UserError(f"{key} ({name}) is not a part of ddp_runner", f"did you mean {match}?")


def _parts() -> list[str]:
    """Return the dotted names of all parts of this package that a config may name."""
    paths = [path.relative_to(PACKAGE.parent).with_suffix("") for path in PACKAGE.rglob("*.py")]
    modules = [".".join(path.parts).removesuffix(".__init__") for path in paths]
    own = [module for module in modules if is_inside(module, OWN)]
    return [f"{module}.{part}" for module in own for part in _defined(module)]


@cache
def _defined(module: str) -> frozenset[str]:
    """Return the public parts that a module of this package defines."""
    path = PACKAGE.parent.joinpath(*module.split("."))
    source = path / "__init__.py"
    if not source.is_file():  # an update may leave the empty folder of a former package
        source = path.with_suffix(".py")
    if not source.is_file():
        return frozenset()
    kinds = next(kinds for package, kinds in OWN.items() if is_inside(module, [package]))
    nodes = [node for node in ast.parse(source.read_bytes()).body if isinstance(node, kinds)]
    return frozenset(node.name for node in nodes if not node.name.startswith("_"))


def _nearest_losses(name: object) -> str:
    """Return the loss of ours nearest to a name such as CrossEntropyLoss, else all of them."""
    losses = {loss.replace("_", ""): f"{LOSSES}.{loss}" for loss in sorted(_defined(LOSSES))}
    word = str(name).rpartition(".")[2].replace("_", "").lower().removesuffix("loss")
    match = nearest(word, losses)
    return losses[match] if match else " or ".join(losses.values())
