"""Saves a run's state so that no kill can lose it, and loads only undamaged checkpoints.

A checkpoint is a folder, ``checkpoints/step-00000600``, with ``state.pt`` and ``manifest.json``
(step, metrics, size and SHA-256 of the state). It is written under a temporary name and then
renamed, so a folder with a checkpoint's name was complete once. The checksum shows whether it still
is. Rank 0 saves, every rank loads.
"""

import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from ddp_runner.checkpoint.manifest import MANIFEST, STATE, manifest_text, read_manifest, verify
from ddp_runner.checkpoint.plain_data import load_plain_data, reject_sharded
from ddp_runner.config.training import CheckpointConfig
from ddp_runner.errors import UserError
from ddp_runner.files import replace_file, sync_folder

TEMP_PREFIX = ".tmp-"
REPLACED_SUFFIX = ".replaced"


def save_checkpoint(
    folder: Path,
    state: dict[str, Any],
    *,
    step: int,
    metrics: Mapping[str, float],
    config: CheckpointConfig,
    log: Callable[[str], None],
) -> Path:
    """Save this step's checkpoint, delete those no longer kept, return its folder. Rank 0 only.

    Args:
        folder: the run's checkpoints folder.
        state: tensors, numbers, strings, and lists and dicts of them.
        step: optimizer steps taken.
        metrics: of this step; `config.monitor` names one of them.
        config: which checkpoints are kept.
        log: takes a sentence for the user if an old checkpoint cannot be deleted.

    Raises:
        UserError: the checkpoint could not be written, and the earlier ones are untouched; or the
            state holds a part of a tensor that other ranks hold parts of.
        TypeError: the state holds an object that a weights-only load would refuse.
    """
    reject_sharded(state)
    final = folder / f"step-{step:08d}"
    temp = folder / (TEMP_PREFIX + final.name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _clear_leftovers(folder, log=log)
        temp.mkdir(exist_ok=True)
        _write_files(temp, state, step=step, metrics=metrics)
        replaced = _put_in_place(temp, final)
    except OSError as error:
        shutil.rmtree(temp, ignore_errors=True)
        raise UserError(
            f"checkpoint {final} could not be saved ({error.strerror or error}); free space or "
            "make the folder writable, then resume: the checkpoints before it are intact"
        ) from error
    if replaced:
        _delete(replaced, log=log)
    retain(folder, config, step=step, log=log)
    return final


def retain(
    folder: Path, config: CheckpointConfig, *, step: int, log: Callable[[str], None]
) -> None:
    """Delete the checkpoints up to `step` that are no longer kept, and what killed saves left.

    Rank 0 only: after a save, and after a resume, since a kill may have come before it.
    """
    try:
        _delete_unfinished(folder, log=log)
        monitor, mode = config.monitor, config.mode
        best = best_checkpoints(folder, monitor=monitor, mode=mode)[:1] if monitor else []
        found = checkpoints_by_step(folder)
    except UserError as error:
        log(f"no old checkpoint was deleted: {error}; the run goes on")
        return
    # Leave later ones alone: they were damaged when this run resumed from an earlier one.
    up_to_now = [path for at_step, path in found.items() if at_step <= step]
    for path in up_to_now[: -config.keep]:
        if path not in best:
            _delete(path, log=log)


def latest_checkpoint(folder: Path, *, log: Callable[[str], None]) -> Path | None:
    """Return the newest checkpoint whose state matches its checksum; None: there are none.

    The folder need not exist.

    Raises:
        UserError: every checkpoint is damaged, or the folder cannot be read.
    """
    paths = newest_first(folder)
    found = first_whole(paths, log=log)
    if found is None and paths:
        raise UserError(
            f"nothing is left to resume from: every checkpoint in {folder} is damaged "
            f"({len(paths)} of {len(paths)}); put back a copy of one, or start a new run"
        )
    return found


def newest_first(folder: Path) -> list[Path]:
    """Return all checkpoints of a run, damaged ones included."""
    return list(reversed(checkpoints_by_step(folder).values()))


def first_whole(paths: Iterable[Path], *, log: Callable[[str], None]) -> Path | None:
    """Return the first checkpoint that matches its checksum; log the damaged ones before it."""
    for number, path in enumerate(paths):
        try:
            verify(path)
        except UserError as error:
            log(f"{error}; it is skipped")
        else:
            if number:
                log(f"{path} is used in its place")
            return path
    return None


def best_checkpoints(
    folder: Path, *, monitor: str, mode: str, log: Callable[[str], None] | None = None
) -> list[Path]:
    """Return the checkpoints with a finite value of a metric, best first, by their manifests.

    The earlier of two equal checkpoints comes first. `mode` is ``max`` or ``min``. The `log` takes
    a sentence about each whose manifest is damaged.
    """
    scores = {}
    for path in checkpoints_by_step(folder).values():
        try:
            score = read_manifest(path).metrics.get(monitor)
        except UserError as error:  # it could not be loaded
            if log is not None:
                log(f"{error}; it is skipped")
            continue
        if score is not None:
            scores[path] = score
    sign = {"max": -1, "min": 1}[mode]
    return sorted(scores, key=lambda path: sign * scores[path])


def load_checkpoint(path: Path, *, is_mapped: bool = False) -> dict[str, Any]:
    """Return the state that was saved, its tensors on the CPU; or in the file, if it is mapped.

    Raises:
        UserError: the checkpoint is damaged, or holds anything but plain data; none of its code
            has run.
    """
    try:
        verify(path)
    except UserError as error:
        raise UserError(f"{error}; use another checkpoint") from error
    fix = "use a checkpoint that this program wrote"
    state: dict[str, Any] = load_plain_data(
        path / STATE, named=f"checkpoint {path}", fix=fix, is_mapped=is_mapped
    )
    return state


def checkpoints_by_step(folder: Path) -> dict[int, Path]:
    """Return each step's checkpoint, oldest first, without looking inside.

    After a kill between the two renames of a replacement, the old folder that was set aside counts.

    Raises:
        UserError: the folder cannot be read.
    """
    found = {}
    # In reverse order, so that a step's own folder replaces the one set aside.
    for path in sorted(_entries(folder), reverse=True):
        if match := re.fullmatch(rf"step-(\d+)({re.escape(REPLACED_SUFFIX)})?", path.name):
            found[int(match[1])] = path
    return dict(sorted(found.items()))


def _entries(folder: Path) -> list[Path]:
    """Return what a checkpoints folder holds; nothing if there is none.

    ``Path.glob`` finds nothing in a folder that cannot be read, and a run would begin anew.
    """
    try:
        return list(folder.iterdir())
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not folder.is_symlink():
            return []
        raise UserError(
            f"the checkpoints in {folder} cannot be read ({error.strerror}); make it a folder that "
            "you may read and write"
        ) from error


def _write_files(
    folder: Path, state: dict[str, Any], *, step: int, metrics: Mapping[str, float]
) -> None:
    with (folder / STATE).open("wb") as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:
            # torch's zip writer hides the reason of a failed write in the context.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise
        file.flush()
        os.fsync(file.fileno())
    unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(folder / STATE)
    if unsafe:
        raise TypeError(f"the state holds what cannot be loaded safely again: {', '.join(unsafe)}")
    replace_file(folder / MANIFEST, manifest_text(folder / STATE, step=step, metrics=metrics))
    sync_folder(folder)


def _put_in_place(temp: Path, final: Path) -> Path | None:
    """Rename a complete checkpoint; return where an earlier one of the same step was set aside."""
    replaced = None
    if final.exists():
        # A rename cannot replace a non-empty folder. Between the two the old one counts.
        replaced = final.rename(final.with_name(final.name + REPLACED_SUFFIX))
    temp.rename(final)
    sync_folder(final.parent)
    return replaced


def _clear_leftovers(folder: Path, *, log: Callable[[str], None]) -> None:
    """Delete what killed saves left, and complete or undo an unfinished replacement."""
    _delete_unfinished(folder, log=log)
    replaced = [path for path in _entries(folder) if path.name.endswith(REPLACED_SUFFIX)]
    for path in replaced:
        original = path.with_name(path.name.removesuffix(REPLACED_SUFFIX))
        if original.exists():
            _delete(path, log=log)
        else:
            path.rename(original)


def _delete_unfinished(folder: Path, *, log: Callable[[str], None]) -> None:
    for path in _entries(folder):
        if path.name.startswith(TEMP_PREFIX):
            _delete(path, log=log)


def _delete(path: Path, *, log: Callable[[str], None]) -> None:
    """Delete a folder; the rename first keeps a kill from leaving half a checkpoint."""
    temp = path.with_name(TEMP_PREFIX + path.name.removeprefix(TEMP_PREFIX))
    try:
        shutil.rmtree(path.rename(temp))
    except OSError as error:
        log(f"{path} could not be deleted ({error.strerror or error}); the run goes on")
