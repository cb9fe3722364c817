"""What the launcher sends to the ranks and what it gets back: see ``launch``; torch-free."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from ddp_runner.config.schema import Config
from ddp_runner.config.secrets import Secrets

TIMEOUT_SIGNS = ("imed out", "imeout caused pair closure")  # the rank itself has waited too long

# The exit codes that the README lists; an interrupted run exits with 128 + the signal's number.
EXIT_COMPLETED, EXIT_FAILED, EXIT_USER_ERROR = 0, 1, 2


class Status(StrEnum):
    """How a run or a job of a sweep stands, in run.json and in sweep.json."""

    QUEUED = "queued"
    RUNNING = "running"
    COMPLETED = "completed"
    PREEMPTED = "preempted"  # stopped by a signal, its checkpoint written: it can go on
    FAILED = "failed"
    SKIPPED = "skipped"  # it breaks a rule of the config, and was to be left out


@dataclass(frozen=True)
class Slot:
    """A part of the machine, for one of the jobs that run side by side."""

    number: int  # from 1
    cores: tuple[int, ...]
    gpus: str | None  # its CUDA_VISIBLE_DEVICES; None where there are none
    folder: Path  # shared by all slots: the request to stop, and the scratch folders


@dataclass(frozen=True)
class Job:
    """What every worker is given."""

    config: Config  # resolved
    started_at: float  # time.time() when the command, or the sweep's job, began
    code: Mapping[str, Any]  # git_revision and versions
    run_dir: Path | None = None  # None: rank 0 claims one
    scratch: Path | None = None  # a folder of this gang alone; None under another launcher
    slot: Slot | None = None  # where it runs beside other jobs
    number: int = 1  # its place in the sweep
    title: str = ""  # what a sweep calls it
    shows_header: bool = True  # a sweep shows it once, for the first job that it runs
    overrides: tuple[str, ...] = ()
    secrets: Secrets = field(default_factory=Secrets)  # what the config has from the environment
    choices: Mapping[str, str] = field(default_factory=dict)  # the option of each group
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Failure:
    """How one rank failed: `kind` is user, crash, peer, late or signal."""

    rank: int
    kind: str
    sentence: str
    traceback: str = ""
    time_ns: int = 0

    @property
    def is_timeout(self) -> bool:
        """Whether the rank has waited for a peer in vain, which is late rather than gone."""
        return self.kind == "peer" and any(sign in self.sentence for sign in TIMEOUT_SIGNS)


@dataclass(frozen=True)
class Outcome:
    """How a job ended: completed, preempted or failed."""

    status: Status
    exit_code: int
    run_dir: Path | None = None
    failure: Failure | None = None

    @classmethod
    def invalid(cls, run_dir: Path, sentence: str) -> "Outcome":
        """Return the outcome of a job that was never started, for what the user can mend."""
        failure = Failure(rank=0, kind="user", sentence=sentence)
        return cls(Status.FAILED, EXIT_USER_ERROR, run_dir, failure)
