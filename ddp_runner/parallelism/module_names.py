"""Finds modules of a model by patterns of their dotted names."""

import difflib
from collections.abc import Iterable
from fnmatch import fnmatchcase

from torch import nn

from ddp_runner.errors import UserError


def matched(module: nn.Module, pattern: str, *, key: str) -> dict[str, nn.Module]:
    """Return the modules with matching names: ``blocks.*`` matches ``blocks.0``, not its children.

    Raises:
        UserError: no module matches; `key` is the config's key with the pattern.
    """
    parts = pattern.split(".")
    names = [name for name, _ in module.named_modules() if name]
    matches = {
        name: module.get_submodule(name)
        for name in names
        if name.count(".") == pattern.count(".") and all(map(fnmatchcase, name.split("."), parts))
    }
    if not matches:
        nearest = difflib.get_close_matches(pattern, names, cutoff=0.0)
        raise UserError(
            f"{key} ({pattern}) matches no module of the model",
            f"the nearest are {', '.join(nearest) or 'none: it has no modules'}",
        )
    return matches


def blocks_of(module: nn.Module, patterns: Iterable[str]) -> list[nn.Module]:
    """Return the modules that the patterns of ``model.blocks`` match, inner modules first."""
    blocks = dict[str, nn.Module]()
    for pattern in patterns:
        blocks |= matched(module, pattern, key="model.blocks")
    return [blocks[name] for name in sorted(blocks, key=lambda name: -name.count("."))]
