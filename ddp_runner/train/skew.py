"""Tells which ranks the others wait for, from the times of each exchange of gradients.

No clocks are compared. An exchange ends on all ranks at nearly the same moment, so from one end to
the next each rank can time its own work; how much longer it is than the others' is how much later
the rank arrives.
"""

from dataclasses import dataclass, field

from torch import Tensor

from ddp_runner.metric_names import StepPart
from ddp_runner.tracking.run_record import RunFields

FEWEST_STEPS = 5  # for figures of a session; a single one may be the noise of the machine


def lateness(work_ms: Tensor) -> Tensor:
    """Return by how much each rank's work in each step exceeds the median rank's; 0 if it does not.

    At least half of the ranks wait for a late rank that long. Of an even number, the median is the
    smaller one of the two in the middle, so two ranks count as well.

    Args:
        work_ms: (num_steps, world_size), as is the result.
    """
    return (work_ms - work_ms.median(dim=1, keepdim=True).values).clamp(min=0)


@dataclass
class Skew:
    """What the ranks waited for in a session, by all its log lines. The same on every rank."""

    num_steps: int = 0
    step_ms: float = 0.0  # of all these steps together
    late_ms: list[float] = field(default_factory=list)  # by rank, of all these steps together

    def add(self, times: Tensor, *, step_time_ms: float) -> dict[str, float]:
        """Count the steps of a log line, and return its metrics.

        The rank that spends the least time in a step's exchange is taken to measure the exchange
        itself; the other ranks spend the rest waiting.

        Args:
            times: (2, num_steps, world_size), each rank's ``Exchange`` of each step.
            step_time_ms: of the line's mean step, of which communication is a share.
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
        """Return what run.json keeps of it: also that nothing was measured, in a later session."""
        if self.num_steps < FEWEST_STEPS:
            return RunFields(skew_ms_by_rank=None, skew_step_ms=None)
        by_rank = [round(ms / self.num_steps, 3) for ms in self.late_ms]
        return RunFields(
            skew_ms_by_rank=by_rank, skew_step_ms=round(self.step_ms / self.num_steps, 3)
        )
