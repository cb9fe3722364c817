"""Runs the jobs of a sweep on Slurm: submits what is left, and watches it to its end. Torch-free.

The command may end before its jobs do, even by SIGKILL. The same command finds them again.
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
from ddp_runner.job import Outcome, Status
from ddp_runner.sweep.jobs import Batch, SweepJob, ended
from ddp_runner.sweep.layout import JobHardware, NodeLayout
from ddp_runner.sweep.slurm.commands import queued_states
from ddp_runner.sweep.slurm.jobs import job_state, number_of, submission_of, submit
from ddp_runner.sweep.slurm.sbatch_file import LOGS, write_sbatch_file
from ddp_runner.sweep.slurm.settings import (
    SlurmSettings,
    job_layout,
    node_hardware,
    sbatch_options,
)
from ddp_runner.sweep.slurm.watch import Watch, kept_signals
from ddp_runner.sweep.validate import validate_slurm_sweep
from ddp_runner.tracking.start_block import shown_path

WATCHED = ".slurm.lock"  # held by the command that watches the sweep's jobs
MOST_ELEMENTS = 1000  # of an array; Slurm's MaxArraySize is 1001 unless a site changes it


class Slurm:
    """Slurm; ``hydra/launcher=slurm``. ``folder`` is the sweep's."""

    def __init__(self, folder: Path, settings: SlurmSettings) -> None:
        self._folder, self._settings = folder, settings
        self._node = node_hardware(settings)
        self._held: ExitStack | None = None  # the lock of the sweep
        self.starts_jobs = settings.submit

    def validate(self, config: Config, *, searches: bool) -> None:
        """Reject what Slurm cannot do; only sweep, launch and backend are read."""
        validate_slurm_sweep(config, searches=searches, submits=self._settings.submit)

    def hardware_of(self, config: Config) -> JobHardware:
        """Return a node of the partition, and the job's rank 0 as srun will start it."""
        if config.resume not in (None, AUTO):
            raise UserError(
                f"hydra/launcher=slurm submits new runs, and resume={config.resume} continues one; "
                "give each run to sbatch by a script of its own, as in docs/slurm.md"
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
        """Return the nodes that a job takes."""
        return job_layout(config, self._node, self._settings)

    def run(self, batch: Batch) -> Mapping[str, Outcome]:
        """Submit what is left of a batch and wait for its end; see ``Local.run``."""
        (self._folder / LOGS).mkdir(exist_ok=True)
        if not self._settings.submit:
            return self._write(batch)
        self._hold()
        with kept_signals() as signals:
            return Watch(batch, self._submitted(batch), signals).run()

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
        """Return the number in Slurm of each job whose end nobody has seen, after submitting more.

        What is neither there nor done is submitted.
        """
        states, again = queued_states(), batch.settings.retry == "failed"
        numbers, left = dict[str, str](), dict[str, SweepJob]()
        for job_id, one in batch.jobs.items():
            run_dir, number = one.run_dir, None
            submission = submission_of(run_dir.path)
            if submission is not None and not submission.is_noted:
                number = number_of(submission)
            if number is not None:
                found = job_state(
                    run_dir.path, number=number, state=states.get(number), folder=self._folder
                )
                is_left = found.status == Status.PREEMPTED or (
                    found.status == Status.FAILED and again
                )
                if not is_left:
                    numbers[job_id] = number
                    continue
            elif ended(batch, one) is not None:
                continue
            if run_dir.is_held is not False:
                raise UserError(
                    f"{shown_path(run_dir.path)} is in use by a process outside of this sweep's "
                    "queue; wait for it to end"
                )
            left[job_id] = one
        for options, job_ids in self._arrays(left):
            submitted = submit(
                [left[job_id].job for job_id in job_ids],
                folder=self._folder.absolute(),
                options=options,
                settings=self._settings,
            )
            numbers |= zip(job_ids, submitted, strict=True)
        return numbers

    def _arrays(
        self, jobs: Mapping[str, SweepJob]
    ) -> Iterator[tuple[Mapping[str, Any], list[str]]]:
        """Yield the options of each array, and the ids of its jobs, which are of one layout."""
        found = dict[str, tuple[Mapping[str, Any], list[str]]]()
        for job_id, one in jobs.items():
            config = one.job.config
            options = sbatch_options(config, self.layout(config), self._node, self._settings)
            found.setdefault(json.dumps(options), (options, []))[1].append(job_id)
        for options, job_ids in found.values():
            for first in range(0, len(job_ids), MOST_ELEMENTS):
                yield options, job_ids[first : first + MOST_ELEMENTS]

    def _write(self, batch: Batch) -> dict[str, Outcome]:
        """Write the arrays of what is left as scripts for sbatch; return how the others ended."""
        outcomes, left = dict[str, Outcome](), dict[str, SweepJob]()
        for job_id, one in batch.jobs.items():
            if (outcome := ended(batch, one)) is not None:
                outcomes[job_id] = outcome
            elif batch.is_to_run(one, one.standing):
                left[job_id] = one
        for path in self._folder.glob("sweep*.sbatch"):
            path.unlink()  # of an earlier start of this sweep
        for number, (options, job_ids) in enumerate(self._arrays(left), start=1):
            path = self._folder / ("sweep.sbatch" if number == 1 else f"sweep-{number}.sbatch")
            write_sbatch_file(
                path,
                [left[job_id].job for job_id in job_ids],
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
