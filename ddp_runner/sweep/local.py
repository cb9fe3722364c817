"""Runs the jobs of a sweep on this machine: one after the other, or in parallel slots."""

import sys
from collections.abc import Mapping
from dataclasses import replace

from ddp_runner.config.schema import Config, RunConfig
from ddp_runner.host.hardware import detect
from ddp_runner.host.processes import start_fork_server
from ddp_runner.host.streams import line_width, print_line, shortened
from ddp_runner.job import Job, Outcome, Status
from ddp_runner.launch.launcher import launch
from ddp_runner.sweep.jobs import Batch, run_left
from ddp_runner.sweep.layout import JobHardware, NodeLayout
from ddp_runner.sweep.slots import Slots
from ddp_runner.sweep.validate import validate_sweep


class Local:
    """This machine; ``hydra/launcher=ddp_runner``."""

    starts_jobs = True

    def __init__(self) -> None:
        self._hardware = detect()
        self._has_header = False  # whether a job of this command has shown it
        self._slots: Slots | None = None

    def validate(self, config: Config, *, searches: bool) -> None:
        """Reject what this machine cannot do; only sweep, launch and backend are read."""
        validate_sweep(config, self._hardware, searches=searches)

    def hardware_of(self, config: Config) -> JobHardware:
        """Return the job's share of this machine."""
        return JobHardware(self._hardware.share(config.sweep.parallel_jobs))

    def layout(self, config: RunConfig) -> NodeLayout:
        """Return one node with all ranks."""
        return NodeLayout(1, config.world_size)

    def run(self, batch: Batch) -> Mapping[str, Outcome]:
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
