"""Submits the jobs of a sweep to Slurm, in arrays, and waits for them. Torch-free.

The command may end before its jobs, even by SIGKILL. The same command finds them again. Each rank
of a job runs ``python -m ddp_runner resume=RUN``.
"""

import json
import os
import re
import secrets
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from ddp_runner.config.schema import Config
from ddp_runner.config.sections import AUTO
from ddp_runner.config.validate import validate_values
from ddp_runner.dist_env import DistEnv
from ddp_runner.errors import UserError, counted
from ddp_runner.files import READER_S, locked, replace_file
from ddp_runner.host.processes import answering
from ddp_runner.job import Outcome, Status
from ddp_runner.sweep.jobs import JobBatch, JobHardware, SweepJob
from ddp_runner.sweep.slurm.queue import LOGS, job_standing, queued_states, run_slurm, submitted_as
from ddp_runner.sweep.slurm.slurm_settings import Options, SlurmSettings
from ddp_runner.sweep.slurm.watch import Signals, Watch
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.tracking.run_record import read_run_record, write_run_record
from ddp_runner.tracking.start_block import shown_path

LOCK = ".slurm.lock"  # held by the command that submits and watches the sweep's jobs
MAX_ARRAY_SIZE = 1000  # jobs; Slurm's default limit, MaxArraySize, is 1001
RUNNER = (sys.executable, "-m", "ddp_runner")
# A job around this process sets variables with these prefixes. sbatch must not see them: they would
# contradict the options of the new jobs. It needs the address of Slurm and the user's token.
JOB_PREFIXES = ("SLURM", "SRUN_", "SBATCH_", "MASTER_")
KEPT_VARIABLES = ("SLURM_CONF", "SLURM_JWT")


class Slurm:
    """Slurm; ``hydra/launcher=slurm``. ``folder`` is the sweep's."""

    def __init__(self, folder: Path, settings: SlurmSettings) -> None:
        self._folder, self._settings = folder.absolute(), settings
        self._node = settings.node  # asks Slurm
        self.layout = settings.layout
        self._locks = ExitStack()
        self._is_locked = False

    def validate(self, config: Config) -> None:
        """Raise a UserError if Slurm cannot run a sweep with these settings."""
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

    def hardware_of(self, config: Config) -> JobHardware:
        """Return a node of the partition, and the environment in which srun starts rank 0."""
        if config.resume not in (None, AUTO):
            raise UserError(
                f"hydra/launcher=slurm submits new runs, and resume={config.resume} continues one",
                "write an sbatch script for each run, as in docs/clusters.md",
            )
        validate_values(config)
        num_nodes, per_node = self.layout(config)
        return self._node, DistEnv(0, 0, num_nodes * per_node, per_node, launcher="srun")

    def run(self, batch: JobBatch) -> Mapping[str, Outcome]:
        """Submit a batch and wait for its jobs; see ``Local.run``."""
        (self._folder / LOGS).mkdir(exist_ok=True)
        if not self._settings.submit:
            return self._write_scripts(batch)
        self._lock()
        signals = Signals()
        with answering(lambda signum, _: signals.put(signum)):
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
        for options, group in self._arrays(new):
            submitted = self.submit(group, options)
            names |= zip((job.planned.job_id for job in group), submitted, strict=True)
        return names

    def _arrays(self, jobs: Iterable[SweepJob]) -> Iterator[tuple[Options, Sequence[SweepJob]]]:
        """Yield arrays of jobs, each with the options that all its jobs share."""
        groups = dict[str, tuple[Options, list[SweepJob]]]()
        for job in jobs:
            options = self._settings.sbatch_options(job.job.config)
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
        for number, (options, group) in enumerate(self._arrays(to_run), start=1):
            path = self._folder / ("sweep.sbatch" if number == 1 else f"sweep-{number}.sbatch")
            self.write_sbatch_file(path, group, options)
            shown = shlex.quote(str(shown_path(path)))
            print(f"\n{counted(len(group), 'job')}: submit with  sbatch {shown}", flush=True)
        if to_run:
            shown = shlex.quote(str(shown_path(self._folder)))
            print(f"then see their status with  python -m ddp_runner.sweep {shown}", flush=True)
        return outcomes

    def submit(self, jobs: Sequence[SweepJob], options: Options) -> list[str]:
        """Submit frozen jobs as an array, and return their names."""
        array = f"{re.sub(r'[^A-Za-z0-9_.-]', '_', self._folder.name)[:60]}.{secrets.token_hex(4)}"
        names = [f"{array}_{index}" for index, _ in enumerate(jobs)]
        for job, name in zip(jobs, names, strict=True):
            earlier = read_run_record(job.run_dir, missing_ok=True).get("status")
            if earlier not in (None, Status.COMPLETED):  # the end of an earlier job
                write_run_record(job.run_dir, status=Status.QUEUED, error=None)
            replace_file(job.run_dir.slurm_job, name)
        script = self._folder / LOGS / f"{array}.sbatch"
        self.write_sbatch_file(script, jobs, options)
        environ = {
            key: value
            for key, value in os.environ.items()
            if key in KEPT_VARIABLES or not key.startswith(JOB_PREFIXES)
        }
        run_slurm("sbatch", str(script), environ=environ, fix="; change the keys of hydra.launcher")
        return names

    def write_sbatch_file(self, path: Path, jobs: Sequence[SweepJob], options: Options) -> None:
        """Write a script for sbatch, named after the array.

        The script requeues a job that stopped before its time limit; Slurm only requeues after a
        preemption. Its ranks end with 138 (128 + SIGUSR1), or with 143 (128 + SIGTERM) if other
        ranks stopped them before. After scancel they also end with 143, but the job is not RUNNING.
        """
        limit = self._settings.array_parallelism
        array = f"0-{len(jobs) - 1}" + (f"%{limit}" if limit else "")
        logs = f"{self._folder / LOGS}/%x_%a.log"
        identity = {"job_name": path.stem, "array": array, "output": logs, "chdir": str(Path.cwd())}
        # Since Slurm 22.05 srun ignores the job's cpus-per-task, and gives a task one core.
        command = shlex.join(["srun", f"--cpus-per-task={options['cpus_per_task']}", *RUNNER])
        lines = [
            "#!/bin/bash",
            f"# Submit it with: sbatch {shlex.quote(str(path))}",
            *(_option(key, value) for key, value in {**identity, **options}.items()),
            "",
            "runs=(",
            *(f"  {_double_quoted(shlex.join(rank_arguments(job)))}" for job in jobs),
            ")",
            *self._settings.setup,
            'eval "words=(${runs[$SLURM_ARRAY_TASK_ID]})"',
            f'{command} "${{words[@]}}"',
            "code=$?",
            'if [ "$code" -eq 138 ] || [ "$code" -eq 143 ]; then',
            # The array has the same number as its last element, so SLURM_JOB_ID may mean all jobs.
            '  job="${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"',
            '  state=$(squeue --noheader --jobs="$job" --format=%T)',
            f'  if [ "$state" = RUNNING ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt '
            f"{self._settings.max_requeues} ]; then",
            '    scontrol requeue "$job"',
            "  fi",
            "fi",
            'exit "$code"',
        ]
        replace_file(path, "\n".join([*lines, ""]))


def rank_arguments(job: SweepJob) -> list[str]:
    """Return the arguments of each rank: its run, and what the frozen config does not hold."""
    run_dir = RunDir(job.run_dir.path.absolute())
    return [*shlex.split(run_dir.resume_argument), *job.job.resume_arguments]


def _option(key: str, value: str | int | bool) -> str:
    name = f"#SBATCH --{key.replace('_', '-')}"
    return name if value is True else f"{name}={shlex.quote(str(value))}"


def _double_quoted(text: str) -> str:
    """Return a text in double quotes for bash; it holds single quotes already."""
    return '"' + re.sub(r'([\\"$`])', r"\\\1", text) + '"'
