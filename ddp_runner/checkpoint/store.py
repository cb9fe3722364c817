"""Saves a run's state so that no kill can lose it, and loads only undamaged checkpoints.

A checkpoint is a folder, ``checkpoints/step-00000600``, with ``state.pt`` and ``manifest.json``
(step, metrics, sizes and SHA-256 of its files). A sharded checkpoint has further files, one of each
rank; see ``shard_notes``. The folder is renamed once it is complete, and the checksums reveal later
damage. Rank 0 saves, every rank loads.
"""

import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ddp_runner.checkpoint.manifest import (
    MANIFEST,
    STATE,
    FileFacts,
    Manifest,
    facts_of,
    manifest_text,
    read_manifest,
    verify,
)
from ddp_runner.checkpoint.state_parts import joined
from ddp_runner.config.training import CheckpointConfig
from ddp_runner.errors import UserError, any_error, os_errors, typed
from ddp_runner.files import is_missing, replace_file, sync_folder

TEMP_PREFIX = ".tmp-"
REPLACED_SUFFIX = ".replaced"
READABLE = "make it a folder that you may read and write"
INTACT = "free space or make the folder writable, then resume: the checkpoints before it are intact"


def save_checkpoint(
    folder: Path,
    state: dict[str, Any],
    *,
    step: int,
    metrics: Mapping[str, float],
    config: CheckpointConfig,
    log: Callable[[str], None],
    more_files: Callable[[Path], Mapping[str, FileFacts]] | None = None,
) -> Path:
    """Save a checkpoint, delete those that `config` does not keep, and return the new folder.

    Rank 0 only. The state has tensors, numbers, strings, and lists and dicts of them. `more_files`
    adds files to the temporary folder, which then exists already, and returns their facts.

    Raises:
        UserError: the checkpoint could not be written; earlier checkpoints are untouched.
        TypeError: the state holds an object that a weights-only load would reject.
    """
    with being_saved(folder, step) as (final, temp):
        try:
            if more_files is None:
                begin_checkpoint(folder, step, log=log)
            files = {STATE: _write_state(temp, state)}
            if more_files is not None:
                files |= more_files(temp)
            text = manifest_text(files, step=step, metrics=metrics)
            replace_file(temp / MANIFEST, text)
            sync_folder(temp)
            if final.exists():  # a rename cannot replace a folder that is not empty
                final.rename(final.with_name(final.name + REPLACED_SUFFIX))
            temp.rename(final)
            sync_folder(folder)
        finally:
            shutil.rmtree(temp, ignore_errors=True)  # after an error
    retain(folder, config, step=step, log=log)
    return final


@contextmanager
def being_saved(folder: Path, step: int) -> Iterator[tuple[Path, Path]]:
    """Yield the folder of a step's checkpoint, and the one in which it is written.

    Raises:
        UserError: for an OSError of the block.
    """
    final = folder / f"step-{step:08d}"
    with os_errors(f"checkpoint {final} could not be saved", fix=INTACT):
        yield final, folder / (TEMP_PREFIX + final.name)


def begin_checkpoint(folder: Path, step: int, *, log: Callable[[str], None]) -> None:
    """Delete what killed saves left, and make the folder in which a checkpoint is written.

    Raises:
        UserError: the folder cannot be made.
    """
    with being_saved(folder, step) as (_, temp):
        folder.mkdir(parents=True, exist_ok=True)
        _clear_leftovers(folder, log=log)
        temp.mkdir(exist_ok=True)


def retain(
    folder: Path, config: CheckpointConfig, *, step: int, log: Callable[[str], None]
) -> None:
    """Delete checkpoints up to `step` that `config` does not keep, and leftovers of killed saves.

    Call on rank 0 after a save, and after a resume: a kill may have skipped it.
    """
    _clear_leftovers(folder, log=log)
    monitor, mode = config.monitor, config.mode
    best = best_checkpoints(folder, monitor=monitor, mode=mode)[:1] if monitor else []
    checkpoints = checkpoints_by_step(folder)
    # A run that found its newest checkpoints damaged resumed from an earlier step: leave them to
    # the user.
    up_to_now = [path for path_step, path in checkpoints.items() if path_step <= step]
    for path in up_to_now[: -config.keep]:
        if path not in best:
            _delete(path, log=log)


def newest_first(folder: Path) -> list[Path]:
    """Return all checkpoints of a run, including damaged checkpoints."""
    return list(reversed(checkpoints_by_step(folder).values()))


def first_undamaged(
    paths: Iterable[Path], *, log: Callable[[str], None], check: Callable[[Path], Manifest] = verify
) -> Path | None:
    """Return the first checkpoint that passes the check; log each skipped checkpoint."""
    for number, path in enumerate(paths):
        if _unless_damaged(check, path, log=log) is not None:
            if number:
                log(f"{path} is used in its place")
            return path
    return None


def best_checkpoints(
    folder: Path, *, monitor: str, mode: str, log: Callable[[str], None] = lambda _: None
) -> list[Path]:
    """Return the checkpoints with a finite value of a metric, best first; ties by step.

    `mode` is ``max`` or ``min``. `log` receives a sentence about each damaged manifest.
    """
    scores = {}
    for path in checkpoints_by_step(folder).values():
        manifest = _unless_damaged(read_manifest, path, log=log)
        if manifest is not None and (score := manifest.metrics.get(monitor)) is not None:
            scores[path] = score
    sign = {"max": -1, "min": 1}[mode]
    return sorted(scores, key=lambda path: sign * scores[path])


def _unless_damaged(
    read: Callable[[Path], Manifest], path: Path, *, log: Callable[[str], None]
) -> Manifest | None:
    """Return a checkpoint's manifest; log why it is skipped, and return None, if it is damaged."""
    try:
        return read(path)
    except UserError as error:
        log(f"{error}; it is skipped")
        return None


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Return the saved state with its tensors on the CPU.

    Of a sharded checkpoint it has stored tensors, whose parts are read when they are used.

    Raises:
        UserError: the checkpoint is damaged, or holds more than plain data; its code did not run.
    """
    verify(path, fix="use another checkpoint")
    return load_verified(path, is_mapped=False)


def load_verified(path: Path, *, is_mapped: bool) -> dict[str, Any]:
    """Return the saved state of a checkpoint whose files are undamaged; see ``load_checkpoint``.

    With `is_mapped` its tensors stay in the file.
    """
    named, fix = f"checkpoint {path}", "use a checkpoint that this program wrote"
    state: dict[str, Any] = load_plain_data(path / STATE, named=named, fix=fix, is_mapped=is_mapped)
    files = [path / name for name in read_manifest(path).files if name != STATE]
    with any_error(f"{named} cannot be loaded", fix):
        return {**state, "objects": joined(state["objects"], files)} if files else state


def checkpoints_by_step(folder: Path) -> dict[int, Path]:
    """Return the checkpoints by step, oldest first, without looking inside.

    After a kill between the two renames of a replacement, the folder set aside is the checkpoint.

    Raises:
        UserError: the folder cannot be read.
    """
    checkpoints = {}
    # In reverse order: the new folder of a step takes precedence over the replaced folder.
    for path in sorted(_entries(folder), reverse=True):
        if match := re.fullmatch(rf"step-(\d+)({re.escape(REPLACED_SUFFIX)})?", path.name):
            checkpoints[int(match[1])] = path
    return dict(sorted(checkpoints.items()))


def _entries(folder: Path) -> list[Path]:
    """Return the paths in a checkpoints folder; [] if it does not exist.

    ``Path.glob`` ignores an unreadable folder, and the run would start again at step 0.
    """
    if is_missing(folder) and not folder.is_symlink():
        return []
    with os_errors(f"the checkpoints in {folder} cannot be read", fix=READABLE):
        return list(folder.iterdir())


def _write_state(folder: Path, state: dict[str, Any]) -> FileFacts:
    with (folder / STATE).open("wb") as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:
            # torch's zip writer hides the reason for a failed write in the context.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise
        file.flush()
        os.fsync(file.fileno())
    unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(folder / STATE)
    if unsafe:
        raise TypeError(f"the state has objects that cannot be loaded safely: {', '.join(unsafe)}")
    return facts_of(folder / STATE)


def _clear_leftovers(folder: Path, *, log: Callable[[str], None]) -> None:
    """Delete leftovers of saves, killed or complete, and undo an unfinished replacement."""
    for path in _entries(folder):
        original = path.with_name(path.name.removesuffix(REPLACED_SUFFIX))
        if path.name.startswith(TEMP_PREFIX) or (original != path and original.exists()):
            _delete(path, log=log)
        elif original != path:
            path.rename(original)


def _delete(path: Path, *, log: Callable[[str], None]) -> None:
    """Delete a folder. Rename it first: a kill must not leave half a checkpoint."""
    temp = path.with_name(TEMP_PREFIX + path.name.removeprefix(TEMP_PREFIX))
    try:
        shutil.rmtree(path.rename(temp))
    except OSError as error:
        log(f"{path} could not be deleted ({error.strerror or error}); the run continues")


def load_plain_data(file: Path, *, named: str, fix: str, is_mapped: bool = False) -> Any:
    """Return the plain data of a torch.save file, with tensors on the CPU; never run its code.

    With `is_mapped`, tensors are read from the file when used; do not change them.

    Raises:
        UserError: the file is damaged or has other objects; `named` starts the message.
    """
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=is_mapped)
    except Exception as error:  # damaged bytes raise any type
        reason = f"it is damaged or of another kind ({typed(error)[:200]})"
        if (forbidden := re.search(r"GLOBAL (\S+)", str(error))) is not None:
            reason = f"rejected: it names {forbidden[1]}, which could run code (none was run)"
        raise UserError(f"{named} cannot be loaded: {reason}", fix) from error
