"""Job and Outcome: the launcher sends a job to its ranks, and gets an outcome back. Torch-free."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ddp_runner.config.schema import RunConfig
from ddp_runner.config.secrets import Secrets

if TYPE_CHECKING:
    from ddp_runner.host.wire import Wire

# An interrupted run exits with 128 + the signal's number.
EXIT_COMPLETED, EXIT_FAILED, EXIT_USER_ERROR = 0, 1, 2


class Status(StrEnum):
    """The state of a run or of a sweep's job, in run.json and in sweep.json."""

    QUEUED = "queued"
    RUNNING = "running"
    COMPLETED = "completed"
    PREEMPTED = "preempted"  # stopped by a signal after a checkpoint: resume continues it
    FAILED = "failed"
    SKIPPED = "skipped"  # invalid, and the sweep skips invalid jobs


# A rank that timed out waiting for a peer has one of these in its error.
TIMEOUT_SIGNS = ("imed out", "imeout caused pair closure", "wait timeout")


# In this order: the user's mistake, an error or exit, a lost peer, a rank that came too late, a
# signal to a rank, a lost machine.
FailureKind = Literal["user", "crash", "peer", "late", "signal", "machine"]


@dataclass(frozen=True)
class Failure:
    """How a run failed."""

    rank: int | None  # None: the launcher's own failure
    kind: FailureKind
    sentence: str
    traceback: str = ""
    time_ns: int = field(default_factory=time.time_ns)  # since the epoch

    @property
    def is_timeout(self) -> bool:
        """Whether the rank timed out waiting for a peer, which is late rather than gone."""
        return self.kind == "peer" and any(sign in self.sentence for sign in TIMEOUT_SIGNS)


@dataclass(frozen=True)
class Slot:
    """A share of the machine, for a parallel job of a sweep."""

    number: int  # from 1
    cores: tuple[int, ...]
    gpus: Mapping[str, str]  # the variable that hides all other GPUs; empty without GPUs
    temp: Path  # temporary folder that all slots share


@dataclass(frozen=True)
class Job:
    """A run's config, its folders and how it was started: the launcher sends this to every rank."""

    config: RunConfig
    started_at: float  # time.time() when the command, or the sweep's job, began
    provenance: Mapping[str, Any]  # ``git_revisions`` and versions: equal on all ranks
    uncommitted: str = ""  # changes in the code that no commit has, for rank 0; may hold secrets
    run_dir: Path | None = None  # None: rank 0 claims a folder
    lacks_run: bool = False  # the run to resume, and its config, are on another machine
    # The next two are None under another launcher.
    temp: Path | None = None  # temporary folder of this worker group
    wire: "Wire | None" = None  # a rank's pipe to the launcher
    earlier: tuple[tuple[int | None, str], ...] = ()  # first step and end of each earlier attempt
    slot: Slot | None = None  # for a parallel job
    number: int = 1  # position in the sweep; 0: a calibration
    title: str = ""  # the job's name in a sweep
    shows_header: bool = True  # False for all but the first job of a sweep
    overrides: tuple[str, ...] = ()
    own_groups: tuple[str, ...] | None = None  # see ``RunFields``
    # A command that resumes the run must repeat these, because a run's own config may not set them:
    # allowed_targets, the user's own groups, trackers, variables and addresses.
    resume_arguments: tuple[str, ...] = ()
    secrets: Secrets = field(default_factory=Secrets)  # values from environment variables
    choices: Mapping[str, str] = field(default_factory=dict)  # option by config group
    warnings: tuple[str, ...] = ()

    @property
    def is_claimed(self) -> bool:
        """Whether the launcher of these ranks holds the run folder; else rank 0 claims it."""
        return self.wire is not None and self.config.launch.nnodes == 1

    @property
    def line_prefix(self) -> str:
        """The prefix of each line that a parallel job prints."""
        return f"[{self.number}] " if self.slot else ""


@dataclass(frozen=True)
class Outcome:
    """How a job, or a rank of it, ended: completed, preempted or failed."""

    status: Status
    exit_code: int
    fault: str | None = None  # why it failed

    @classmethod
    def stopped(cls, signum: int) -> "Outcome":
        """Return the outcome of a job that a signal stopped."""
        return cls(Status.PREEMPTED, 128 + signum)


COMPLETED = Outcome(Status.COMPLETED, EXIT_COMPLETED)
