"""The folder of a sweep: asked for, found again, or new. Torch-free."""

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from omegaconf import DictConfig

from ddp_runner.errors import UserError
from ddp_runner.job import Status
from ddp_runner.sweep.ledger import JOURNAL, LEDGER, UNFINISHED, Ledger
from ddp_runner.tracking.outputs import claim, sweep_folder


@contextmanager
def sweep_dir(
    composed: DictConfig, asked: Path | None, arguments: Sequence[str], *, is_search: bool
) -> Iterator[tuple[Path, Path]]:
    """Give the sweep's folder, and the one for what Hydra's sweeper writes.

    The first is the one that the user asked for, else that of an unfinished sweep of the same
    command, else a new one, which is removed if no job of it was even queued. A dry run makes none,
    so Hydra gets a temporary one. `composed` is what all jobs have in common, with the ``hydra``
    node.
    """
    folder = asked or _unfinished(composed, arguments, is_search=is_search)
    if composed.sweep.dry_run:
        with tempfile.TemporaryDirectory() as temporary:
            yield folder or sweep_folder(composed.name), Path(temporary)
        return
    if folder is not None:
        yield folder, folder
        return
    folder = claim(sweep_folder(composed.name))
    try:
        yield folder, folder
    finally:
        if not (folder / LEDGER).exists():
            shutil.rmtree(folder, ignore_errors=True)
            with suppress(OSError):
                folder.parent.rmdir()  # outputs, if it is empty


def _unfinished(composed: DictConfig, arguments: Sequence[str], *, is_search: bool) -> Path | None:
    """Return the folder of an unfinished sweep of the same command."""
    sampler = composed.hydra.sweeper.get("sampler") if is_search else None
    if sampler is not None and sampler.get("seed") is None:
        return None  # it would try other jobs
    return unfinished_sweep(
        sweep_folder(composed.name).parent,
        command=sweep_command(arguments),
        retry_failed=composed.sweep.retry is not None,
    )


def unfinished_sweep(parent: Path, *, command: Sequence[str], retry_failed: bool) -> Path | None:
    """Return the newest sweep in `parent` that the same command began and that has work left."""
    wanted = {*UNFINISHED, Status.FAILED} if retry_failed else set(UNFINISHED)
    found = [path.parent for path in parent.glob(f"*/{LEDGER}")]
    for folder in sorted(found, key=_changed_at, reverse=True):
        ledger = Ledger(folder)
        try:
            if ledger.command() != list(command):
                continue
            statuses = {entry.status for entry in ledger.read().values()}
        except UserError:
            continue  # damaged, or of another version
        if not wanted.isdisjoint(statuses):
            return folder
    return None


def _changed_at(folder: Path) -> float:
    """Return when the ledger of a sweep was last written; 0.0 if it is gone."""
    times = [0.0]
    for name in (LEDGER, JOURNAL):
        with suppress(OSError):  # another launcher folds it, or removes the sweep
            times.append((folder / name).stat().st_mtime)
    return max(times)


def sweep_command(arguments: Sequence[str]) -> list[str]:
    """Return what identifies a sweep: its command line, without how and where its jobs run."""
    others = ("sweep.", "verbose=", "hydra/launcher=", "hydra.launcher.")
    return [one for one in arguments if not one.startswith(others)]
