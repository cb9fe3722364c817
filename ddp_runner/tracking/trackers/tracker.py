"""What a tracker gets of a run: the one interface of MLflow, W&B and the user's own. Torch-free."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from ddp_runner.config.identity import leaves, only_used


@dataclass(frozen=True)
class TrackedRun:
    """A run as it begins, or as it goes on after a resume."""

    folder: Path
    name: str  # of the job in a sweep; else FOLDER/TIME
    sweep: str | None  # the name of the sweep's folder; None: a run of its own
    config: Mapping[str, Any]  # frozen: a secret is ${oc.env:X}
    tags: Sequence[str]
    notes: str | None
    versions: Mapping[str, str]  # of Python and the packages
    git_revision: str | None
    started_at: float  # time.time()
    earlier_id: str | None  # what ``begin`` returned in an earlier session; None: a new run

    @property
    def parameters(self) -> dict[str, Any]:
        """The config's dotted keys with their values."""
        return only_used(dict(leaves(self.config)), uses=None)

    def place_of(self, path: Path) -> str:
        """Return the name of a file in the tracker; pictures keep their folders, images/NAME."""
        return path.relative_to(self.folder).as_posix() if path.suffix == ".png" else path.name


@dataclass(frozen=True)
class MetricLine:
    """The metrics of a step; a step may have several lines."""

    step: int
    epoch: int  # counts from 1
    time: float  # time.time()
    metrics: Mapping[str, float]  # a value that was not finite is NaN


@runtime_checkable
class Tracker(Protocol):
    """Sends a run elsewhere. It lives in a process of its own; see ``track``.

    It may raise, block and print as it likes: the run goes on. A call that has raised is repeated
    later with the same arguments, and with further lines.
    """

    def begin(self, run: TrackedRun) -> str:
        """Begin the run, or go on with ``run.earlier_id``; return its id, for a later session.

        If it is another id than the earlier one, ``log`` gets all lines of the run once more.
        """
        ...

    def log(self, lines: Sequence[MetricLine]) -> None:
        """Send lines, in their order: those since the last call, at most about 64 KiB."""
        ...

    def end(
        self, status: str, *, metrics: Mapping[str, float | None], files: Sequence[Path]
    ) -> None:
        """End the run.

        Args:
            status: completed, preempted (it can go on) or failed.
            metrics: the last value of each; None: not finite.
            files: to keep with the run. A completed run has ``model.safetensors`` among them.
        """
        ...
