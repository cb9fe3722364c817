"""Composes the jobs of a sweep, each from its own words. Torch-free."""

import pickle
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from ddp_runner.cli.command_line import CommandLine, group_folders
from ddp_runner.cli.hydra_adapter import compose_config
from ddp_runner.cli.resume import resumed_overrides


def job_composer(
    command: CommandLine, common: DictConfig
) -> Callable[[Sequence[str], int], DictConfig]:
    """Return what composes a job of a sweep from its overrides and its number, from 0.

    Hydra reads every YAML again for each config that it composes. Jobs that choose the same options
    of groups differ in plain keys only, so here Hydra composes each choice of options once, and the
    keys of a job are set in a copy: tens of times sooner.

    Args:
        command: the command line.
        common: what its jobs have in common, with the ``hydra`` node.
    """
    read, folders = OverridesParser.create().parse_overrides, group_folders(command.folders)
    of_hydra = [str(one.input_line) for one in command.overrides if one.is_hydra_override()]
    composed = dict[tuple[str, ...], bytes]()  # by the overrides that choose options

    def compose(overrides: Sequence[Override]) -> DictConfig:
        words = [str(one.input_line) for one in overrides]
        return compose_config([*of_hydra, *words], folders=command.folders)

    def compose_job(words: Sequence[str], number: int) -> DictConfig:
        whole, implied = resumed_overrides(words, folders=folders)
        overrides = read(whole)
        keys = [one for one in overrides if _sets_a_key(one, folders)]
        options = [one for one in overrides if one not in keys]
        name = tuple(str(one.input_line) for one in options)
        if name not in composed:
            composed[name] = pickle.dumps(compose(options))
        job: DictConfig = pickle.loads(composed[name])
        try:
            for one in keys:
                OmegaConf.update(job, one.key_or_group, one.value(), merge=True)
        except OmegaConfBaseException:
            job = compose(overrides)  # which says what is wrong
        OmegaConf.copy_cache(from_config=common, to_config=job)  # of a time, for example
        written = [word for word in whole if word not in implied]
        with open_dict(job):
            job.hydra.overrides.task = written
            job.hydra.job.id = job.hydra.job.num = number
            job.hydra.job.override_dirname = _dirname(job, overrides)
        return job

    return compose_job


def _sets_a_key(override: Override, folders: Sequence[Path]) -> bool:
    """Return whether an override sets a key that the chosen options have; else it chooses one."""
    key = override.key_or_group
    return (
        override.type == OverrideType.CHANGE
        and override.package is None
        and not override.is_sweep_override()
        and "/" not in key
        and not any((folder / key).is_dir() for folder in folders)
    )


def _dirname(job: DictConfig, overrides: Sequence[Override]) -> str:
    """Return what ``hydra.job.override_dirname`` stands for, which a folder's name may use."""
    rules = job.hydra.job.config.override_dirname
    shown = [one for one in overrides if one.key_or_group not in rules.exclude_keys]
    text = rules.item_sep.join(sorted(str(one.input_line) for one in shown))
    return re.sub("=", rules.kv_sep, text)
