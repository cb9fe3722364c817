"""Saves checkpoints while the loop goes on: it waits for a copy of the state, a thread writes it.

``worker`` opens one on rank 0 around the loop. What is written, and how, is in ``checkpoint``.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
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

    After the block nothing is being written any more, however it is left.

    Args:
        folder: the run's checkpoints folder.
        config: which ones are kept.
        scratch: of the worker group; a file there tells the launcher to let a save end.
        log: takes a sentence for the user; from the thread, too.
        pinned: whether the state lies on CUDA devices, and is copied to page-locked memory.
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
        self._folder, self._scratch, self._log = folder, scratch, log
        self._kept: Any = {
            "keep": config.keep,
            "monitor": config.monitor,
            "mode": config.mode,
        }
        self._stager = Stager(pinned=pinned)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[Path] | None = None

    def retain(self, *, step: int) -> None:
        """Delete what a kill kept the save of this step, or one before, from deleting."""
        retain(self._folder, step=step, log=self._log, **self._kept)

    def save(self, state: dict[str, Any], *, step: int, metrics: Mapping[str, float]) -> None:
        """Copy a state, once the save before has ended, and have the copy written.

        Args:
            state: tensors on any device, numbers, strings, and lists and dicts of them. No part of
                it is read after this call.
            step: optimizer steps taken.
            metrics: of this step.

        Raises:
            UserError: the save before could not be written; the checkpoints before it are intact.
            TypeError: it held an object that a weights-only load would refuse.
        """
        self.wait()
        copy = self._stager.stage(state)
        self._pending = self._thread.submit(self._write, copy, step, dict(metrics))

    def wait(self) -> None:
        """Wait for the end of the save that is being written, if there is one.

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
            self._log(f"besides, {failed}")  # what made the run end comes first
        finally:
            self._thread.shutdown()

    def _write(self, state: dict[str, Any], step: int, metrics: Mapping[str, float]) -> Path:
        with self._scratch.marked_as_saving() if self._scratch else nullcontext():
            return save_checkpoint(
                self._folder,
                state,
                step=step,
                metrics=metrics,
                log=self._log,
                **self._kept,
            )
