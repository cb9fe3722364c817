"""The folder of a sweep: asked for, found again, or new. Torch-free."""

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from omegaconf import DictConfig

from ddp_runner.config.sections import AUTO
from ddp_runner.errors import UserError
from ddp_runner.job import Status
from ddp_runner.sweep.plan_file import PLAN, TO_RUN, Plan, read_plan
from ddp_runner.tracking.outputs import claim, sweep_folder
from ddp_runner.tracking.run_dir import RunDir

UNNAMED = AUTO  # hydra.sweep.dir, unless the user names a folder


@contextmanager
def sweep_dir(composed: DictConfig, words: Sequence[str]) -> Iterator[tuple[Path, Path | None]]:
    """Give the sweep's folder, and that of a sweep of the same command that has ended, if any.

    The first is the one that the user asked for, else that of an unfinished sweep of the same
    command, else a new one, which is removed if no job of it was even queued. A dry run makes none.
    `composed` is what all jobs have in common, with the ``hydra`` node.

    Raises:
        UserError: the user asks for a folder without a name, or that cannot be written.
    """
    asked = composed.hydra.sweep.dir
    if not asked:
        raise UserError("hydra.sweep.dir is empty; write hydra.sweep.dir=FOLDER, or leave it out")
    folder, earlier = Path(asked) if asked != UNNAMED else None, None
    new = sweep_folder(composed.name)
    if folder is None:
        retries, command = composed.sweep.retry is not None, sweep_command(words)
        folder = unfinished_sweep(new.parent, command=command, retry_failed=retries)
        if folder is None:
            earlier, _ = next(_sweeps_of(command, new.parent), (None, None))
    if composed.sweep.dry_run:
        yield folder or new, earlier
    elif folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        RunDir(folder).ensure_writable()
        yield folder, None
    else:
        folder = claim(new)
        try:
            yield folder, earlier
        finally:
            if not (folder / PLAN).exists():
                shutil.rmtree(folder, ignore_errors=True)
                with suppress(OSError):
                    folder.parent.rmdir()  # outputs, if it is empty


def unfinished_sweep(parent: Path, *, command: Sequence[str], retry_failed: bool) -> Path | None:
    """Return the newest sweep in `parent` that the same command began and that has work left."""
    wanted = {*TO_RUN, *([Status.FAILED] if retry_failed else [])}
    for folder, plan in _sweeps_of(command, parent):
        states = (one.standing(folder) for one in plan.jobs.values())
        if plan.is_open or any(one.is_alive or one.status in wanted for one in states):
            return folder
    return None


def _sweeps_of(command: Sequence[str], parent: Path) -> Iterator[tuple[Path, Plan]]:
    """Yield the sweeps in `parent` that a command began, the newest first, with their plans."""
    plans = [path for path in parent.glob(f"*/{PLAN}") if path.stat().st_uid == os.geteuid()]
    for path in sorted(plans, key=lambda one: one.stat().st_mtime, reverse=True):
        with suppress(UserError):  # damaged, or of another version
            plan = read_plan(path.parent)
            if list(plan.command) == list(command):
                yield path.parent, plan


def sweep_command(arguments: Sequence[str]) -> list[str]:
    """Return what identifies a sweep: its command line, without how and where its jobs run."""
    others = ("sweep.", "verbose=", "hydra/launcher=", "hydra.launcher.", "--multirun")
    own = "sweep.objective="  # of a search: another one makes another study

    def counts(word: str) -> bool:
        key = word.lstrip("+~")
        return key.startswith(own) or not (key == "-m" or key.startswith(others))

    return [*filter(counts, arguments)]
