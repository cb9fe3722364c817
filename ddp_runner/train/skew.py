"""Finds slow ranks from the times of each gradient exchange.

No clocks are compared. An exchange ends on all ranks at nearly the same moment, so each rank times
its own work between two ends. The longer the work, the later the rank arrives.
"""

from dataclasses import dataclass, field

from torch import Tensor

from ddp_runner.metric_names import StepPart
from ddp_runner.tracking.run_record import RunFields

FEWEST_STEPS = 5  # that a session must measure; fewer may be noise


def lateness(work_ms: Tensor) -> Tensor:
    """Return how much each rank's work in each step exceeds the median rank's, at least 0.

    At least half of the ranks wait that long for a late rank. torch takes the lower median, so with
    two ranks the slower counts as late.

    Args:
        work_ms: (num_steps, world_size), like the result.
    """
    return (work_ms - work_ms.median(dim=1, keepdim=True).values).clamp(min=0)


@dataclass
class Skew:
    """The lateness of each rank in a session, the same on every rank."""

    num_steps: int = 0
    step_ms: float = 0.0  # total over the steps
    late_ms: list[float] = field(default_factory=list)  # by rank, total over the steps

    def add(self, times: Tensor, *, step_time_ms: float) -> dict[str, float]:
        """Count the steps of a log line, and return its metrics.

        The shortest time of a rank in a step's exchange counts as communication; the other ranks
        spend the rest of their time waiting.

        Args:
            times: (2, num_steps, world_size), each rank's ``Exchange`` of each step.
            step_time_ms: mean step time of the log line.
        """
        work_ms, comm_ms = times
        num_steps, world_size = work_ms.shape
        if not num_steps:
            return {}
        late_ms = lateness(work_ms).sum(dim=0).tolist()
        self.num_steps += num_steps
        self.step_ms += float(times.sum()) / world_size
        self.late_ms = [
            before + late
            for before, late in zip(self.late_ms or [0.0] * world_size, late_ms, strict=True)
        ]
        exchange_ms = float(comm_ms.amin(dim=1).mean())
        return {
            StepPart.COMM.metric: exchange_ms,
            StepPart.WAIT.metric: float(comm_ms.mean()) - exchange_ms,
            "perf/comm_share": exchange_ms / step_time_ms,
            "perf/skew_ms": max(late_ms) / num_steps,
            "perf/skew_rank": float(late_ms.index(max(late_ms))),
        }

    def fields(self) -> RunFields:
        """Return the fields of run.json; None replaces an earlier session's values."""
        if self.num_steps < FEWEST_STEPS:
            return RunFields(skew_ms_by_rank=None, skew_step_ms=None)
        by_rank = [round(ms / self.num_steps, 3) for ms in self.late_ms]
        return RunFields(
            skew_ms_by_rank=by_rank, skew_step_ms=round(self.step_ms / self.num_steps, 3)
        )
