"""Keeps the keys of an option that the command line chooses, as in optimizer=adam.

Hydra merges the YAMLs of the model and the experiment last. Their keys for the optimizer that they
choose would be merged into any other optimizer too, and win over its own YAML.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from ddp_runner.cli.compose import compose_config, literal
from ddp_runner.config.identity import is_inside, leaves
from ddp_runner.config.load import chosen_keys
from ddp_runner.config.schema import LIST_GROUPS, RUNNER_KEYS
from ddp_runner.config.sections import AUTO
from ddp_runner.errors import listed

GROUPS = (*RUNNER_KEYS, "backend", *LIST_GROUPS)
MERGED_LAST = ("model", "experiment")  # their YAMLs may set keys of any group
_composed = lru_cache(maxsize=99)(compose_config)  # the jobs of a sweep choose the same options


def keep_chosen_options(
    raw: DictConfig, words: Sequence[str], *, choices: Mapping[str, Any], folders: tuple[str, ...]
) -> Iterator[str]:
    """Restore the keys of the options and targets that a command chooses; yield notes about it.

    Hydra has composed `raw`, which is changed, from the user's `words`, with an option for each
    group in `choices`; the `folders` are URLs of the user's own groups.
    """
    given = dict(zip(chosen_keys(words), words, strict=True))
    is_new = raw.resume in (None, AUTO)
    for group in (key for key in GROUPS if key in given):
        last = MERGED_LAST[1:] if group == "model" else MERGED_LAST
        # The default model sets no keys of other groups; the model of a resumed run may.
        merged = [key for key in last if choices.get(key) and (key in given or not is_new)]
        if not merged:
            continue
        last_words = [f"{key}={choices[key]}" for key in merged]
        words_within = [word for key, word in given.items() if key.startswith(f"{group}.")]
        # With ++ a key may exist or not.
        keys = [word if word[0] == "~" else f"++{word.lstrip('+')}" for word in words_within]
        alone = _composed((*(f"~{key}" for key in last), given[group], *keys), folders=folders)
        # All options of backend share the other keys, such as timeout_s.
        part = "backend.name" if group == "backend" else group
        before = _keys(raw)
        wanted = OmegaConf.select(alone, part)
        if OmegaConf.select(raw, part) == wanted:
            continue
        if _is_same(alone, _composed(tuple(last_words), folders=folders), group):
            continue
        OmegaConf.update(raw, part, wanted, merge=False)
        after = _keys(raw)
        if dropped := [key for key, value in before.items() if after.get(key) != value]:
            paths = " and ".join(f"{word.replace('=', '/')}.yaml" for word in last_words)
            yield (
                f"{given[group]} does not take the keys that {paths} sets for another option: "
                f"{listed(sorted(dropped))}"
            )
    _replace_targets(raw, words, folders=folders)


def _replace_targets(raw: DictConfig, words: Sequence[str], *, folders: tuple[str, ...]) -> None:
    """Where the command names another ``_target_``, drop the keys of the replaced class, in place.

    The command's own keys stay, and those that the runner reads.
    """
    given = chosen_keys(words)
    for key in (key for key in given if key.endswith("._target_")):
        owner = key.removesuffix("._target_")
        pairs = zip(given, words, strict=True)
        others = [word for other, word in pairs if not other.startswith(f"{owner}.")]
        before = OmegaConf.select(_composed(tuple(others), folders=folders), key)
        node = OmegaConf.select(raw, owner)
        if before in (None, node._target_):
            continue
        kept = {*RUNNER_KEYS.get(owner, ()), "name", "_target_"} - {"requires"}
        with open_dict(node):
            for name in map(str, list(node)):
                is_given = any(is_inside(other, [f"{owner}.{name}"]) for other in given)
                if name not in kept and not is_given:
                    del node[name]
            if owner in RUNNER_KEYS and "name" in node and f"{owner}.name" not in given:
                node.name = node._target_.rpartition(".")[2].lower()


def changes(raw: DictConfig, kept: DictConfig) -> list[str]:
    """Return the overrides that turn the composed config `raw` into `kept`."""
    before, after = _keys(raw), _keys(kept)
    differing = [key for key, value in after.items() if before.get(key, ...) != value]
    removed = [f"~{key}" for key in before if key not in after]
    return removed + [f"++{key}={literal(after[key])}" for key in differing]


def changed_keys(raw: DictConfig, words: Sequence[str]) -> list[str]:
    """Return the keys and groups that the chosen model and experiment change."""
    usual = _keys(_composed(tuple(f"~{key}" for key in MERGED_LAST if key in chosen_keys(words))))
    changed = [key for key, value in _keys(raw).items() if usual.get(key) != value]
    return [key.partition(".")[0] if key.startswith(GROUPS) else key for key in changed]


def _is_same(alone: DictConfig, usual: DictConfig, group: str) -> bool:
    """Return whether the chosen option is the usual option of a group, with the same name."""
    if group in LIST_GROUPS:
        return bool(alone[group]) and set(alone[group]) <= set(usual[group])
    return bool(
        alone.hydra.runtime.choices[group] == usual.hydra.runtime.choices[group]
        and alone[group].get("name") == usual[group].get("name")
    )


def _keys(config: DictConfig) -> dict[str, Any]:
    tree: Any = OmegaConf.to_container(config, resolve=False)
    return dict(leaves(tree, whole_lists=True))
