"""What rank 0 keeps of a run with a loop, ours or a user's: its lines, checkpoints and model."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from torch import Tensor

from ddp_runner.checkpoint.model_file import export_weights
from ddp_runner.checkpoint.writer import CheckpointWriter
from ddp_runner.files import json_safe
from ddp_runner.rank.session import Session
from ddp_runner.rank.task_log import task_logger
from ddp_runner.tracking.claim import freeze
from ddp_runner.tracking.run_logger import Logger
from ddp_runner.tracking.run_record import RunFields, write_run_record


class Records:
    """The logger and the checkpoint writer of a run; ranks other than 0 write nothing.

    To make it begins the run: it freezes the config, tells the launcher, and enters the stack. So
    make it once nothing can refuse the run any more, and a failed resume changes nothing.

    Args:
        session: of this rank.
        fields: of run.json. Only rank 0's are written.
        resume_step: the step of the checkpoint that the run continues from; None: it begins anew.
        stack: closes both at the end of the run, also after an error.
        shown: further keywords of ``task_logger``.

    Attributes:
        logger: takes the metrics of steps and evaluations.
    """

    def __init__(
        self,
        session: Session,
        *,
        fields: RunFields,
        resume_step: int | None,
        stack: ExitStack,
        **shown: Any,
    ) -> None:
        self._run_dir = session.run_dir
        self._writer: CheckpointWriter | None = None
        wire = session.job.wire
        if session.env.is_rank_zero:
            freeze(session.job, session.run_dir)
            write_run_record(session.run_dir, **fields)
        if wire is not None:
            wire.ready()
        self.logger: Logger = task_logger(session, resume_step=resume_step, **shown)
        stack.enter_context(self.logger)
        if session.env.is_rank_zero:
            folder, settings = session.run_dir.checkpoints, session.config.checkpoint
            writer = CheckpointWriter(folder, settings, wire=wire, log=session.log)
            self._writer = stack.enter_context(writer)
            if resume_step is not None:
                self._writer.retain(step=resume_step)

    def save(
        self,
        snapshot: Callable[..., dict[str, Any]],
        *,
        step: int,
        metrics: Mapping[str, float],
    ) -> None:
        """Start to write a checkpoint. Collective: every rank must call.

        Args:
            snapshot: returns what to save, and adds addresses to `copies` as ``gathered`` does.
            step: optimizer steps taken.
            metrics: of this step.

        Raises:
            UserError: what is saved is not finite, or the save before it failed.
        """
        metrics = dict(metrics)
        self.wait()  # so that only one state is in memory
        copies = set[int]()
        content = snapshot(copies=copies)
        if self._writer is not None:
            self._writer.save(content, step=step, metrics=metrics, copies=copies)

    def wait(self) -> None:
        """Wait for the last checkpoint.

        Raises:
            UserError: it could not be saved.
        """
        if self._writer is not None:
            self._writer.wait()

    def export(
        self,
        state: Mapping[str, Tensor],
        *,
        step: int,
        metrics: Mapping[str, float | None],
        is_average: bool = False,
    ) -> None:
        """Write rank 0's state_dict to model.safetensors; see ``export_weights``."""
        if self._writer is not None:
            digest = export_weights(
                self._run_dir.export,
                state,
                step=step,
                metrics=json_safe(metrics),
                is_average=is_average,
            )
            write_run_record(self._run_dir, export_sha256=digest)
