"""The entry: ``python -m ddp_runner``, alone or in each worker of torchrun, srun or mpirun.

Composes the config with Hydra and validates it, without importing torch; then hands it to
``launch``, which starts workers, or, where this process is a worker already, to ``worker``.
"""

import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
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
from ddp_runner.execution import complain, execute, told
from ddp_runner.explain import user_error
from ddp_runner.folders import check_writable, locked, resume_argument
from ddp_runner.hardware import Hardware, detect
from ddp_runner.job import EXIT_COMPLETED, EXIT_USER_ERROR, Job
from ddp_runner.launch import launch, start_fork_server
from ddp_runner.ledger import LEDGER
from ddp_runner.multirun import Multirun
from ddp_runner.record import RUN_RECORD, git_revision, versions
from ddp_runner.rules import resolve
from ddp_runner.text_files import check_text_files


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
        self._started_at = started_at
        self._env = dist_env()
        self._exit_code = EXIT_COMPLETED
        self._refused: UserError | None = None
        self._multirun = Multirun(self._plan)

    def run(self) -> int:
        """Let Hydra compose and call back; return the exit code."""
        claimed = register(self._env)

        def run_job(raw: DictConfig) -> None:
            self._run_job(raw)

        vars(run_job)["run_batch"] = self._run_batch  # for our Hydra launcher
        entry = hydra.main(version_base="1.3", config_path=str(CONFIG_DIR), config_name="config")
        try:
            with self._multirun:
                entry(run_job)()
            if self._refused is not None:
                raise self._refused
        except BaseException:
            for path in map(Path, claimed.values()):
                if not any(path.rglob(RUN_RECORD)) and not (path / LEDGER).exists():
                    shutil.rmtree(path, ignore_errors=True)  # refused before anything ran in it
                    with suppress(OSError):
                        path.parent.rmdir()
            raise
        self._multirun.report()
        return max(self._exit_code, self._multirun.exit_code)

    def _run_job(self, raw: DictConfig) -> None:
        """Run the one composed config of a command that is no sweep."""
        hydra_config = HydraConfig.get()
        run_dir = Path(hydra_config.runtime.output_dir)
        # Where rank 0 of the whole gang claims the folder, Hydra was given the current one.
        is_ours = run_dir.resolve() != Path.cwd()
        try:
            job = self._plan(
                raw, run_dir if is_ours else None, hydra_config.overrides.task, detect()
            )
            if self._env is not None:
                from ddp_runner.worker import run_under_launcher

                run_under_launcher(job, self._env)
            if not is_ours:
                self._exit_code = told(launch(job)).exit_code
                return
            check_writable(run_dir)
            with locked(run_dir):
                if job.config.resume is None and (run_dir / RUN_RECORD).exists():
                    raise UserError(
                        f"{run_dir} already holds a run; give another folder, or "
                        f"{resume_argument(run_dir)}"
                    )
                self._exit_code = execute(job).exit_code
        except UserError as error:
            self._refused = error  # raised here, Hydra would print a line of its own
            if is_ours:
                with suppress(OSError):
                    run_dir.rmdir()  # one that Hydra made just now is empty

    def _run_batch(
        self, composed: Sequence[DictConfig], *, searches: bool
    ) -> list[float | str | None]:
        """Run a batch of jobs of a command that is a sweep."""
        if self._env is not None:
            raise UserError("-m starts its own workers; run a sweep without torchrun or srun")
        return self._multirun.run_batch(composed, searches=searches)

    def _plan(
        self, raw: DictConfig, run_dir: Path | None, task_overrides: Any, hardware: Hardware
    ) -> Job:
        """Resolve a composed config."""
        overrides = tuple(as_written(task_overrides))
        raw = with_resumed(raw, overrides)
        config, warnings = resolve(
            to_config(raw), hardware=hardware, chosen=chosen_keys(overrides), env=self._env
        )
        check_text_files(config.model, config.dataset, data_root=Path(config.data_root))
        if self._env is None and config.sweep.parallel_jobs == 1:
            start_fork_server()  # as early as can be: it imports torch while we go on
        return Job(
            config=config,
            started_at=self._started_at,
            code=self._code,
            run_dir=run_dir,
            overrides=overrides,
            raw_config=OmegaConf.to_container(raw, resolve=False),
            warnings=tuple(warnings),
        )

    @cached_property
    def _code(self) -> dict[str, Any]:
        return {"git_revision": git_revision(), "versions": versions()}


if __name__ == "__main__":
    main()
