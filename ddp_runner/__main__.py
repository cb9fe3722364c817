"""The entry: ``python -m ddp_runner``, alone or in each worker of torchrun, srun or mpirun.

Composes the config with Hydra and validates it, without importing torch; then hands it to
``launch``, which starts workers, or, where this process is a worker already, to ``worker``.
"""

import os
import shutil
import signal
import sys
import time
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from ddp_runner.compose import (
    CONFIG_DIR,
    as_written,
    chosen_keys,
    register,
    to_config,
    with_resumed,
)
from ddp_runner.environment import dist_env
from ddp_runner.errors import UserError
from ddp_runner.explain import user_error
from ddp_runner.folders import check_writable, freeze_config, locked
from ddp_runner.hardware import detect
from ddp_runner.job import EXIT_USER_ERROR, Job, Outcome
from ddp_runner.launch import launch, start_fork_server
from ddp_runner.record import RUN_RECORD, git_revision, versions, write_run_record
from ddp_runner.rules import resolve
from ddp_runner.sweep import sweep_table


def main() -> None:
    """Run the command line; exit with one of the codes that the README lists."""
    started_at = time.time()
    wants_traceback = "HYDRA_FULL_ERROR" in os.environ
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises; what the user reads is written here
    try:
        sys.exit(Command(started_at).run())
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)  # before any worker: there is nothing to save
    except Exception as error:
        explained = user_error(error)
        if explained is None or wants_traceback:
            raise
        complain(str(explained))
        sys.exit(EXIT_USER_ERROR)


class Command:
    """One command line: a run, a sweep of runs, or one rank's part of a run."""

    def __init__(self, started_at: float) -> None:
        self._job_started_at = started_at
        self._env = dist_env()
        self._in_sweep = False
        self._outcomes: list[Outcome] = []
        self._refused: UserError | None = None

    def run(self) -> int:
        """Let Hydra compose and call back; return the exit code."""
        claimed = register(self._env)
        entry = hydra.main(version_base="1.3", config_path=str(CONFIG_DIR), config_name="config")
        try:
            entry(self._run_job)()
            if self._refused is not None:
                raise self._refused
        except BaseException:
            for path in claimed.values():
                if not any(Path(path).rglob(RUN_RECORD)):  # refused before anything ran in it
                    shutil.rmtree(path, ignore_errors=True)
            raise
        finally:
            if self._in_sweep:
                print(sweep_table(self._outcomes), flush=True)
        return max((outcome.exit_code for outcome in self._outcomes), default=0)

    def _run_job(self, raw: DictConfig) -> None:
        """Run one composed config; a sweep goes on after any failure of a job."""
        hydra_config = HydraConfig.get()
        self._in_sweep = hydra_config.mode == RunMode.MULTIRUN
        run_dir = Path(hydra_config.runtime.output_dir)
        try:
            outcome = self._run_config(raw, run_dir, tuple(as_written(hydra_config.overrides.task)))
        except UserError as error:
            if not self._in_sweep:
                self._refused = error  # raised here, Hydra would print a line of its own
                if run_dir.resolve() != Path.cwd():
                    with suppress(OSError):
                        run_dir.rmdir()  # one that Hydra made just now is empty
                return
            outcome = Outcome.refused(run_dir, str(error))
        self._outcomes.append(outcome)
        self._job_started_at = time.time()
        if outcome.failure is not None:
            complain(outcome.failure.sentence)
            if outcome.failure.kind != "user":
                print(outcome.failure.traceback, file=sys.stderr, flush=True)
        if self._in_sweep and outcome.status == "preempted":
            sys.exit(outcome.exit_code)

    def _run_config(self, raw: DictConfig, run_dir: Path, overrides: tuple[str, ...]) -> Outcome:
        raw = with_resumed(raw, overrides)
        config, warnings = resolve(
            to_config(raw), hardware=detect(), chosen=chosen_keys(overrides), env=self._env
        )
        if self._env is None:
            start_fork_server()  # as early as can be: it imports torch while we go on
        elif self._in_sweep:
            raise UserError("-m starts its own workers; run a sweep without torchrun or srun")
        # Where rank 0 of the whole gang claims the folder, Hydra was given the current one.
        is_ours = run_dir.resolve() != Path.cwd()
        job = Job(
            config=config,
            started_at=self._job_started_at,
            code=self._code,
            run_dir=run_dir if is_ours else None,
            overrides=overrides,
            raw_config=OmegaConf.to_container(raw, resolve=False),
            warnings=tuple(warnings),
        )
        if self._env is not None:
            from ddp_runner.worker import run_under_launcher

            run_under_launcher(job, self._env)
        if not is_ours:
            return launch(job)
        check_writable(run_dir)
        with locked(run_dir):
            if config.resume is None and (run_dir / RUN_RECORD).exists():
                raise UserError(
                    f"{run_dir} already holds a run; give another folder, or resume={run_dir}"
                )
            freeze_config(run_dir, config, overrides=overrides, raw=job.raw_config)
            write_run_record(run_dir, status="running", started_at=job.started_at, error=None)
            return launch(job)

    @cached_property
    def _code(self) -> dict[str, Any]:
        return {"git_revision": git_revision(), "versions": versions()}


def complain(sentence: str) -> None:
    """Print one line to stderr; of the ranks of a machine, which stumble alike, one speaks."""
    env = dist_env()
    if env is None or env.local_rank == 0:
        print(f"error: {sentence}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
