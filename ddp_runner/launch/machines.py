"""Runs this machine's ranks of a run on several machines, together with the other machines.

Each machine runs its ranks as a run on one machine does. They learn who they are, and meet at the
launchers' store, as under torchrun. When ranks fail, the machines tell each other why: all name the
failure that came first, and all start again or all end.

Torch's own agent would not do: it says why ranks failed only after the last restart, it waits 30 s
for a rank that does not answer SIGTERM, and it waits for no checkpoint.
"""

import json
import math
import signal
import time
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any

from ddp_runner.config.sections import LaunchConfig, meeting_place
from ddp_runner.errors import UserError
from ddp_runner.host.patience import StoppedError, patiently
from ddp_runner.host.processes import adopt_orphans
from ddp_runner.host.temp_folder import temp_folder
from ddp_runner.job import EXIT_COMPLETED, EXIT_FAILED, Failure, Job, Outcome, Status
from ddp_runner.launch.ranks import POLL_S, SAVING_FACTOR, Ranks
from ddp_runner.launch.rendezvous import LOST, Group, Meeting, store_is_lost
from ddp_runner.launch.stop_requests import StopRequests, mark_ended
from ddp_runner.launch.wire import rank_environ
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.tracking.trackers.start import followed

WATCH_S, PAUSE_S = 1.0, 0.1  # between two looks at the store: while ranks run, while they end
SILENT_S = 5.0  # for another machine to say that it ends its ranks, too
ENDING_S = 15.0  # for it to end them; longer if they are saving
OUT_OF_SIGHT_S = 10.0  # a store that has not answered for this long is hardly there
LEAVE_S = 3.0  # for the other machines to read what the machine with the store has told them


def run_on_machines(job: Job, trackers: ExitStack) -> Outcome:
    """Run this machine's ranks, again if ranks of any machine fail, and return how they ended.

    The stack gets the trackers of a run whose rank 0 is on this machine.

    Raises:
        UserError: the machines do not meet, or do not fit together.
    """
    adopt_orphans()  # of ranks, if the server is killed that adopts them otherwise
    attempts: list[Ranks] = []

    def claimed() -> list[Path]:
        return [one for one in (job.run_dir, *(each.claimed for each in attempts)) if one]

    stop = StopRequests(running=claimed)
    stop.may_save = True  # the first signal is a request, also while the machines meet
    launch, result = job.config.launch, None
    sees_run = job.run_dir is not None and RunDir(job.run_dir).record.exists()
    num_ranks = None if job.lacks_run else job.config.world_size // launch.nnodes
    meeting = Meeting(launch, num_ranks=num_ranks, sees_run=sees_run)
    with stop.handled(), closing(meeting), suppress(StoppedError):
        result = _attempts(replace(job, temp=temp_folder()), meeting, stop, attempts, trackers)
    run_dir = next(reversed(claimed()), None)
    if isinstance(result, Failure):
        return Outcome(Status.FAILED, EXIT_FAILED, run_dir, result)
    received = stop.received or signal.SIGTERM
    if result is None:  # it was stopped while it waited for other machines
        stop.say(is_training=False)
        if run_dir is not None:  # another machine may have it
            mark_ended(run_dir)
        return Outcome(Status.PREEMPTED, 128 + received, run_dir)
    exit_code = EXIT_COMPLETED if result["status"] == Status.COMPLETED else 128 + received
    return Outcome(result["status"], exit_code, Path(result["run_dir"]))


def _attempts(
    job: Job, meeting: Meeting, stop: StopRequests, attempts: list[Ranks], trackers: ExitStack
) -> dict[str, Any] | Failure:
    """Return the first rank's result, or the failure that came first in the last attempt."""
    launch = job.config.launch

    def follow(folder: Path) -> list[int]:
        return trackers.enter_context(followed(job, RunDir(folder)))

    while True:
        try:
            group = meeting.join(lambda: stop.is_asked)
        except UserError as error:
            if not job.earlier:
                raise
            sentence = f"{job.earlier[-1][1]}; {error}"
            return Failure(rank=-1, kind="machine", sentence=sentence)
        attempts.append(ranks := Ranks(job, stop))
        if group.place == 0 and not any(one.claimed for one in attempts):
            ranks.followed_by = follow
        peers = Peers(group, launch)
        try:
            ranks.start(
                [
                    rank_environ(
                        rank,
                        job.config,
                        attempt=len(job.earlier),
                        run_id=launch.rdzv_id,
                        local_world_size=group.num_ranks,
                        address=meeting_place(launch),
                    )
                    for rank in group.ranks(group.place)
                ]
            )
            failure = _watched(ranks, peers, timeout_s=job.config.backend.timeout_s)
        finally:
            ranks.end()
        if failure is None:
            peers.leave()
            return dict(ranks.results[min(ranks.results)])
        failure = peers.first_failure(failure)
        if failure.kind == "user" or failure.rank < 0 or len(job.earlier) >= launch.max_restarts:
            return failure  # it would recur, or there is nowhere to meet, or no restart is left
        job = replace(job, earlier=(*job.earlier, (ranks.first_step, failure.sentence)))


def _watched(ranks: Ranks, peers: "Peers", *, timeout_s: float) -> Failure | None:
    """Wait until the ranks of all machines have ended; return how this machine's failed."""
    late_at = math.inf
    while True:
        lost = ranks.poll(POLL_S)
        if lost or peers.failures:
            timed_out = any(one.is_timeout for one in list(peers.failures.values()))
            return ranks.failed(lost, peers_waited_in_vain=timed_out)
        if late_at == math.inf and (ranks.results or peers.ended):
            late_at = time.monotonic() + timeout_s
        if not ranks.all_ended():
            if time.monotonic() > late_at and (suspended := ranks.suspended()):
                return ranks.failed({}, suspended=suspended[0])
        elif (is_over := peers.all_ended(limit_s=timeout_s + ENDING_S)) is not None:
            return None if is_over else ranks.failed({})


class Peers:
    """What the machines of one attempt tell each other as their ranks end, through their store.

    The store may block for minutes if its machine is gone, so each look at it is in a thread.
    """

    def __init__(self, group: Group, launch: LaunchConfig) -> None:
        self.failures: dict[int, Failure] = {}  # of other machines, by place
        self.ended = set[int]()  # the machines whose ranks have ended well
        self._group, self._launch = group, launch
        self._longest_s = ENDING_S + SAVING_FACTOR * launch.shutdown_timeout_s  # to end ranks
        self._others = set(range(len(group.hosts))) - {group.place}
        self._ended_at: float | None = None  # when the ranks of this machine had ended well
        self._seen_at = time.monotonic()  # the last time that the store answered
        self._closed = Event()
        Thread(target=self._watch, name="machines-watch", daemon=True).start()

    def all_ended(self, *, limit_s: float) -> bool | None:
        """Return whether all ranks of the run have ended well, as this machine's have; None: wait.

        A run that restarts needs all machines again, so none leaves before the last has ended, or
        before `limit_s` seconds have passed. If the store is lost, only the end of rank 0 counts:
        the run is complete with it.
        """
        if self._ended_at is None:
            self._ended_at = time.monotonic()
        if len(self.ended) == len(self._group.hosts):
            return True
        if self._is_out_of_sight:
            return 0 in {self._group.place, *self.ended}
        return True if time.monotonic() > self._ended_at + limit_s else None

    @property
    def _is_out_of_sight(self) -> bool:
        return time.monotonic() > self._seen_at + OUT_OF_SIGHT_S

    def leave(self) -> None:
        """Leave once the others know that all ranks have ended well."""
        self._closed.set()
        with suppress(*LOST):  # the run is complete, whatever became of the others
            patiently(partial(self._leave, list(self.ended)), limit_s=2 * LEAVE_S)

    def first_failure(self, own: Failure) -> Failure:
        """Tell the other machines how ranks of this one failed; return what failed first.

        Its kind is ``machine`` if one was lost; its rank is then the first of that machine, or -1
        if the store is lost as well.
        """
        self._closed.set()
        if own.kind != "user":  # which may name several ranks, or none
            own = replace(own, sentence=self._group.with_host(own.sentence, own.rank))
        self._seen_at = time.monotonic()
        try:
            found = patiently(
                partial(self._exchanged, own),
                limit_s=self._longest_s + 2 * SILENT_S,
                stop_requested=lambda: self._is_out_of_sight,
            )
        except (*LOST, StoppedError):
            if own.kind != "peer":
                return own
            return Failure(rank=-1, kind="machine", sentence=store_is_lost(self._launch))
        for place, one in found.items():
            if one.kind == "user" and one.sentence != own.sentence:  # it may name no rank
                host = self._group.hosts[place]
                found[place] = replace(one, sentence=f"on {host}: {one.sentence}")
        causes = [one for one in found.values() if one.kind != "peer"]
        silent = sorted(self._others - found.keys())
        if causes or not silent:
            return min(causes or found.values(), key=lambda one: one.time_ns)
        sentence = (
            f"{', '.join(map(self._group.described, silent))} was lost: it was switched off, its "
            "launcher was killed, or the network to it is down"
        )
        return Failure(rank=self._group.ranks(silent[0])[0], kind="machine", sentence=sentence)

    def _watch(self) -> None:
        while not self._closed.wait(WATCH_S if self._ended_at is None else PAUSE_S):
            try:
                self._look()
            except LOST:  # the ranks notice, too: their failure ends the run
                self._seen_at = -math.inf

    def _look(self) -> None:
        """Look once at what the other machines tell, and tell them how this one stands."""
        store = self._group.store
        for place in self._others - self.failures.keys():
            if store.check([f"failure/{place}"]):
                self.failures[place] = Failure(**json.loads(store.get(f"failure/{place}")))
            elif store.check([f"ended/{place}"]):
                self.ended.add(place)
        if self.failures:
            store.set(f"ending/{self._group.place}", "")
        if self._ended_at is not None:
            store.set(f"ended/{self._group.place}", "")
            self.ended.add(self._group.place)  # only now: the others must know before it leaves
        self._seen_at = time.monotonic()

    def _exchanged(self, own: Failure) -> dict[int, Failure]:
        """Tell a failure; return those of all machines that answer."""
        begun_at, store = time.monotonic(), self._group.store
        store.set(f"failure/{self._group.place}", json.dumps(asdict(own)))
        while True:
            self._look()
            silent = [f"ending/{place}" for place in self._others - self.failures.keys()]
            limit_s = self._longest_s if any(store.check([key]) for key in silent) else SILENT_S
            if not silent or time.monotonic() > begun_at + limit_s:
                self._leave(self.failures)
                return {self._group.place: own, **self.failures}
            time.sleep(PAUSE_S)

    def _leave(self, others: Any) -> None:
        """Let the machine with the store wait until the others have read it: its end closes it."""
        group, deadline = self._group, time.monotonic() + LEAVE_S
        group.store.set(f"left/{group.place}", "")
        awaited = [f"left/{place}" for place in others if place != group.place]
        while group.serves and awaited and not group.store.check(awaited):
            if time.monotonic() > deadline:
                break
            time.sleep(PAUSE_S)
