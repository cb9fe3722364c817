"""Lets an option that the command line chooses, as in optimizer=adam, keep its own keys.

Hydra merges the YAMLs of the model and the experiment last. What they say of the optimizer that
they choose would be merged into any other optimizer, too, and win over its own YAML. So it is left
out, with a note, before Hydra merges anything.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from hydra._internal import config_loader_impl
from hydra._internal.config_repository import IConfigRepository
from hydra._internal.defaults_list import DefaultsList, create_defaults_list
from hydra.conf import HydraConf
from hydra.core.default_element import GroupDefault
from hydra.plugins.config_source import ConfigResult
from omegaconf import OmegaConf, open_dict, read_write

from ddp_runner.config.schema import LIST_GROUPS, RUNNER_KEYS, leaves
from ddp_runner.errors import listed

# Among the choices of the hydra node, which reach each job of a sweep.
NOTES, KEYS = "ddp_runner/notes", "ddp_runner/keys"
EXPERIMENT = "experiment"
GROUPS = (*RUNNER_KEYS, "backend")
Note = tuple[str, list[str]]  # a text, and the keys that it is about


def keep_chosen_options() -> None:
    """Change what Hydra composes in this process, from now on."""
    vars(config_loader_impl)["create_defaults_list"] = _defaults_list


def notes_of(node: HydraConf, *, chosen: Collection[str]) -> list[str]:
    """Return what a user may not expect of how a config was composed.

    `chosen` holds the keys that the command line gives: of those there is nothing to say.
    """
    notes = node.runtime.choices.get(NOTES, [])
    left = {text: [one for one in keys if one not in chosen] for text, keys in notes}
    return [f"{text}: {listed(keys)}" for text, keys in left.items() if keys]


def keys_of_yamls(node: HydraConf) -> list[str]:
    """Return the dotted keys that the YAMLs of the chosen model and experiment set."""
    return list(node.runtime.choices.get(KEYS, []))


def _defaults_list(repo: IConfigRepository, **given: Any) -> DefaultsList:
    """Return Hydra's list of the YAMLs to merge, which `repo` holds, and change these."""
    found = create_defaults_list(repo, **given)
    choices, origins = found.overrides.override_choices, found.overrides.override_metadata
    known = [one for one in (*GROUPS, *LIST_GROUPS) if one in origins]
    chosen = {one: choices[one] for one in known if origins[one].external_override}
    files = {str(one.config_path): one.package for one in found.defaults}
    by_kind: dict[str, dict[str, Any]] = {EXPERIMENT: {}, "model": {}}
    usual: dict[str, Any] = {}
    for path in (path for path, package in files.items() if package == ""):
        options = _options_in(repo, path)
        usual |= options  # the experiment comes last, and wins
        by_kind.setdefault(path.partition("/")[0], {}).update(options)
    notes = list[Note]()
    if "model" in chosen and by_kind[EXPERIMENT].get("model") != chosen["model"]:
        notes += _overruled(by_kind["model"], by_kind[EXPERIMENT], chosen)
    for group, option in chosen.items():
        if usual.get(group) != option:
            notes += _leave_out(repo, files, group=group, option=_shown(option))
    said = vars(found.overrides)["known_choices"]
    said[NOTES], said[KEYS] = notes, _keys_of(repo, files, has_model="model" in origins)
    return found


def _keys_of(
    repo: IConfigRepository, files: Mapping[str, str | None], *, has_model: bool
) -> list[str]:
    """Return the keys in the experiment's YAML, and in the model's unless it is the default one."""
    kinds = (EXPERIMENT, "model") if has_model else (EXPERIMENT,)
    trees = [_tree(repo, path) for path in files if path.partition("/")[0] in kinds]
    return sorted({key for tree in trees for key, _ in leaves(tree)})


def _options_in(repo: IConfigRepository, path: str) -> dict[str, Any]:
    """Return the options that a YAML chooses by its defaults; an empty list chooses none.

    With a key such as dataset.name it makes an option of its own.
    """
    defaults, tree = _loaded(repo, path).defaults_list or (), _tree(repo, path)
    groups = (one for one in defaults if isinstance(one, GroupDefault))
    options = {str(one.group).lstrip("/"): one.value for one in groups if one.value != []}
    kind, is_of_group, _ = path.partition("/")
    for group in GROUPS if is_of_group else ():
        if group != kind and "name" in _dict(tree.get(group)):
            options[group] = tree[group]["name"]
    return options


def _overruled(
    model: Mapping[str, Any], experiment: Mapping[str, Any], chosen: Mapping[str, Any]
) -> Iterator[Note]:
    """Yield a note if an experiment's YAML replaces options that a model's YAML chooses."""
    groups = [one for one in model if one in experiment and one not in chosen]
    differing = [one for one in groups if model[one] != experiment[one]]
    if differing:
        options = [f"{one}={_shown(experiment[one])}" for one in differing]
        yield f"the experiment replaces options of model={chosen['model']}", options


def _leave_out(
    repo: IConfigRepository, files: Mapping[str, str | None], *, group: str, option: str
) -> Iterator[Note]:
    """Remove what other YAMLs say of a group; yield a note if it is something else."""
    own, absent, keys = dict[str, Any](), object(), dict[str, set[str]]()
    for path, package in files.items():
        if path.startswith(f"{group}/"):
            tree = _tree(repo, path)
            own |= _dict(tree.get(group)) if package == "" else tree
    for path, package in files.items():
        kind, is_of_group, _ = path.partition("/")
        said = _dict(_tree(repo, path).get(group))
        if package != "" or not is_of_group or kind == group or not said:
            continue
        config: Any = _loaded(repo, path).config
        # All options of backend have the same other keys, such as timeout_s.
        left = {key for key in said if group != "backend" or key in own}
        with read_write(config), open_dict(config):
            config[group] = {key: one for key, one in said.items() if key not in left}
        keys[path] = {f"{group}.{key}" for key in left if said[key] != own.get(key, absent)}
    if differing := sorted(set().union(*keys.values())):
        paths = " and ".join(f"{path}.yaml" for path in keys if keys[path])
        yield f"{group}={option} does not take what {paths} says of another option", differing


def _loaded(repo: IConfigRepository, path: str) -> ConfigResult:
    loaded = repo.load_config(path)
    assert loaded is not None
    return loaded


def _tree(repo: IConfigRepository, path: str) -> dict[str, Any]:
    """Return a YAML's keys; none if it has another form, which Hydra reports when it merges."""
    return _dict(OmegaConf.to_container(_loaded(repo, path).config, resolve=False))


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _shown(option: Any) -> str:
    return f"[{','.join(option)}]" if isinstance(option, list) else str(option)
