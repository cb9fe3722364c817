"""The jobs of a sweep and how each stands. Torch-free.

A sweep that rests has its ledger in ``sweep.json``. While launchers work it is ``sweep.jsonl``: a
first line with the command, then a line for each change, which replaces what earlier lines say of
the job. So a change costs a line, however many jobs there are. If sweep.jsonl exists, it is
complete, and sweep.json is out of date; ``fold`` ends that.

Several launchers may work on one sweep. Each changes the ledger under a lock, and a job belongs to
the launcher that holds the lock of its folder. A reader needs no lock: sweep.jsonl only grows, or
is replaced whole.
"""

import json
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ddp_runner.errors import UserError, os_errors
from ddp_runner.files import locked, open_file, replace_file
from ddp_runner.job import Status

LEDGER, JOURNAL = "sweep.json", "sweep.jsonl"
UNFINISHED = (Status.QUEUED, Status.RUNNING, Status.PREEMPTED)
INVALID = "invalid"  # the kind of failure of a job with an invalid config
FORMAT_VERSION = 1


@dataclass(frozen=True)
class Entry:
    """One job: see ``Status``."""

    job_id: str  # the hash of its resolved config, and its name
    folder: str  # its name, inside the sweep's folder, or the path of a run that goes on
    status: Status = Status.QUEUED
    kind: str | None = None  # of its failure: invalid, user, crash, signal, late, peer
    sentence: str | None = None


@dataclass
class _Known:
    """What has been read of a ledger's file, and how far."""

    source: Any = None  # tells the file from others of its name; None: there is none
    num_bytes: int = 0
    command: list[str] = field(default_factory=list)
    entries: dict[str, Entry] = field(default_factory=dict)  # by their id, in order of queueing
    folders: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)  # ids

    def add(self, entry: Entry) -> None:
        self.entries[entry.job_id] = entry
        self.folders.add(entry.folder)
        (self.failed.add if entry.status == Status.FAILED else self.failed.discard)(entry.job_id)


@dataclass(frozen=True)
class Ledger:
    """The ledger of the sweep in `folder`; of one thread, since it keeps what it has read.

    The methods raise UserError if a file is damaged, from another version, or cannot be written.
    """

    folder: Path
    _cache: list[_Known] = field(default_factory=lambda: [_Known()], compare=False, repr=False)

    def read(self) -> dict[str, Entry]:
        """Return the entries by their id, in the order of queueing."""
        return dict(self._known().entries)

    def entry(self, job_id: str) -> Entry:
        """Return the entry of a job, at the cost of what has changed since the last look."""
        return self._known().entries[job_id]

    def failed(self) -> set[str]:
        """Return the ids of the failed jobs, at the same cost; the next look changes it."""
        return self._known().failed

    def command(self) -> list[str]:
        """Return the command that began the sweep."""
        return self._known().command

    def begin(self, *, command: Sequence[str], retry_failed: bool) -> list[str]:
        """Start the sweep, perhaps again; return the ids of the jobs that stay failed.

        Args:
            command: identifies the sweep: see ``sweep_command``.
            retry_failed: queue failed jobs again.
        """
        with self._locked():
            entries = self.read()
            for job_id, entry in list(entries.items()):
                if entry.kind in (INVALID, "refused"):  # as version 0.1.0 called it
                    del entries[job_id]  # its config is validated again
                elif entry.status == Status.FAILED and retry_failed:
                    entries[job_id] = Entry(job_id, entry.folder)
            self._fold(command, entries)
        return [job_id for job_id, entry in entries.items() if entry.status == Status.FAILED]

    def queue(self, jobs: Mapping[str, str], *, invalid: Sequence[Entry]) -> dict[str, Entry]:
        """Add the jobs that are new; return the entries of all given jobs.

        Args:
            jobs: the folder name that each job wants, by its id.
            invalid: the jobs that are never started.
        """
        with self._locked():
            known = self._known()
            taken, new = known.folders.union(one.folder for one in invalid), list(invalid)
            numbers = dict.fromkeys(jobs.values(), 1)  # tried so far: thousands may want one name
            for job_id, folder in jobs.items():
                if job_id in known.entries:
                    continue
                free = folder
                while free in taken and not Path(free).is_absolute():  # a YAML was edited meanwhile
                    numbers[folder] += 1
                    free = f"{folder}-{numbers[folder]}"
                taken.add(free)
                new.append(Entry(job_id, free))
            if new:
                self._append(new)
            entries = self._known().entries
            return {job_id: entries[job_id] for job_id in jobs}

    def note(
        self, job_id: str, *, status: Status, kind: str | None = None, sentence: str | None = None
    ) -> None:
        """Record how a job stands; the kind and sentence of an earlier failure are removed."""
        with self._locked():
            self._append([Entry(job_id, self.entry(job_id).folder, status, kind, sentence)])

    def fold(self) -> None:
        """Write all into sweep.json and remove sweep.jsonl; the next change begins a new one."""
        with self._locked():
            if (self.folder / JOURNAL).exists():
                self._fold(self.command(), self.read())

    def _fold(self, command: Sequence[str], entries: Mapping[str, Entry]) -> None:
        fields: dict[str, Any] = {"format_version": FORMAT_VERSION, "command": list(command)}
        fields["jobs"] = [asdict(entry) for entry in entries.values()]
        path = self.folder / LEDGER
        with os_errors(f"{path} cannot be written"):
            replace_file(path, json.dumps(fields, indent=1, ensure_ascii=False))
            (self.folder / JOURNAL).unlink(missing_ok=True)  # last: it counts while it exists

    def _append(self, new: Sequence[Entry]) -> None:
        path, known = self.folder / JOURNAL, self._known()
        with os_errors(f"{path} cannot be written"):
            # A launcher that was killed may have left the beginning of a line.
            is_whole = path.exists() and path.stat().st_size == known.num_bytes
            if is_whole and len(new) < len(known.entries):
                with path.open("ab") as file:
                    file.write(b"".join(_line(asdict(entry)) for entry in new))
                    file.flush()
                    os.fsync(file.fileno())
                return
            head = {"format_version": FORMAT_VERSION, "command": known.command}
            head["token"] = secrets.token_hex(8)  # no two files begin with the same line
            lines = [head, *map(asdict, [*known.entries.values(), *new])]
            replace_file(path, b"".join(map(_line, lines)))

    def _known(self) -> _Known:
        """Return what the ledger holds now; the next look changes it."""
        known = self._cache[0]
        try:
            with _reading(self.folder / JOURNAL), open_file(self.folder / JOURNAL) as file:
                head = file.readline()
                if known.source != head:
                    known = _Known(head, len(head), _command(_fields(head)))
                file.seek(known.num_bytes)
                lines = file.read()
                num_bytes = lines.rfind(b"\n") + 1  # behind it is a line that is being written
                for line in lines[:num_bytes].split(b"\n")[:-1]:
                    known.add(_entry(_fields(line)))
                known.num_bytes += num_bytes
        except FileNotFoundError:
            known = self._rested(known)
        self._cache[0] = known
        return known

    def _rested(self, known: _Known) -> _Known:
        """Return what sweep.json holds."""
        path = self.folder / LEDGER
        with suppress(FileNotFoundError), _reading(path), open_file(path) as file:
            stat = os.fstat(file.fileno())
            source = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
            if known.source == source:
                return known
            fields = _fields(file.read())
            known = _Known(source, stat.st_size, _command(fields))
            for one in fields["jobs"]:
                known.add(_entry(one))
            return known
        return _Known()

    def _locked(self) -> AbstractContextManager[None]:
        return locked(self.folder / ".sweep.lock")


def _line(fields: Mapping[str, Any]) -> bytes:
    return json.dumps(fields, ensure_ascii=False).encode() + b"\n"


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(
            f"{path} is damaged or of another version ({error}); "
            "delete it: what its jobs left is in their folders"
        ) from error


def _fields(text: bytes) -> Any:
    fields = json.loads(text)
    json.dumps(fields, ensure_ascii=False).encode()  # it must be possible to write it again
    return fields


def _command(fields: Mapping[str, Any]) -> list[str]:
    """Return the command that the fields of sweep.json, or of the first line, hold."""
    if fields["format_version"] != FORMAT_VERSION:
        raise ValueError(f"format version {fields['format_version']}")
    command = fields["command"]
    if not (isinstance(command, list) and all(isinstance(one, str) for one in command)):
        raise ValueError("a command that is not a list of texts")
    return command


def _entry(fields: Mapping[str, Any]) -> Entry:
    """Return a checked entry: its folder is a plain name, or a run that its command names."""
    entry = Entry(**fields)
    texts = [entry.job_id, entry.folder, entry.status]
    texts += [one for one in (entry.kind, entry.sentence) if one is not None]
    if not all(isinstance(one, str) for one in texts):
        raise ValueError("a job with a field that is not a text")
    try:
        entry = replace(entry, status=Status(entry.status))
    except ValueError:
        raise ValueError(f"a job with the status {entry.status[:40]}") from None
    name = entry.folder
    is_run = Path(name).is_absolute() and entry.job_id.endswith(f" {name}")  # as a command named it
    if "\0" in name or not (is_run or (Path(name).name == name and name not in ("", ".."))):
        raise ValueError(f"a job with the folder {name[:40]}")
    return entry
