"""The wire of a rank whose run has several machines: files in the launcher's scratch folder.

Torch's agent ends the ranks of a failed group by SIGTERM, which they answer by their stacks.
"""

import os
import signal
import threading
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from ddp_runner.host.processes import ignore_stop_signals
from ddp_runner.launch.scratch import SAVING_POLL_S, Scratch

# From SIGTERM to the end of a rank whose launcher did not ask for a checkpoint: its worker group
# has failed, and the rank may be in a collective that never ends.
FAILED_GROUP_GRACE_S = 3.0


class FileWire:
    """A ``job.Wire`` of files."""

    def __init__(self, scratch: Scratch, *, rank: int, attempt: int) -> None:
        self.lost = set[int]()  # only a run on one machine continues without a rank
        self._scratch, self._rank, self._attempt = scratch, rank, attempt
        ignore_stop_signals()
        self._watch_sigterm()

    @property
    def stop(self) -> bool:
        """Whether to finish the step, save and end."""
        return self._scratch.stop.exists()

    @property
    def earlier(self) -> tuple[tuple[int | None, str], ...]:
        """The first step of each earlier attempt, and why it ended."""
        known = self._scratch.first_steps(rank=self._rank)
        steps = [None] * (self._attempt - len(known)) + known
        return tuple(
            (step, self._scratch.cause(attempt=attempt)) for attempt, step in enumerate(steps)
        )

    def claimed(self, folder: Path) -> None:
        """Tell the run folder, once it is known."""
        self._scratch.record_run(folder)

    def began(self, step: int) -> None:
        """Tell the step from which this attempt continues."""
        if self._attempt:
            self._scratch.record_first_step(step, rank=self._rank)

    def ready(self) -> None:
        """Tell that the training loop begins."""
        self._scratch.begin_loop()

    def saving(self) -> AbstractContextManager[None]:
        """Ask the launcher to wait for the end of this block before it ends the rank."""
        return self._scratch.marked_as_saving()

    def _watch_sigterm(self) -> None:
        # The interpreter writes a signal's number here even while the main thread is in a
        # collective, where no Python handler runs.
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer)

        def end_with_the_group() -> None:
            while os.read(reader, 1) != bytes([signal.SIGTERM]):
                continue
            self._scratch.record_stack(rank=self._rank, attempt=self._attempt)
            deadline = time.monotonic() + FAILED_GROUP_GRACE_S
            # Rank 0 finishes the checkpoint that it is writing.
            while (self._rank == 0 and self._scratch.renew_saving()) or time.monotonic() < deadline:
                time.sleep(SAVING_POLL_S)
            if not self._scratch.stop.exists():
                os._exit(128 + signal.SIGTERM)

        signal.signal(signal.SIGTERM, _wake)
        threading.Thread(target=end_with_the_group, name="sigterm-watch", daemon=True).start()


def _wake(*_: Any) -> None:
    """Answer SIGTERM by the wakeup descriptor alone, until the task has its own handler."""
