"""What a loop of the user's own leaves: metrics, pictures and checkpoints, all of rank 0."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from ddp_runner.checkpoint.weights import export_weights
from ddp_runner.checkpoint.writer import CheckpointWriter
from ddp_runner.data.trees import shape_of
from ddp_runner.device import peak_memory_gib
from ddp_runner.errors import UserError
from ddp_runner.files import json_safe
from ddp_runner.job import Status
from ddp_runner.metric_names import LINE_FIELDS
from ddp_runner.own_loop.loader import Loader
from ddp_runner.rank.session import Session
from ddp_runner.rank.task_log import task_logger
from ddp_runner.tracking.claims import freeze
from ddp_runner.tracking.images import encoded
from ddp_runner.tracking.run_logger import Logger, NullLogger
from ddp_runner.tracking.run_record import RunFields, write_run_record

PLAIN = (int, float, str, list, type(None))  # what run.json holds


class Records:
    """The logger and the checkpoint writer of a run, which do nothing on ranks other than 0.

    Args:
        session: of this rank.
        uses: the groups of the config that the function has built from, with its own arguments.
        resume_step: the step of the checkpoint that the run continues from; None: it begins anew.
        stack: closes both at the end of the run, also after an error.
    """

    def __init__(
        self,
        session: Session,
        *,
        uses: Mapping[str, Mapping[str, Any]],
        resume_step: int | None,
        stack: ExitStack,
    ) -> None:
        self._run_dir = session.run_dir
        self.metrics: dict[str, float] = {}  # of the last step that has any
        self._metrics_step = -1
        self._logger: Logger = NullLogger()
        self._writer: CheckpointWriter | None = None
        if session.job.wire is not None:
            session.job.wire.ready()
        if session.env.is_rank_zero:
            # Only now, so that a failed resume changes nothing.
            freeze(session.job, session.run_dir)
            fields = RunFields(uses=sorted(uses))
            if (given := uses.get("model")) is not None:  # it can be built again from the run
                plain = {key: one for key, one in given.items() if isinstance(one, PLAIN)}
                fields["model_arguments"] = plain
            write_run_record(session.run_dir, **fields)
            self._logger = task_logger(session, resume_step=resume_step, max_steps=None)
            self._writer = CheckpointWriter(
                session.run_dir.checkpoints,
                session.config.checkpoint,
                wire=session.job.wire,
                log=session.log,
            )
            stack.enter_context(self._logger)
            stack.enter_context(self._writer)
            if resume_step is not None:
                self._writer.retain(step=resume_step)
        self._timed_step, self._timed_samples = resume_step or 0, 0
        self._timed_at = time.perf_counter()

    def log(
        self, values: Mapping[str, float | Tensor], *, step: int, loaders: Sequence[Loader]
    ) -> None:
        """Write the values of a step, and the speed since the last call.

        Raises:
            UserError: a name is one of LINE_FIELDS, or a value is not a number.
        """
        if self._writer is None:
            return
        numbers = dict[str, float]()
        for name, value in values.items():
            if name in LINE_FIELDS:
                raise UserError(f"run.log: {name} is a field of each line; give another name")
            try:
                numbers[name] = float(value)
            except (TypeError, ValueError, RuntimeError) as error:
                raise UserError(
                    f"run.log: {name} is {shape_of(value)}, not a single number; reduce it first"
                ) from error
        if step != self._metrics_step:  # a checkpoint keeps only its own step's metrics
            self.metrics, self._metrics_step = {}, step
        self.metrics |= numbers
        self._logger.log(numbers | self._speed(step, loaders), step=step, epoch=_epoch(loaders))

    def log_image(self, name: str, image: Tensor, *, step: int) -> None:
        """Write a picture: see ``Run.log_image``.

        Raises:
            UserError: the name or the shape cannot be used.
        """
        if self._writer is None:
            return
        if image.ndim == 2:
            image = image[None]
        if image.ndim != 3 or image.shape[0] not in (1, 3):
            raise UserError(
                f"run.log_image: {name} is {shape_of(image)}; give (3 or 1, height, width) or "
                "(height, width)"
            )
        if image.is_floating_point():
            image = image.detach().clamp(0, 1).mul(255).round()
        pixels = image.to("cpu", torch.uint8).expand(3, -1, -1).permute(1, 2, 0).numpy()
        self._logger.log_image(name, encoded(pixels), step=step)

    def step_done(self, step: int, *, loaders: Sequence[Loader]) -> None:
        """Note that a step is done: the first one ends the start-up."""
        self._logger.step_done(step=step, epoch=_epoch(loaders))

    def save(self, content: Callable[..., dict[str, Any]], *, step: int) -> None:
        """Start to write a checkpoint, with the metrics of its step. Collective.

        Args:
            content: returns what to save, and adds addresses to `copies` as ``gathered`` does.
            step: of the loop.
        """
        if self._writer is not None:
            self._writer.wait()  # so that only one state is in memory
        copies = set[int]()
        found = content(copies=copies)
        if self._writer is not None:
            metrics = self.metrics if step == self._metrics_step else {}
            self._writer.save(found, step=step, metrics=metrics, copies=copies)

    def export(self, state: Mapping[str, Tensor], *, step: int) -> None:
        """Write the weights of a module; see ``export_weights``."""
        if self._writer is not None:
            metrics = json_safe(self.metrics)
            digest = export_weights(self._run_dir.export, state, step=step, metrics=metrics)
            write_run_record(self._run_dir, export_sha256=digest)

    def finish(self, status: Status, *, step: int, loaders: Sequence[Loader]) -> None:
        """Wait for the last checkpoint, and write how the run ended."""
        if self._writer is not None:
            self._writer.wait()
        epoch = max((loader.epoch for loader in loaders), default=0)
        self._logger.finish(status, step=step, epoch=epoch)

    def _speed(self, step: int, loaders: Sequence[Loader]) -> dict[str, float]:
        """Return the speed since the last line of an earlier step; nothing for the same step."""
        num_steps = step - self._timed_step
        if num_steps <= 0:
            return {}
        now, num_samples = time.perf_counter(), sum(loader.num_seen for loader in loaders)
        elapsed_s, new_samples = now - self._timed_at, num_samples - self._timed_samples
        self._timed_step, self._timed_at, self._timed_samples = step, now, num_samples
        speed = {
            "perf/step_time_ms": 1000 * elapsed_s / num_steps,
            "perf/peak_memory_gib": peak_memory_gib(),
        }
        return speed | ({"perf/samples_per_s": new_samples / elapsed_s} if new_samples else {})


def _epoch(loaders: Sequence[Loader]) -> int:
    return max((loader.epoch_number for loader in loaders), default=0)
