"""What a config needs on this machine before anything starts: packages, files, folders. Torch-free.

A YAML says so in its block ``requires``, which no constructor gets::

    requires:
      packages: {datasets: hf} # with the extra of ddp-runner that brings it; null: none does
      files: [path] # keys that hold a file, or a list of files, under data_root
      folders: [folder] # likewise folders; one that the dataset downloads need not exist yet
      when: # blocks that hold for one value of a key
        - {if: {streaming: true}, packages: {torchdata: streams}}
"""

import importlib.util
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ddp_runner.config.fields import walk
from ddp_runner.config.identity import leaves
from ddp_runner.config.schema import LIST_GROUPS, RUNNER_KEYS, Config
from ddp_runner.config.sections import SAMPLE
from ddp_runner.config.targets import foreign_targets, package_of
from ddp_runner.errors import UserError, in_yaml

EXTRAS = {"torchmetrics": "metrics"}  # of packages that any config may name, if it is allowed
NAME = re.compile(r"[A-Za-z]\w*", re.ASCII)  # it is printed in a command to copy


def validate_requires(config: Config) -> None:
    """Reject a config that needs a missing package, file or folder.

    Raises:
        UserError: something is missing; the message says what to write or install.
    """
    for key in filter(lambda key: key.rule.packages, walk(config)):
        for choice in key.value if isinstance(key.value, list) else [key.value]:
            if choice in key.rule.packages:
                shown = f"[{choice}]" if isinstance(key.value, list) else choice
                _validate_package(f"{key.name}={shown}", *key.rule.packages[choice])
    root = Path(config.data_root)
    for owner, label, keys in _options(config):
        _validate_block(owner, label, keys, keys.get("requires", {}), root)
    # A config that may name no other code names none.
    for name, target in foreign_targets(asdict(config) if config.allowed_targets else {}).items():
        package = package_of(target)
        if (extra := EXTRAS.get(package)) is not None:
            _validate_package(f"{name.removesuffix('._target_')} ({target})", package, extra)
        elif importlib.util.find_spec(package) is None:
            raise UserError(
                f"{name} ({target}) cannot be imported: there is no package {package}; install it, "
                "or start in the folder that holds it"
            )


def _options(config: Config) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yield each option of the groups: its key, its name in a message, and its keys."""
    for group in RUNNER_KEYS:
        if not (group == "dataset" and config.task == SAMPLE):  # which needs the run's folder alone
            keys = getattr(config, group)
            yield group, f"{group}={keys.get('name')}", keys
    for group in LIST_GROUPS:
        for name, keys in getattr(config, group).items():
            yield f"{group}.{name}", f"{group}=[{name}]", keys


def _validate_block(
    owner: str, label: str, keys: Mapping[str, Any], block: Any, root: Path
) -> None:
    if not _is_block(block):
        raise UserError(
            f"{owner}.requires ({in_yaml(block)}) must be a mapping of packages: {{NAME: EXTRA}}, "
            "files: [KEY], folders: [KEY] and when: [{if: {KEY: VALUE}, packages: ...}]"
        )
    for package, extra in block.get("packages", {}).items():
        _validate_package(label, package, extra)
    for name in block.get("files", ()):
        value = keys.get(name)
        for path in value if isinstance(value, list) else [value]:
            if path is not None and not (root / str(path)).is_file():
                raise UserError(
                    f"{owner}.{name} ({path}): there is no file {(root / str(path)).absolute()}; "
                    "give a path under data_root, or an absolute one"
                )
    for name in block.get("folders", ()):
        path = keys.get(name)
        if path is not None and not ((root / str(path)).exists() or _downloads(keys)):
            raise UserError(
                f"{owner}.{name} ({path}): there is no folder {(root / str(path)).absolute()}; "
                "give one under data_root"
            )
    for inner in block.get("when", ()):
        for name, value in inner["if"].items():
            if keys.get(name) == value:
                _validate_block(owner, f"{owner}.{name}={in_yaml(value)}", keys, inner, root)


def _downloads(keys: Mapping[str, Any]) -> bool:
    found = (value for key, value in leaves(keys) if key.rpartition(".")[2] == "download")
    return any(value is True for value in found)


def _is_block(block: Any) -> bool:
    """Return whether a value is a block as the head of this file shows it."""
    if not isinstance(block, Mapping):
        return False
    packages, when = block.get("packages", {}), block.get("when", [])
    lists = [block.get("files", []), block.get("folders", []), when]
    return (
        {*block} <= {"packages", "files", "folders", "when", "if"}
        and isinstance(packages, Mapping)
        and all(NAME.fullmatch(f"{name}{extra or ''}") for name, extra in packages.items())
        and all(isinstance(one, list) for one in lists)
        and all(isinstance(one, str) for names in lists[:2] for one in names)
        and all(_is_block(one) and isinstance(one.get("if"), Mapping) for one in when)
    )


def _validate_package(label: str, package: str, extra: str | None) -> None:
    spec = importlib.util.find_spec(package)
    # A folder of that name, as W&B leaves one, is found as a package without a file.
    if spec is None or spec.origin is None:
        # A command to copy names our own extras alone: the block may come with somebody's run.
        fix = f"pip install 'ddp-runner[{extra}]'" if extra else "install it, if you trust it"
        raise UserError(f"{label} needs {package}, which is not installed; {fix}")
