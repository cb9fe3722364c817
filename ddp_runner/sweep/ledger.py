"""What a sweep knows of its jobs: ``sweep.json`` in its folder; used by ``sweep``. Torch-free.

Several launchers may work on one sweep: each change is made under a lock, and a job belongs to the
launcher that holds its folder's lock.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from filelock import FileLock

from ddp_runner.errors import UserError
from ddp_runner.files import replace_file
from ddp_runner.job import Status

LEDGER = "sweep.json"
UNFINISHED = (Status.QUEUED, Status.RUNNING, Status.PREEMPTED)
EARLIER_WORDS = {"done": Status.COMPLETED, "interrupted": Status.PREEMPTED}  # of version 0.1.0
INVALID = "invalid"  # the kind of failure of a job that breaks a rule of the config
FORMAT_VERSION = 1


@dataclass(frozen=True)
class Entry:
    """One job: see ``Status``."""

    job_id: str  # the hash of its resolved config, and its name
    folder: str  # below the sweep's
    status: Status = Status.QUEUED
    kind: str | None = None  # of its failure: refused, user, crash, signal, late, peer
    sentence: str | None = None


@dataclass(frozen=True)
class Ledger:
    """The ledger of the sweep in `folder`."""

    folder: Path

    def read(self) -> dict[str, Entry]:
        """Return the entries by their id, in the order in which they were queued.

        Raises:
            UserError: the file is damaged or from another version.
        """
        return self._content()[0]

    def begin(self, *, command: Sequence[str], retry_failed: bool) -> list[str]:
        """Start the sweep, or start it again; return the ids of the jobs that stay failed.

        Args:
            command: what the user asked for, by which the sweep is found again.
            retry_failed: queue the jobs that have failed once more.
        """
        with self._changing() as entries:
            for job_id, entry in list(entries.items()):
                if entry.kind in (INVALID, "refused"):  # as version 0.1.0 called it
                    del entries[job_id]  # the rules are asked anew
                elif entry.status == Status.FAILED and retry_failed:
                    entries[job_id] = Entry(job_id, entry.folder)
            self._write(entries, command)
            return [job_id for job_id, entry in entries.items() if entry.status == Status.FAILED]

    def queue(self, jobs: Mapping[str, str], *, refused: Sequence[Entry]) -> dict[str, Entry]:
        """Add the jobs that are not there yet; return all entries of these jobs.

        Args:
            jobs: the folder that each would have, by their id.
            refused: those that are never started.
        """
        with self._changing() as entries:
            entries |= {one.job_id: one for one in refused}
            taken = {entry.folder for entry in entries.values()}
            for job_id, folder in jobs.items():
                if job_id in entries:
                    continue
                free, number = folder, 1
                while free in taken:  # another config had this name: a YAML was edited meanwhile
                    number += 1
                    free = f"{folder}-{number}"
                taken.add(free)
                entries[job_id] = Entry(job_id, free)
            self._write(entries, self.command())
            return {job_id: entries[job_id] for job_id in jobs}

    def note(
        self, job_id: str, *, status: Status, kind: str | None = None, sentence: str | None = None
    ) -> None:
        """Write down where a job stands; kind and sentence of an earlier failure go."""
        with self._changing() as entries:
            folder = entries[job_id].folder
            entries[job_id] = Entry(job_id, folder, status, kind, sentence)
            self._write(entries, self.command())

    def command(self) -> list[str]:
        """Return what the user asked for."""
        return self._content()[1]

    def _content(self) -> tuple[dict[str, Entry], list[str]]:
        """Return the entries by their id, and the command."""
        path = self.folder / LEDGER
        if not path.exists():
            return {}, []
        try:
            fields = json.loads(path.read_bytes())
            json.dumps(fields, ensure_ascii=False).encode()  # as it is to be written again
            if fields["format_version"] != FORMAT_VERSION:
                raise ValueError(f"format version {fields['format_version']}")
            entries = [_entry(one) for one in fields["jobs"]]
            command = fields["command"]
            if not (isinstance(command, list) and all(isinstance(one, str) for one in command)):
                raise ValueError("a command that is no list of texts")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise UserError(
                f"{path} is damaged or of another version ({error}); "
                "delete it: what its jobs left is in their folders"
            ) from error
        return {entry.job_id: entry for entry in entries}, command

    @contextmanager
    def _changing(self) -> Iterator[dict[str, Entry]]:
        with FileLock(self.folder / ".sweep.lock"):
            yield self.read()

    def _write(self, entries: Mapping[str, Entry], command: Sequence[str]) -> None:
        fields = {
            "format_version": FORMAT_VERSION,
            "command": list(command),
            "jobs": [asdict(entry) for entry in entries.values()],
        }
        try:
            replace_file(self.folder / LEDGER, json.dumps(fields, indent=1, ensure_ascii=False))
        except OSError as error:
            raise UserError(
                f"{self.folder / LEDGER} cannot be written ({error.strerror}); free space or make "
                "the folder writable"
            ) from error


def _entry(fields: Mapping[str, Any]) -> Entry:
    """Return an entry whose job can be run: its folder is one name, and leads nowhere else.

    Raises:
        ValueError, TypeError: a field is missing, unknown or of another kind.
    """
    entry = Entry(**fields)
    texts = [entry.job_id, entry.folder, entry.status]
    texts += [one for one in (entry.kind, entry.sentence) if one is not None]
    if not all(isinstance(one, str) for one in texts):
        raise ValueError("a job with a field that is no text")
    try:
        entry = replace(entry, status=Status(EARLIER_WORDS.get(entry.status, entry.status)))
    except ValueError:
        raise ValueError(f"a job with the status {entry.status[:40]}") from None
    is_name = Path(entry.folder).name == entry.folder and entry.folder not in ("", "..")
    if not is_name or "\0" in entry.folder:
        raise ValueError(f"a job with the folder {entry.folder[:40]}")
    return entry


def unfinished_sweep(parent: Path, *, command: Sequence[str], retry_failed: bool) -> Path | None:
    """Return the newest sweep below `parent` that the same command began and that has work left."""
    found = parent.glob(f"*/{LEDGER}")
    for path in sorted(found, key=lambda one: one.stat().st_mtime, reverse=True):
        ledger = Ledger(path.parent)
        try:
            entries, began_with = ledger.read(), ledger.command()
        except UserError:
            continue  # not a sweep that this program can go on with
        wanted = (*UNFINISHED, Status.FAILED) if retry_failed else UNFINISHED
        if began_with == list(command) and any(e.status in wanted for e in entries.values()):
            return path.parent
    return None


def sweep_command() -> list[str]:
    """Return what identifies a sweep: this command without what no job's work depends on."""
    return [one for one in sys.argv[1:] if not one.startswith(("sweep.", "verbose="))]
