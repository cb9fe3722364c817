"""Job and Outcome: what the launcher sends to the ranks and what it gets back. Torch-free."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from ddp_runner.config.schema import RunConfig
from ddp_runner.config.secrets import Secrets
from ddp_runner.scratch import Failure, Scratch

# The exit codes that the README lists; an interrupted run exits with 128 + the signal's number.
EXIT_COMPLETED, EXIT_FAILED, EXIT_USER_ERROR = 0, 1, 2


class Status(StrEnum):
    """The state of a run or of a sweep's job, in run.json and in sweep.json."""

    QUEUED = "queued"
    RUNNING = "running"
    COMPLETED = "completed"
    PREEMPTED = "preempted"  # stopped by a signal after a checkpoint: it can go on
    FAILED = "failed"
    SKIPPED = "skipped"  # invalid, and the sweep leaves those out


@dataclass(frozen=True)
class Slot:
    """A share of the machine, for one of the parallel jobs of a sweep."""

    number: int  # from 1
    cores: tuple[int, ...]
    gpus: str | None  # its CUDA_VISIBLE_DEVICES; None where there are none
    scratch: Scratch  # shared by all slots; holds the request to stop, and their own ones


@dataclass(frozen=True)
class Job:
    """What every rank receives."""

    config: RunConfig
    started_at: float  # time.time() when the command, or the sweep's job, began
    code: Mapping[str, Any]  # git_revision and versions
    run_dir: Path | None = None  # None: rank 0 claims one
    lacks_run: bool = False  # the run to resume is on another machine, which tells its config
    scratch: Scratch | None = None  # of this worker group only; None under another launcher
    slot: Slot | None = None  # for a parallel job
    number: int = 1  # its place in the sweep
    title: str = ""  # its name in a sweep
    shows_header: bool = True  # a sweep shows it once, for the first job that it runs
    overrides: tuple[str, ...] = ()
    own_groups: tuple[str, ...] | None = None  # see ``RunFields``
    # What a command that resumes the run says again, since a resumed run allows nothing and sends
    # nothing by itself: allowed_targets, where the user's own groups are, and trackers.
    said_again: tuple[str, ...] = ()
    secrets: Secrets = field(default_factory=Secrets)  # what the config took from the environment
    choices: Mapping[str, str] = field(default_factory=dict)  # the option of each group
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """How a job ended: completed, preempted or failed."""

    status: Status
    exit_code: int
    run_dir: Path | None = None
    failure: Failure | None = None

    @classmethod
    def invalid(cls, run_dir: Path, sentence: str) -> "Outcome":
        """Return the outcome of a job that could not start, for a reason that the user can fix."""
        failure = Failure(rank=0, kind="user", sentence=sentence)
        return cls(Status.FAILED, EXIT_USER_ERROR, run_dir, failure)
