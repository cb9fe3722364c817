"""Stand-ins for Slurm: its commands, its queue, and a sweep whose jobs it runs."""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import pytest
from sweeps import batch_of, planned

from ddp_runner.errors import UserError
from ddp_runner.sweep.jobs import JobBatch
from ddp_runner.sweep.slurm import executor as slurm
from ddp_runner.sweep.slurm import watch as slurm_watch
from ddp_runner.sweep.slurm.slurm_settings import SlurmSettings

SETTINGS = SlurmSettings(gpus_per_node=0, cpus_per_node=4)


def three_jobs(sweep: Path) -> JobBatch:
    """Return three queued jobs with their folders, of a sweep in a new folder."""
    (sweep / "slurm").mkdir(parents=True)
    planned(sweep, *"abc")
    return batch_of(sweep, *"abc", world_size=2)


def program(folder: Path, name: str, *lines: str) -> None:
    """Write a shell script that stands for a command of Slurm."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("\n".join(["#!/bin/bash", *lines, ""]))
    (folder / name).chmod(0o755)


class Queue:
    """Stands for Slurm: its jobs, by name, and those that were cancelled."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, states: Mapping[str, str]) -> None:
        self.states = dict(states)
        self.cancelled, self.num_asked, self.is_down = list[str](), 0, False
        self.on_ask: Callable[[int], None] = lambda num_asked: None
        monkeypatch.setattr(slurm_watch, "queued_states", self._ask)
        monkeypatch.setattr(slurm, "queued_states", self._ask)
        monkeypatch.setattr(slurm_watch, "cancel", self._cancel)
        for name, value in {"MIN_POLL_S": 0.01, "SETTLE_S": 0.0}.items():
            monkeypatch.setattr(slurm_watch, name, value)

    def _ask(self) -> dict[str, str]:
        self.num_asked += 1
        self.on_ask(self.num_asked)
        if self.is_down:
            raise UserError("squeue failed: no controller")
        return dict(self.states)

    def _cancel(self, names: Collection[str]) -> None:
        self.cancelled += names
        for name in names:
            self.states[name] = "CANCELLED"
