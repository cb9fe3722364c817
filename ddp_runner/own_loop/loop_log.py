"""The log of a user's own loop: rank 0's metrics, images and speed."""

import math
import time
from collections.abc import Mapping, Sequence
from typing import SupportsFloat

import torch
from torch import Tensor

from ddp_runner.data.trees import shape_of
from ddp_runner.device import peak_memory_gib
from ddp_runner.errors import UserError
from ddp_runner.metric_names import LINE_FIELDS
from ddp_runner.own_loop.rank_batches import Loader
from ddp_runner.rank.records import Records
from ddp_runner.tracking.run_logger import NullLogger


def number(value: float | Tensor) -> float:
    """Return a value as a float; torch would warn of a tensor with a gradient."""
    return float(value.detach() if isinstance(value, Tensor) else value)


class LoopLog:
    """Writes the metrics, images and speed of a loop to its records; `loaders` may grow."""

    def __init__(self, records: Records, loaders: Sequence[Loader], *, step: int) -> None:
        self.records, self._loaders = records, loaders
        self._metrics: dict[str, float] = {}  # logged at _metrics_step
        self._metrics_step = -1
        self._timed_step, self._timed_samples = step, 0
        self._timed_at = time.perf_counter()

    def metrics_of(self, step: int) -> dict[str, float]:
        """Return the metrics that the loop logged at a step."""
        return self._metrics if step == self._metrics_step else {}

    def log(self, values: Mapping[str, float | Tensor], *, step: int) -> None:
        """Write the values of a step, and the speed since the last call.

        Raises:
            UserError: a name is in LINE_FIELDS, or a value is not a number.
        """
        if isinstance(self.records.logger, NullLogger):
            return
        numbers = dict[str, float]()
        for name, value in values.items():
            if name in LINE_FIELDS:
                raise UserError(f"run.log: {name} is a field of each line", "give another name")
            if not isinstance(value, SupportsFloat) or math.prod(getattr(value, "shape", ())) != 1:
                raise UserError(
                    f"run.log: {name} is {shape_of(value)}, not a single number", "reduce it first"
                )
            numbers[name] = number(value)
        if step != self._metrics_step:  # a checkpoint keeps only the metrics of its own step
            self._metrics, self._metrics_step = {}, step
        self._metrics |= numbers
        self.records.logger.log(numbers | self._speed(step), step=step, epoch=self._epoch)

    def log_image(self, name: str, image: Tensor, *, step: int) -> None:
        """Write an image: see ``Run.log_image``."""
        if isinstance(self.records.logger, NullLogger):
            return
        if image.ndim == 2:
            image = image[None]
        if image.ndim != 3 or image.shape[0] not in (1, 3):
            raise UserError(
                f"run.log_image: {name} is {shape_of(image)}",
                "give (3 or 1, height, width) or (height, width)",
            )
        if image.is_floating_point():
            image = image.detach().clamp(0, 1).mul(255).round()
        pixels = image.to("cpu", torch.uint8).expand(3, -1, -1).permute(1, 2, 0).numpy()
        self.records.logger.log_image(name, pixels, step=step)

    def step_done(self, step: int) -> None:
        """Report a completed step; the first step ends the start-up."""
        self.records.logger.step_done(step=step, epoch=self._epoch)

    @property
    def _epoch(self) -> int:
        return max((loader.epoch_number for loader in self._loaders), default=0)

    def _speed(self, step: int) -> dict[str, float]:
        """Return the speed since the last line of an earlier step; empty for the same step."""
        num_steps = step - self._timed_step
        if num_steps <= 0:
            return {}
        now, num_samples = time.perf_counter(), sum(loader.num_seen for loader in self._loaders)
        elapsed_s, new_samples = now - self._timed_at, num_samples - self._timed_samples
        self._timed_step, self._timed_at, self._timed_samples = step, now, num_samples
        speed = {
            "perf/step_time_ms": 1000 * elapsed_s / num_steps,
            "perf/peak_memory_gib": peak_memory_gib(),
        }
        return speed | ({"perf/samples_per_s": new_samples / elapsed_s} if new_samples else {})
