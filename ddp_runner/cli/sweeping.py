"""Composes and plans the jobs of a sweep, each from its own words. Torch-free."""

import pickle
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from ddp_runner.cli.compose import compose_config, group_folders, opened, opened_node
from ddp_runner.cli.messages import user_error
from ddp_runner.cli.plan import Invocation, PreparedConfig, finish, plan_at, prepare
from ddp_runner.cli.resume import resumed_overrides
from ddp_runner.config.load import resolved_texts, to_config, value_at, with_values
from ddp_runner.config.schema import Config
from ddp_runner.config.sections import AUTO
from ddp_runner.errors import UserError
from ddp_runner.job import Job
from ddp_runner.sweep.layout import JobHardware

MOST_SHAPES = 200  # that are kept
# What decides more than its own value: how other keys are composed, or what holds for the sweep.
DECIDING = re.compile(
    r"(task|resume|allowed_targets|trackers|launch|sweep|backend)\b|.*\._target_$"
)


@dataclass
class PreparedJobs:
    """Jobs of a sweep that choose the same options, and give the same plain keys other values."""

    composed: DictConfig  # of the job that was composed last, with its ``hydra`` node
    values: Mapping[str, Any] = field(default_factory=dict)  # of its plain keys
    words: tuple[str, ...] = ()
    # Of the first job that was planned: prepared, and its config, pickled.
    planned: tuple[PreparedConfig, bytes] | None = None


class Jobs:
    """Composes and plans one job of a sweep after another.

    Hydra reads every YAML again for each config that it composes. Here it composes the first job of
    each shape; for the others their values are set. What they have in common is planned once, too:
    of each job are its values, what is interpolated, and every rule.

    Args:
        common: what the jobs have in common, composed, with the ``hydra`` node.
        invocation: the command.
    """

    def __init__(self, common: DictConfig, invocation: Invocation) -> None:
        command = invocation.command
        self._common, self._invocation = common, invocation
        self._urls, self._folders = command.folders, group_folders(command.folders)
        self._of_hydra = [str(o.input_line) for o in command.overrides if o.is_hydra_override()]
        self._shapes = dict[tuple[str, ...], PreparedJobs]()
        self._last: PreparedJobs | None = None
        self._words: Sequence[str] = ()  # of the job that was composed last

    def compose(self, words: Sequence[str], number: int) -> DictConfig:
        """Return the config of a job; the next call may change it.

        Args:
            words: its overrides.
            number: its place in the sweep, from 0.

        Raises:
            UserError: Hydra cannot compose it.
        """
        self._words = words
        with self._explained():
            return self._compose(words, number)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Raise a UserError for what Hydra and OmegaConf say of a job: the others are not wrong."""
        try:
            yield
        except UserError:
            raise
        except Exception as error:
            given = (*self._invocation.command.own_groups, *self._words)
            explained = user_error(error, given)
            if explained is None:  # a fault of this program
                raise
            raise explained from error

    def _compose(self, words: Sequence[str], number: int) -> DictConfig:
        whole, implied = resumed_overrides(words, folders=self._folders)
        overrides = [_parsed(word) for word in whole]
        keys = {o.key_or_group: o for o in overrides if _is_plain(o, self._folders)}
        name = tuple(
            o.key_or_group if o.key_or_group in keys else str(o.input_line) for o in overrides
        )
        values = {key: o.value() for key, o in keys.items()}
        if (shape := self._shapes.get(name)) is None or not _set(shape.composed, values):
            composed = compose_config([*self._of_hydra, *whole], folders=self._urls)
            if len(self._shapes) == MOST_SHAPES:
                self._shapes.clear()
            shape = self._shapes[name] = PreparedJobs(composed)
        shape.values, shape.words = values, tuple(one for one in whole if one not in implied)
        self._last, job = shape, shape.composed
        OmegaConf.copy_cache(from_config=self._common, to_config=job)  # of a time, for example
        with open_dict(job):
            node = job.hydra
            node.overrides.task = list(shape.words)
            node.job.id = node.job.num = number
            node.job.override_dirname = _dirname(node.job.config.override_dirname, overrides)
        return job

    def plan(self, composed: DictConfig, place_of: Callable[[Config], JobHardware]) -> Job:
        """Return the job that was composed last; see ``plan_at``."""
        with self._explained():
            return self._plan(composed, place_of)

    def _plan(self, composed: DictConfig, place_of: Callable[[Config], JobHardware]) -> Job:
        shape = self._last
        assert shape is not None
        assert shape.composed is composed
        if shape.planned is None:
            job = plan_at(composed, place_of, self._invocation)
            if composed.resume in (None, AUTO):
                shape.planned = _common(shape, self._invocation)
            return job
        prepared, config = shape.planned
        with opened_node(composed):
            is_set = _set(prepared.raw, shape.values)
            assert is_set
            texts, secrets = resolved_texts(prepared.raw, prepared.interpolations)
            with secrets.hidden_in_errors():
                if texts.keys() != prepared.interpolations.keys():
                    return plan_at(composed, place_of, self._invocation)  # which says why
                values = {_place(key): value_at(prepared.raw, _place(key)) for key in shape.values}
                unresolved = with_values(pickle.loads(config), values | texts)
                return finish(
                    prepared, unresolved, place_of, secrets, shape.words, self._invocation
                )


def _common(shape: PreparedJobs, invocation: Invocation) -> tuple[PreparedConfig, bytes] | None:
    """Return what the next job of a shape begins with; None if its values cannot be set alone."""
    with opened(shape.composed) as (given, node):
        prepared = prepare(given, node, invocation)
        config = to_config(prepared.raw)
        kept = pickle.dumps(config)
        try:
            places = [*map(_place, shape.values), *prepared.interpolations]
            values = {place: value_at(prepared.raw, place) for place in places}
            again = with_values(pickle.loads(kept), values)
        except (LookupError, AttributeError, TypeError):  # a key that is no text
            return None
    return (prepared, kept) if again == config else None


def _set(config: DictConfig, values: Mapping[str, Any]) -> bool:
    """Set values of plain keys; return whether all of them could be."""
    try:
        for key, value in values.items():
            OmegaConf.update(config, key, value, merge=True)
    except OmegaConfBaseException:
        return False  # Hydra says what is wrong
    return True


def _place(key: str) -> tuple[str, ...]:
    return tuple(key.split("."))


@lru_cache(maxsize=10_000)  # the jobs of a grid have few words, again and again
def _parsed(word: str) -> Override:
    return OverridesParser.create().parse_override(word)


def _is_plain(override: Override, folders: Sequence[Path]) -> bool:
    """Return whether an override gives a plain key a value, and decides nothing else."""
    key = override.key_or_group
    return (
        override.type == OverrideType.CHANGE
        and override.package is None
        and not override.is_sweep_override()
        and not re.search(r"[/\[]|\$\{", str(override.input_line).partition("=")[0])
        and "${" not in str(override.input_line)
        and not isinstance(override.value(), dict)
        and not DECIDING.match(key)
        and not any((folder / key).is_dir() for folder in folders)
    )


def _dirname(rules: DictConfig, overrides: Sequence[Override]) -> str:
    """Return what ``hydra.job.override_dirname`` stands for, which a folder's name may use."""
    shown = [one for one in overrides if one.key_or_group not in rules.exclude_keys]
    text = rules.item_sep.join(sorted(str(one.input_line) for one in shown))
    return re.sub("=", rules.kv_sep, text)
