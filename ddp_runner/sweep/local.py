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
from ddp_runner.sweep.jobs import JobBatch, run_jobs
from ddp_runner.sweep.layout import JobHardware, NodeLayout
from ddp_runner.sweep.slots import Slots


class Local:
    """This machine; ``hydra/launcher=ddp_runner``."""

    starts_jobs = True

    def __init__(self) -> None:
        self._hardware = detect()
        self._has_header = False  # a job of this command has shown the header
        self._slots: Slots | None = None

    def validate(self, config: Config, *, searches: bool) -> None:
        """Validate the sections sweep, launch and backend; `searches` only matters to Slurm."""
        validate_sweep(config, self._hardware)

    def hardware_of(self, config: Config) -> JobHardware:
        """Return the job's share of this machine."""
        return JobHardware(self._hardware.share(config.sweep.parallel_jobs))

    def layout(self, config: RunConfig) -> NodeLayout:
        """Return one node with all ranks."""
        return NodeLayout(1, config.world_size)

    def run(self, batch: JobBatch) -> Mapping[str, Outcome]:
        """Run a batch; return the outcome of each job by its id.

        A signal that ended the batch is an outcome, too: its key is not the id of a job.
        """
        parallel_jobs = batch.settings.parallel_jobs
        if parallel_jobs == 1:
            start_fork_server()
            return run_jobs(batch, execute=self._execute)
        if self._slots is None:
            self._slots = Slots()
            self._slots.start(parallel_jobs, self._hardware)
        return self._slots.run(batch)

    def close(self) -> None:
        """End the slots."""
        if self._slots is not None:
            self._slots.close()

    def _execute(self, job: Job) -> Outcome:
        """Run a job. On a terminal, its result replaces the progress line of rank 0."""
        shows_header, self._has_header = not self._has_header, True
        width = line_width(sys.stdout)
        if not width:
            print(f"\n{job.title}", flush=True)
        outcome = launch(replace(job, shows_header=shows_header))
        if width and outcome.status == Status.FAILED:
            print_line(f"{shortened(job.title, width - 8)}  failed", stream=sys.stdout)
        return outcome


def validate_sweep(config: Config, hardware: Hardware) -> None:
    """Raise a UserError if this machine cannot run a sweep with these settings."""
    sweep, launch = config.sweep, config.launch
    if launch.nnodes > 1:
        raise UserError(
            f"launch.nnodes ({launch.nnodes}) must be 1 in a sweep on this machine",
            "write hydra/launcher=slurm, or start each job with its own command, without -m",
        )
    slots, on_gpus = sweep.parallel_jobs, hardware.num_gpus and config.backend.device != "cpu"
    if slots < 1:
        raise UserError(f"sweep.parallel_jobs ({slots}) must be greater than 0")
    if slots == 1:
        return
    if launch.init_method is not None:
        raise UserError(
            f"sweep.parallel_jobs ({slots}) would let several jobs meet at the same address, "
            f"launch.init_method ({launch.init_method})",
            "leave one of the two keys out",
        )
    if sweep.calibrate:
        raise UserError(
            f"sweep.calibrate measures all_reduce, and sweep.parallel_jobs ({slots}) would disturb "
            "it",
            "leave one of the two keys out",
        )
    if sys.platform != "linux":
        raise UserError(
            f"sweep.parallel_jobs ({slots}) gives each job its own cores, which only works on "
            "Linux",
            "leave it out",
        )
    if slots > hardware.num_cores:
        raise UserError(
            f"sweep.parallel_jobs ({slots}) is more than the {hardware.num_cores} cores that this "
            "process may use",
            f"write {hardware.num_cores} or fewer",
        )
    if on_gpus and slots > hardware.num_gpus:
        raise UserError(
            f"sweep.parallel_jobs ({slots}) is more than the {hardware.num_gpus} GPUs that its "
            "jobs use",
            f"write {hardware.num_gpus} or fewer, or backend.device=cpu",
        )
    if on_gpus and hardware.kind not in VISIBLE:
        raise UserError(
            f"sweep.parallel_jobs ({slots}) can share {' and '.join(VISIBLE)} devices, not "
            f"{hardware.kind}",
            "leave it out, or write backend.device=cpu",
        )
