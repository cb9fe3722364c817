"""How Hydra finds and fills the config: the schema, the resolvers of conf/config.yaml, resuming.

Called by ``__main__``; torch-free.
"""

import os
import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from ddp_runner.cli.preflight import validate_files
from ddp_runner.cli.resume import with_resumed
from ddp_runner.config.load import as_written, chosen_keys, to_config
from ddp_runner.config.resolve import resolve
from ddp_runner.config.schema import CONFIG_DIR as CONFIG_DIR
from ddp_runner.config.schema import Config, work_hash
from ddp_runner.config.secrets import find_secrets
from ddp_runner.dist_env import DistEnv
from ddp_runner.errors import UserError
from ddp_runner.host.hardware import detect
from ddp_runner.sweep.ledger import sweep_command, unfinished_sweep
from ddp_runner.tracking.claims import AUTO
from ddp_runner.tracking.launch_marks import find_unfinished_run
from ddp_runner.tracking.run_dir import (
    OUTPUTS,
    claim,
    job_name,
    run_folder,
    sibling_runs,
    sweep_folder,
)


@dataclass
class Folders:
    """What Hydra's questions have made this command claim: one folder, however often it asks."""

    run: Path | None = None
    sweep: Path | None = None
    is_left_to_ranks: bool = False  # Hydra was given the current folder: rank 0 claims the run's


def register(env: DistEnv | None, *, implied: Collection[str] = ()) -> Folders:
    """Tell Hydra the schema, and OmegaConf the resolvers that conf/config.yaml uses.

    Args:
        env: this process's rank facts if it is a worker already; such a process creates no folder.
        implied: overrides that the user did not write; see ``resumed_groups``.
    """
    ConfigStore.instance().store(name="schema", node=Config)
    claimed = Folders()

    def run_dir(*, _root_: DictConfig) -> str:
        if "resume" not in _root_:  # --cfg hydra shows that node alone
            return str(OUTPUTS / "NAME" / "DATE_TIME")
        # Before Hydra creates anything: a mistake leaves no folder behind.
        raw = OmegaConf.masked_copy(_root_, [str(key) for key in _root_ if key != "hydra"])
        overrides = written(_root_.hydra.overrides.task, implied)
        raw = with_resumed(raw, overrides, is_launched=env is not None)
        with find_secrets(raw).hidden_in_errors():
            config = to_config(raw)
            config = resolve(config, hardware=detect(), chosen=chosen_keys(overrides), env=env)[0]
            is_ranks = env is not None or config.launch.nnodes > 1
            if config.resume in (None, AUTO) and not is_ranks:
                validate_files(config, env=env)
        forbid_chdir(_root_.hydra)
        if config.resume not in (None, AUTO):
            return str(config.resume)
        if is_ranks:
            claimed.is_left_to_ranks = True
            return "."
        if claimed.run is None and config.resume == AUTO:
            unfinished = find_unfinished_run(sibling_runs(config), work=work_hash(config))
            if unfinished is not None:
                return str(unfinished)
        if claimed.run is None:
            claimed.run = claim(run_folder(config))
        return str(claimed.run)

    def sweep_dir(*, _root_: DictConfig) -> str:
        if "resume" not in _root_:
            return str(OUTPUTS / "NAME-DATE_TIME")
        if claimed.sweep is None:
            planned = sweep_folder(_root_.name)
            sampler = _root_.hydra.sweeper.get("sampler")  # of a search such as Optuna's
            begun = None
            if sampler is None or sampler.get("seed") is not None:  # else it tries other jobs
                begun = unfinished_sweep(
                    planned.parent,
                    command=sweep_command(),
                    retry_failed=_root_.sweep.retry is not None,
                )
            claimed.sweep = begun or claim(planned)
        return str(claimed.sweep)

    def sweep_job_name(*, _root_: DictConfig) -> str:
        # What the command line gives without a choice is the same for all jobs: no part of a name.
        fixed = {
            one.key_or_group
            for one in OverridesParser.create().parse_overrides(
                [argument for argument in sys.argv[1:] if "=" in argument and argument[0] != "-"]
            )
            if not one.is_sweep_override()
        }
        overrides = as_written(_root_.hydra.overrides.task)
        varied = [one for one in overrides if one.partition("=")[0].lstrip("+~") not in fixed]
        return job_name(varied or overrides)

    for name, resolver in (
        ("run_dir", run_dir),
        ("sweep_dir", sweep_dir),
        ("job_name", sweep_job_name),
        ("data_root", lambda: os.environ.get("DDP_RUNNER_DATA_ROOT", "data")),
    ):
        OmegaConf.register_new_resolver(name, resolver, replace=True)
    return claimed


def forbid_chdir(hydra_node: Any) -> None:
    """Refuse to change the folder: relative paths would mean others before than after.

    Raises:
        UserError: hydra.job.chdir is on.
    """
    if hydra_node.job.chdir:
        raise UserError(
            "hydra.job.chdir=true would change what data_root and resume mean; leave it out: a run "
            "writes all that it leaves into its own folder anyway"
        )


def written(overrides: Any, implied: Collection[str]) -> list[str]:
    """Return the overrides that the user wrote, as they were written."""
    return [one for one in as_written(overrides) if one not in implied]
