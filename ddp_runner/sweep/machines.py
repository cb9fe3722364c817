"""Runs the jobs of a sweep on several machines, one after the other.

The command is the same on each machine. The first of them leads: it composes the jobs, keeps the
ledger and the folders, and tells the others which job is next. They follow: the ranks get the
config of each job from rank 0.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ddp_runner.config.launching import LaunchConfig
from ddp_runner.config.schema import Config, RunConfig
from ddp_runner.errors import UserError
from ddp_runner.host.patience import patiently
from ddp_runner.host.streams import print_line
from ddp_runner.job import Job, Outcome, Status
from ddp_runner.launch.launcher import launch
from ddp_runner.sweep.executor import Place, Shape
from ddp_runner.sweep.local import Local
from ddp_runner.sweep.validate import validate_sweep

if TYPE_CHECKING:
    from ddp_runner.launch.meeting import Meeting

POLL_S = 0.2  # between two looks for the next job
CALL_S, GOODBYE_S = 15.0, 5.0  # for an answer of the store; for the others to see the end


@dataclass(frozen=True)
class SweepMeeting:
    """Where the machines of a sweep have met, and this one's place among them."""

    meeting: "Meeting"
    place: int  # 0 leads

    def tell(self, key: str, value: Any) -> None:
        """Write a value for the others."""
        self.meeting.store.set(f"sweep/{key}", json.dumps(value))

    def told(self, key: str) -> Any:
        """Return a value that another machine has written; None: not yet."""
        name = f"sweep/{key}"
        store = self.meeting.store
        return json.loads(store.get(name)) if store.check([name]) else None


def meet(config: LaunchConfig) -> SweepMeeting:
    """Meet the other machines at launch.rdzv_endpoint; the one that serves it leads.

    Raises:
        UserError: it is not reached within launch.join_timeout_s.
    """
    from ddp_runner.launch.meeting import open_meeting

    reasons = [""]
    limit_s = config.join_timeout_s
    try:
        meeting = patiently(
            lambda: open_meeting(config, deadline=time.monotonic() + limit_s, note=reasons.append),
            limit_s=limit_s + CALL_S,
            notice=lambda: (
                f"waiting for the first machine of the sweep at {config.rdzv_endpoint} "
                f"({reasons[-1]}), up to {limit_s:g} s"
            ),
        )
    except TimeoutError as error:
        raise UserError(
            f"waited {limit_s:g} s (launch.join_timeout_s) for the first machine of the sweep at "
            f"{config.rdzv_endpoint} ({reasons[-1]}); start the same command on each machine"
        ) from error
    if meeting.is_served_here:
        return SweepMeeting(meeting, 0)
    place = int(patiently(lambda: meeting.store.add("sweep/followers", 1), limit_s=CALL_S))
    return SweepMeeting(meeting, config.node_rank or place)


class Leader(Local):
    """The executor of a sweep on several machines, on the first of them; None: a dry run."""

    def __init__(self, machines: SweepMeeting | None) -> None:
        super().__init__()
        self._machines, self._num_told = machines, 0
        self._worst = 0

    def validate(self, config: Config, *, searches: bool) -> None:
        """Reject what several machines cannot do together; see ``Executor``."""
        if config.launch.is_elastic:
            raise UserError(
                f"launch.nnodes ({config.launch.nnodes}) is a range, and the jobs of a sweep are "
                "compared by their ranks; give the number of machines"
            )
        if config.sweep.parallel_jobs > 1:
            raise UserError(
                f"sweep.parallel_jobs ({config.sweep.parallel_jobs}) shares one machine, and "
                f"launch.nnodes is {config.launch.nnodes}; leave one of them out"
            )
        alone = replace(config, launch=replace(config.launch, nnodes=1))
        validate_sweep(alone, self._hardware, searches=searches)

    def place(self, config: Config) -> Place:
        """Return all machines, or as many as the job has ranks."""
        ranks, num_nodes = config.world_size, config.launch.most_nodes
        fewer = isinstance(ranks, int) and not isinstance(ranks, bool) and 0 < ranks < num_nodes
        return Place(self._hardware, num_nodes=ranks if fewer else num_nodes)

    def shape(self, config: RunConfig) -> Shape:
        """Return the machines of a job, and the ranks of each."""
        num_nodes = config.launch.most_nodes
        return Shape(num_nodes, config.world_size // num_nodes)

    def close(self) -> None:
        """Let the others end, with the exit code of the worst job."""
        super().close()
        if self._machines is None:
            return
        self._machines.tell(f"job/{self._num_told}", {"end": self._worst})
        deadline, count = time.monotonic() + GOODBYE_S, self._machines.meeting.store.add
        num_followers = int(count("sweep/followers", 0))
        # The store ends with this process.
        while int(count("sweep/ended", 0)) < num_followers and time.monotonic() < deadline:
            time.sleep(POLL_S)

    def _launch(self, job: Job) -> Outcome:
        num_nodes = job.config.launch.most_nodes
        assert self._machines is not None
        if num_nodes > 1:
            number, self._num_told = self._num_told, self._num_told + 1
            config = replace(job.config.launch, rdzv_id=f"{job.config.launch.rdzv_id}-{number}")
            job = replace(job, config=replace(job.config, launch=config))
            self._machines.tell(f"job/{number}", {"nnodes": num_nodes, "title": job.title})
        outcome = launch(job, meeting=self._machines.meeting)
        self._worst = max(self._worst, outcome.exit_code)
        return outcome


def follow(machines: SweepMeeting, job: Job) -> int:
    """Run this machine's ranks of each job that the leader names; return the exit code.

    Args:
        machines: where they have met.
        job: how this machine starts ranks; their config comes from rank 0.

    Raises:
        UserError: the leader is gone.
    """
    from ddp_runner.launch.reports import LOST, store_is_lost

    own, number = job.config.launch, 0
    print_line(f"following the sweep of {own.rdzv_endpoint}", stream=sys.stdout)

    def call(of_store: Callable[[], Any]) -> Any:
        try:
            return patiently(of_store, limit_s=CALL_S)
        except LOST as error:
            raise UserError(f"{store_is_lost(own)}; start the same command again") from error

    while True:
        told = call(partial(machines.told, f"job/{number}"))
        if told is None:
            time.sleep(POLL_S)
            continue
        if "end" in told:
            call(lambda: machines.meeting.store.add("sweep/ended", 1))
            return int(told["end"])
        if machines.place < told["nnodes"]:
            config = replace(own, nnodes=told["nnodes"], rdzv_id=f"{own.rdzv_id}-{number}")
            print(f"\n{told['title']}", flush=True)
            one = replace(job, config=replace(job.config, launch=config))
            outcome = launch(one, meeting=machines.meeting)
            if outcome.status == Status.PREEMPTED:
                return outcome.exit_code
        number += 1
