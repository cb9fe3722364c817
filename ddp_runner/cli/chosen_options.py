"""An option that the command line chooses, as in optimizer=adam, keeps its own keys.

Hydra merges the YAMLs of the model and the experiment last. What they say of the optimizer that
they choose would be merged into any other optimizer, too, and win over its own YAML.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from ddp_runner.cli.compose import compose_config, literal
from ddp_runner.config.identity import leaves
from ddp_runner.config.load import chosen_keys
from ddp_runner.config.schema import LIST_GROUPS, RUNNER_KEYS
from ddp_runner.config.sections import AUTO
from ddp_runner.errors import listed

GROUPS = (*RUNNER_KEYS, "backend", *LIST_GROUPS)
LATER = ("model", "experiment")  # their YAMLs may set keys of any group


def keep_chosen_options(
    raw: DictConfig, words: Sequence[str], *, choices: Mapping[str, Any], folders: Sequence[str]
) -> Iterator[str]:
    """Give the options that a command chooses their own keys, in place; yield what is left out.

    Args:
        raw: what Hydra has composed.
        words: the overrides that the user wrote.
        choices: the option of each group.
        folders: URLs of the user's own groups.
    """
    given, is_new = dict(zip(chosen_keys(words), words, strict=True)), raw.resume in (None, AUTO)
    for group in (one for one in GROUPS if one in given):
        later = LATER[1:] if group == "model" else LATER
        # The default model says nothing of other groups; that of a resumed run may.
        asked = [one for one in later if choices.get(one) and (one in given or not is_new)]
        if not asked:
            continue
        others, without = [f"{one}={choices[one]}" for one in asked], [f"~{one}" for one in later]
        words_within = [word for key, word in given.items() if key.startswith(f"{group}.")]
        # By two plus signs a key may be there or not.
        keys = [one if one[0] == "~" else f"++{one.lstrip('+')}" for one in words_within]
        own = _composed(*without, given[group], *keys, folders=tuple(folders))
        # All options of backend have the same other keys, such as timeout_s.
        part, before = "backend.name" if group == "backend" else group, _keys(raw)
        wanted = OmegaConf.select(own, part)
        if OmegaConf.select(raw, part) == wanted:
            continue
        if _is_same(own, _composed(*others, folders=tuple(folders)), group):
            continue
        OmegaConf.update(raw, part, wanted, merge=False)
        after = _keys(raw)
        if left_out := [key for key, value in before.items() if after.get(key) != value]:
            paths = " and ".join(f"{one.replace('=', '/')}.yaml" for one in others)
            yield (
                f"{given[group]} does not take what {paths} says of another option: "
                f"{listed(sorted(left_out))}"
            )


def replace_targets(raw: DictConfig, words: Sequence[str], *, folders: Sequence[str]) -> None:
    """Where the command names another ``_target_``, drop the keys of the replaced one, in place.

    What the command itself gives stays, and of a group what the runner reads.
    """
    given = chosen_keys(words)
    for key in (one for one in given if one.endswith("._target_")):
        owner = key.removesuffix("._target_")
        pairs = zip(given, words, strict=True)
        others = [word for one, word in pairs if not one.startswith(f"{owner}.")]
        before = OmegaConf.select(_composed(*others, folders=tuple(folders)), key)
        node = OmegaConf.select(raw, owner)
        if before in (None, node._target_):
            continue
        kept = {*RUNNER_KEYS.get(owner, ()), "name", "_target_"} - {"requires"}
        with open_dict(node):
            for name in [str(one) for one in node]:
                if name not in kept and not any(_is_in(one, f"{owner}.{name}") for one in given):
                    del node[name]
            if owner in RUNNER_KEYS and "name" in node and f"{owner}.name" not in given:
                node.name = node._target_.rpartition(".")[2].lower()


def _is_in(key: str, group: str) -> bool:
    return f"{key}.".startswith(f"{group}.")


def changes(raw: DictConfig, kept: DictConfig) -> list[str]:
    """Return the overrides by which Hydra composes `kept` where it has composed `raw`."""
    before, after = _keys(raw), _keys(kept)
    differing = [key for key, value in after.items() if before.get(key, ...) != value]
    removed = [f"~{key}" for key in before if key not in after]
    return removed + [f"++{key}={literal(after[key])}" for key in differing]


def changed_keys(raw: DictConfig, words: Sequence[str]) -> list[str]:
    """Return the keys, and the groups, that a model and an experiment among the words change."""
    usual = _keys(_composed(*(f"~{one}" for one in LATER if one in chosen_keys(words))))
    found = [key for key, value in _keys(raw).items() if usual.get(key) != value]
    return [one.partition(".")[0] if one.startswith(GROUPS) else one for one in found]


@lru_cache(maxsize=99)  # the jobs of a sweep choose the same options again and again
def _composed(*words: str, folders: Sequence[str] = ()) -> DictConfig:
    return compose_config(words, folders=folders)


def _is_same(own: DictConfig, usual: DictConfig, group: str) -> bool:
    """Return whether a chosen option is the usual one; with a name of its own it is another."""
    if group in LIST_GROUPS:
        return bool(own[group]) and set(own[group]) <= set(usual[group])
    kinds = [(one.hydra.runtime.choices[group], one[group].get("name")) for one in (own, usual)]
    return bool(kinds[0] == kinds[1])


def _keys(config: DictConfig) -> dict[str, Any]:
    tree = OmegaConf.to_container(config, resolve=False)
    assert isinstance(tree, dict)
    return dict(leaves(tree, whole_lists=True))
