"""The jobs of a sweep and how each stands: ``sweep.json`` in its folder. Torch-free.

Several launchers may work on one sweep. Each changes the ledger under a lock, and a job belongs to
the launcher that holds the lock of its folder.
"""

import json
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
INVALID = "invalid"  # the kind of failure of a job with an invalid config
FORMAT_VERSION = 1


@dataclass(frozen=True)
class Entry:
    """One job: see ``Status``."""

    job_id: str  # the hash of its resolved config, and its name
    folder: str  # its name, inside the sweep's folder
    status: Status = Status.QUEUED
    kind: str | None = None  # of its failure: invalid, user, crash, signal, late, peer
    sentence: str | None = None


@dataclass(frozen=True)
class Ledger:
    """The ledger of the sweep in `folder`."""

    folder: Path

    def read(self) -> dict[str, Entry]:
        """Return the entries by their id, in the order of queueing.

        Raises:
            UserError: the file is damaged or from another version.
        """
        return self._content()[0]

    def begin(self, *, command: Sequence[str], retry_failed: bool) -> list[str]:
        """Start the sweep, perhaps again; return the ids of the jobs that stay failed.

        Args:
            command: identifies the sweep: see ``sweep_command``.
            retry_failed: queue failed jobs again.
        """
        with self._changing(command) as entries:
            for job_id, entry in list(entries.items()):
                if entry.kind in (INVALID, "refused"):  # as version 0.1.0 called it
                    del entries[job_id]  # its config is validated again
                elif entry.status == Status.FAILED and retry_failed:
                    entries[job_id] = Entry(job_id, entry.folder)
            return [job_id for job_id, entry in entries.items() if entry.status == Status.FAILED]

    def queue(self, jobs: Mapping[str, str], *, invalid: Sequence[Entry]) -> dict[str, Entry]:
        """Add the jobs that are new; return the entries of all given jobs.

        Args:
            jobs: the folder name that each job wants, by its id.
            invalid: the jobs that are never started.
        """
        with self._changing() as entries:
            entries |= {one.job_id: one for one in invalid}
            taken = {entry.folder for entry in entries.values()}
            for job_id, folder in jobs.items():
                if job_id in entries:
                    continue
                free, number = folder, 1
                while free in taken:  # another config has this name: a YAML was edited meanwhile
                    number += 1
                    free = f"{folder}-{number}"
                taken.add(free)
                entries[job_id] = Entry(job_id, free)
            return {job_id: entries[job_id] for job_id in jobs}

    def note(
        self, job_id: str, *, status: Status, kind: str | None = None, sentence: str | None = None
    ) -> None:
        """Record how a job stands; the kind and sentence of an earlier failure are removed."""
        with self._changing() as entries:
            entries[job_id] = Entry(job_id, entries[job_id].folder, status, kind, sentence)

    def command(self) -> list[str]:
        """Return the command that began the sweep."""
        return self._content()[1]

    def _content(self) -> tuple[dict[str, Entry], list[str]]:
        """Return the entries by their id, and the command."""
        path = self.folder / LEDGER
        if not path.exists():
            return {}, []
        try:
            fields = json.loads(path.read_bytes())
            json.dumps(fields, ensure_ascii=False).encode()  # it must be possible to write it again
            if fields["format_version"] != FORMAT_VERSION:
                raise ValueError(f"format version {fields['format_version']}")
            entries = [_entry(one) for one in fields["jobs"]]
            command = fields["command"]
            if not (isinstance(command, list) and all(isinstance(one, str) for one in command)):
                raise ValueError("a command that is not a list of texts")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise UserError(
                f"{path} is damaged or of another version ({error}); "
                "delete it: what its jobs left is in their folders"
            ) from error
        return {entry.job_id: entry for entry in entries}, command

    @contextmanager
    def _changing(self, command: Sequence[str] | None = None) -> Iterator[dict[str, Entry]]:
        """Give the entries to change, and write them with the command; None: the one before."""
        with FileLock(self.folder / ".sweep.lock"):
            entries, known_command = self._content()
            yield entries
            fields = {
                "format_version": FORMAT_VERSION,
                "command": known_command if command is None else list(command),
                "jobs": [asdict(entry) for entry in entries.values()],
            }
            path, text = self.folder / LEDGER, json.dumps(fields, indent=1, ensure_ascii=False)
            try:
                replace_file(path, text)
            except OSError as error:
                raise UserError(
                    f"{path} cannot be written ({error.strerror}); free space or make the folder "
                    "writable"
                ) from error


def _entry(fields: Mapping[str, Any]) -> Entry:
    """Return a checked entry: its folder is a plain name, inside the sweep's folder.

    Raises:
        ValueError, TypeError: a field is missing, unknown or of another kind.
    """
    entry = Entry(**fields)
    texts = [entry.job_id, entry.folder, entry.status]
    texts += [one for one in (entry.kind, entry.sentence) if one is not None]
    if not all(isinstance(one, str) for one in texts):
        raise ValueError("a job with a field that is not a text")
    try:
        entry = replace(entry, status=Status(EARLIER_WORDS.get(entry.status, entry.status)))
    except ValueError:
        raise ValueError(f"a job with the status {entry.status[:40]}") from None
    is_name = Path(entry.folder).name == entry.folder and entry.folder not in ("", "..")
    if not is_name or "\0" in entry.folder:
        raise ValueError(f"a job with the folder {entry.folder[:40]}")
    return entry


def unfinished_sweep(parent: Path, *, command: Sequence[str], retry_failed: bool) -> Path | None:
    """Return the newest sweep in `parent` that the same command began and that has work left."""
    found = parent.glob(f"*/{LEDGER}")
    for path in sorted(found, key=lambda one: one.stat().st_mtime, reverse=True):
        ledger = Ledger(path.parent)
        try:
            entries, began_with = ledger.read(), ledger.command()
        except UserError:
            continue  # damaged, or of another version
        wanted = (*UNFINISHED, Status.FAILED) if retry_failed else UNFINISHED
        if began_with == list(command) and any(e.status in wanted for e in entries.values()):
            return path.parent
    return None


def sweep_command(arguments: Sequence[str]) -> list[str]:
    """Return what identifies a sweep: its command line, without how and where its jobs run."""
    others = ("sweep.", "verbose=", "hydra/launcher=", "hydra.launcher.")
    return [one for one in arguments if not one.startswith(others)]
