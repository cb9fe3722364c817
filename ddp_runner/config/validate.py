"""What each value of a config must be by itself: of its kind, in its range, known. Torch-free.

The rules of the schema's keys stand beside its fields; here are those of the groups, whose keys
come from YAMLs. What must hold between several keys is in ``rules``.
"""

import re
from collections.abc import Mapping
from dataclasses import fields
from functools import lru_cache
from typing import Any

import yaml

from ddp_runner.config.fields import KINDS, Rule, plain_kind, validate_kind, validate_value, walk
from ddp_runner.config.identity import leaves
from ddp_runner.config.schema import (
    CONFIG_DIR,
    GROUP_KEYS,
    LIST_GROUPS,
    RUNNER_KEYS,
    Config,
    ModeNeeds,
    mode_needs,
)
from ddp_runner.errors import UserError, in_yaml, nearest
from ddp_runner.metric_names import LISTED

ANYTHING = Rule()  # but a number that no library takes
OF_OPTIMIZER = re.compile(r"params\.groups\.\d+\.")  # its keys have the rules of the optimizer's
ANY_KIND = ("name", "requires", "needs", "loss", "reshard_after_forward")  # checked elsewhere


def validate_values(config: Config) -> None:
    """Reject a value that no run can use, whatever the other keys are.

    What the user wrote comes first: a mode's needs may follow from its other keys.

    Raises:
        UserError: a value is infinite, of another kind, out of its range, or an unknown word.
    """
    for group in RUNNER_KEYS:
        if not isinstance(getattr(config, group).get("_target_"), str):
            raise UserError(
                f"{group} has no _target_, the name of what is built; choose an option, as in "
                f"{group}=NAME: see --help"
            )
    for group in LIST_GROUPS:
        _validate_named(group, getattr(config, group))
    for key in walk(config):
        may_be_null = plain_kind(key.kind) is not key.kind
        if key.value is not None or not may_be_null:
            validate_value(key.name, key.value, key.rule)
    groups = {group: getattr(config, group) for group in (*RUNNER_KEYS, *LIST_GROUPS, "loop")}
    own = {key: value for key, value in groups["parallelism"].items() if key != "needs"}
    tree = groups | {"parallelism": own, "params": {"groups": config.params.groups}}
    for name, value in leaves(tree):
        rule = GROUP_KEYS.get(OF_OPTIMIZER.sub("optimizer.", name), ANYTHING)
        validate_value(name, value, rule)
    for group in RUNNER_KEYS:
        _validate_kinds(group, groups[group], _usual(group, groups[group]))
    validate_kind("dataset.shuffle", config.dataset.get("shuffle", True), bool)
    for name, keys in config.trackers.items():
        usual = yaml_values("trackers", str(name)).get(name, {})
        _validate_kinds(f"trackers.{name}", keys, {"wait_s": 10.0, **usual})
    _validate_needs(config.parallelism.get("needs", {}))


def _validate_needs(needs: Any) -> None:
    if not isinstance(needs, Mapping):
        raise _not_a_group("parallelism.needs", needs)
    known = {field.name: field for field in fields(ModeNeeds)}
    for name, value in needs.items():
        if name not in known:
            meant = nearest(str(name), known, cutoff=0.0)
            raise UserError(f"parallelism.needs.{name} does not exist; did you mean {meant}?")
        kind = plain_kind(known[name].type)
        if value is not None or kind is known[name].type:  # null: any, or all
            validate_kind(f"parallelism.needs.{name}", value, kind)
    for key in walk(mode_needs({"needs": needs}), "parallelism.needs."):
        validate_value(key.name, key.value, key.rule)


def _validate_kinds(key: str, value: Any, usual: Any) -> None:
    """Reject a value of another kind than its YAML has; a group's keys one by one."""
    if isinstance(usual, Mapping):
        if not isinstance(value, Mapping):
            raise _not_a_group(key, value)
        for name, default in usual.items():
            inner = value.get(name, default)
            # What an option inherits may be null for another that inherits the same.
            is_left_out = inner is None and (isinstance(default, Mapping) or "defaults" in usual)
            if name not in ANY_KIND and not is_left_out:
                _validate_kinds(f"{key}.{name}", inner, default)
        return
    kind = type(usual)
    if kind not in KINDS or str(usual).startswith(("${", "???")):
        return
    if kind is float and isinstance(value, list):
        return  # such as a number per channel: the target checks how many
    validate_kind(key, value, kind)
    if kind in (int, float) and usual >= 0 > value:
        raise UserError(f"{key} ({value}) must be 0 or greater")


def _not_a_group(key: str, value: Any) -> UserError:
    return UserError(f"{key} ({in_yaml(value)}) is a group of keys; write {key}.KEY=VALUE")


def _validate_named(group: str, options: Mapping[Any, Any]) -> None:
    """Reject an option of `metrics` or `trackers` without a name that keys can have, or a class."""
    word = group.removesuffix("s")
    for name, keys in options.items():
        if not re.fullmatch(r"[A-Za-z_]\w*", str(name), re.ASCII):
            raise UserError(
                f"{group}.{name}: the name of a {word} is letters, digits and _; write "
                f"{group}.{re.sub(r'[^A-Za-z0-9_]', '_', f'_{name}').strip('_') or 'mine'}"
            )
        if f"eval/{name}" in LISTED and group == "metrics":
            raise UserError(
                f"metrics.{name}: eval/{name} is a metric of every evaluation; give yours another "
                f"name, such as metrics.own_{name}"
            )
        if not isinstance(keys, Mapping) or not isinstance(keys.get("_target_"), str):
            raise UserError(
                f"{group}.{name} has no _target_, the class of the {word}; write {group}=[{name}] "
                f"for one that has a YAML, or +{group}.{name}._target_=my_package.Mine"
            )


def _usual(group: str, keys: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the keys of the YAML that a group's option has, or inherits in a user's YAML."""
    usual = yaml_values(group, str(keys.get("name")))
    if not usual and keys.keys() >= {"prepare", "shuffle_buffer"}:
        return {"defaults": [], **yaml_values("dataset", "torch_dataset")}
    return usual


@lru_cache
def yaml_values(group: str, option: str) -> Mapping[str, Any]:
    """Return the keys of an option's YAML; nothing for a user's option."""
    path = CONFIG_DIR / group / f"{option}.yaml"
    if not re.fullmatch(r"\w+", option) or not path.is_file():
        return {}
    content: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    own: dict[str, Any] = content.get(group, content)
    for base in content.get("defaults", ()):
        if isinstance(base, str):  # another option of the group
            own = {**yaml_values(group, base), **own}
    return own
