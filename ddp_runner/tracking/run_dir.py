"""Run folders: how they are named, claimed and locked, and the frozen config inside.

Torch-free: the launcher of one machine claims a folder before any rank exists; else rank 0 does.
"""

import glob
import os
import re
import shlex
import shutil
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

import yaml
from filelock import FileLock, Timeout

from ddp_runner.config.schema import Config
from ddp_runner.errors import UserError
from ddp_runner.files import replace_file, safe_name
from ddp_runner.tracking.run_record import RUN_RECORD

OUTPUTS = Path("outputs")
CHOICES_FILE = Path(".hydra", "choices.yaml")  # the options of the groups that a run is made of
MIN_FREE_MIB = 100


def run_folder(config: Config) -> Path:
    """Return the path of a single run, not yet claimed; `config` is resolved."""
    model, dataset, mode = (
        group.get("name", "custom") for group in (config.model, config.dataset, config.parallelism)
    )
    usual = f"{model}-{dataset}-{mode}"
    if config.task != "train":
        usual = f"{config.task}-{config.backend.name if config.task == 'collectives' else usual}"
    name = config.name or f"{usual}-ws{config.world_size}"
    return OUTPUTS / safe_name(name) / timestamp()


def sweep_folder(name: str | None) -> Path:
    """Return the path of a sweep, not yet claimed."""
    return OUTPUTS / f"{safe_name(name or 'sweep')}-{timestamp()}"


def job_name(overrides: Sequence[str]) -> str:
    """Return a sweep job's folder: the overrides that the sweep varies, in their order.

    A search draws numbers of 17 digits: long ones are rounded to four.
    """
    short = (re.sub(r"=(-?\d+\.\d{5,}(e[+-]?\d+)?)$", _rounded, one) for one in overrides)
    return safe_name(",".join(short) or "job")


def _rounded(value: re.Match[str]) -> str:
    return f"={float(value[1]):.4g}"


def timestamp() -> str:
    """Return the local time as a folder name that sorts."""
    return time.strftime("%Y-%m-%d_%H-%M-%S")


def claim(path: Path) -> Path:
    """Create the folder and return it; one that exists already is left alone for `path-2`, ….

    Raises:
        UserError: the folder cannot be written, or the disk is nearly full.
    """
    try:
        # Before anything is made, so that a refusal leaves nothing.
        _ensure_space(path, place=next(one for one in path.parents if one.is_dir()))
        path.parent.mkdir(parents=True, exist_ok=True)
        for attempt in range(1, 1000):
            candidate = path if attempt == 1 else path.with_name(f"{path.name}-{attempt}")
            try:
                candidate.mkdir()
            except FileExistsError:
                continue
            return candidate
    except OSError as error:
        raise UserError(
            f"the run folder {path} cannot be created ({error.strerror}); "
            "start in a folder that you may write to, or give hydra.run.dir=FOLDER"
        ) from error
    raise UserError(f"{path} and 998 numbered folders beside it exist; give name=...")


def ensure_writable(path: Path) -> None:
    """Refuse a folder where a run would fail later.

    Raises:
        UserError: the folder is not writable, or its disk is nearly full.
    """
    if not os.access(path, os.W_OK):
        raise UserError(f"the run folder {path} is not writable; give hydra.run.dir=FOLDER")
    _ensure_space(path, place=path)


def _ensure_space(path: Path, *, place: Path) -> None:
    """Refuse a run folder on a disk that is nearly full; `place` is a folder on it."""
    free_mib = shutil.disk_usage(place).free // 2**20
    if free_mib < MIN_FREE_MIB:
        raise UserError(
            f"{free_mib} MiB are free for the run folder {path} and a run needs {MIN_FREE_MIB}; "
            "free some, or give hydra.run.dir=FOLDER on another disk"
        )


def sibling_runs(config: Config) -> list[Path]:
    """Return the runs that this config's could be among, newest first: of any world size."""
    planned = run_folder(config)
    pattern = glob.escape(planned.parent.name)
    if config.name is None:
        pattern = re.sub(r"-ws\d+$", "-ws*", pattern)
    found = OUTPUTS.glob(f"{pattern}/*/{RUN_RECORD}")
    return sorted((path.parent for path in found), key=lambda one: one.name, reverse=True)


def newest_run() -> Path | None:
    """Return the run below the outputs folder that was written to last, a sweep's job or not."""
    found = [*OUTPUTS.glob(f"*/{RUN_RECORD}"), *OUTPUTS.glob(f"*/*/{RUN_RECORD}")]
    newest = max(found, key=lambda path: path.stat().st_mtime_ns, default=None)
    return None if newest is None else newest.parent


def forbid_links(run_dir: Path) -> None:
    """Refuse a run folder, perhaps somebody else's, whose files would be written elsewhere.

    Raises:
        UserError: one of its files is a link; a folder may be one, such as checkpoints/.
    """
    for folder, _, names in os.walk(run_dir):
        for path in (Path(folder, name) for name in names):
            if path.is_symlink():
                raise UserError(
                    f"{path} is a link to {path.readlink()}, which the run would write to; put "
                    "the file itself there, or delete the link"
                )


class InUseError(UserError):
    """Another process holds the run folder."""


@contextmanager
def locked(run_dir: Path, *, patience_s: float = 0.0) -> Iterator[None]:
    """Hold a run folder for this process alone.

    Args:
        run_dir: the run's folder.
        patience_s: how long to wait for another process to let go of it.

    Raises:
        InUseError: another process holds it; the message says which.
        UserError: it holds links.
    """
    forbid_links(run_dir)
    holder = run_dir / ".lock.holder"
    lock = FileLock(run_dir / ".lock")
    try:
        lock.acquire(timeout=patience_s)
    except Timeout:
        who = holder.read_text().strip() if holder.exists() else "another process"
        raise InUseError(
            f"{run_dir} is in use by {who}; wait for it to end, or start a run of its own"
        ) from None
    try:
        holder.write_text(f"process {os.getpid()} on {socket.gethostname()}")
        yield
    finally:
        holder.unlink(missing_ok=True)
        lock.release()


def discard_unused(run_dir: Path) -> None:
    """Remove a folder that holds nothing but a lock, if nobody holds that."""
    with suppress(OSError):
        if all(path.name == ".lock" for path in run_dir.iterdir()) and not is_locked(run_dir):
            shutil.rmtree(run_dir)


def is_locked(run_dir: Path) -> bool:
    """Return whether a process holds the folder's lock."""
    lock = FileLock(run_dir / ".lock")
    try:
        with lock.acquire(timeout=0):
            return False
    except (Timeout, OSError):
        return run_dir.is_dir()


def freeze_config(
    run_dir: Path, config: Config, *, overrides: Sequence[str], choices: Mapping[str, str]
) -> str:
    """Write .hydra/{config,overrides,choices}.yaml, each whole or not at all.

    Returns:
        The config's text.

    Args:
        run_dir: the run's folder.
        config: resolved, but for what comes from the environment: see ``Secrets.written``.
        overrides: what was given on the command line.
        choices: the option of each group.

    Raises:
        UserError: they cannot be written; what was there before is intact.
    """
    folder = run_dir / ".hydra"
    # YAML's own marks of a document's begin and end show a file that was cut off.
    text = yaml.safe_dump(
        asdict(config), sort_keys=False, allow_unicode=True, explicit_start=True, explicit_end=True
    )
    given = yaml.safe_dump(list(overrides), allow_unicode=True)
    try:
        folder.mkdir(exist_ok=True)
        replace_file(folder / "overrides.yaml", given)
        replace_file(run_dir / CHOICES_FILE, yaml.safe_dump(dict(choices)))
        replace_file(folder / "config.yaml", text)  # last: a run is resumed from this one
    except OSError as error:
        raise UserError(
            f"{folder} cannot be written ({error.strerror}); free space or make the folder writable"
        ) from error
    return text


def is_frozen(run_dir: Path) -> bool:
    """Return whether a folder holds a run that can be resumed.

    Its config is not written again before the resume has succeeded: one that is refused, for a key
    that the run's checkpoint does not fit, would take the run's own config away.
    """
    return (run_dir / ".hydra" / "config.yaml").exists()


def resume_argument(run_dir: Path) -> str:
    """Return what a shell and Hydra both take for ``resume=`` this folder, whatever its name."""
    text = str(run_dir)
    if re.fullmatch(r"[\w./~-]+", text, re.ASCII):
        return f"resume={text}"
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return shlex.quote(f"resume='{escaped}'")
