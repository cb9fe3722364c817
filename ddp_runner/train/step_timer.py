"""Measures throughput and the parts of a step's time, and finds slow ranks."""

import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from ddp_runner.device import has_streams
from ddp_runner.metric_names import StepPart
from ddp_runner.tracking.run_record import RunFields

MOST_EVENTS = 1024  # CUDA events kept; beyond that, the older half is read and dropped
UNMEASURED_STEPS = 2  # ranks connect in the first step, DDP rebuilds its buckets in the second
MOST_EXCHANGES = 128  # kept for a log line: the data that a line sends must not grow with its steps
FEWEST_STEPS = 5  # that a session must measure to report its skew; fewer may be noise
# Measuring the parts of a step takes a few hundredths of a millisecond. Of steps that take less
# than CHEAP_MS, only some are measured, one of MOST_STEPS at least.
CHEAP_MS, MOST_STEPS = 10.0, 8

# This rank's times between the ends of two gradient exchanges, in ms: work until its gradients are
# computed, without saving, evaluating and logging; then waiting for slower ranks and the exchange.
Exchange = tuple[float, float]


@dataclass(frozen=True)
class Lap:
    """A rank's measurements between two log lines."""

    metrics: Mapping[str, float]
    parts: Mapping[StepPart, float]  # milliseconds of a mean step
    exchanges: Sequence[Exchange]  # the last MOST_EXCHANGES; without the session's first two


class StepTimer:
    """Throughput and parts of a step between two log lines, without saving and evaluating.

    Each ``mark`` assigns the time since the previous mark to a part. On a GPU the times come from
    CUDA events. Of short steps only some are measured.
    """

    def __init__(self, device: torch.device) -> None:
        """Measure on the rank's first device."""
        self._device, self._on_gpu = device, has_streams(device)
        self._parts_ms = defaultdict[StepPart | None, float](float)
        self._work_ms = self._wait_ms = 0.0
        self._exchanges = deque[Exchange](maxlen=MOST_EXCHANGES)
        self._num_exchanges = self._num_steps = 0
        self._every = 1  # steps from one that is measured to the next, the same on all ranks
        self._warm_since: float | None = None
        self._last = time.perf_counter()
        self._events = list[tuple[torch.Event, StepPart | None, bool]]()  # only on a GPU
        self.restart()

    def restart(self) -> None:
        """Restart the interval, but keep the exchanges since the last lap."""
        self._started, self._steps, self._samples = time.perf_counter(), 0, 0
        self._is_measuring, self._num_measured, self._data_s = True, 0, 0.0
        self.mark(None, restarts=True)

    def forget(self) -> None:
        """Restart the interval and drop its exchanges: profiling slowed them."""
        self._read_events(len(self._events))
        self._exchanges.clear()
        self.restart()

    def mark(
        self,
        part: StepPart | None,  # None drops the time
        *,
        ends_on: torch.device | None = None,  # the device that finishes the part; None: the first
        restarts: bool = False,  # forget the parts so far
    ) -> None:
        """Add the time since the last mark to a part of the step.

        COMM ends the exchange of a step; WAIT is the wait for other ranks before it.
        """
        now = time.perf_counter()
        if part is None:
            self._ready_at = now
        elif part is StepPart.DATA:  # few steps wait for data, perhaps none that is measured
            self._data_s += now - self._ready_at
        if not self._is_measuring:
            return
        if self._on_gpu:
            # Autograd's threads may have another current device, and CUDA cannot measure the time
            # between events of two devices.
            stream = torch.accelerator.current_stream(self._device)
            if ends_on is not None and ends_on != self._device:
                # Free after a forward: the first device waits for its gradients anyway.
                stream.wait_event(torch.accelerator.current_stream(ends_on).record_event())
            event = torch.Event(self._device, enable_timing=True)
            event.record(stream)
            self._events.append((event, part, restarts))
            if len(self._events) > MOST_EVENTS:
                self._read_events(MOST_EVENTS // 2)
            return
        self._count(part, 1000 * (now - self._last), restarts=restarts)
        self._last = now

    def mark_end_of_backward(self, loss: Tensor) -> None:
        """Mark the moment when autograd has computed all gradients, before DDP waits for ranks."""
        if not self._is_measuring:
            return
        # Before torch 2.15 the callback for autograd's end is private. Checked from torch 2.11 on.
        engine = torch.autograd.Variable._execution_engine
        loss.register_hook(lambda _: engine.queue_callback(lambda: self.mark(StepPart.BACKWARD)))

    def add(self, *, samples: int) -> None:
        """Count a step and the samples of its global batch."""
        self._steps += 1
        self._samples += samples
        self._num_steps += 1
        self._num_measured += self._is_measuring
        self._is_measuring = self._steps % self._every == 0
        if self._num_steps == UNMEASURED_STEPS:
            self._warm_since = time.perf_counter()

    @property
    def running_s(self) -> float:
        """Seconds since the warm-up, with evaluations and checkpoints; 0 during the warm-up."""
        return 0.0 if self._warm_since is None else time.perf_counter() - self._warm_since

    def lap(self) -> Lap:
        """Return the measurements since the last lap or restart; begin a new interval."""
        self._read_events(len(self._events))
        elapsed_s = time.perf_counter() - self._started
        data = {StepPart.DATA: 1000 * self._data_s / self._steps} if self._every > 1 else {}
        lap = Lap(
            metrics={
                "perf/samples_per_s": self._samples / elapsed_s,
                "perf/step_time_ms": 1000 * elapsed_s / self._steps,
            },
            parts={part: ms / self._num_measured for part, ms in self._parts_ms.items() if part}
            | data,
            exchanges=tuple(self._exchanges),
        )
        self._exchanges.clear()
        self.restart()
        return lap

    def choose_steps(self, step_ms: float) -> None:
        """Choose which steps are measured from now on, by the mean over all ranks of a step."""
        self._every = min(MOST_STEPS, max(1, int(CHEAP_MS / step_ms)))

    def _count(self, part: StepPart | None, ms: float, *, restarts: bool) -> None:
        """Add time to a part, and to the exchange that follows or ends with it."""
        self._parts_ms[part] += ms
        if restarts:
            self._parts_ms.clear()
        elif part is StepPart.COMM:
            self._num_exchanges += 1
            if self._num_exchanges > UNMEASURED_STEPS:
                self._exchanges.append((self._work_ms, self._wait_ms + ms))
            self._work_ms = self._wait_ms = 0.0
        elif part is StepPart.WAIT:
            self._wait_ms += ms
        elif part is not None:  # also the optimizer: it delays the next exchange
            self._work_ms += ms

    def _read_events(self, count: int) -> None:
        """Wait for the oldest events, and add the times between them to their parts."""
        events = self._events[:count]
        if events:
            events[-1][0].synchronize()
        for (before, _, _), (event, part, restarts) in pairwise(events):
            self._count(part, before.elapsed_time(event), restarts=restarts)
        del self._events[: count - 1]  # the next time begins at the last event


def lateness(work_ms: Tensor) -> Tensor:
    """Return how much each rank's work in each step exceeds the median rank's, at least 0.

    Argument and result are (num_steps, world_size). At least half of the ranks wait that long for a
    late rank. torch takes the lower median, so with two ranks the slower counts as late.
    """
    return (work_ms - work_ms.median(dim=1, keepdim=True).values).clamp(min=0)


@dataclass
class Skew:
    """The lateness of each rank in a session, the same on every rank.

    No clocks are compared. An exchange ends on all ranks at nearly the same moment, so each rank
    times its own work between two ends. The longer the work, the later the rank arrives.
    """

    num_steps: int = 0
    step_ms: float = 0.0  # total over the steps
    late_ms: Tensor = field(default_factory=lambda: torch.zeros(()))  # by rank, total over steps

    def add(self, times: Tensor, *, step_time_ms: float) -> dict[str, float]:
        """Count the steps of a log line, and return its metrics.

        `times` are each rank's ``Exchange`` of each step, (2, num_steps, world_size). The shortest
        time of a rank in a step's exchange counts as communication; the other ranks spend the rest
        of their time waiting.
        """
        work_ms, comm_ms = times
        num_steps, world_size = work_ms.shape
        if not num_steps:
            return {}
        late_ms = lateness(work_ms).sum(dim=0)
        self.num_steps += num_steps
        self.step_ms += float(times.sum()) / world_size
        self.late_ms = self.late_ms + late_ms
        exchange_ms = float(comm_ms.amin(dim=1).mean())
        return {
            StepPart.COMM.metric: exchange_ms,
            StepPart.WAIT.metric: float(comm_ms.mean()) - exchange_ms,
            "perf/comm_share": exchange_ms / step_time_ms,
            "perf/skew_ms": float(late_ms.max()) / num_steps,
            "perf/skew_rank": float(late_ms.argmax()),
        }

    def fields(self) -> RunFields:
        """Return the fields of run.json; None replaces an earlier session's values."""
        if self.num_steps < FEWEST_STEPS:
            return RunFields(skew_ms_by_rank=None, skew_step_ms=None)
        by_rank = [round(ms / self.num_steps, 3) for ms in self.late_ms.tolist()]
        return RunFields(
            skew_ms_by_rank=by_rank, skew_step_ms=round(self.step_ms / self.num_steps, 3)
        )
