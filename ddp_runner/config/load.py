"""Reads a composed or a frozen config: the schema's object, overrides and secrets. Torch-free."""

import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, fields, is_dataclass
from functools import cache, reduce
from io import StringIO
from operator import getitem
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.resolvers import oc

from ddp_runner.config.fields import walk
from ddp_runner.config.identity import dotted_keys
from ddp_runner.config.schema import RUNNER_KEYS, Config
from ddp_runner.config.secrets import KeyPath, Secrets, replaced, walk_texts
from ddp_runner.errors import UserError, any_error, nearest, os_errors
from ddp_runner.files import is_missing, yaml_text

MIN_SECRET_LENGTH = 4  # shorter values are common words or numbers: not hidden in messages


def to_config(raw: DictConfig) -> Config:
    """Return a composed config as the schema's object, its interpolations resolved.

    Raises:
        UserError: a key is not in the schema, or a list of texts holds another value.
    """
    for group in RUNNER_KEYS:
        keys = raw.get(group)
        if OmegaConf.is_dict(keys) and group in keys and "_target_" not in keys:
            fix = "begin its YAML with the line # @package _global_"
            raise UserError(f"{group}.{group} has the keys of {group}", fix)
    if not is_typed(raw, Config):
        raw = cast(DictConfig, OmegaConf.merge(_schema(), raw))
    config = OmegaConf.to_object(raw)
    assert isinstance(config, Config)
    _validate_texts(config)
    return config


def changed_config(config: Config, raw: DictConfig, paths: Iterable[KeyPath]) -> Config:
    """Return ``to_config(raw)``, if `config` is that of `raw` before the values at `paths` changed.

    All values that an interpolation can change must be among them.

    Raises:
        OmegaConfBaseException: an interpolation fails, or a value is missing.
    """
    for path in paths:
        config = replaced(config, path, _value_at(raw, path))
    _validate_texts(config)
    return config


def _value_at(raw: DictConfig, path: KeyPath) -> Any:
    """Return a resolved value as ``to_config`` does."""
    value = reduce(getitem, path, cast(Any, raw))
    return OmegaConf.to_object(value) if OmegaConf.is_config(value) else value


def is_typed(node: DictConfig, kind: type[Any], prefix: str = "") -> bool:
    """Return whether a node and its sections have exactly the keys of their classes.

    Hydra composes such nodes unless the command adds a key. Merging them into the schema again
    would take ten times as long as the rest of ``to_config``.

    Raises:
        UserError: a key is not in the schema; OmegaConf would silently drop it inside a section.
    """
    types: dict[str, Any] = {item.name: item.type for item in fields(kind)}
    is_exact = OmegaConf.get_type(node) is kind and set(node) == types.keys()
    for key in map(str, node):
        if key not in types:
            hint = f"see --help for all keys, and put your own under user, as in user.{key}"
            if match := nearest(key, types):
                hint = f"did you mean {prefix}{match}?"
            raise UserError(f"{prefix}{key} is not a key of the config", hint)
        if not is_dataclass(types[key]):
            continue
        if OmegaConf.is_interpolation(node, key):
            raise UserError(
                f"{prefix}{key} is a section, and an interpolation cannot replace all its keys",
                "write an interpolation for each key",
            )
        is_section = OmegaConf.is_dict(node[key])
        is_exact &= is_section and is_typed(node[key], types[key], f"{prefix}{key}.")
    return is_exact


def _validate_texts(config: Config) -> None:
    """Reject lists and mappings in a list of texts: OmegaConf accepts them."""
    for key in walk(config):
        texts = key.value if key.kind in (list[str], list[str] | None) else None
        for index, text in enumerate(texts or ()):
            if not isinstance(text, str):
                shown = str(text).replace("'", "")
                raise UserError(
                    f"{key.name}[{index}] ({shown}) must be a text", f"write {key.name}=[ONE,OTHER]"
                )


def frozen_config(path: Path) -> DictConfig:
    """Return the frozen config of a run; values of oc.env stay unresolved.

    Raises:
        UserError: the file is damaged, or cannot be read.
    """
    rule, fix = f"{path} is damaged or of another version", "restore it, or start a new run"
    with any_error(rule, fix):
        with os_errors(f"{path} cannot be read", fix="name the folder of a run that you may read"):
            text = yaml_text(path).strip()
        if text.startswith("---") and not text.endswith("..."):
            raise ValueError("it is cut off")
        frozen = cast(DictConfig, OmegaConf.merge(_schema(), OmegaConf.load(StringIO(text))))
        plain: Any = OmegaConf.to_container(frozen)
        for group, keys in asdict(Config()).items():
            if isinstance(keys, dict) and not isinstance(plain[group], dict):
                raise ValueError(f"{group} is not a mapping")
        for group in RUNNER_KEYS:
            if "_target_" not in plain[group]:
                raise ValueError(f"it ends before {group}")
    return frozen


def forced_override(override: str, paths: Iterable[Path], *, chosen: Collection[str]) -> str:
    """Return an override with ++ if all these frozen configs have its key: the YAMLs may not."""
    key = override.partition("=")[0]
    if "." not in key or key.partition(".")[0] not in {"loop", "metrics", *RUNNER_KEYS} - {*chosen}:
        return override
    for path in paths:
        # with_resumed reports a missing file.
        if is_missing(path) or key not in dotted_keys(OmegaConf.to_container(frozen_config(path))):
            return override
    return f"++{override}"


@cache
def _schema() -> DictConfig:
    """Return the schema for OmegaConf.merge, which copies it."""
    return cast(DictConfig, OmegaConf.structured(Config))


def chosen_keys(overrides: Sequence[str]) -> list[str]:
    """Return the keys of the overrides."""
    return [override.partition("=")[0].lstrip("+~") for override in overrides]


def interpolations(raw: DictConfig) -> dict[KeyPath, str]:
    """Return the texts of a composed config that hold an interpolation, by their paths."""
    texts = walk_texts(OmegaConf.to_container(raw, resolve=False))
    return {path: text for path, text in texts if "${" in text}


def find_secrets(raw: DictConfig, unresolved: Mapping[KeyPath, str] | None = None) -> Secrets:
    """Return the values that a composed config reads from the environment.

    ``oc.env`` is watched while each interpolation is resolved: a value may come through other keys,
    in a longer text, in a list, or through other resolvers. `unresolved`: see ``interpolations``.
    """
    unresolved = interpolations(raw) if unresolved is None else unresolved
    if not any("oc.env" in text for text in unresolved.values()):
        return Secrets()
    read, from_environ, written = list[str](), dict[str, str](), dict[KeyPath, str]()

    def watched(name: str, *default: Any) -> str | None:
        read.append(name)
        value = os.environ.get(name, "")
        if len(value) >= MIN_SECRET_LENGTH and not re.fullmatch(r"[\d.eE+-]+", value):
            from_environ[value] = f"${{oc.env:{name}}}"
        return oc.env(name, *default)

    OmegaConf.register_new_resolver("oc.env", watched, replace=True)
    try:
        for path, text in unresolved.items():
            read.clear()
            with suppress(Exception):  # to_config reports a failed interpolation
                _value_at(raw, path)
            if read:
                written[path] = text
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)
    longest_first = sorted(from_environ, key=len, reverse=True)
    return Secrets(written, {value: from_environ[value] for value in longest_first})
