"""The interface of all trackers: MLflow, W&B and the user's own. Torch-free."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from ddp_runner.config.identity import leaves, only_used


@dataclass(frozen=True)
class TrackedRun:
    """The facts of a run that begins or resumes."""

    folder: Path
    name: str  # name of the sweep's job, or FOLDER/TIME
    sweep: str | None  # name of the sweep's folder; None: a single run
    config: Mapping[str, Any]  # the frozen config: a secret is ${oc.env:X}
    tags: Sequence[str]
    notes: str | None
    versions: Mapping[str, str]  # versions of Python and the packages
    git_revision: str | None
    started_at: float  # time.time()
    earlier_id: str | None  # the id from ``begin`` in an earlier session; None: a new run

    @property
    def parameters(self) -> dict[str, Any]:
        """The config's dotted keys with their values."""
        return only_used(dict(leaves(self.config)), uses=None)

    def artifact_name(self, path: Path) -> str:
        """Return a file's name in the tracker. Pictures keep their folders, images/NAME."""
        return path.relative_to(self.folder).as_posix() if path.suffix == ".png" else path.name


@dataclass(frozen=True)
class MetricLine:
    """The metrics of a step; a step may have several lines."""

    step: int
    epoch: int  # counts from 1
    time: float  # time.time()
    metrics: Mapping[str, float]  # NaN: the value was not finite


@runtime_checkable
class Tracker(Protocol):
    """Sends a run to a server, from a process of its own; see ``track``.

    It may raise, block and print without any effect on the run. A call that raised is repeated
    later with the same arguments and further lines.
    """

    def begin(self, run: TrackedRun) -> str:
        """Begin the run, or continue ``run.earlier_id``; return its id for later sessions.

        If the id differs from the earlier one, ``log`` gets all lines of the run again.
        """

    def log(self, lines: Sequence[MetricLine]) -> None:
        """Send the lines since the last call, in order; at most about 64 KiB."""

    def end(
        self, status: str, *, metrics: Mapping[str, float | None], files: Sequence[Path]
    ) -> None:
        """End the run.

        Args:
            status: completed, preempted (it can be resumed) or failed.
            metrics: last value of each metric; None: not finite.
            files: files to keep with the run, with ``model.safetensors`` if it has completed.
        """
