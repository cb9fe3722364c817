"""Runs the jobs of a sweep on Slurm: submits what is left, and watches it to its end. Torch-free.

The command may end while its jobs go on, even by SIGKILL. The same command finds them again.
"""

import json
import shlex
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ddp_runner.config.schema import Config, RunConfig
from ddp_runner.config.sections import AUTO
from ddp_runner.config.validate import validate_values
from ddp_runner.dist_env import DistEnv
from ddp_runner.errors import UserError, counted
from ddp_runner.files import READER_S, locked
from ddp_runner.job import Job, Outcome, Status
from ddp_runner.sweep.executor import Place, Shape
from ddp_runner.sweep.jobs import Batch, recorded
from ddp_runner.sweep.results import WATCHED, current
from ddp_runner.sweep.slurm.commands import queued_states
from ddp_runner.sweep.slurm.jobs import standing, submit, submitted_number
from ddp_runner.sweep.slurm.sbatch_file import LOGS, write_sbatch_file
from ddp_runner.sweep.slurm.settings import (
    SlurmSettings,
    job_shape,
    node_hardware,
    sbatch_options,
)
from ddp_runner.sweep.slurm.watch import Watch, kept_signals
from ddp_runner.sweep.validate import validate_slurm_sweep
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.tracking.start_block import shown_path

MOST_ELEMENTS = 1000  # of an array; Slurm's MaxArraySize is 1001 unless a site changes it


class Slurm:
    """The executor of ``hydra/launcher=slurm``; ``folder`` is the sweep's."""

    def __init__(self, folder: Path, settings: SlurmSettings) -> None:
        self._folder, self._settings = folder, settings
        self._node = node_hardware(settings)
        self._held: ExitStack | None = None  # the lock of the sweep
        self.starts_jobs = settings.submit

    def validate(self, config: Config, *, searches: bool) -> None:
        """Reject what Slurm cannot do; see ``Executor``."""
        validate_slurm_sweep(config, searches=searches, submits=self._settings.submit)

    def place(self, config: Config) -> Place:
        """Return a node of the partition, and the job's rank 0 as srun will start it."""
        if config.resume not in (None, AUTO):
            raise UserError(
                f"hydra/launcher=slurm submits new runs, and resume={config.resume} goes on with "
                "one; give each run to sbatch by a script of its own, as in docs/slurm.md"
            )
        validate_values(config)
        shape = job_shape(config, self._node, self._settings)
        env = DistEnv(
            rank=0,
            local_rank=0,
            world_size=shape.num_ranks,
            local_world_size=shape.ranks_per_node,
            launcher="srun",
        )
        return Place(self._node, env=env)

    def shape(self, config: RunConfig) -> Shape:
        """Return the nodes that a job takes."""
        return job_shape(config, self._node, self._settings)

    def run(self, batch: Batch) -> list[Outcome]:
        """Submit what is left of a batch and wait for its end; see ``Executor``."""
        (self._folder / LOGS).mkdir(exist_ok=True)
        if not self._settings.submit:
            return self._write(batch)
        self._hold()
        with kept_signals() as signals:
            numbers = self._submitted(batch)
            return Watch(batch, numbers, signals).run()

    def close(self) -> None:
        """Let another command watch the sweep."""
        if self._held is not None:
            self._held.close()

    def _hold(self) -> None:
        """Keep other commands from submitting the same jobs."""
        if self._held is not None:
            return
        held = ExitStack()
        try:
            held.enter_context(locked(self._folder / WATCHED, wait_s=READER_S))
        except TimeoutError:
            raise UserError(
                f"another command submits the jobs of {shown_path(self._folder)}; wait for it, or "
                "end it with Ctrl-C: its jobs go on"
            ) from None
        self._held = held

    def _submitted(self, batch: Batch) -> dict[str, str]:
        """Return the number in Slurm of each job that is left, after submitting what is not there.

        What ended while nobody watched is noted in the ledger.
        """
        entries, states = batch.ledger.read(), queued_states()
        numbers, left = dict[str, str](), dict[str, Job]()
        for job_id, job in batch.jobs.items():
            if recorded(entries[job_id], job) is not None:
                continue
            assert job.run_dir is not None
            number = submitted_number(job.run_dir)
            if number is not None:
                found = standing(
                    job.run_dir, number=number, state=states.get(number), folder=self._folder
                )
                is_left = found.status == Status.PREEMPTED or (
                    found.status == Status.FAILED and batch.settings.retry == "failed"
                )
                if not is_left:
                    numbers[job_id] = number
                    continue
            if RunDir(job.run_dir).is_held is not False:
                raise UserError(
                    f"{shown_path(job.run_dir)} is in use by a process outside of this sweep's "
                    "queue; wait for it to end"
                )
            left[job_id] = job
        for options, job_ids in self._arrays(left):
            submitted = submit(
                [left[job_id] for job_id in job_ids],
                folder=self._folder.absolute(),
                options=options,
                settings=self._settings,
            )
            numbers |= zip(job_ids, submitted, strict=True)
        return numbers

    def _arrays(self, jobs: Mapping[str, Job]) -> Iterator[tuple[Mapping[str, Any], list[str]]]:
        """Yield the options of each array, and the ids of its jobs, which are of one shape."""
        found = dict[str, tuple[Mapping[str, Any], list[str]]]()
        for job_id, job in jobs.items():
            config = job.config
            options = sbatch_options(config, self.shape(config), self._node, self._settings)
            found.setdefault(json.dumps(options), (options, []))[1].append(job_id)
        for options, job_ids in found.values():
            for first in range(0, len(job_ids), MOST_ELEMENTS):
                yield options, job_ids[first : first + MOST_ELEMENTS]

    def _write(self, batch: Batch) -> list[Outcome]:
        """Write the arrays of what is left as scripts for sbatch; return how the others ended."""
        (self._folder / WATCHED).touch()  # so that the table asks run.json
        outcomes, left = list[Outcome](), dict[str, Job]()
        entries = [one for one in batch.ledger.read().values() if one.job_id in batch.jobs]
        for entry, now in zip(entries, current(entries, self._folder), strict=True):
            job_id, job = entry.job_id, batch.jobs[entry.job_id]
            if now.status == Status.FAILED and entry.status != now.status:
                is_left = batch.settings.retry == "failed"
            else:
                is_left = now.status in (Status.QUEUED, Status.PREEMPTED)
            if is_left:
                left[job_id] = job
            elif now.status in (Status.COMPLETED, Status.FAILED):
                batch.ledger.note(job_id, status=now.status, kind=now.kind, sentence=now.sentence)
                outcomes += filter(None, [recorded(now, job)])
        for path in self._folder.glob("sweep*.sbatch"):
            path.unlink()  # of an earlier start of this sweep
        for number, (options, job_ids) in enumerate(self._arrays(left), start=1):
            path = self._folder / ("sweep.sbatch" if number == 1 else f"sweep-{number}.sbatch")
            write_sbatch_file(
                path,
                [left[job_id] for job_id in job_ids],
                folder=self._folder,
                name=self._folder.name,
                options=options,
                settings=self._settings,
            )
            jobs = counted(len(job_ids), "job")
            print(f"\n{jobs}: submit with  sbatch {shlex.quote(str(shown_path(path)))}", flush=True)
        if left:
            shown = shlex.quote(str(shown_path(self._folder)))
            print(f"then see how they stand with  python -m ddp_runner.sweep {shown}", flush=True)
        return outcomes
