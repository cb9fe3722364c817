"""The scratch folder of this machine's ranks, where several machines run one job.

Files that the ranks and their launcher leave for each other.
"""

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from ddp_runner.files import FileIn, replace_file
from ddp_runner.job import Failure

SAVING_POLL_S = 0.05
FRESH_S = 4.0  # a rank that has not renewed its saving mark for this long is suspended


@dataclass(frozen=True)
class Scratch:
    """The folder, and the name of each file in it. Attempts of the worker group count from 0."""

    path: Path

    stop = FileIn("stop")  # exists once the ranks should finish the step, save and end
    ready = FileIn("ready")  # exists once the training loop has begun
    saving = FileIn("saving")  # exists while a checkpoint is being written
    _run = FileIn("run")

    def make(self) -> None:
        """Create the folder; a program that cleans up temporary files may have removed it."""
        self.path.mkdir(parents=True, exist_ok=True)

    def begin_attempt(self) -> None:
        """Remove the marks that the ranks of the last attempt left."""
        self.make()
        self.ready.unlink(missing_ok=True)
        self.saving.unlink(missing_ok=True)

    def record_run(self, folder: Path) -> None:
        """Note the run folder that rank 0 has claimed, for this machine's launcher."""
        self._run.write_text(str(folder), encoding="utf-8")

    def run_folder(self) -> Path | None:
        """Return the folder of the run, once rank 0 has claimed it."""
        return Path(self._run.read_text(encoding="utf-8")) if self._run.exists() else None

    def begin_loop(self) -> None:
        """Note that the training loop begins."""
        self.make()
        self.ready.touch()

    def record_failure(self, failure: Failure, *, attempt: int) -> None:
        """Write down why a rank fails."""
        self._write(f"failure-{attempt}-{failure.rank}.json", failure)

    def failures(self, *, attempt: int) -> dict[int, Failure]:
        """Return the failures that the ranks of an attempt have recorded, by rank."""
        paths = self.path.glob(f"failure-{attempt}-*.json")
        failures = [Failure(**json.loads(path.read_text())) for path in paths]
        return {failure.rank: failure for failure in failures}

    def record_cause(self, failure: Failure, *, attempt: int) -> None:
        """Keep why an attempt ended, for the ranks of the next attempt."""
        self._write(f"cause-{attempt}.json", failure)

    def cause(self, *, attempt: int) -> str:
        """Return why an earlier attempt ended."""
        path = self.path / f"cause-{attempt}.json"
        if not path.exists():
            return "another machine's ranks have failed"
        return Failure(**json.loads(path.read_text())).sentence

    def _write(self, name: str, failure: Failure) -> None:
        # A rank that cannot write this still ends, and its exit code reaches the launcher.
        with suppress(OSError):
            self.make()
            replace_file(self.path / name, json.dumps(asdict(failure)))

    def record_first_step(self, step: int, *, rank: int) -> None:
        """Note the step from which a restarted rank continues."""
        steps = [*self.first_steps(rank=rank), step]
        (self.path / f"attempts-{rank}.json").write_text(json.dumps(steps))

    def first_steps(self, *, rank: int) -> list[int]:
        """Return the steps from which a rank has continued after restarts."""
        path = self.path / f"attempts-{rank}.json"
        return list(json.loads(path.read_text())) if path.exists() else []

    def record_stack(self, *, rank: int, attempt: int) -> None:
        """Write down where this rank's main thread is, when its worker group has failed."""
        main_thread = threading.main_thread().ident
        frame = sys._current_frames().get(main_thread or 0)
        if frame is not None and self.path.is_dir():
            path = self.path / f"stack-{attempt}-{rank}.txt"
            path.write_text("".join(traceback.format_stack(frame)), encoding="utf-8")

    def stacks(self, *, attempt: int) -> dict[int, Path]:
        """Return the files with the stacks of an attempt's ranks, by rank, the lowest first."""
        paths = self.path.glob(f"stack-{attempt}-*.txt")
        return dict(sorted((int(path.stem.rpartition("-")[2]), path) for path in paths))

    @contextmanager
    def marked_as_saving(self) -> Iterator[None]:
        """Keep the saving mark while this lasts."""
        self.make()
        self.saving.touch()
        try:
            yield
        finally:
            self.saving.unlink(missing_ok=True)

    def renew_saving(self) -> bool:
        """Renew the saving mark, from a rank that was asked to end; return whether it exists."""
        with suppress(FileNotFoundError):
            os.utime(self.saving)
            return True
        return False

    def saving_is_fresh(self) -> bool:
        """Return whether a rank is writing a checkpoint and is not suspended."""
        with suppress(FileNotFoundError):
            return time.time() - self.saving.stat().st_mtime < FRESH_S
        return False
