"""The folder of a run: its files, its lock, and the frozen config. Torch-free."""

import os
import re
import shlex
import shutil
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_runner.config.fields import plain
from ddp_runner.errors import UserError, os_errors
from ddp_runner.files import READER_S, FileIn, is_locked, locked, read_file, replace_file, yaml_dump
from ddp_runner.job import Job

# Other modules search for these file names; `RunDir` has all files of a known folder.
RUN_RECORD, METRICS_FILE, CONFIG_FILE = "run.json", "metrics.jsonl", ".hydra/config.yaml"
SUBFOLDERS = (".hydra", "checkpoints", "images", "logs", "trackers")
MIN_FREE_MIB = 100
MOST_SECTIONS = 1000  # config sections whose YAML is cached
_SECTIONS = dict[str, str]()


class InUseError(UserError):
    """Another process holds the run folder."""


@dataclass(frozen=True)
class RunDir:
    """The folder of a run and the path of each file in it. Path-like."""

    path: Path

    record = FileIn(RUN_RECORD)  # run.json: the run's facts and status
    metrics = FileIn(METRICS_FILE)
    config = FileIn(CONFIG_FILE)  # frozen
    overrides = FileIn(".hydra/overrides.yaml")  # from the command line
    choices = FileIn(".hydra/choices.yaml")  # the chosen option of each config group
    checkpoints = FileIn("checkpoints")
    export = FileIn("model.safetensors")  # the weights of the best, or last, model
    images = FileIn("images")  # pictures that a user's own loop logs: NAME/step-XXXXXXXX.png
    trackers = FileIn("trackers")  # NAME.json: the metrics already sent to each tracker
    logs = FileIn("logs")
    heartbeat = FileIn(".heartbeat")  # exists while the run lasts; see ``alive``
    failure = FileIn("logs/failure.txt")  # the traceback that ended the run
    slurm_job = FileIn("slurm.job")  # see ``sweep.slurm.queue``
    lock = FileIn(".lock")
    holder = FileIn(".lock.holder")  # the process that holds the lock

    def __fspath__(self) -> str:
        return str(self.path)

    __str__ = __fspath__

    @property
    def is_frozen(self) -> bool:
        """Whether the folder holds a run's config; only a successful resume may replace it."""
        return self.config.exists()

    @property
    def is_held(self) -> bool | None:
        """Whether a process holds the folder's lock; None: unknown on this file system."""
        return is_locked(self.lock)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder for this process.

        Raises:
            InUseError: another process holds it; the message names the process.
            UserError: the folder is not writable, its disk is nearly full, it holds a link or a
                pipe, or a subfolder cannot be read.
        """
        self.ensure_writable()
        self.validate_content()
        with ExitStack() as held:
            try:
                held.enter_context(locked(self.lock, wait_s=READER_S))
            except TimeoutError:
                pid, host = self.holder_process or (None, None)
                process = f"process {pid} on {host}" if pid else "another process"
                fix = "wait for it to end, or start a new run"
                raise InUseError(f"{self} is in use by {process}", fix) from None
            self.holder.write_text(f"process {os.getpid()} on {socket.gethostname()}")
            held.callback(self.holder.unlink, missing_ok=True)
            yield

    @property
    def holder_process(self) -> tuple[int, str] | None:
        """Process id and host of the lock's holder, even if it was killed; None: unknown."""
        try:
            text = read_file(self.holder).decode(errors="replace").strip()
        except OSError:  # no process holds the lock, or it ends right now
            return None
        match = re.fullmatch(r"process (\d+) on (.+)", text)
        return (int(match[1]), match[2]) if match else None

    def validate_content(self) -> None:
        """Reject a foreign folder that could make this process hang or write outside of it.

        Raises:
            UserError: the folder holds a link or a pipe, or a subfolder cannot be read.
        """
        for folder, subfolders, names in os.walk(self, onerror=_reject_unreadable):
            for path in (Path(folder, name) for name in [*subfolders, *names]):
                if path.is_symlink():
                    raise UserError(
                        f"{path} is a link to {path.readlink()}, and the run would write to it",
                        "replace the link with its files, or delete it",
                    )
                if not (path.is_file() or path.is_dir()) and path.exists():
                    raise UserError(
                        f"{path} is neither a file nor a folder, so no run wrote it", "delete it"
                    )

    def ensure_writable(self) -> None:
        """Reject a folder where the run would fail later.

        Raises:
            UserError: the folder is not writable, or its disk is nearly full.
        """
        if not os.access(self, os.W_OK):
            raise UserError(f"the run folder {self} is not writable", "give hydra.run.dir=FOLDER")
        ensure_space(self.path, existing=self.path)

    def discard_unused(self) -> None:
        """Remove the folder if it holds nothing except a free lock."""
        with suppress(OSError):  # a folder of another user
            if set(self.path.iterdir()) <= {self.lock} and self.is_held is False:
                shutil.rmtree(self)

    def freeze(self, job: Job, *, sync: bool = True) -> None:
        """Write a job's config, overrides and choices; replace each file atomically.

        The config is resolved, except for values from the environment: see ``Secrets.written``.

        Raises:
            UserError: the files cannot be written; the earlier files are intact.
        """
        sections = [{key: value} for key, value in plain(job.secrets.written(job.config)).items()]
        # YAML's markers for the start and end of a document reveal a truncated file.
        text = "".join(["---\n", *map(_yaml_of, sections), "...\n"])
        folder = self.config.parent
        with os_errors(f"{folder} cannot be written"):
            folder.mkdir(exist_ok=True)
            replace_file(self.overrides, yaml_dump(list(job.overrides)), sync=sync)
            replace_file(self.choices, _yaml_of(dict(job.choices)), sync=sync)
            replace_file(self.config, text, sync=sync)  # last: a resume reads it

    @property
    def resume_argument(self) -> str:
        """``resume=FOLDER``, quoted for both a shell and Hydra."""
        if re.fullmatch(r"[\w./~-]+", str(self), re.ASCII):
            return f"resume={self}"
        # Hydra reads backslashes as escapes only where they stand before a quote.
        escaped = re.sub(r"(\\*)('|$)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), str(self))
        word = f"resume='{escaped}'"
        # A shell interprets these characters even in double quotes.
        return shlex.quote(word) if re.search(r'[$`"!\\]', word) else f'"{word}"'

    def resume_words(self, others: Sequence[str]) -> str:
        """Return the words that resume the run, for a shell; see ``Job.resume_arguments``."""
        return " ".join([self.resume_argument, *map(_quoted, others)])


def _quoted(word: str) -> str:
    """Return an argument quoted for a shell; a list of names in double quotes, as in the docs."""
    is_list = re.fullmatch(r"\w+=\[[\w.,]*\]", word, re.ASCII)
    return f'"{word}"' if is_list else shlex.quote(word)


def _yaml_of(section: Mapping[str, Any]) -> str:
    """Return a config section as YAML. The cache helps sweeps: their jobs share most sections."""
    key = repr(section)
    if key not in _SECTIONS:
        if len(_SECTIONS) > MOST_SECTIONS:
            _SECTIONS.clear()
        _SECTIONS[key] = yaml_dump(section)
    return _SECTIONS[key]


def _reject_unreadable(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):  # removed by the process that runs there
        raise UserError(
            f"{error.filename} cannot be read ({error.strerror}), and the run would write to it",
            "make it readable, or give another folder",
        ) from error


def keep_files(run_dir: Path, files: Mapping[str, bytes]) -> None:
    """Copy a dataset's files into the run folder: the model must be usable without the data.

    Raises:
        UserError: a file in the run folder differs, so the model was trained on other data.
    """
    for name, content in files.items():
        path = run_dir / name
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, content)
        elif path.read_bytes() != content:
            raise UserError(
                f"{path} differs from the current dataset's file, so the run trained on other data",
                "resume with the original data, or start a new run",
            )


def ensure_space(path: Path, *, existing: Path) -> None:
    """Reject a run folder on a nearly full disk; `existing` is a folder on that disk."""
    free_mib = shutil.disk_usage(existing).free // 2**20
    if free_mib < MIN_FREE_MIB:
        raise UserError(
            f"{free_mib} MiB are free for the run folder {path}, and a run needs {MIN_FREE_MIB}",
            "free some, or give hydra.run.dir=FOLDER on another disk",
        )
