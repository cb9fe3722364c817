"""Saves checkpoints while training goes on: the loop waits for a copy, and a thread writes it."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from ddp_runner.checkpoint.staging import Stager
from ddp_runner.checkpoint.store import retain, save_checkpoint
from ddp_runner.config.schema import CheckpointConfig
from ddp_runner.errors import UserError
from ddp_runner.scratch import Scratch


class CheckpointWriter:
    """Writes one checkpoint at a time, in the order of the calls. Rank 0 only.

    The end of the `with` block waits for the last save, also after an error.

    Args:
        folder: the run's checkpoints folder.
        config: which checkpoints are kept.
        scratch: the worker group's folder; a file there asks the launcher to let a save finish.
        log: takes a sentence for the user, also from the thread.
        pinned: copy to page-locked memory, for a state on CUDA devices.
    """

    def __init__(
        self,
        folder: Path,
        config: CheckpointConfig,
        *,
        scratch: Scratch | None,
        log: Callable[[str], None],
        pinned: bool,
    ) -> None:
        self._scratch, self._log = scratch, log
        keep, monitor, mode = config.keep, config.monitor, config.mode
        self._retain = partial(retain, folder, keep=keep, monitor=monitor, mode=mode, log=log)
        self._save = partial(
            save_checkpoint, folder, keep=keep, monitor=monitor, mode=mode, log=log
        )
        self._stager = Stager(pinned=pinned)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[Path] | None = None

    def retain(self, *, step: int) -> None:
        """Delete what an earlier save was killed before it could delete."""
        self._retain(step=step)

    def save(self, state: dict[str, Any], *, step: int, metrics: Mapping[str, float]) -> None:
        """Wait for the previous save, copy the state, and start writing the copy.

        Args:
            state: tensors on any device, numbers, strings, and lists and dicts of them. It is not
                read after this call.
            step: optimizer steps taken.
            metrics: of this step.

        Raises:
            UserError: the previous save failed; the checkpoints before it are intact.
            TypeError: the previous state held an object that a weights-only load would refuse.
        """
        self.wait()
        copy = self._stager.stage(state)
        self._pending = self._thread.submit(self._write, copy, step, dict(metrics))

    def wait(self) -> None:
        """Wait for the save in progress, if there is one.

        Raises:
            UserError, TypeError: as ``save``.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def __enter__(self) -> "CheckpointWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.wait()
        except (UserError, TypeError) as failed:
            if error is None:
                raise
            self._log(f"besides, {failed}")  # what ended the run comes first
        finally:
            self._thread.shutdown()

    def _write(self, state: dict[str, Any], step: int, metrics: Mapping[str, float]) -> Path:
        with self._scratch.marked_as_saving() if self._scratch else nullcontext():
            return self._save(state, step=step, metrics=metrics)
