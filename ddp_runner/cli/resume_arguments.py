"""The arguments of a command that resumes a run: what it must repeat, and which keys follow."""

import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import reduce
from operator import getitem
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ddp_runner.cli.compose import literal
from ddp_runner.config.fields import plain
from ddp_runner.config.schema import RunConfig
from ddp_runner.config.secrets import foreign_keys, texts
from ddp_runner.config.targets import given_packages
from ddp_runner.errors import UserError


def follow_again(frozen: DictConfig, own: Any, unresolved: Mapping[str, Any]) -> None:
    """Let what followed other keys of a run's dataset follow them again. Change it in place.

    A frozen config holds values, so without this dataset.folder would change, and not the root of
    the pictures. What the run's own command had changed stays as it is. A run may be anybody's:
    only our texts are resolved, among the run's values that are no texts to resolve.

    Args:
        frozen: the run's config.
        own: likewise, with nothing resolved.
        unresolved: the dataset that this command composes.
    """
    plain = OmegaConf.create(_without_texts(own))
    for place, text in texts(unresolved):
        if not re.search(r"\$\{(dataset\.|data_root\})", text):
            continue
        with suppress(LookupError, TypeError, OmegaConfBaseException):  # it is another dataset
            value = reduce(getitem, place, own["dataset"])
            owner: Any = reduce(getitem, place[:-1], plain.dataset)
            before = owner[place[-1]]
            owner[place[-1]] = text
            try:
                follows = owner[place[-1]] == value
            finally:
                owner[place[-1]] = before
            if follows:
                reduce(getitem, place[:-1], cast(Any, frozen.dataset))[place[-1]] = text


def _without_texts(tree: Any) -> Any:
    """Return a plain tree with None in place of what OmegaConf would resolve."""
    if isinstance(tree, dict):
        return {key: _without_texts(one) for key, one in tree.items()}
    if isinstance(tree, list):
        return [*map(_without_texts, tree)]
    return None if isinstance(tree, str) and "${" in tree else tree


OF_COMMAND = ("allowed_targets", "launch", "sweep", "trackers")  # a resume takes none of a run's


def resume_arguments(
    config: RunConfig,
    given: DictConfig,
    overrides: Sequence[str],
    own_groups: Sequence[str],
    *,
    choices: Mapping[str, str],
) -> tuple[str, ...]:
    """Return what a command that resumes this run says again; see ``Job``.

    Args:
        config: of this run, as it is frozen.
        given: what this command composes.
        overrides: that the user wrote.
        own_groups: where the user's own groups are; see ``CommandLine``.
        choices: the option of each group.
    """
    allowed = ",".join(given_packages(given))
    trackers = [one for one in overrides if re.match(r"[+~]*trackers\b", one)]
    # A run that is resumed leaves out its experiment, so its trackers are given key by key.
    if own_groups and "experiment" in choices:
        found: Any = OmegaConf.to_container(given.trackers, resolve=False)
        trackers = [f"+trackers.{name}={literal(keys)}" for name, keys in found.items()]
    kept = {key: one for key, one in plain(config).items() if key not in OF_COMMAND}
    words = _words(foreign_keys(kept, {}))
    return (*([f"allowed_targets=[{allowed}]"] if allowed else []), *own_groups, *trackers, *words)


def validate_repeated(frozen: DictConfig, own: Mapping[str, Any]) -> None:
    """Reject a resumed run's config that reads the environment, or names an address, by itself.

    Args:
        frozen: the config, with this command's keys.
        own: what this command composes, unresolved.

    Raises:
        UserError: this command does not say so, too.
    """
    plain: Any = OmegaConf.to_container(frozen)
    if found := foreign_keys(plain, own):
        key, value = next(iter(found.items()))
        raise UserError(
            f"{key} ({value}) of the run reads the environment or names an address, and a run's "
            "config may be anybody's, so this command must say it, too; if you trust it, add "
            f"{shlex.join(_words(found))}"
        )


def _words(values: Mapping[str, Any]) -> list[str]:
    """Return the overrides that set these keys, whether another YAML has them or not."""
    return [f"++{key}={literal(value)}" for key, value in values.items()]
