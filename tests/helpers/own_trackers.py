"""Trackers of a test's own, by the names that a config gives; each writes to a file."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ddp_runner.tracking.trackers.tracker import MetricLine, TrackedRun


class Recorder:
    """Appends every call to a file; its calls fail while the file `broken` exists."""

    def __init__(self, *, path: str, broken: str = "/none", id: str | None = None) -> None:
        self.path, self.broken, self.id = Path(path), Path(broken), id

    def _note(self, **call: Any) -> None:
        if self.broken.exists():
            raise ConnectionError("no answer")
        with self.path.open("a") as file:
            file.write(json.dumps(call) + "\n")

    def begin(self, run: TrackedRun) -> str:
        """Write the name and the earlier id."""
        self._note(begin=run.name, earlier=run.earlier_id, tags=list(run.tags), sweep=run.sweep)
        return self.id or run.earlier_id or "id-1"

    def log(self, lines: Sequence[MetricLine]) -> None:
        """Write the lines."""
        self._note(log=[asdict(line) for line in lines])

    def end(
        self, status: str, *, metrics: Mapping[str, float | None], files: Sequence[Path]
    ) -> None:
        """Write how the run ended."""
        self._note(end=status, metrics=metrics, files=[path.name for path in files])


class Raising:
    """Raises in every method, with a text of several lines."""

    def begin(self, run: TrackedRun) -> str:
        """Raise."""
        raise RuntimeError("the server\nsaid no")

    def log(self, lines: Sequence[MetricLine]) -> None:
        """Raise."""
        raise RuntimeError("the server\nsaid no")

    def end(
        self, status: str, *, metrics: Mapping[str, float | None], files: Sequence[Path]
    ) -> None:
        """Raise."""
        raise RuntimeError("the server\nsaid no")


class Quoting(Raising):
    """Raises with a text of the test's own."""

    def __init__(self, *, text: str) -> None:
        self.text = text

    def begin(self, run: TrackedRun) -> str:
        """Raise."""
        raise ConnectionError(self.text)


class Hanging(Raising):
    """Never returns from its first call."""

    def begin(self, run: TrackedRun) -> str:
        """Sleep."""
        time.sleep(3600)
        return ""


class Exiting(Raising):
    """Exits instead, as a client may without its key."""

    def begin(self, run: TrackedRun) -> str:
        """Exit."""
        raise SystemExit("no key")


class Serving(Raising):
    """Starts a process, writes its number, and hangs."""

    def __init__(self, *, path: str) -> None:
        self.path = Path(path)

    def begin(self, run: TrackedRun) -> str:
        """Start it."""
        self.path.write_text(str(subprocess.Popen(["sleep", "600"]).pid))
        time.sleep(3600)
        return ""


class Dying(Raising):
    """Ends its process in its first call."""

    def begin(self, run: TrackedRun) -> str:
        """Die."""
        os.kill(os.getpid(), signal.SIGKILL)
        return ""


class DyingLast(Recorder):
    """Ends its process in its last call."""

    def end(
        self, status: str, *, metrics: Mapping[str, float | None], files: Sequence[Path]
    ) -> None:
        """Die."""
        os.kill(os.getpid(), signal.SIGKILL)


class Lingering(Recorder):
    """Takes longer for its last call than a run that has failed waits."""

    def end(
        self, status: str, *, metrics: Mapping[str, float | None], files: Sequence[Path]
    ) -> None:
        """Sleep, and write how the run ended."""
        time.sleep(4.0)
        super().end(status, metrics=metrics, files=files)


class Forking(Recorder):
    """Leaves a copy of its process, in a group of its own, and writes its number."""

    def end(
        self, status: str, *, metrics: Mapping[str, float | None], files: Sequence[Path]
    ) -> None:
        """Fork."""
        pid = os.fork()
        if pid == 0:
            os.setsid()
            time.sleep(3600)
        self._note(pid=pid)


def calls(path: Path) -> list[dict[str, Any]]:
    """Return the calls that a ``Recorder`` has written, each whole."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def points(path: Path) -> list[tuple[int, str, float]]:
    """Return (step, name, value) of each metric that a ``Recorder`` got."""
    lines = [line for call in calls(path) for line in call.get("log", ())]
    return [(line["step"], name, one) for line in lines for name, one in line["metrics"].items()]
