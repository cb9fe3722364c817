"""Finds the runs and sweeps below paths, and looks at each. Torch-free."""

import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from ddp_runner.errors import UserError
from ddp_runner.job import Status
from ddp_runner.status.look import UNREADABLE, RunStatus, look
from ddp_runner.sweep.plan_file import PLAN, read_plan
from ddp_runner.tracking.alive import LOST
from ddp_runner.tracking.run_dir import RUN_RECORD, SUBFOLDERS


@dataclass(frozen=True)
class SweepStatus:
    """A sweep at one moment."""

    folder: Path
    counts: Mapping[str, int]  # how many jobs have each status; an abandoned one is lost
    reason: str | None = None  # why its plan cannot be read

    @property
    def is_shown(self) -> bool:
        """Whether it is listed without --all: a job of it runs, or should."""
        return bool({Status.RUNNING, LOST} & self.counts.keys())


@dataclass(frozen=True)
class Report:
    """All runs and sweeps below the paths, by folder."""

    runs: Sequence[RunStatus]
    sweeps: Sequence[SweepStatus]

    @property
    def num_missing(self) -> int:
        """How many runs should be alive and give no sign of it."""
        return sum(run.is_missing for run in self.runs)

    def shown(self, *, show_all: bool) -> tuple[list[RunStatus], list[SweepStatus]]:
        """Return the runs and the sweeps to list: what is alive, or should be; or all."""
        sweeps = [one for one in self.sweeps if show_all or one.is_shown or one.reason]
        return [one for one in self.runs if show_all or one.is_shown], sweeps


def survey(paths: Sequence[Path]) -> Report:
    """Return the status of every run and sweep below the paths, each once.

    Raises:
        UserError: a path does not exist.
    """
    runs: dict[Path, RunStatus] = {}
    sweeps: dict[Path, SweepStatus] = {}

    def note(error: OSError) -> None:
        folder = Path(error.filename)
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            reason = f"the folder cannot be read ({error.strerror})"
            runs.setdefault(folder.resolve(), RunStatus(folder, UNREADABLE, reason=reason))
        elif folder == path:
            raise UserError(
                f"{path} is not a folder; give that of a run, of a sweep, or of all outputs"
            ) from error

    for path in paths:
        server_time = cache(partial(folder_time, path))
        for folder, names in _folders(path, note):
            if RUN_RECORD in names:
                runs.setdefault(folder.resolve(), look(folder, server_time=server_time))
            if PLAN in names:
                sweeps.setdefault(folder.resolve(), _sweep(folder, server_time))
    return Report(list(runs.values()), list(sweeps.values()))


def folder_time(folder: Path) -> float:
    """Return the time by the clock that stamps the files of a folder.

    On a shared disk that is the file server's clock. Where nothing can be written, return the time
    of this machine.
    """
    try:
        with tempfile.TemporaryFile(dir=folder) as file:  # on most disks it never has a name
            file.write(b".")
            file.flush()
            os.fsync(file.fileno())  # NFS asks the server only now
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return time.time()


def _folders(path: Path, onerror: Callable[[OSError], None]) -> Iterator[tuple[Path, list[str]]]:
    """Yield each folder at and below a path with the names of its files, in their order."""
    for name, subfolders, files in os.walk(path, onerror=onerror):
        is_run = RUN_RECORD in files
        subfolders[:] = sorted(
            one for one in subfolders if not (one.startswith(".") or (is_run and one in SUBFOLDERS))
        )
        yield Path(name), files


def _sweep(folder: Path, server_time: Callable[[], float]) -> SweepStatus:
    try:
        jobs = read_plan(folder).jobs.values()
    except UserError as error:
        return SweepStatus(folder, {}, str(error))
    found = (one.standing(folder, server_time=server_time) for one in jobs)
    counts = Counter(str(Status.RUNNING if one.is_alive else one.status) for one in found)
    return SweepStatus(folder, dict(counts))
