"""From a command line to its composed config, and to a job whose files exist. Torch-free."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.conf import HydraConf
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from ddp_runner.cli.chosen_options import (
    changed_keys,
    changes,
    keep_chosen_options,
    replace_targets,
)
from ddp_runner.cli.command import CommandLine
from ddp_runner.cli.compose import UNNAMED, compose_config, opened, opened_node
from ddp_runner.cli.preflight import validate_files
from ddp_runner.cli.resume import NotARunError, left_trackers, with_resumed
from ddp_runner.cli.resume_arguments import resume_arguments
from ddp_runner.config.load import (
    as_written,
    chosen_keys,
    interpolations,
    resolved_texts,
    to_config,
)
from ddp_runner.config.resolve import resolve
from ddp_runner.config.schema import LIST_GROUPS, Config, has_own_loop
from ddp_runner.config.secrets import Place, Secrets
from ddp_runner.config.sections import AUTO, INFERENCE
from ddp_runner.config.task_rules import unused_note
from ddp_runner.dist_env import DistEnv
from ddp_runner.errors import UserError
from ddp_runner.files import safe_name
from ddp_runner.host.hardware import Hardware
from ddp_runner.job import Job
from ddp_runner.sweep.layout import JobHardware
from ddp_runner.sweep.sweep_dir import sweep_command
from ddp_runner.tracking.outputs import job_name

GRID = "ddp_runner.sweep.grid.Grid"  # the _target_ of hydra/sweeper=grid


@dataclass(frozen=True)
class Invocation:
    """What all jobs of a command have in common."""

    command: CommandLine
    env: DistEnv | None  # this rank's facts; None where no launcher has started this process
    started_at: float  # time.time()
    code: Mapping[str, Any]  # git_revision and versions
    warnings: tuple[str, ...] = ()  # about stdout and stderr


def compose(command: CommandLine) -> DictConfig:
    """Return the composed config of a run, or what all jobs of a sweep have in common.

    Raises:
        UserError: a key has several values and the command is not a sweep.
        HydraException: the config cannot be composed.
    """
    sweeps = [one for one in command.overrides if one.is_sweep_override()]
    same = [str(one.input_line) for one in command.overrides if one not in sweeps]  # in all jobs
    composed = compose_config(same, folders=command.folders)
    for sweep in sweeps:
        line = sweep.input_line
        if is_sweep(command, composed):
            if composed.hydra.sweeper.get("_target_") == GRID and not sweep.is_discrete_sweep():
                raise UserError(
                    f"{line} is an interval and this sweeper takes a list of values; write "
                    "hydra/sweeper=optuna, which searches intervals"
                )
        elif sweep.is_choice_sweep():
            key = sweep.key_or_group
            is_list = OmegaConf.is_list(OmegaConf.select(composed, key)) or key in LIST_GROUPS
            raise UserError(
                f"{line} has a comma; write -m for a sweep over its values, or "
                + (f"{key}=[ONE,OTHER] for a list" if is_list else f"{key}=VALUE for one run")
            )
        else:
            raise UserError(f"{line} is a sweep; write -m for it")
    if composed.hydra.verbose or composed.hydra.job.chdir:
        raise UserError(
            "hydra.verbose and hydra.job.chdir are not for this program; leave them out: a run "
            "writes all that it leaves into its own folder, tracebacks into RUN/logs"
        )
    return composed


def is_sweep(command: CommandLine, composed: DictConfig) -> bool:
    """Return whether the command is a sweep: by -m, or by ``hydra.mode`` in a YAML."""
    return command.is_multirun or composed.hydra.mode == RunMode.MULTIRUN


def plan(composed: DictConfig, hardware: Hardware, invocation: Invocation) -> Job:
    """Return the job that a composed config describes, on this machine; see ``plan_at``."""
    return plan_at(composed, lambda _: JobHardware(hardware, env=invocation.env), invocation)


def plan_at(
    composed: DictConfig, place_of: Callable[[Config], JobHardware], invocation: Invocation
) -> Job:
    """Return the job that a composed config describes; it has no run folder yet.

    Args:
        composed: with its ``hydra`` node.
        place_of: gives the place where a job of this config will run.
        invocation: the command.

    Raises:
        UserError: the config is invalid, or a file that it names does not exist.
    """
    with opened(composed) as (given, node):
        one = prepare(given, node, invocation)
        _, secrets = resolved_texts(one.raw, one.interpolations)
        with secrets.hidden_in_errors():
            return finish(one, to_config(one.raw), place_of, secrets, one.overrides, invocation)


@dataclass(frozen=True)
class PreparedConfig:
    """A composed config, and all that does not follow from the values of its plain keys."""

    given: DictConfig  # without its ``hydra`` node
    raw: DictConfig  # likewise; of a resumed run its own config, with this command's keys
    interpolations: Mapping[Place, str]
    overrides: tuple[str, ...]  # that the user wrote
    choices: Mapping[str, str]  # the option of each group
    lacks_run: bool
    notes: Sequence[str]


def prepare(given: DictConfig, node: HydraConf, invocation: Invocation) -> PreparedConfig:
    """Apply what follows from a command's choices to its composed config, in place."""
    command, env = invocation.command, invocation.env
    raw, overrides, lacks_run = given, _written(node, command), False
    own_keys = chosen_keys(overrides)
    notes = _keep_options(given, node, command)
    try:
        raw = with_resumed(given, overrides, is_launched=env is not None)
        if raw is not given:
            notes = left_trackers(given, overrides)
        elif has_own_loop(raw.task):
            own_keys += changed_keys(raw, overrides)
        notes += unused_note(raw.task, own_keys)
    except NotARunError:
        lacks_run = (env.num_nodes if env else given.launch.nnodes) > 1
        if not lacks_run:
            raise
    choices = _choices(node, raw)
    return PreparedConfig(given, raw, interpolations(raw), overrides, choices, lacks_run, notes)


def finish(
    one: PreparedConfig,
    unresolved: Config,
    place_of: Callable[[Config], JobHardware],
    secrets: Secrets,
    overrides: tuple[str, ...],
    invocation: Invocation,
) -> Job:
    """Return the job of a prepared config: resolved and validated."""
    env, own_groups, place = invocation.env, invocation.command.own_groups, place_of(unresolved)
    config, warnings = resolve(
        unresolved, hardware=place.hardware, chosen=chosen_keys(overrides), env=place.env
    )
    validate_files(config, env=place.env, is_here=place.env is env)
    return Job(
        config=config,
        started_at=invocation.started_at,
        lacks_run=one.lacks_run,
        code=invocation.code,
        overrides=overrides,
        own_groups=own_groups if env is None else None,
        resume_arguments=resume_arguments(
            secrets.written(config), one.given, overrides, own_groups, choices=one.choices
        ),
        secrets=secrets,
        choices=one.choices,
        warnings=(*invocation.warnings, *map(secrets.hide, [*one.notes, *warnings])),
    )


def shown_arguments(command: CommandLine, composed: DictConfig) -> list[str]:
    """Return the arguments by which Hydra shows the config that a run would have."""
    with opened(composed) as (raw, node), opened(composed) as (kept, _):
        _keep_options(kept, node, command)
        return command.arguments(*changes(raw, kept))


def _keep_options(raw: DictConfig, node: HydraConf, command: CommandLine) -> list[str]:
    words, choices = _written(node, command), node.runtime.choices
    said = list(keep_chosen_options(raw, words, choices=choices, folders=command.folders))
    replace_targets(raw, words, folders=command.folders)
    return said


def _choices(node: HydraConf, raw: DictConfig) -> dict[str, str]:
    """Return the option of each group; a list for those of several, which Hydra leaves out."""
    choices = {
        str(group): str(option)
        for group, option in node.runtime.choices.items()
        if option is not None and "/" not in str(group)
    }
    lists = {one: ",".join(map(str, raw[one])) for one in LIST_GROUPS}
    return choices | {group: f"[{names}]" for group, names in lists.items() if names}


def job_folder(composed: DictConfig, command: CommandLine) -> str:
    """Return the name of a sweep job's folder: the overrides that differ between the jobs.

    A job that goes on with a run has that run's folder: an absolute path.
    """
    with opened_node(composed) as node:
        if composed.resume not in (None, AUTO) and composed.task not in INFERENCE:
            if node.sweep.subdir != UNNAMED:
                raise UserError(
                    f"hydra.sweep.subdir ({node.sweep.subdir}) names a new folder, and resume="
                    f"{composed.resume} goes on in its own; leave hydra.sweep.subdir out"
                )
            return str(Path(composed.resume).absolute())
        if node.sweep.subdir != UNNAMED:
            return safe_name(str(node.sweep.subdir))  # a job's folder is directly in the sweep's
        swept = {one.key_or_group for one in command.overrides if one.is_sweep_override()}
        fixed = {one.key_or_group for one in command.overrides} - swept
        overrides = sweep_command(_written(node, command))
        varied = [one for one in overrides if one.partition("=")[0].lstrip("+~") not in fixed]
        return job_name([one.removeprefix("++") for one in varied or overrides])


def _written(node: HydraConf, command: CommandLine) -> tuple[str, ...]:
    """Return the overrides that the user wrote, as they were written."""
    return tuple(one for one in as_written(node.overrides.task) if one not in command.implied)
