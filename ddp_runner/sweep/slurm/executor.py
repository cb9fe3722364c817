"""Submits the jobs of a sweep to Slurm and waits for them. Torch-free.

The command may end before its jobs, even by SIGKILL. The same command finds them again.
"""

import json
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from ddp_runner.config.schema import Config, RunConfig
from ddp_runner.config.sections import AUTO
from ddp_runner.config.validate import validate_values
from ddp_runner.dist_env import DistEnv
from ddp_runner.errors import UserError, counted
from ddp_runner.files import READER_S, locked
from ddp_runner.job import Outcome, Status
from ddp_runner.sweep.jobs import JobBatch, SweepJob
from ddp_runner.sweep.layout import JobHardware, NodeLayout
from ddp_runner.sweep.slurm.queue import LOGS, job_standing, queued_states, submitted_as
from ddp_runner.sweep.slurm.script import submit, write_sbatch_file
from ddp_runner.sweep.slurm.slurm_settings import (
    Options,
    SlurmSettings,
    job_layout,
    node_hardware,
    sbatch_options,
)
from ddp_runner.sweep.slurm.watch import Watch, queued_signals
from ddp_runner.tracking.start_block import shown_path

LOCK = ".slurm.lock"  # held by the command that submits and watches the sweep's jobs
MAX_ARRAY_SIZE = 1000  # jobs; Slurm's default limit, MaxArraySize, is 1001


class Slurm:
    """Slurm; ``hydra/launcher=slurm``. ``folder`` is the sweep's."""

    def __init__(self, folder: Path, settings: SlurmSettings) -> None:
        self._folder, self._settings = folder.absolute(), settings
        self._node = node_hardware(settings)
        self._locks = ExitStack()
        self._is_locked = False
        self.starts_jobs = settings.submit

    def validate(self, config: Config, *, searches: bool) -> None:
        """Validate the sections sweep and launch; `searches`: the sweep is a search."""
        slots, address = config.sweep.parallel_jobs, config.launch.init_method
        if slots != 1:
            raise UserError(
                f"sweep.parallel_jobs ({slots}) shares one machine among jobs, and Slurm runs all "
                "jobs that fit",
                "to limit them, write hydra.launcher.array_parallelism=N",
            )
        if address is not None:
            raise UserError(
                f"launch.init_method ({address}) is one address for all jobs of a sweep, and Slurm "
                "runs them at the same time",
                "leave it out",
            )
        if searches and not self._settings.submit:
            raise UserError(
                "hydra.launcher.submit=false leaves the jobs to you, and a search needs their "
                "results to choose the next jobs",
                "leave it out",
            )

    def hardware_of(self, config: Config) -> JobHardware:
        """Return a node of the partition, and the environment in which srun starts rank 0."""
        if config.resume not in (None, AUTO):
            raise UserError(
                f"hydra/launcher=slurm submits new runs, and resume={config.resume} continues one",
                "write an sbatch script for each run, as in docs/clusters.md",
            )
        validate_values(config)
        layout = job_layout(config, self._node, self._settings)
        env = DistEnv(
            rank=0,
            local_rank=0,
            world_size=layout.num_ranks,
            local_world_size=layout.ranks_per_node,
            launcher="srun",
        )
        return JobHardware(self._node, env=env)

    def layout(self, config: RunConfig) -> NodeLayout:
        """Return the nodes of a job."""
        return job_layout(config, self._node, self._settings)

    def run(self, batch: JobBatch) -> Mapping[str, Outcome]:
        """Submit a batch and wait for its jobs; see ``Local.run``."""
        (self._folder / LOGS).mkdir(exist_ok=True)
        if not self._settings.submit:
            return self._write_scripts(batch)
        self._lock()
        with queued_signals() as signals:
            names = self._submit(batch)
            return Watch(batch, names, folder=self._folder, signals=signals).run()

    def close(self) -> None:
        """Release the sweep to other commands."""
        self._locks.close()

    def _lock(self) -> None:
        """Keep other commands from submitting the same jobs."""
        if self._is_locked:
            return
        try:
            self._locks.enter_context(locked(self._folder / LOCK, wait_s=READER_S))
        except TimeoutError:
            raise UserError(
                f"another command submits the jobs of {shown_path(self._folder)}",
                "wait for it, or end it with Ctrl-C: its jobs continue",
            ) from None
        self._is_locked = True

    def _submit(self, batch: JobBatch) -> dict[str, str]:
        """Submit new jobs; return the names in Slurm of all jobs whose ends are not noted."""
        states, names, new = queued_states(), dict[str, str](), list[SweepJob]()
        to_submit = {Status.PREEMPTED, *([Status.FAILED] if batch.settings.retry else [])}
        for job_id, job in batch.jobs.items():
            run_dir = job.run_dir
            if (name := submitted_as(run_dir.path)) is not None:
                state = states.get(name)
                current = job_standing(run_dir.path, name=name, state=state, sweep=self._folder)
                if current.status not in to_submit:
                    names[job_id] = name
                    continue
            elif batch.outcome(job) is not None:
                continue
            if run_dir.is_held is not False:
                raise UserError(
                    f"{shown_path(run_dir.path)} is in use by a process outside of this sweep's "
                    "queue",
                    "wait for it to end",
                )
            new.append(job)
        folder, settings = self._folder, self._settings
        for options, group in self._arrays(new):
            jobs = [job.job for job in group]
            submitted = submit(jobs, folder=folder, options=options, settings=settings)
            names |= zip((job.planned.job_id for job in group), submitted, strict=True)
        return names

    def _arrays(self, jobs: Iterable[SweepJob]) -> Iterator[tuple[Options, Sequence[SweepJob]]]:
        """Yield arrays of jobs, each with the options that all its jobs share."""
        groups = dict[str, tuple[Options, list[SweepJob]]]()
        for job in jobs:
            config = job.job.config
            options = sbatch_options(config, self.layout(config), self._node, self._settings)
            groups.setdefault(json.dumps(options), (options, []))[1].append(job)
        for options, group in groups.values():
            for start in range(0, len(group), MAX_ARRAY_SIZE):
                yield options, group[start : start + MAX_ARRAY_SIZE]

    def _write_scripts(self, batch: JobBatch) -> dict[str, Outcome]:
        """Write a script for sbatch for each array; return the outcomes of jobs that have ended."""
        outcomes = batch.outcomes()
        to_run = [job for job in batch.jobs.values() if batch.must_run(job, job.standing)]
        for path in self._folder.glob("sweep*.sbatch"):
            path.unlink()  # of an earlier start of this sweep
        folder, settings = self._folder, self._settings
        for number, (options, group) in enumerate(self._arrays(to_run), start=1):
            path = folder / ("sweep.sbatch" if number == 1 else f"sweep-{number}.sbatch")
            jobs = [job.job for job in group]
            write_sbatch_file(path, jobs, folder=folder, options=options, settings=settings)
            shown = shlex.quote(str(shown_path(path)))
            print(f"\n{counted(len(jobs), 'job')}: submit with  sbatch {shown}", flush=True)
        if to_run:
            shown = shlex.quote(str(shown_path(folder)))
            print(f"then see their status with  python -m ddp_runner.sweep {shown}", flush=True)
        return outcomes
