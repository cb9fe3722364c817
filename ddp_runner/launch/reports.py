"""What the machines of a run tell each other while their ranks run, and when ranks have failed.

Through the store at which they met. A store whose machine is gone may block for minutes, so each
look at it is in a thread.
"""

import json
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, replace
from functools import partial
from threading import Event, Thread
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousError

from ddp_runner.config.sections import LaunchConfig
from ddp_runner.errors import listed
from ddp_runner.host.patience import StoppedError, patiently
from ddp_runner.job import Failure
from ddp_runner.launch.machine import Machine
from ddp_runner.launch.ranks import SAVING_FACTOR

WATCH_S = 1.0  # between two looks at the store
PAUSE_S = 0.1
# How long the others wait for the report of a machine that gives no sign of life, and for the next
# sign of one that did and now ends its ranks.
SILENT_S, REPORT_S = 5.0, 15.0
READ_S = 3.0  # for the other machines to read the reports
OUT_OF_SIGHT_S = 10.0  # a store that has not answered for this long is hardly there
MOST_TRACEBACK = 20_000  # characters
LOST = (RuntimeError, OSError, RendezvousError, TimeoutError)  # of a store whose machine is gone


def store_is_lost(launch: LaunchConfig) -> str:
    """Return that this machine does not reach the store any more, for the user."""
    return (
        f"{launch.rdzv_endpoint}, where the machines meet, is lost: its machine was switched off, "
        "its launcher has ended, or the network is down"
    )


class Reports:
    """The reports of one round, from its begin to ``close``.

    Args:
        machines: in the order of their ranks.
        own: the place of this machine among them.
        store: of this round.
        launch: where the store is, for the user.
    """

    def __init__(
        self,
        machines: Sequence[Machine],
        own: int,
        *,
        store: Any,
        launch: LaunchConfig,
    ) -> None:
        self._machines, self._own, self._store = machines, own, store
        self._launch = launch
        self._closed = Event()
        self._seen_at = time.monotonic()  # the last time that the store answered
        self._is_lost = False  # the last look at the store failed
        self._known: dict[int, Failure] = {}
        self._ended_at: float | None = None  # when the ranks of this machine had ended well
        self._ended = set[int]()  # the machines whose ranks have
        Thread(target=self._watch, name="machines-watch", daemon=True).start()

    @property
    def have_come(self) -> bool:
        """Whether ranks of another machine have failed."""
        return bool(self._known)

    @property
    def are_of_late_peers(self) -> bool:
        """Whether a rank of another machine has waited in vain, perhaps for one of this machine."""
        return any(one.is_timeout for one in list(self._known.values()))

    @property
    def ranks_have_ended(self) -> bool:
        """Whether the ranks of a machine have ended well."""
        return bool(self._ended)

    def all_ended(self, *, limit_s: float) -> bool | None:
        """Return whether all ranks of the run have ended well, as this machine's have; None: wait.

        A run that restarts needs all machines again, so none leaves before the last has ended, or
        before `limit_s` seconds have passed. If the store is lost, only the end of rank 0 counts:
        the run is complete with it.
        """
        if self._ended_at is None:
            self._ended_at = time.monotonic()
        if len(self._ended) == len(self._machines):
            return True
        if self._is_lost or not self._is_seen:
            return 0 in {self._own, *self._ended}
        return True if time.monotonic() - self._ended_at > limit_s else None

    def close(self) -> None:
        """End the watch: a new round begins, or the run has ended."""
        self._closed.set()

    def first_failure(self, own: Failure) -> Failure:
        """Tell the other machines how ranks of this one failed; return what failed first.

        Its kind is ``machine`` if one was lost; its rank is then the first of that machine, or -1
        if the store is lost as well.
        """
        if own.kind != "user":  # which may name several ranks, or none
            own = replace(own, sentence=self._with_host(own.sentence, own.rank))
        own = replace(own, traceback=own.traceback[-MOST_TRACEBACK:])
        try:
            begun_at = time.monotonic()
            store_s = REPORT_S + SILENT_S if self._is_seen else SILENT_S
            found = patiently(
                partial(self._exchange, own),
                limit_s=self._longest_s + store_s,
                # The machine of the store is gone, too.
                stop_requested=lambda: time.monotonic() > max(begun_at, self._seen_at) + store_s,
            )
        except (*LOST, StoppedError):
            if own.kind != "peer":
                return own
            return Failure(rank=-1, kind="machine", sentence=store_is_lost(self._launch))
        for place, one in found.items():
            if one.kind == "user" and one.sentence != own.sentence:  # it may name no rank
                host = self._machines[place].host
                found[place] = replace(one, sentence=f"on {host}: {one.sentence}")
        causes = [one for one in found.values() if one.kind != "peer"]
        silent = [place for place in range(len(self._machines)) if place not in found]
        if causes or not silent:
            return min(causes or found.values(), key=lambda one: one.time_ns)
        names = ", ".join(self.described(place) for place in silent)
        sentence = (
            f"{names} was lost: it was switched off, its launcher was killed, or the network to it "
            "is down"
        )
        return Failure(rank=self._ranks(silent[0])[0], kind="machine", sentence=sentence)

    def described(self, place: int) -> str:
        """Return a machine's name and ranks, for the user."""
        ranks = self._ranks(place)
        numbers = listed(list(map(str, ranks)))
        return f"{self._machines[place].host} (rank{'s' * (len(ranks) > 1)} {numbers})"

    @property
    def _longest_s(self) -> float:
        """How long a machine may take to end its ranks: one of them may be saving."""
        return REPORT_S + SAVING_FACTOR * self._launch.shutdown_timeout_s

    @property
    def _is_seen(self) -> bool:
        return time.monotonic() - self._seen_at < OUT_OF_SIGHT_S

    def _ranks(self, place: int) -> range:
        count = self._machines[place].num_ranks or 1  # all machines have equally many
        return range(place * count, (place + 1) * count)

    def _with_host(self, sentence: str, rank: int) -> str:
        place = next((i for i in range(len(self._machines)) if rank in self._ranks(i)), self._own)
        host, name = self._machines[place].host, f"rank {rank}"
        if name not in sentence:
            return f"on {host}: {sentence}"
        return sentence.replace(name, f"{name} on {host}", 1)

    def _watch(self) -> None:
        while not self._closed.wait(WATCH_S if self._ended_at is None else PAUSE_S):
            try:
                self._look()
                self._is_lost = False
            except LOST:  # the ranks notice, too: their failure ends the run
                self._is_lost = True

    def _look(self) -> None:
        """Look once for what the other machines tell; may block."""
        if self._reported() and not self._closed.is_set():
            self._store.add(f"alive/{self._own}", 1)
        if self._ended_at is not None:
            self._store.set(f"ended/{self._own}", "")
            self._ended.add(self._own)  # only now: this machine may leave, and the others must know
        others = set(range(len(self._machines))) - self._ended
        self._ended |= {one for one in others if self._store.check([f"ended/{one}"])}

    def _reported(self) -> dict[int, Failure]:
        """Return the failures that machines have reported so far; may block."""
        others = [place for place in range(len(self._machines)) if place not in self._known]
        for place in others:
            is_told = self._store.check([f"failure/{place}"])
            self._seen_at = time.monotonic()
            if is_told:
                fields = json.loads(self._store.get(f"failure/{place}"))
                self._known[place] = Failure(**fields)
        return dict(self._known)  # the watch adds to it while another thread reads

    def _exchange(self, own: Failure) -> dict[int, Failure]:
        """Report, and return the reports of all machines that are alive; may block."""
        begun_at, alive_at, signs = time.monotonic(), None, dict[int, bytes]()
        self._store.set(f"failure/{self._own}", json.dumps(asdict(own)))
        while len(found := self._reported()) < len(self._machines):
            now = time.monotonic()
            before, signs = signs, self._signs(set(range(len(self._machines))) - found.keys())
            if signs.items() - before.items():
                alive_at = now
            deadline = begun_at + SILENT_S if alive_at is None else alive_at + REPORT_S
            if now > min(deadline, begun_at + self._longest_s):
                break
            time.sleep(PAUSE_S)
        self._store.set(f"read/{self._own}", "")
        readers, deadline = [f"read/{place}" for place in found], time.monotonic() + READ_S
        # The end of the machine that serves the store closes it.
        while self._machines[self._own].serves and time.monotonic() < deadline:
            if self._store.check(readers):
                break
            time.sleep(PAUSE_S)
        return found

    def _signs(self, places: Collection[int]) -> dict[int, bytes]:
        """Return how many signs of life each machine has given so far; may block."""
        known = [place for place in places if self._store.check([f"alive/{place}"])]
        return {place: self._store.get(f"alive/{place}") for place in known}
