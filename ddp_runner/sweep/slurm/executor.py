"""Runs the jobs of a sweep on Slurm: submits what is left, and watches it to its end. Torch-free.

The command may end before its jobs do, even by SIGKILL. The same command finds them again.
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
from ddp_runner.sweep.jobs import JobBatch, SweepJob, ended, ended_jobs
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
from ddp_runner.sweep.slurm.watch import Watch, kept_signals
from ddp_runner.tracking.start_block import shown_path

WATCHED = ".slurm.lock"  # held by the command that watches the sweep's jobs
MOST_ELEMENTS = 1000  # of an array; Slurm's MaxArraySize is 1001 unless a site changes it


class Slurm:
    """Slurm; ``hydra/launcher=slurm``. ``folder`` is the sweep's."""

    def __init__(self, folder: Path, settings: SlurmSettings) -> None:
        self._folder, self._settings = folder.absolute(), settings
        self._node = node_hardware(settings)
        self._held, self._is_held = ExitStack(), False  # the lock of the sweep
        self.starts_jobs = settings.submit

    def validate(self, config: Config, *, searches: bool) -> None:
        """Reject what Slurm cannot do; only sweep, launch and backend are read."""
        slots, address = config.sweep.parallel_jobs, config.launch.init_method
        if slots != 1:
            raise UserError(
                f"sweep.parallel_jobs ({slots}) shares one machine among jobs, and Slurm runs as "
                "many as fit; to limit them, write hydra.launcher.array_parallelism=N"
            )
        if address is not None:
            raise UserError(
                f"launch.init_method ({address}) lets all jobs of a sweep meet at one address, and "
                "Slurm runs them at the same time; leave it out"
            )
        if searches and not self._settings.submit:
            raise UserError(
                "hydra.launcher.submit=false leaves the jobs to you, and a search chooses the next "
                "ones by their results; leave it out"
            )

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

    def run(self, batch: JobBatch) -> Mapping[str, Outcome]:
        """Submit what is left of a batch and wait for its end; see ``Local.run``."""
        (self._folder / LOGS).mkdir(exist_ok=True)
        if not self._settings.submit:
            return self._write(batch)
        self._hold()
        with kept_signals() as signals:
            names = self._submitted(batch)
            return Watch(batch, names, folder=self._folder, signals=signals).run()

    def close(self) -> None:
        """Let another command watch the sweep."""
        self._held.close()

    def _hold(self) -> None:
        """Keep other commands from submitting the same jobs."""
        if self._is_held:
            return
        try:
            self._held.enter_context(locked(self._folder / WATCHED, wait_s=READER_S))
        except TimeoutError:
            raise UserError(
                f"another command submits the jobs of {shown_path(self._folder)}; wait for it, or "
                "end it with Ctrl-C: its jobs go on"
            ) from None
        self._is_held = True

    def _submitted(self, batch: JobBatch) -> dict[str, str]:
        """Return the name in Slurm of each job whose end nobody has seen, after submitting more.

        What is neither there nor done is submitted.
        """
        states, names, left = queued_states(), dict[str, str](), list[SweepJob]()
        to_run = {Status.PREEMPTED, *([Status.FAILED] if batch.settings.retry else [])}
        for job_id, one in batch.jobs.items():
            run_dir = one.run_dir
            if (name := submitted_as(run_dir.path)) is not None:
                state, sweep = states.get(name), self._folder
                found = job_standing(run_dir.path, name=name, state=state, sweep=sweep)
                if found.status not in to_run:
                    names[job_id] = name
                    continue
            elif ended(batch, one) is not None:
                continue
            if run_dir.is_held is not False:
                raise UserError(
                    f"{shown_path(run_dir.path)} is in use by a process outside of this sweep's "
                    "queue; wait for it to end"
                )
            left.append(one)
        for options, jobs in self._arrays(left):
            submitted = submit(
                [one.job for one in jobs],
                folder=self._folder,
                options=options,
                settings=self._settings,
            )
            names |= zip((one.planned.job_id for one in jobs), submitted, strict=True)
        return names

    def _arrays(self, jobs: Iterable[SweepJob]) -> Iterator[tuple[Options, Sequence[SweepJob]]]:
        """Yield the options of each array and its jobs, which are of one layout."""
        found = dict[str, tuple[Options, list[SweepJob]]]()
        for one in jobs:
            config = one.job.config
            layout = self.layout(config)
            options = sbatch_options(config, layout, self._node, self._settings)
            found.setdefault(json.dumps(options), (options, []))[1].append(one)
        for options, alike in found.values():
            for first in range(0, len(alike), MOST_ELEMENTS):
                yield options, alike[first : first + MOST_ELEMENTS]

    def _write(self, batch: JobBatch) -> dict[str, Outcome]:
        """Write the arrays of what is left as scripts for sbatch; return how the others ended."""
        outcomes = ended_jobs(batch)
        left = [one for one in batch.jobs.values() if batch.is_to_run(one, one.standing)]
        for path in self._folder.glob("sweep*.sbatch"):
            path.unlink()  # of an earlier start of this sweep
        for number, (options, jobs) in enumerate(self._arrays(left), start=1):
            path = self._folder / ("sweep.sbatch" if number == 1 else f"sweep-{number}.sbatch")
            write_sbatch_file(
                path,
                [one.job for one in jobs],
                folder=self._folder,
                options=options,
                settings=self._settings,
            )
            what, shown = counted(len(jobs), "job"), shlex.quote(str(shown_path(path)))
            print(f"\n{what}: submit with  sbatch {shown}", flush=True)
        if left:
            shown = shlex.quote(str(shown_path(self._folder)))
            print(f"then see how they stand with  python -m ddp_runner.sweep {shown}", flush=True)
        return outcomes
