"""A command with -m: its folder, its batches of jobs, its table and its exit code. Torch-free.

Hydra's sweeper composes the jobs. A grid is one batch; a sweeper that searches, such as Optuna's,
sends one batch after another and chooses each by the results of the last.
"""

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from omegaconf import DictConfig

from ddp_runner.errors import UserError
from ddp_runner.sweep.batches import StopSweep, Sweep
from ddp_runner.sweep.ledger import LEDGER, sweep_command, unfinished_sweep
from ddp_runner.tracking.outputs import claim, sweep_folder


def run_sweep(sweep: Sweep, run_hydra: Callable[[Sweep], None]) -> int:
    """Run a sweep, print its table, and its report if sweep.report is set; return the exit code.

    Args:
        sweep: whose batches Hydra's launcher runs.
        run_hydra: lets Hydra's sweeper and launcher call its ``run_batch``.

    Raises:
        UserError: the sweep is invalid, or the search has no best job.
    """
    try:
        run_hydra(sweep)
    except StopSweep:
        pass
    except ValueError as error:
        # Optuna asks for the best trial at the end, and raises if there is none.
        if sweep.is_search and sweep.has_begun and not sweep.has_completed:
            raise UserError(
                "the search has no best job, since none was completed; see the sentences above"
            ) from error
        raise
    finally:
        sweep.close()
    sweep.report()
    return sweep.exit_code


@contextmanager
def sweep_dir(
    composed: DictConfig, asked: Path | None, arguments: Sequence[str], *, is_search: bool
) -> Iterator[Path]:
    """Give the sweep's folder; remove a folder made for it if no job of it was even queued.

    Args:
        composed: what all jobs have in common, with the ``hydra`` node.
        asked: the user's choice; None: an unfinished sweep of this command, else a new folder.
        arguments: the command line as the user wrote it, by which an unfinished sweep is found.
        is_search: whether the sweeper chooses jobs by the results of earlier jobs.
    """
    if asked is not None:
        yield asked
        return
    planned = sweep_folder(composed.name)
    sampler = composed.hydra.sweeper.get("sampler") if is_search else None
    begun = None
    if sampler is None or sampler.get("seed") is not None:  # without a seed it tries other jobs
        begun = unfinished_sweep(
            planned.parent,
            command=sweep_command(arguments),
            retry_failed=composed.sweep.retry is not None,
        )
    folder = begun or claim(planned)
    try:
        yield folder
    finally:
        if not (folder / LEDGER).exists():
            shutil.rmtree(folder, ignore_errors=True)
            with suppress(OSError):
                folder.parent.rmdir()  # outputs, if it is empty
