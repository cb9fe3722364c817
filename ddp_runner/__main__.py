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
from dataclasses import replace
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
    opened,
    register,
    sweep_command,
    to_config,
    with_resumed,
)
from ddp_runner.config import config_hash
from ddp_runner.environment import dist_env
from ddp_runner.errors import UserError
from ddp_runner.explain import user_error
from ddp_runner.folders import check_writable, freeze_config, locked
from ddp_runner.hardware import detect
from ddp_runner.job import EXIT_USER_ERROR, Job, Outcome
from ddp_runner.launch import launch, start_fork_server
from ddp_runner.ledger import LEDGER, REFUSED, Entry, Ledger
from ddp_runner.record import (
    RUN_RECORD,
    git_revision,
    read_run_record,
    versions,
    write_run_record,
)
from ddp_runner.rules import resolve
from ddp_runner.sweep import run_jobs, sweep_table
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
        self._outcomes: list[Outcome] = []
        self._refused: UserError | None = None
        self._sweep_folder: Path | None = None

    def run(self) -> int:
        """Let Hydra compose and call back; return the exit code."""
        claimed = register(self._env)

        def run_job(raw: DictConfig) -> None:
            self._run_job(raw)

        run_job.run_batch = self._run_sweep  # type: ignore[attr-defined]  # for our Hydra launcher
        entry = hydra.main(version_base="1.3", config_path=str(CONFIG_DIR), config_name="config")
        try:
            entry(run_job)()
            if self._refused is not None:
                raise self._refused
        except BaseException:
            for path in map(Path, claimed.values()):
                if not any(path.rglob(RUN_RECORD)) and not (path / LEDGER).exists():
                    shutil.rmtree(path, ignore_errors=True)  # refused before anything ran in it
            raise
        finally:
            if self._sweep_folder is not None:
                print(sweep_table(self._sweep_folder), flush=True)
        return max((outcome.exit_code for outcome in self._outcomes), default=0)

    def _run_job(self, raw: DictConfig) -> None:
        """Run the one composed config of a command that is no sweep."""
        hydra_config = HydraConfig.get()
        run_dir = Path(hydra_config.runtime.output_dir)
        # Where rank 0 of the whole gang claims the folder, Hydra was given the current one.
        is_ours = run_dir.resolve() != Path.cwd()
        try:
            job = self._plan(raw, run_dir if is_ours else None, hydra_config.overrides.task)
            if self._env is not None:
                from ddp_runner.worker import run_under_launcher

                run_under_launcher(job, self._env)
            if not is_ours:
                self._outcomes.append(self._told(launch(job)))
                return
            check_writable(run_dir)
            with locked(run_dir):
                if job.config.resume is None and (run_dir / RUN_RECORD).exists():
                    raise UserError(
                        f"{run_dir} already holds a run; give another folder, or resume={run_dir}"
                    )
                self._outcomes.append(self._execute(job))
        except UserError as error:
            self._refused = error  # raised here, Hydra would print a line of its own
            if is_ours:
                with suppress(OSError):
                    run_dir.rmdir()  # one that Hydra made just now is empty

    def _run_sweep(self, composed: Sequence[DictConfig]) -> list[float | None]:
        """Plan and freeze all jobs of a batch, then run them; return their objectives."""
        if self._env is not None:
            raise UserError("-m starts its own workers; run a sweep without torchrun or srun")
        jobs, refused, order = dict[str, Job](), list[Entry](), list[str]()
        for one in composed:
            raw, node = opened(one)
            folder, name = Path(node.sweep.dir), node.sweep.subdir
            try:
                job = self._plan(raw, folder / name, node.overrides.task)
                # With its name: two jobs may differ in how their gangs start alone.
                identity = f"{config_hash(job.config)} {name}"
                jobs[identity] = job
            except UserError as error:
                identity = f"{REFUSED}: {name}"
                refused.append(Entry(identity, name, "failed", REFUSED, str(error)))
                complain(f"{name}: {error}")
            order.append(identity)
        ledger = Ledger(folder)
        entries = ledger.queue(
            {identity: job.run_dir.name for identity, job in jobs.items() if job.run_dir},
            refused=refused,
            command=sweep_command(),
        )
        self._sweep_folder = folder
        for identity, planned in jobs.items():
            run_dir = folder / entries[identity].folder
            run_dir.mkdir(exist_ok=True)
            jobs[identity] = job = replace(planned, run_dir=run_dir)
            if entries[identity].status == "queued":
                freeze_config(run_dir, job.config, overrides=job.overrides, raw=job.raw_config)
        check_writable(folder)
        self._outcomes += [
            Outcome.refused(folder / one.folder, one.sentence or "") for one in refused
        ]
        settings = to_config(raw).sweep
        if not (refused and settings.fail_fast):
            self._outcomes += run_jobs(
                jobs, ledger=ledger, settings=settings, execute=self._execute
            )
        if any(outcome.status == "preempted" for outcome in self._outcomes):
            sys.exit(max(outcome.exit_code for outcome in self._outcomes))
        return [self._objective(jobs.get(identity), settings.objective) for identity in order]

    def _objective(self, job: Job | None, name: str | None) -> float | None:
        """Return a metric of a run that was completed; None where none was asked for."""
        if name is None:
            return None
        assert job is None or job.run_dir is not None
        record = read_run_record(job.run_dir) if job and job.run_dir else {}
        value = record.get("metrics", {}).get(name) if record.get("status") == "completed" else None
        return float("nan") if value is None else float(value)

    def _plan(self, raw: DictConfig, run_dir: Path | None, task_overrides: Any) -> Job:
        """Resolve a composed config."""
        overrides = tuple(as_written(task_overrides))
        raw = with_resumed(raw, overrides)
        config, warnings = resolve(
            to_config(raw), hardware=detect(), chosen=chosen_keys(overrides), env=self._env
        )
        check_text_files(config.model, config.dataset, data_root=Path(config.data_root))
        if self._env is None:
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

    def _execute(self, job: Job) -> Outcome:
        """Run a job in its folder, whose lock is held."""
        assert job.run_dir is not None
        freeze_config(job.run_dir, job.config, overrides=job.overrides, raw=job.raw_config)
        write_run_record(job.run_dir, status="running", started_at=job.started_at, error=None)
        return self._told(launch(job))

    def _told(self, outcome: Outcome) -> Outcome:
        """Print how a job failed, if it did."""
        if outcome.failure is not None:
            complain(outcome.failure.sentence)
            if outcome.failure.kind != "user":
                print(outcome.failure.traceback, file=sys.stderr, flush=True)
        return outcome

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
