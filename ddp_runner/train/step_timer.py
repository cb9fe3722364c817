"""How fast the loop goes, and where the time of a step goes."""

import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ddp_runner.metric_names import StepPart

MOST_EVENTS = 1024  # CUDA events kept; beyond that, the times of the older half are added up


class StepTimer:
    """Throughput and the parts of a step between two log lines; saving and evaluating excluded.

    The parts are measured on this rank, on a GPU in its own time: ``mark`` names what the time
    since the mark before has gone into.
    """

    def __init__(self, device: torch.device) -> None:
        """Measure on `device`, the rank's first."""
        self._device, self._on_gpu = device, device.type == "cuda"
        self.restart()

    def restart(self) -> None:
        """Begin a new interval."""
        self._started, self._steps, self._samples = time.perf_counter(), 0, 0
        self._parts_ms: dict[StepPart | None, float] = {}
        self._last = self._started
        self._events: list[tuple[StepPart | None, torch.cuda.Event]] = []
        self.mark(None)

    def mark(self, part: StepPart | None, *, ends_on: torch.device | None = None) -> None:
        """Count the time since the last mark for a part of the step.

        Args:
            part: what the time went into; None: it counts for nothing.
            ends_on: the device that finishes the part; None: this rank's first.
        """
        if self._on_gpu:
            # By device: in a thread of autograd's another one may be current, and there is no
            # time between events of two devices.
            stream = torch.cuda.current_stream(self._device)
            if ends_on is not None and ends_on != self._device:
                # Costs nothing after a forward: the first device has to wait for its gradients.
                stream.wait_event(torch.cuda.current_stream(ends_on).record_event())
            event = torch.cuda.Event(enable_timing=True)
            event.record(stream)
            self._events.append((part, event))
            if len(self._events) > MOST_EVENTS:
                self._add_up(MOST_EVENTS // 2)
            return
        now = time.perf_counter()
        self._parts_ms[part] = self._parts_ms.get(part, 0.0) + 1000 * (now - self._last)
        self._last = now

    def mark_end_of_backward(self, loss: Tensor) -> None:
        """Mark when autograd has computed all gradients; what DDP still waits for comes later."""
        # Autograd has no public callback for its end; checked on torch 2.11 to 2.15.
        engine = torch.autograd.Variable._execution_engine
        loss.register_hook(lambda _: engine.queue_callback(lambda: self.mark(StepPart.BACKWARD)))

    def add(self, *, samples: int) -> None:
        """Count one step of the whole gang."""
        self._steps += 1
        self._samples += samples

    def lap(self) -> tuple[dict[str, float], dict[StepPart, float]]:
        """Return the interval's throughput and the parts of its mean step; begin a new one.

        Returns:
            Metrics; and the milliseconds of each part that was marked, on this rank.
        """
        if self._on_gpu:
            self._add_up(len(self._events) - 1)
        elapsed_s = time.perf_counter() - self._started
        figures = {
            "perf/samples_per_s": self._samples / elapsed_s,
            "perf/step_time_ms": 1000 * elapsed_s / self._steps,
        }
        parts = {part: ms / self._steps for part, ms in self._parts_ms.items() if part is not None}
        self.restart()
        return figures, parts

    def _add_up(self, count: int) -> None:
        """Add the oldest events' times to their parts, once the GPU has passed them."""
        self._events[count][1].synchronize()
        for (_, before), (part, event) in zip(
            self._events[:count], self._events[1 : count + 1], strict=True
        ):
            passed_ms = before.elapsed_time(event)
            self._parts_ms[part] = self._parts_ms.get(part, 0.0) + passed_ms
        del self._events[:count]


def part_metrics(
    parts: Mapping[StepPart, float], *, comm_by_rank: Sequence[float], step_time_ms: float
) -> dict[str, float]:
    """Return metrics of the parts of a step.

    Communication is what no computation hides. Of the rank that spends least in it, it is taken to
    be the exchange itself; what the others spend above that, they wait for slower ranks.

    Args:
        parts: mean over the ranks, in milliseconds.
        comm_by_rank: milliseconds of each rank in ``comm``; of one rank alone it means nothing.
        step_time_ms: the whole step.
    """
    figures = {part.metric: value for part, value in parts.items() if part is not StepPart.COMM}
    if len(comm_by_rank) > 1:
        exchange = min(comm_by_rank)
        figures[StepPart.COMM.metric] = exchange
        figures[StepPart.WAIT.metric] = parts[StepPart.COMM] - exchange
        figures["perf/comm_share"] = exchange / step_time_ms
    return figures
