"""Runs the jobs of a sweep on several machines, one after the other.

The command is the same on each machine. The first of them leads: it composes the jobs, keeps the
ledger and the folders, and tells the others which job is next. They follow: the ranks get the
config of each job from rank 0.
"""

import json
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ddp_runner.config.launching import LaunchConfig
from ddp_runner.config.schema import Config, RunConfig
from ddp_runner.errors import UserError
from ddp_runner.host.patience import patiently
from ddp_runner.host.streams import notice_if_slow, print_line
from ddp_runner.job import EXIT_USER_ERROR, Job, Outcome, Status
from ddp_runner.launch.launcher import launch, print_error
from ddp_runner.sweep.executor import Place, Shape
from ddp_runner.sweep.local import Local
from ddp_runner.sweep.validate import validate_sweep

if TYPE_CHECKING:
    from ddp_runner.launch.meeting import Meeting

# What the leader tells; how many machines follow, and how many of those have left.
NOW, FOLLOWERS, ENDED = "sweep/now", "sweep/followers", "sweep/ended"
POLL_S = 0.2  # between two looks for the next job
CALL_S, GOODBYE_S = 15.0, 5.0  # for an answer of the store; for the others to see the end
ARRIVAL_S = 30.0  # for those that come after it: a sweep with nothing left to do ends at once


@dataclass(frozen=True)
class SweepMeeting:
    """Where the machines of a sweep have met: one leads, the others follow."""

    meeting: "Meeting"

    @property
    def leads(self) -> bool:
        """Whether this machine leads: it serves the store."""
        return self.meeting.is_served_here

    def tell(self, value: Any) -> None:
        """Write which job is now, for the others; a machine that comes late begins with it."""
        self.meeting.store.set(NOW, json.dumps(value))

    def told(self) -> Any:
        """Return what the leader has written last; None: nothing yet."""
        store = self.meeting.store
        return json.loads(store.get(NOW)) if store.check([NOW]) else None

    def takes_part(self, told: Mapping[str, Any], launch: LaunchConfig) -> bool:
        """Return whether this machine joins a job: one for fewer machines takes those that ask.

        Nothing counts the machines that live, since one may be killed, and started again.
        """
        needed = int(told["nnodes"])
        if needed == launch.most_nodes:
            return True
        if launch.node_rank is not None:
            return launch.node_rank < needed
        return int(self.meeting.store.add(f"sweep/asked/{told['job']}", 1)) < needed

    def dismiss(self, exit_code: int, *, num_expected: int = 0) -> None:
        """Let the others end, with the exit code of the sweep.

        Args:
            exit_code: of the sweep.
            num_expected: machines that are waited for, even if they have not come yet.
        """
        self.tell({"end": exit_code})
        count, num_followers, deadline = self.meeting.store.add, -1, 0.0
        # The store ends with this process.
        while (num := int(count(FOLLOWERS, 0))) > num_followers or time.monotonic() < deadline:
            if num > num_followers:
                limit_s = GOODBYE_S if num >= num_expected else ARRIVAL_S
                num_followers, deadline = num, time.monotonic() + limit_s
            if int(count(ENDED, 0)) >= max(num, num_expected):
                return
            time.sleep(POLL_S)


def meet(config: LaunchConfig) -> SweepMeeting:
    """Meet the other machines at launch.rdzv_endpoint; the one that serves it leads.

    Raises:
        UserError: it is not reached within launch.join_timeout_s.
    """
    from ddp_runner.launch.meeting import open_meeting
    from ddp_runner.launch.reports import LOST

    reasons = [""]  # of the last try, in parentheses
    limit_s = config.join_timeout_s
    first = f"the first machine of the sweep at {config.rdzv_endpoint}"

    def note(reason: str) -> None:
        reasons.append(f" ({reason})")

    try:
        meeting = patiently(
            lambda: open_meeting(config, deadline=time.monotonic() + limit_s, note=note),
            limit_s=limit_s + CALL_S,
            notice=lambda: f"waiting for {first}{reasons[-1]}, up to {limit_s:g} s",
        )
        if not meeting.is_served_here:
            patiently(lambda: meeting.store.add(FOLLOWERS, 1), limit_s=CALL_S)
    except LOST as error:
        raise UserError(
            f"waited {limit_s:g} s (launch.join_timeout_s) for {first}{reasons[-1]}; start the "
            "same command on each machine"
        ) from error
    return SweepMeeting(meeting)


def lead(machines: SweepMeeting, num_nodes: int, run: Callable[[], int]) -> int:
    """Run a sweep, and return its exit code, with which the other machines end as well."""
    try:
        exit_code = run()
    except BaseException:
        machines.dismiss(EXIT_USER_ERROR)
        raise
    is_stopped = exit_code > EXIT_USER_ERROR  # 128 + a signal
    awaited = f"waiting up to {ARRIVAL_S:g} s for the other machines, which end with this one"
    with notice_if_slow(lambda: awaited):
        machines.dismiss(exit_code, num_expected=0 if is_stopped else num_nodes - 1)
    return exit_code


class Leader(Local):
    """The executor of a sweep on several machines, on the first of them; None: a dry run."""

    def __init__(self, machines: SweepMeeting | None) -> None:
        super().__init__()
        self._machines, self._num_told = machines, 0

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

    def _launch(self, job: Job) -> Outcome:
        num_nodes = job.config.launch.most_nodes
        assert self._machines is not None
        if num_nodes == 1:
            self._machines.tell(None)  # a machine that comes now has no job to join
        else:
            number, self._num_told = self._num_told, self._num_told + 1
            config = replace(job.config.launch, rdzv_id=f"{job.config.launch.rdzv_id}-{number}")
            job = replace(job, config=replace(job.config, launch=config))
            self._machines.tell({"job": number, "nnodes": num_nodes, "title": job.title})
        return launch(job, meeting=self._machines.meeting)


def follow(machines: SweepMeeting, job: Job) -> int:
    """Run this machine's ranks of each job that the leader names; return the exit code.

    Args:
        machines: where they have met.
        job: how this machine starts ranks; their config comes from rank 0.

    Raises:
        UserError: the leader is gone.
    """
    from ddp_runner.launch.reports import LOST, store_is_lost

    own, following = job.config.launch, 0
    print_line(f"following the sweep of {own.rdzv_endpoint}", stream=sys.stdout)

    def call(of_store: Callable[[], Any]) -> Any:
        try:
            return patiently(of_store, limit_s=CALL_S)
        except LOST as error:
            raise UserError(f"{store_is_lost(own)}; start the same command again") from error

    def leave(exit_code: int) -> int:
        with suppress(*LOST):  # the leader waits for this machine, unless it is gone
            patiently(lambda: machines.meeting.store.add(ENDED, 1), limit_s=CALL_S)
        return exit_code

    while True:
        told = call(machines.told) or {"job": -1}
        if "end" in told:
            return leave(int(told["end"]))
        if (number := int(told["job"])) < following:
            time.sleep(POLL_S)
            continue
        following = number + 1
        if not call(partial(machines.takes_part, told, own)):
            continue
        config = replace(own, nnodes=told["nnodes"], rdzv_id=f"{own.rdzv_id}-{number}")
        print(f"\n{told['title']}", flush=True)
        one = replace(job, config=replace(job.config, launch=config))
        try:
            outcome = launch(one, meeting=machines.meeting)
        except UserError as error:  # the machines have not met for this job; the next one is due
            print_error(str(error))
            continue
        if outcome.status == Status.PREEMPTED:
            return leave(outcome.exit_code)
