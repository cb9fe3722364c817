"""Runs the jobs of a sweep on this machine: one after the other, or in parallel slots."""

import sys
from collections.abc import Mapping
from dataclasses import replace

from ddp_runner.config.schema import Config, RunConfig
from ddp_runner.errors import UserError
from ddp_runner.host.hardware import VISIBLE, Hardware, detect
from ddp_runner.host.processes import start_fork_server
from ddp_runner.host.streams import line_width, print_line, shortened
from ddp_runner.job import Job, Outcome, Status
from ddp_runner.launch.launcher import launch
from ddp_runner.sweep.jobs import JobBatch, run_left
from ddp_runner.sweep.layout import JobHardware, NodeLayout
from ddp_runner.sweep.slots import Slots


class Local:
    """This machine; ``hydra/launcher=ddp_runner``."""

    starts_jobs = True

    def __init__(self) -> None:
        self._hardware = detect()
        self._has_header = False  # whether a job of this command has shown it
        self._slots: Slots | None = None

    def validate(self, config: Config, *, searches: bool) -> None:
        """Reject what this machine cannot do; only sweep, launch and backend are read.

        Only Slurm needs to know whether the sweep `searches`.
        """
        validate_sweep(config, self._hardware)

    def hardware_of(self, config: Config) -> JobHardware:
        """Return the job's share of this machine."""
        return JobHardware(self._hardware.share(config.sweep.parallel_jobs))

    def layout(self, config: RunConfig) -> NodeLayout:
        """Return one node with all ranks."""
        return NodeLayout(1, config.world_size)

    def run(self, batch: JobBatch) -> Mapping[str, Outcome]:
        """Run what is left of a batch; return how each job ended, by its id.

        What ended the whole batch, such as a signal, has a name that no job has.
        """
        parallel_jobs = batch.settings.parallel_jobs
        if parallel_jobs == 1:
            start_fork_server()
            return run_left(batch, execute=self._execute)
        if self._slots is None:
            self._slots = Slots(parallel_jobs, self._hardware)
        return self._slots.run(batch)

    def close(self) -> None:
        """End the slots."""
        if self._slots is not None:
            self._slots.close()

    def _execute(self, job: Job) -> Outcome:
        """Run a job; on a terminal rank 0 shows its line, and replaces it by the result."""
        shows_header, self._has_header = not self._has_header, True
        width = line_width(sys.stdout)
        if not width:
            print(f"\n{job.title}", flush=True)
        outcome = launch(replace(job, shows_header=shows_header))
        if width and outcome.status == Status.FAILED:
            print_line(f"{shortened(job.title, width - 8)}  failed", stream=sys.stdout)
        return outcome


def validate_sweep(config: Config, hardware: Hardware) -> None:
    """Reject settings that a sweep cannot run its jobs on this machine with.

    Raises:
        UserError: a rule is broken.
    """
    sweep, launch = config.sweep, config.launch
    if launch.nnodes > 1:
        raise UserError(
            f"launch.nnodes ({launch.nnodes}) must be 1 in a sweep, which runs on this machine; "
            "write hydra/launcher=slurm, or start each job by a command of its own, without -m"
        )
    slots = sweep.parallel_jobs
    if slots < 1:
        raise UserError(f"sweep.parallel_jobs ({slots}) must be greater than 0")
    if slots == 1:
        return
    if launch.init_method is not None:
        raise UserError(
            f"sweep.parallel_jobs ({slots}) would let jobs meet at one address, which "
            f"launch.init_method ({launch.init_method}) gives; leave one of them out"
        )
    if sweep.calibrate:
        raise UserError(
            "sweep.calibrate measures what the jobs beside it disturb, sweep.parallel_jobs is "
            f"{slots}; leave one of them out"
        )
    if sys.platform != "linux":
        raise UserError(
            f"sweep.parallel_jobs ({slots}) gives each job cores of its own, which only Linux can; "
            "leave it out"
        )
    if slots > hardware.num_cores:
        raise UserError(
            f"sweep.parallel_jobs ({slots}) is more than the {hardware.num_cores} cores that this "
            f"process may use; write {hardware.num_cores} or fewer"
        )
    if hardware.num_gpus and slots > hardware.num_gpus and config.backend.device != "cpu":
        raise UserError(
            f"sweep.parallel_jobs ({slots}) is more than the {hardware.num_gpus} GPUs that its "
            f"jobs use; write {hardware.num_gpus} or fewer, or backend.device=cpu"
        )
    if hardware.num_gpus and hardware.kind not in VISIBLE and config.backend.device != "cpu":
        raise UserError(
            f"sweep.parallel_jobs ({slots}) shares out {' and '.join(VISIBLE)} devices, not "
            f"{hardware.kind}; leave it out, or write backend.device=cpu"
        )
