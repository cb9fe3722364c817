"""The hub of a run on several machines: numbers them, and says which failure came first.

Each launcher keeps a connection to the hub, a thread of the launcher that serves the port. A
message is a line of JSON: a word, and what belongs to it. A launcher sends ``join`` for each
attempt, and ``ended`` or ``failed`` at its end. The hub sends ``group`` to the machines of an
attempt, ``ended`` once the ranks of one have ended well, ``end`` once those of one have failed, and
last ``over`` or ``verdict``: the failure that came first. Where a machine cannot take part,
``refused`` says why. Both send ``beat`` each second; the hub's says how many machines are missing.
"""

import math
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import wait
from typing import Any

from ddp_runner.config.sections import LaunchConfig, meeting_place
from ddp_runner.errors import UserError
from ddp_runner.host.network import SILENT_S, Link, is_loopback
from ddp_runner.job import Failure
from ddp_runner.launch.group import Group, equal_ranks
from ddp_runner.launch.ranks import SAVING_FACTOR

PAUSE_S = 0.1  # between two looks at what is due
ENDING_S = 15.0  # for a machine to end its ranks; longer if they are saving
MOST_STRANGERS = 64  # connections that have not joined, such as those of a port scanner
JOINED = {  # what a ``join`` says
    **{"host": str, "nnodes": int, "rdzv_id": str, "number": int | None},
    **{"num_ranks": int | None, "sees_run": bool, "serves": bool, "port": int},
}
FAILED = {"rank": int, "kind": str, "sentence": str, "traceback": str, "time_ns": int}


@dataclass(eq=False)
class Machine:
    """What the hub knows of a launcher."""

    link: Link
    address: str
    joined: Mapping[str, Any] = field(default_factory=dict)  # what its ``join`` says
    state: str = "new"  # then waiting, running, and ended, failed, refused or gone
    failure: Failure | None = None  # in the attempt
    came_at: float = field(default_factory=time.monotonic)


class Hub:
    """Decides for all machines, in a thread of the launcher that has the port.

    Args:
        listener: where the launchers connect.
        launch: of this machine; the others must have the same number of machines and id.
    """

    def __init__(self, listener: socket.socket, launch: LaunchConfig) -> None:
        self._listener, self._launch = listener, launch
        self._longest_s = ENDING_S + SAVING_FACTOR * launch.shutdown_timeout_s  # to end ranks
        self._machines: list[Machine] = []  # in the order in which they came
        self._machines_of_attempt: list[Machine] = []  # in the order of their ranks
        self._group: Group | None = None  # of the attempt
        self._failed_at: float | None = None
        self.is_leaving = self._is_closed = False
        threading.Thread(target=self._serve, name="hub", daemon=True).start()

    def close(self, *, within_s: float) -> None:
        """End once the machines have read the last word, which the end would take away."""
        self.is_leaving = True
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline and any(
            one.state in ("ended", "failed", "refused") for one in list(self._machines)
        ):
            time.sleep(PAUSE_S)
        self._is_closed = True

    def _serve(self) -> None:
        try:
            while not self._is_closed:
                self._look()
        finally:  # whatever has happened, the machines must not wait for this thread
            for connection in (self._listener, *(one.link.socket for one in self._machines)):
                connection.close()

    def _look(self) -> None:
        sockets = {one.link.socket: one for one in self._machines}
        for ready in wait([self._listener, *sockets], PAUSE_S):
            if ready in sockets:
                self._hear(sockets[ready])
                continue
            with suppress(OSError):  # it has left already
                connection, address = self._listener.accept()
                self._machines.append(Machine(Link(connection), str(address[0])))
        self._drop_strangers()
        if self._group is None:
            self._form()
        else:
            self._judge(self._group)
        missing = self._launch.nnodes - len(self._waiting()) if self._group is None else 0
        for one in self._machines:
            if one.joined:  # before that it would count itself among the missing
                one.link.beat(max(0, missing))

    def _drop_strangers(self) -> None:
        """Close what has connected and does not join, before it uses up the descriptors."""
        strangers = [one for one in self._machines if one.state == "new"]
        newest = strangers[-MOST_STRANGERS:]
        for one in strangers:
            if one not in newest or time.monotonic() > one.came_at + SILENT_S:
                one.link.socket.close()
                self._machines.remove(one)

    def _hear(self, machine: Machine) -> None:
        try:
            for word, value in machine.link.receive(0.0):
                self._take(machine, word, value)
        except (OSError, ValueError, TypeError, KeyError):  # it is gone, or is no launcher
            machine.link.socket.close()
            self._machines.remove(machine)
            if machine.state not in ("ended", "failed"):
                machine.state = "gone"

    def _take(self, machine: Machine, word: str, value: Any) -> None:
        if word == "join":
            machine.joined, machine.state = typed_fields(value, JOINED), "waiting"
            nnodes, rule = self._launch.nnodes, ""
            if value["nnodes"] != nnodes:
                rule = f"launch.nnodes is {value['nnodes']} here and {nnodes}"
            elif value["rdzv_id"] != self._launch.rdzv_id:  # which may be a secret
                rule = "launch.rdzv_id is not the one"
            if rule:
                fix = "start the same command on each machine"
                self._refuse(machine, f"{rule} where the machines meet; {fix}")
        elif machine not in self._machines_of_attempt:
            return
        elif word == "failed":
            machine.failure, machine.state = Failure(**typed_fields(value, FAILED)), word
        elif word == "ended":
            machine.state = word
            self._tell(word)

    def _refuse(self, machine: Machine, sentence: str) -> None:
        machine.state = "refused"
        machine.link.send("refused", sentence)

    def _tell(self, word: str, value: object = None) -> None:
        for one in self._machines_of_attempt:
            one.link.send(word, value)

    def _waiting(self) -> list[Machine]:
        return [
            one for one in self._machines if one.state == "waiting" and not one.link.is_silent()
        ]

    def _form(self) -> None:
        """Begin an attempt once all machines have come.

        Those of the attempt before come first: they have the run, and spare ones would begin
        another. So those that have just ended or failed come again, or leave, before it begins.
        """
        earlier = self._machines_of_attempt
        are_leaving = [one for one in earlier if one.state in ("ended", "failed")]
        if self.is_leaving or any(
            one in self._machines and not one.link.is_silent() for one in are_leaving
        ):
            return
        waiting = sorted(self._waiting(), key=lambda one: one not in earlier)
        machines = waiting[: self._launch.nnodes]
        if len(machines) < self._launch.nnodes:
            return
        machines.sort(key=_order)
        facts = [one.joined for one in machines]
        try:
            num_ranks = equal_ranks(facts)
        except UserError as error:
            for one in machines:
                self._refuse(one, str(error))
            return
        first = machines[0]
        is_near = first.joined["serves"] or is_loopback(first.address)
        address = meeting_place(self._launch)[0] if is_near else first.address
        hosts = [str(one["host"]) for one in facts]
        self._group = Group(hosts, 0, num_ranks, address, first.joined["port"])
        self._machines_of_attempt, self._failed_at = machines, None
        for place, one in enumerate(machines):
            one.state, one.failure = "running", None
            one.link.send("group", asdict(replace(self._group, place=place)))

    def _judge(self, group: Group) -> None:
        """End the attempt once all ranks have ended well, or all machines that fail say why."""
        machines = self._machines_of_attempt
        failures = [one.failure for one in machines if one.failure is not None]
        if all(one.state == "ended" for one in machines):
            self._group = None
            for one in self._machines:  # also a spare one that waits for a place
                one.link.send("over")
        elif self._failed_at is None and (failures or any(one.state == "gone" for one in machines)):
            self._failed_at = time.monotonic()
            self._tell("end", any(one.is_timeout for one in failures))
        elif self._failed_at is not None:
            limit = self._failed_at + SILENT_S, self._failed_at + self._longest_s
            if any(
                one.state in ("running", "ended")
                and time.monotonic() < limit[not one.link.is_silent()]
                for one in machines
            ):
                return
            self._tell("verdict", asdict(first_failure(group, machines)))
            self._group = None


def typed_fields(value: Mapping[str, Any], kinds: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a message, which may come from anybody.

    Raises:
        TypeError: one has another type.
        KeyError: one is missing.
    """
    fields = {name: value[name] for name in kinds}
    for name, kind in kinds.items():
        if not isinstance(fields[name], kind):
            raise TypeError(f"{name} is {fields[name]!r}")
    return fields


def first_failure(group: Group, machines: Sequence[Machine]) -> Failure:
    """Return what failed first; its kind is ``machine`` if a machine was lost."""
    by_place = {place: one.failure for place, one in enumerate(machines) if one.failure is not None}
    lost = [place for place, one in enumerate(machines) if one.state in ("running", "gone")]
    causes = [place for place, failure in by_place.items() if failure.kind != "peer"]
    if causes or not lost:
        place = min(causes or by_place, key=lambda place: by_place[place].time_ns)
        first = by_place[place]
        if first.kind == "user" and any(
            one.sentence != first.sentence for one in by_place.values()
        ):
            return replace(first, sentence=f"on {group.hosts[place]}: {first.sentence}")
        return first
    sentence = (
        f"{', '.join(map(group.described, lost))} was lost: it was switched off, its launcher was "
        "killed, or the network to it is down"
    )
    return Failure(rank=group.ranks(lost[0])[0], kind="machine", sentence=sentence)


def _order(machine: Machine) -> tuple[float, bool, bool]:
    """Sort by launch.node_rank, then those that have the run's folder, then the hub's own."""
    facts = machine.joined
    number = math.inf if facts["number"] is None else facts["number"]
    return number, not facts["sees_run"], not facts["serves"]
