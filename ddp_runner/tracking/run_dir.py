"""The folder of a run: its files, its lock, and the frozen config. Torch-free."""

import json
import os
import re
import shlex
import shutil
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ddp_runner.config.schema import RunConfig
from ddp_runner.errors import UserError, os_errors
from ddp_runner.files import READER_S, FileIn, is_locked, locked, read_file, replace_file, yaml_dump

# The names of files that other modules search for; a known folder's files are in `RunDir`.
RUN_RECORD, METRICS_FILE, CONFIG_FILE = "run.json", "metrics.jsonl", ".hydra/config.yaml"
SUBFOLDERS = (".hydra", "checkpoints", "images", "logs", "trackers")
MIN_FREE_MIB = 100
MOST_SECTIONS = 1000  # whose YAML is kept
_SECTIONS = dict[str, str]()


class InUseError(UserError):
    """Another process holds the run folder."""


@dataclass(frozen=True)
class RunDir:
    """The folder of a run, and the name of each file in it; path-like, as its `path` is."""

    path: Path

    record = FileIn(RUN_RECORD)  # what the run is, and its status
    metrics = FileIn(METRICS_FILE)
    config = FileIn(CONFIG_FILE)  # frozen
    overrides = FileIn(".hydra/overrides.yaml")  # from the command line
    choices = FileIn(".hydra/choices.yaml")  # the chosen option of each config group
    checkpoints = FileIn("checkpoints")
    export = FileIn("model.safetensors")  # the weights of the best, or last, model
    images = FileIn("images")  # what a loop of the user's own has drawn: NAME/step-XXXXXXXX.png
    trackers = FileIn("trackers")  # what each tracker has of the run: NAME.json
    logs = FileIn("logs")
    heartbeat = FileIn(".heartbeat")  # while it runs; see ``alive``
    failure = FileIn("logs/failure.txt")  # the traceback that ended the run
    lock = FileIn(".lock")
    holder = FileIn(".lock.holder")  # the process that holds the lock

    def __fspath__(self) -> str:
        return str(self.path)

    __str__ = __fspath__

    def rank_log(self, rank: int) -> Path:
        """Return the path of a rank's log."""
        return self.logs / f"rank-{rank}.log"

    @property
    def is_frozen(self) -> bool:
        """Whether the folder has a run's config, which only a resume that succeeds may replace."""
        return self.config.exists()

    @property
    def is_held(self) -> bool | None:
        """Whether a process holds the folder's lock; None: nobody can tell here."""
        return is_locked(self.lock)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder for this process only.

        Raises:
            InUseError: another process holds it; the message names the process.
            UserError: it is not writable, its disk is nearly full, it holds a link or a pipe, or a
                folder in it cannot be read.
        """
        self.ensure_writable()
        self.validate_content()
        with ExitStack() as held:
            try:
                held.enter_context(locked(self.lock, wait_s=READER_S))
            except TimeoutError:
                pid, host = self.holder_process or (None, None)
                who = f"process {pid} on {host}" if pid else "another process"
                raise InUseError(
                    f"{self} is in use by {who}; wait for it to end, or start a new run"
                ) from None
            self.holder.write_text(f"process {os.getpid()} on {socket.gethostname()}")
            held.callback(self.holder.unlink, missing_ok=True)
            yield

    @property
    def holder_process(self) -> tuple[int, str] | None:
        """The process that holds the folder, or was killed while it did, and its host."""
        try:
            text = read_file(self.holder).decode().strip()
        except (OSError, UnicodeDecodeError):
            return None  # none holds it, or it ends right now
        found = re.fullmatch(r"process (\d+) on (.+)", text)
        return (int(found[1]), found[2]) if found else None

    def validate_content(self) -> None:
        """Reject a folder of somebody else's that could make its reader write or wait elsewhere.

        Raises:
            UserError: it holds a link or a pipe, or a folder in it cannot be read.
        """
        for folder, subfolders, names in os.walk(self, onerror=_reject_unreadable):
            for path in (Path(folder, name) for name in [*subfolders, *names]):
                if path.is_symlink():
                    raise UserError(
                        f"{path} is a link to {path.readlink()}, which the run would write to; put "
                        "the files themselves there, or delete the link"
                    )
                if not (path.is_file() or path.is_dir()) and path.exists():
                    raise UserError(
                        f"{path} is neither a file nor a folder, which no run leaves; delete it"
                    )

    def ensure_writable(self) -> None:
        """Reject a folder in which the run would fail later.

        Raises:
            UserError: the folder is not writable, or its disk is nearly full.
        """
        if not os.access(self, os.W_OK):
            raise UserError(f"the run folder {self} is not writable; give hydra.run.dir=FOLDER")
        ensure_space(self.path, place=self.path)

    def discard_unused(self) -> None:
        """Remove the folder if it holds nothing but a lock that nobody holds."""
        with suppress(OSError):
            if all(path == self.lock for path in self.path.iterdir()) and self.is_held is False:
                shutil.rmtree(self)

    def clear_if_unbegun(self) -> None:
        """Empty the folder of a run that a mistake in its command ended before its first step."""
        known = {self.config.parent, self.lock, self.holder, self.logs, self.record}
        with suppress(OSError, ValueError, LookupError, TypeError):  # then it is left as it is
            is_mistake = json.loads(read_file(self.record))["error"]["kind"] == "user"
            if is_mistake and known.issuperset(self.path.iterdir()):
                shutil.rmtree(self.logs)
                shutil.rmtree(self.config.parent)
                self.record.unlink()

    def freeze(
        self,
        config: RunConfig,
        *,
        overrides: Sequence[str],
        choices: Mapping[str, str],
        sync: bool = True,
    ) -> None:
        """Write the config, the overrides and the choices, each whole or not at all.

        The config is resolved, but for what comes from the environment: see ``Secrets.written``.

        Raises:
            UserError: they cannot be written; what was there before is intact.
        """
        # YAML's own marks of a document's begin and end reveal a file that was cut off.
        text = "".join(["---\n", *map(_yaml_of, asdict(config).items()), "...\n"])
        folder = self.config.parent
        with os_errors(f"{folder} cannot be written"):
            folder.mkdir(exist_ok=True)
            replace_file(self.overrides, yaml_dump(list(overrides)), sync=sync)
            replace_file(self.choices, yaml_dump(dict(choices)), sync=sync)
            replace_file(self.config, text, sync=sync)  # last: a run is resumed from this one

    @property
    def resume_argument(self) -> str:
        """``resume=`` this folder, as both a shell and Hydra read it, whatever its name."""
        if re.fullmatch(r"[\w./~-]+", str(self), re.ASCII):
            return f"resume={self}"
        # Hydra reads backslashes as escapes only where they stand before a quote.
        escaped = re.sub(r"(\\*)('|$)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), str(self))
        word = f"resume='{escaped}'"
        # What follows these a shell would read in double quotes, too.
        return shlex.quote(word) if re.search(r'[$`"!\\]', word) else f'"{word}"'


def _yaml_of(section: tuple[str, Any]) -> str:
    """Return a section of a config as YAML; most jobs of a sweep share most of theirs."""
    if (known := _SECTIONS.get(repr(section))) is not None:
        return known
    if len(_SECTIONS) > MOST_SECTIONS:
        _SECTIONS.clear()
    return _SECTIONS.setdefault(repr(section), yaml_dump(dict([section])))


def _reject_unreadable(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):  # the process that runs in it has removed it
        raise UserError(
            f"{error.filename} cannot be read ({error.strerror}), and the run would write to it; "
            "make it readable, or give another folder"
        ) from error


def keep_files(run_dir: Path, files: Mapping[str, bytes]) -> None:
    """Write a dataset's files into the run folder, so that its model can be used without the data.

    Raises:
        UserError: the run folder has other files, so the model was trained on other data.
    """
    for name, content in files.items():
        path = run_dir / name
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, content)
        elif path.read_bytes() != content:
            raise UserError(
                f"{path} differs from the one that the data give now, so the run has trained on "
                "other data; resume with the data as they were, or start anew"
            )


def ensure_space(path: Path, *, place: Path) -> None:
    """Reject a run folder whose disk is nearly full; `place` is an existing folder on it."""
    free_mib = shutil.disk_usage(place).free // 2**20
    if free_mib < MIN_FREE_MIB:
        raise UserError(
            f"{free_mib} MiB are free for the run folder {path} and a run needs {MIN_FREE_MIB}; "
            "free some, or give hydra.run.dir=FOLDER on another disk"
        )
