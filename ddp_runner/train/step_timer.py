"""Measures throughput, and how a step's time divides into parts."""

import time
from collections import defaultdict
from itertools import pairwise

import torch
from torch import Tensor

from ddp_runner.metric_names import StepPart

MOST_EVENTS = 1024  # CUDA events kept; past this, the older half is read and dropped


class StepTimer:
    """Throughput and parts of a step between two log lines, without saving and evaluating.

    The parts are this rank's own: each ``mark`` names the part that the time since the previous
    mark belongs to. On a GPU the times come from CUDA events.
    """

    def __init__(self, device: torch.device) -> None:
        """Measure on a device, the rank's first."""
        self._device, self._on_gpu = device, device.type == "cuda"
        self.restart()

    def restart(self) -> None:
        """Begin a new interval."""
        self._started, self._steps, self._samples = time.perf_counter(), 0, 0
        self._parts_ms = defaultdict[StepPart | None, float](float)
        self._last = self._started
        self._events: list[tuple[StepPart | None, torch.cuda.Event]] = []
        self.mark(None)

    def mark(self, part: StepPart | None, *, ends_on: torch.device | None = None) -> None:
        """Add the time since the last mark to a part of the step.

        Args:
            part: what the time was spent on; None drops it.
            ends_on: the device that finishes the part; None for the rank's first.
        """
        if self._on_gpu:
            # Name the device: in autograd's threads another may be current, and CUDA measures no
            # time between events of two devices.
            stream = torch.cuda.current_stream(self._device)
            if ends_on is not None and ends_on != self._device:
                # Costs nothing after a forward: the first device waits for its gradients anyway.
                stream.wait_event(torch.cuda.current_stream(ends_on).record_event())
            event = torch.cuda.Event(enable_timing=True)
            event.record(stream)
            self._events.append((part, event))
            if len(self._events) > MOST_EVENTS:
                self._add_up(MOST_EVENTS // 2)
            return
        now = time.perf_counter()
        self._parts_ms[part] += 1000 * (now - self._last)
        self._last = now

    def mark_end_of_backward(self, loss: Tensor) -> None:
        """Mark the moment when autograd has computed all gradients; DDP may still wait after it."""
        # Autograd has no public callback for its end. Checked with torch 2.11 to 2.15.
        engine = torch.autograd.Variable._execution_engine
        loss.register_hook(lambda _: engine.queue_callback(lambda: self.mark(StepPart.BACKWARD)))

    def add(self, *, samples: int) -> None:
        """Count a step and the samples of its global batch."""
        self._steps += 1
        self._samples += samples

    def lap(self) -> tuple[dict[str, float], dict[StepPart, float]]:
        """Return the interval's throughput and each part's mean milliseconds; begin a new one."""
        if self._on_gpu:
            self._add_up(len(self._events) - 1)
        elapsed_s = time.perf_counter() - self._started
        metrics = {
            "perf/samples_per_s": self._samples / elapsed_s,
            "perf/step_time_ms": 1000 * elapsed_s / self._steps,
        }
        parts = {part: ms / self._steps for part, ms in self._parts_ms.items() if part is not None}
        self.restart()
        return metrics, parts

    def _add_up(self, count: int) -> None:
        """Wait for the oldest events and add their times to their parts."""
        self._events[count][1].synchronize()
        for (_, before), (part, event) in pairwise(self._events[: count + 1]):
            self._parts_ms[part] += before.elapsed_time(event)
        del self._events[:count]
