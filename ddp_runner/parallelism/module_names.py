"""Finds modules of a model by patterns of their dotted names."""

import difflib
from collections.abc import Iterable
from fnmatch import fnmatchcase

from torch import nn

from ddp_runner.errors import UserError


def matched(module: nn.Module, pattern: str, *, key: str) -> dict[str, nn.Module]:
    """Return the modules whose names match, each part of the name by the shell's rules.

    ``blocks.*`` matches ``blocks.0`` and not ``blocks.0.mlp``.

    Raises:
        UserError: none matches; `key` is the config's key with the pattern.
    """
    parts = pattern.split(".")
    names = [name for name, _ in module.named_modules() if name]
    found = {
        name: module.get_submodule(name)
        for name in names
        if len(own := name.split(".")) == len(parts) and all(map(fnmatchcase, own, parts))
    }
    if not found:
        nearest = difflib.get_close_matches(pattern, names, cutoff=0.0)
        raise UserError(
            f"{key} ({pattern}) matches no module of the model; the nearest are "
            f"{', '.join(nearest) or 'none: it has no modules'}"
        )
    return found


def blocks_of(module: nn.Module, patterns: Iterable[str]) -> list[nn.Module]:
    """Return the modules that the patterns of ``model.blocks`` name, once each, inner ones first.

    Raises:
        UserError: a pattern matches none.
    """
    found = dict[str, nn.Module]()
    for pattern in patterns:
        found |= matched(module, pattern, key="model.blocks")
    return [found[name] for name in sorted(found, key=lambda name: -name.count("."))]
