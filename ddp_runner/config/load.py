"""Reads a composed config: as the schema's object, its overrides, and its secrets. Torch-free."""

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
from ddp_runner.config.schema import RUNNER_KEYS, Config
from ddp_runner.config.secrets import Place, Secrets, put, texts
from ddp_runner.errors import UserError, nearest, one_line, os_errors
from ddp_runner.files import yaml_text

LEAST_LENGTH = 4  # of a value that is hidden in sentences: shorter ones are words or numbers


def to_config(raw: DictConfig) -> Config:
    """Return a composed config as the schema's object, its interpolations resolved.

    Raises:
        UserError: a key is not in the schema, or a list of texts holds something else.
    """
    for group in RUNNER_KEYS:
        keys = raw.get(group)
        if OmegaConf.is_dict(keys) and group in keys and "_target_" not in keys:
            fix = "begin its YAML with the line # @package _global_"
            raise UserError(f"{group}.{group} has the keys of {group}; {fix}")
    if not _is_typed(raw, Config):
        _validate_known(raw, Config)
        merged = OmegaConf.merge(_schema(), raw)
        assert isinstance(merged, DictConfig)
        raw = merged
    config = OmegaConf.to_object(raw)
    assert isinstance(config, Config)
    _validate_texts(config)
    return config


def _validate_known(raw: DictConfig, kind: type[Any], prefix: str = "") -> None:
    """Reject a key that the schema lacks: below a section OmegaConf would drop it in silence."""
    known = {one.name: one.type for one in fields(kind)}
    for key in map(str, raw):
        if key not in known:
            hint = f"see --help for all keys, and put your own under user, as in user.{key}"
            if meant := nearest(key, known):
                hint = f"did you mean {prefix}{meant}?"
            raise UserError(f"{prefix}{key} is not a key of the config; {hint}")
        if is_dataclass(known[key]) and OmegaConf.is_interpolation(raw, key):
            raise UserError(
                f"{prefix}{key} has keys of its own, and an interpolation cannot stand for all of "
                "them; write one for each key"
            )
        if is_dataclass(known[key]) and OmegaConf.is_dict(raw[key]):
            _validate_known(raw[key], cast(type[Any], known[key]), f"{prefix}{key}.")


def _validate_texts(config: Config) -> None:
    for one in walk(config):  # OmegaConf lets lists and mappings into lists of texts
        texts = one.value if one.kind in (list[str], list[str] | None) else None
        for index, text in enumerate(texts or ()):
            if not isinstance(text, str):
                shown = str(text).replace("'", "")
                raise UserError(
                    f"{one.name}[{index}] ({shown}) must be a text; write {one.name}=[ONE,OTHER]"
                )


def with_values(config: Config, values: Mapping[Place, Any]) -> Config:
    """Set values of a config, in place; return it.

    Raises:
        UserError: a list of texts holds something else.
    """
    for place, value in values.items():
        put(config, place, value)
    if any(isinstance(value, list) for value in values.values()):
        _validate_texts(config)
    return config


def value_at(raw: DictConfig, place: Place) -> Any:
    """Return the value at a place of a composed config, its interpolations resolved.

    Raises:
        OmegaConfBaseException: they cannot be.
    """
    value = reduce(getitem, place, cast(Any, raw))
    return OmegaConf.to_object(value) if OmegaConf.is_config(value) else value


def _is_typed(node: Any, kind: type[Any]) -> bool:
    """Return whether a node has the keys of this class and no others, in its sections as well.

    What Hydra composes is, unless the command has added a key. To merge it into the schema once
    more takes ten times as long as all else.
    """
    if OmegaConf.get_type(node) is not kind or set(node) != {one.name for one in fields(kind)}:
        return False
    sections = [one for one in fields(kind) if is_dataclass(one.type)]
    return all(_is_typed(node[one.name], cast(type[Any], one.type)) for one in sections)


def frozen_config(path: Path) -> DictConfig:
    """Return the frozen config of a run; values of oc.env stay unresolved.

    Raises:
        UserError: the file is damaged, or cannot be read.
    """
    try:
        with os_errors(f"{path} cannot be read", fix="name the folder of a run that you may read"):
            text = yaml_text(path).strip()
        if text.startswith("---") and not text.endswith("..."):
            raise ValueError("it is cut off")
        frozen = OmegaConf.merge(_schema(), OmegaConf.load(StringIO(text)))
        assert isinstance(frozen, DictConfig)
        plain: Any = OmegaConf.to_container(frozen)
        for group, keys in asdict(Config()).items():
            if isinstance(keys, dict) and not isinstance(plain[group], dict):
                raise ValueError(f"{group} is not a mapping")
        lacking = [group for group in RUNNER_KEYS if "_target_" not in plain[group]]
        if lacking:
            raise ValueError(f"it ends before {lacking[0]}")
    except UserError:
        raise
    except Exception as error:  # PyYAML raises errors of any kind for odd tags
        reason = one_line(error)
        raise UserError(
            f"{path} is damaged or of another version ({reason}); restore it, or start a new run"
        ) from error
    return frozen


def forced(override: str, paths: Iterable[Path], *, chosen: Collection[str]) -> str:
    """Return an override with two plus signs if these frozen configs have its key: no YAML may."""
    key = override.partition("=")[0]
    if "." not in key or key.partition(".")[0] not in {"loop", "metrics", *RUNNER_KEYS} - {*chosen}:
        return override
    with suppress(UserError, LookupError, TypeError):  # with_resumed reports a damaged config
        for path in paths:
            held: Any = OmegaConf.to_container(frozen_config(path), resolve=False)
            reduce(getitem, key.split("."), held)
        return f"++{override}"
    return override


@cache
def _schema() -> DictConfig:
    """Return the schema as OmegaConf merges it: into a copy."""
    schema: DictConfig = OmegaConf.structured(Config)
    return schema


def as_written(overrides: Any) -> list[str]:
    """Return Hydra's overrides without resolving interpolations, which may be secrets."""
    written = OmegaConf.to_container(overrides, resolve=False)
    assert isinstance(written, list)
    return list(map(str, written))


def chosen_keys(overrides: Sequence[str]) -> list[str]:
    """Return the keys that the command line gives."""
    return [override.partition("=")[0].lstrip("+~") for override in overrides]


def interpolations(raw: DictConfig) -> dict[Place, str]:
    """Return the texts of a composed config that are to be resolved, and where they stand."""
    tree = OmegaConf.to_container(raw, resolve=False)
    return {place: text for place, text in texts(tree) if "${" in text}


def find_secrets(raw: DictConfig) -> Secrets:
    """Return the values that a composed config and its ``hydra`` node read from the environment."""
    found = interpolations(raw)
    reads = any("oc.env" in text for text in found.values())
    return resolved_texts(raw, found)[1] if reads else Secrets()


def resolved_texts(
    raw: DictConfig, unresolved: Mapping[Place, str]
) -> tuple[dict[Place, Any], Secrets]:
    """Return the values of a composed config's interpolations, and those from the environment.

    Each is resolved while ``oc.env`` is watched: a value may come through other keys, in a longer
    text, in a list, or through other resolvers. What cannot be resolved is left out.
    """
    read, from_environ, written = list[str](), dict[str, str](), dict[Place, str]()
    values = dict[Place, Any]()

    def watched(name: str, *default: Any) -> str | None:
        read.append(name)
        value = os.environ.get(name, "")
        if len(value) >= LEAST_LENGTH and not re.fullmatch(r"[\d.eE+-]+", value):
            from_environ[value] = f"${{oc.env:{name}}}"
        return oc.env(name, *default)

    OmegaConf.register_new_resolver("oc.env", watched, replace=True)
    try:
        for place, text in unresolved.items():
            read.clear()
            with suppress(Exception):  # it is reported when the config is resolved
                values[place] = value_at(raw, place)
            if read:
                written[place] = text
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)
    longest_first = sorted(from_environ, key=len, reverse=True)
    return values, Secrets(written, {value: from_environ[value] for value in longest_first})
