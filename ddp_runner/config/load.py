"""Turns a composed config into the schema's object."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from omegaconf import DictConfig, OmegaConf

from ddp_runner.config.schema import Config
from ddp_runner.errors import UserError


def to_config(raw: DictConfig) -> Config:
    """Return a composed config as the schema's object, its interpolations resolved.

    Raises:
        UserError: a key is not in the schema.
    """
    for key in map(str, raw):
        if key not in {field.name for field in fields(Config)}:
            raise UserError(f"{key} is not a key of the config; see --help for all keys")
    config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), raw))
    assert isinstance(config, Config)
    return config


def as_written(overrides: Any) -> list[str]:
    """Return Hydra's overrides without resolving interpolations, which may be secrets."""
    written = OmegaConf.to_container(overrides, resolve=False)
    assert isinstance(written, list)
    return list(map(str, written))


def chosen_keys(overrides: Sequence[str]) -> list[str]:
    """Return the keys that the command line gives."""
    return [override.partition("=")[0].lstrip("+~") for override in overrides]
