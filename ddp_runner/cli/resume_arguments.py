"""The arguments that a command must repeat to resume a run, and keys that follow other keys."""

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
from ddp_runner.config.secrets import foreign_keys, walk_texts
from ddp_runner.config.targets import given_packages
from ddp_runner.errors import UserError
from ddp_runner.files import mapped

COMMAND_GROUPS = ("allowed_targets", "launch", "sweep", "trackers")  # not taken from the run


def restore_interpolations(frozen: DictConfig, run: Any, dataset: Mapping[str, Any]) -> None:
    """Restore the interpolations of a resumed run's dataset, in place.

    A frozen config holds values: without this a new dataset.folder would not change the root of the
    pictures. Values that the run's command had changed stay. A run may come from anybody: only our
    own texts are resolved, among the run's values without interpolations.

    `run` is the run's frozen config as plain containers, and the dataset is as this command
    composes it, unresolved.
    """
    values = mapped(lambda value: None if "${" in str(value) else value, run)
    for (*owners, key), text in walk_texts(dataset):
        if not re.search(r"\$\{(dataset\.|data_root\})", text):
            continue
        trial = OmegaConf.create(values)
        with suppress(LookupError, TypeError, OmegaConfBaseException):  # another dataset
            before, owner = (reduce(getitem, owners, tree["dataset"]) for tree in (run, trial))
            owner[key] = text
            if owner[key] == before[key]:
                reduce(getitem, owners, cast(Any, frozen.dataset))[key] = text


def resume_arguments(
    config: RunConfig,
    given: DictConfig,
    overrides: Sequence[str],
    own_groups: Sequence[str],
    *,
    choices: Mapping[str, str],
) -> tuple[str, ...]:
    """Return the arguments that a command must repeat to resume this run; see ``Job``.

    `config` is this run's as it is frozen, and `given` the config that this command composes.
    """
    allowed = ",".join(given_packages(given))
    trackers = [word for word in overrides if re.match(r"[+~]*trackers\b", word)]
    # A resumed run leaves out its experiment, so its trackers are given key by key.
    if own_groups and "experiment" in choices:
        tree: Any = OmegaConf.to_container(given.trackers, resolve=False)
        trackers = [f"+trackers.{name}={literal(keys)}" for name, keys in tree.items()]
    kept = {key: value for key, value in plain(config).items() if key not in COMMAND_GROUPS}
    words = _words(foreign_keys(kept, {}))
    return (*([f"allowed_targets=[{allowed}]"] if allowed else []), *own_groups, *trackers, *words)


def validate_foreign_keys(frozen: DictConfig, composed: Mapping[str, Any]) -> None:
    """Reject a run's keys that read the environment or name an address, unless repeated.

    `frozen` is the run's config with this command's keys, and `composed` this command's config.
    """
    tree: Any = OmegaConf.to_container(frozen)
    if keys := foreign_keys(tree, composed):
        key, value = next(iter(keys.items()))
        raise UserError(
            f"{key} ({value}) of the run reads the environment or names an address, and a run may "
            "come from anybody, so this command must repeat it",
            f"if you trust it, add {shlex.join(_words(keys))}",
        )


def _words(values: Mapping[str, Any]) -> list[str]:
    """Return the overrides that set these keys, whether they exist or not."""
    return [f"++{key}={literal(value)}" for key, value in values.items()]
