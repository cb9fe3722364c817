"""Composes and plans the jobs of a sweep. Torch-free."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from omegaconf import DictConfig, OmegaConf, open_dict

from ddp_runner.cli.compose import (
    compose_config,
    get_overrides_dirname,
    group_folders,
    opened,
    opened_node,
)
from ddp_runner.cli.messages import user_error
from ddp_runner.cli.plan import Invocation, PreparedConfig, prepare, written_words
from ddp_runner.cli.resume import resumed_overrides
from ddp_runner.config.load import changed_config, is_typed, to_config
from ddp_runner.config.schema import Config
from ddp_runner.config.sections import AUTO
from ddp_runner.job import Job
from ddp_runner.sweep.jobs import JobHardware

MAX_SHAPES = 200  # kept in memory
# Keys that decide how other keys are composed, or that hold for the whole sweep.
DECIDING = re.compile(
    r"(task|resume|allowed_targets|trackers|launch|sweep|backend)\b|.*\._target_$"
)


@dataclass
class PreparedJobs:
    """Jobs of one shape: they choose the same options and set the same plain keys."""

    composed: DictConfig  # the latest job's, with its ``hydra`` node
    values: Mapping[str, Any] = field(default_factory=dict)  # of the latest job's plain keys
    prepared: PreparedConfig | None = None  # the first job's, then the latest job's
    config: Config | None = None  # of a job, unresolved

    def read(self, prepared: PreparedConfig) -> Config:
        """Return the unresolved config of the latest job.

        Only the plain keys and what interpolations make of them differ between the jobs.
        """
        if self.config is not None:
            paths = {*(tuple(key.split(".")) for key in self.values), *prepared.texts}
            with suppress(Exception):  # to_config raises the error of the command alone
                return changed_config(self.config, prepared.raw, paths)
        config = to_config(prepared.raw)
        if prepared is self.prepared and is_typed(prepared.raw, Config):
            self.config = config
        return config


class Jobs:
    """Composes and plans the jobs of a sweep in turn.

    For each config Hydra reads every YAML again. Here it composes only the first job of each shape;
    the other jobs set their values in that config. The plan of the first job is reused too: the
    other jobs resolve interpolations and validate every rule again. `common` is the composed config
    that the jobs share, with the ``hydra`` node.
    """

    def __init__(self, common: DictConfig, invocation: Invocation) -> None:
        command = invocation.command
        self._common, self._invocation = common, invocation
        self._urls, self._folders = command.folders, group_folders(command.folders)
        self._hydra_words = [str(o.input_line) for o in command.overrides if o.is_hydra_override()]
        self._shapes = dict[tuple[str, ...], PreparedJobs]()
        self._latest: PreparedJobs | None = None
        self._words: Sequence[str] = ()  # of the latest job

    def compose(self, words: Sequence[str], number: int) -> DictConfig:
        """Return the config of a job by its overrides and its index; the next call may change it.

        Raises:
            UserError: Hydra cannot compose it.
        """
        self._words = words
        with self._explained_errors():
            whole, implied = resumed_overrides(words, folders=self._folders)
            overrides = [_parsed(word) for word in whole]
            keys = {o.key_or_group: o for o in overrides if _is_plain(o, self._folders)}
            name = tuple(
                o.key_or_group if o.key_or_group in keys else str(o.input_line) for o in overrides
            )
            values = {key: o.value() for key, o in keys.items()}
            if shape := self._shapes.get(name):
                _set(shape.composed, values)
            else:
                composed = compose_config([*self._hydra_words, *whole], folders=self._urls)
                if len(self._shapes) == MAX_SHAPES:
                    self._shapes.clear()
                shape = self._shapes[name] = PreparedJobs(composed)
        shape.values = values
        self._latest, job = shape, shape.composed
        OmegaConf.copy_cache(from_config=self._common, to_config=job)  # such as ${now:...}
        with open_dict(job):
            node = job.hydra
            node.overrides.task = [word for word in whole if word not in implied]
            node.job.id = node.job.num = number
            rules = node.job.config.override_dirname
            node.job.override_dirname = get_overrides_dirname(overrides, **rules)
        return job

    def plan(self, composed: DictConfig, hardware_for: Callable[[Config], JobHardware]) -> Job:
        """Return the job that was composed last; see ``cli.plan.plan``."""
        shape = self._latest
        assert shape is not None
        assert shape.composed is composed
        with self._explained_errors():
            if (prepared := shape.prepared) is None:
                with opened(composed) as (given, node):
                    prepared = prepare(given, node, self._invocation)
                if composed.resume in (None, AUTO):
                    shape.prepared = prepared
            else:
                _set(prepared.raw, shape.values)
            with opened_node(composed) as node:
                words = written_words(node, self._invocation.command)
                return prepared.finish(hardware_for, words, shape.read)

    @contextmanager
    def _explained_errors(self) -> Iterator[None]:
        """Turn errors about one job into a UserError, so that the other jobs can run."""
        try:
            yield
        except Exception as error:
            explained = user_error(error, (*self._invocation.command.own_groups, *self._words))
            if explained is None or explained is error:
                raise
            raise explained from error


def _set(config: DictConfig, values: Mapping[str, Any]) -> None:
    """Set values of plain keys as Hydra does."""
    for key, value in values.items():
        OmegaConf.update(config, key, value, merge=True)


@lru_cache(maxsize=10_000)  # the jobs of a grid repeat their words
def _parsed(word: str) -> Override:
    return OverridesParser.create().parse_override(word)


def _is_plain(override: Override, folders: Sequence[Path]) -> bool:
    """Return whether an override only gives a plain key a value."""
    key = override.key_or_group
    return (
        override.type == OverrideType.CHANGE
        and override.package is None
        and not override.is_sweep_override()
        and re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", key) is not None
        and "${" not in str(override.input_line)
        and not isinstance(override.value(), dict)
        and not DECIDING.match(key)
        and not any((folder / key).is_dir() for folder in folders)
    )
