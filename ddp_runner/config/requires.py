"""The packages, files and folders that a config needs on this machine. Torch-free.

A YAML lists them in its block ``requires``, which the constructor does not get::

    requires:
      packages: [datasets]
      files: [path] # keys that hold a file, or a list of files, under data_root
      folders: [folder] # keys that hold a folder; it may be missing if the dataset downloads it
      streaming=true: [torchdata] # packages needed while a key has this value
"""

import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ddp_runner.config.fields import plain, walk
from ddp_runner.config.identity import leaves
from ddp_runner.config.schema import LIST_GROUPS, RUNNER_KEYS, Config
from ddp_runner.config.sections import SAMPLE
from ddp_runner.config.targets import foreign_targets, package_of
from ddp_runner.errors import UserError, in_yaml

LISTS = ("packages", "files", "folders")  # the words of a block, beside KEY=VALUE
# The extra of ddp-runner that installs a package: see pyproject.toml.
EXTRAS = {
    **{"transformers": "text", "tokenizers": "text", "datasets": "hf", "torchdata": "streams"},
    **{"torchmetrics": "metrics", "mlflow": "mlflow", "wandb": "wandb"},
    **{"pyarrow": "parquet", "onnxscript": "onnx"},
}


def validate_requires(config: Config) -> None:
    """Reject a config that needs a missing package, file or folder."""
    for key in filter(lambda key: key.rule.packages, walk(config)):
        for choice in key.value if isinstance(key.value, list) else [key.value]:
            if choice in key.rule.packages:
                shown = f"[{choice}]" if isinstance(key.value, list) else choice
                _validate_package(f"{key.name}={shown}", key.rule.packages[choice])
    for owner, label, keys in _options(config):
        _validate_block(owner, label, keys, Path(config.data_root))
    # Without allowed_targets a config names no foreign code.
    for name, target in foreign_targets(plain(config) if config.allowed_targets else {}).items():
        _validate_package(f"{name} ({target})", package_of(target))


def _options(config: Config) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yield each chosen option: its dotted key, its name in a message, and its keys."""
    for group in RUNNER_KEYS:
        if group != "dataset" or config.task != SAMPLE:  # sampling reads no dataset
            keys = getattr(config, group)
            yield group, f"{group}={keys.get('name')}", keys
    for group in LIST_GROUPS:
        for name, keys in getattr(config, group).items():
            yield f"{group}.{name}", f"{group}=[{name}]", keys


def _validate_block(owner: str, label: str, keys: Mapping[str, Any], root: Path) -> None:
    block = keys.get("requires", {})
    is_of_lists = isinstance(block, Mapping) and all(isinstance(x, list) for x in block.values())
    if not (is_of_lists and all(str(x).isidentifier() for names in block.values() for x in names)):
        raise UserError(
            f"{owner}.requires ({in_yaml(block)}) must be a mapping with lists of names: packages: "
            "[PACKAGE], files: [KEY], folders: [KEY] and KEY=VALUE: [PACKAGE]"
        )
    for word in block:
        name, is_choice, _ = word.partition("=")
        if word not in LISTS and not (is_choice and name in keys):
            raise UserError(
                f"{owner}.requires.{word} must be one of {', '.join(LISTS)}, or KEY=VALUE with a "
                "KEY beside requires"
            )
    for package in block.get("packages", ()):
        _validate_package(label, package)
    for name in block.get("files", ()):
        value = keys.get(name)
        for path in value if isinstance(value, list) else [value]:
            if path is not None and not (root / str(path)).is_file():
                raise UserError(
                    f"{owner}.{name} ({path}): there is no file {(root / str(path)).absolute()}",
                    "give a path under data_root, or an absolute path",
                )
    downloads = any(
        key.rpartition(".")[2] == "download" and value is True for key, value in leaves(keys)
    )
    for name in block.get("folders", ()):
        path = keys.get(name)
        if path is not None and not (downloads or (root / str(path)).exists()):
            raise UserError(
                f"{owner}.{name} ({path}): there is no folder {(root / str(path)).absolute()}",
                "give a folder under data_root",
            )
    for name, value in keys.items():
        for package in block.get(f"{name}={in_yaml(value)}", ()):
            _validate_package(f"{owner}.{name}={in_yaml(value)}", package)


def _validate_package(label: str, package: str) -> None:
    # find_spec raises a ValueError for __main__.
    spec = None if package == "__main__" else importlib.util.find_spec(package)
    extra = EXTRAS.get(package)
    # A plain folder of that name, such as W&B's ./wandb, has a spec without a file.
    if spec is None or (extra and spec.origin is None):
        # The command installs only our own extras: the config may come with somebody else's run.
        own = "install it, if you trust it, or start in the folder that holds it"
        fix = f"pip install 'ddp-runner[{extra}]'" if extra else own
        raise UserError(f"{label} needs {package}, which is not installed", fix)
