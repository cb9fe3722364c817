"""The hub of a run on several machines: it forms each attempt and names the first failure.

Each launcher keeps a connection to the hub, which is a thread of the launcher that has the port.
A message is a line of JSON: a word and its value. A launcher sends ``join`` for each attempt, and
``ended`` or ``failed`` at its end. The hub sends ``group`` to the machines of an attempt, ``ended``
once the ranks of a machine have ended well, ``end`` once a machine has failed, and last ``over``,
or ``verdict`` with the first failure. ``rejected`` says why a machine cannot take part. Both sides
send ``beat`` each second; the hub's beat says how many machines are missing.
"""

import math
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import wait
from typing import Any, Literal, TypeVar, get_origin, get_type_hints

from ddp_runner.config.sections import LaunchConfig, meeting_place
from ddp_runner.host.network import SILENT_S, Link, is_loopback
from ddp_runner.job import Failure
from ddp_runner.launch.group import Group, MachineFacts, mismatch
from ddp_runner.launch.ranks import SAVING_FACTOR

PAUSE_S = 0.1  # the longest wait for a message
ENDING_S = 15.0  # for a machine to end its ranks, besides the time for a save
T = TypeVar("T")


@dataclass(eq=False)
class Machine:
    """The hub's view of a launcher."""

    link: Link
    address: str
    joined: MachineFacts | None = None
    state: Literal["new", "waiting", "running", "ended", "failed", "rejected", "gone"] = "new"
    failure: Failure | None = None  # in this attempt
    connected_at: float = field(default_factory=time.monotonic)


class Hub:
    """Decide for all machines, in a thread of the launcher that has the port.

    The launchers connect to `listener`, and must have the nnodes and the rdzv_id of `launch`.
    """

    def __init__(self, listener: socket.socket, launch: LaunchConfig) -> None:
        self._listener, self._launch = listener, launch
        self._longest_s = ENDING_S + SAVING_FACTOR * launch.shutdown_timeout_s  # to end ranks
        self._machines: list[Machine] = []  # in the order in which they connected
        self._machines_of_attempt: list[Machine] = []  # in the order of their ranks
        self._group: Group | None = None  # of the attempt
        self._failed_at: float | None = None
        self.is_leaving = self._is_closed = False
        threading.Thread(target=self._serve, name="hub", daemon=True).start()

    def close(self, *, within_s: float) -> None:
        """Stop once the machines have read the last message, which closing would discard."""
        self.is_leaving = True
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline and any(
            machine.state in ("ended", "failed", "rejected") for machine in list(self._machines)
        ):
            time.sleep(PAUSE_S)
        self._is_closed = True

    def _serve(self) -> None:
        try:
            while not self._is_closed:
                self._receive()
                for machine in list(self._machines):
                    is_late = time.monotonic() > machine.connected_at + SILENT_S
                    if machine.state == "new" and is_late:
                        self._drop(machine)  # such as a port scanner
                if self._group is None:
                    self._form()
                else:
                    self._judge(self._group)
                missing = 0 if self._group else self._launch.nnodes - len(self._waiting())
                for machine in self._machines:
                    if machine.joined:  # before it joins, it would be one of the missing
                        machine.link.beat(max(0, missing))
        finally:  # the machines must not wait for a hub that has ended
            for sock in (self._listener, *(machine.link.socket for machine in self._machines)):
                sock.close()

    def _receive(self) -> None:
        machines: dict[Any, Machine] = {machine.link.socket: machine for machine in self._machines}
        for ready in wait([self._listener, *machines], PAUSE_S):
            machine = machines.get(ready)
            try:
                if machine is None:
                    connection, address = self._listener.accept()
                    self._machines.append(Machine(Link(connection), str(address[0])))
                    continue
                for word, value in machine.link.receive(0.0):
                    self._handle(machine, word, value)
            except (OSError, ValueError, TypeError, KeyError, RecursionError):
                # It has left, or is no launcher: anybody may connect.
                if machine is not None:
                    self._drop(machine)
                    if machine.state not in ("ended", "failed"):
                        machine.state = "gone"

    def _drop(self, machine: Machine) -> None:
        machine.link.socket.close()
        self._machines.remove(machine)

    def _handle(self, machine: Machine, word: str, value: Any) -> None:
        if word == "join":
            machine.joined = facts = parsed(MachineFacts, value)
            machine.state, rule = "waiting", ""
            if facts.nnodes != self._launch.nnodes:
                rule = f"launch.nnodes is {facts.nnodes} here and {self._launch.nnodes}"
            elif facts.rdzv_id != self._launch.rdzv_id:  # may be a secret: do not print it
                rule = "launch.rdzv_id differs from the id"
            if rule:
                fix = "start the same command on each machine"
                self._reject(machine, f"{rule} where the machines meet; {fix}")
        elif machine not in self._machines_of_attempt:
            return
        elif word == "failed":
            machine.failure, machine.state = parsed(Failure, value), "failed"
        elif word == "ended":
            machine.state = "ended"
            self._send_to_attempt("ended")

    def _reject(self, machine: Machine, sentence: str) -> None:
        machine.state = "rejected"
        machine.link.send("rejected", sentence)

    def _send_to_attempt(self, word: str, value: object = None) -> None:
        for machine in self._machines_of_attempt:
            machine.link.send(word, value)

    def _waiting(self) -> list[Machine]:
        return [
            machine
            for machine in self._machines
            if machine.state == "waiting" and not machine.link.is_silent()
        ]

    def _form(self) -> None:
        """Begin an attempt once all machines have joined.

        The previous attempt's machines come first: they have the run, and spare machines would
        begin another. So wait until those that have just ended or failed have joined again or left.
        """
        earlier = self._machines_of_attempt
        if self.is_leaving or any(
            machine in self._machines and not machine.link.is_silent()
            for machine in earlier
            if machine.state in ("ended", "failed")
        ):
            return
        waiting = sorted(self._waiting(), key=lambda machine: machine not in earlier)
        if len(waiting) < self._launch.nnodes:
            return
        machines = sorted(waiting[: self._launch.nnodes], key=_rank_order)
        facts = [machine.joined for machine in machines if machine.joined is not None]
        if (sentence := mismatch(facts)) is not None:
            for machine in machines:
                self._reject(machine, sentence)
            return
        # Without any number, no machine has the run, and the ranks report that.
        num_ranks = next((joined.num_ranks for joined in facts if joined.num_ranks), 1)
        first, address = facts[0], machines[0].address
        if first.serves or is_loopback(address):
            address, _ = meeting_place(self._launch)
        hosts = [joined.host for joined in facts]
        self._group = Group(hosts, 0, num_ranks, address, first.port)
        self._machines_of_attempt, self._failed_at = machines, None
        for index, machine in enumerate(machines):
            machine.state, machine.failure = "running", None
            machine.link.send("group", asdict(replace(self._group, index=index)))

    def _judge(self, group: Group) -> None:
        """End the attempt once all ranks have ended well, or all failed machines have reported."""
        machines, now = self._machines_of_attempt, time.monotonic()
        failures = [machine.failure for machine in machines if machine.failure is not None]
        if all(machine.state == "ended" for machine in machines):
            self._group = None
            for machine in self._machines:  # also to a spare machine that waits
                machine.link.send("over")
        elif self._failed_at is None:
            if failures or any(machine.state == "gone" for machine in machines):
                self._failed_at = now
                self._send_to_attempt("end", any(failure.is_timeout for failure in failures))
        elif not any(self._may_report(machine, now - self._failed_at) for machine in machines):
            self._send_to_attempt("verdict", asdict(run_failure(group, machines)))
            self._group = None

    def _may_report(self, machine: Machine, since_s: float) -> bool:
        """Return whether a machine may still report, this long after the first failure."""
        limit_s = SILENT_S if machine.link.is_silent() else self._longest_s
        return machine.state in ("running", "ended") and since_s < limit_s


def parsed(kind: type[T], value: Mapping[str, Any]) -> T:
    """Return a message's value as an object of this class; anybody may have sent the message.

    Raises:
        TypeError: a field has another type.
        KeyError: a field is missing.
    """
    hints = get_type_hints(kind)
    fields = {name: value[name] for name in hints}
    for name, hint in hints.items():
        if not isinstance(fields[name], str if get_origin(hint) is Literal else hint):
            raise TypeError(f"{name} is {fields[name]!r}")
    return kind(**fields)


def run_failure(group: Group, machines: Sequence[Machine]) -> Failure:
    """Return the first failure; its kind is ``machine`` if a machine was lost."""
    failures = {
        index: machine.failure
        for index, machine in enumerate(machines)
        if machine.failure is not None
    }
    lost = [i for i, machine in enumerate(machines) if machine.state in ("running", "gone")]
    causes = [index for index, failure in failures.items() if failure.kind != "peer"]
    if causes or not lost:
        index = min(causes or failures, key=lambda index: failures[index].time_ns)
        first = failures[index]
        if first.kind == "user" and {first.sentence} != {f.sentence for f in failures.values()}:
            return replace(first, sentence=f"on {group.hosts[index]}: {first.sentence}")
        return first
    sentence = (
        f"{', '.join(map(group.described, lost))} was lost: it was switched off, its launcher was "
        "killed, or the network to it is down"
    )
    return Failure(group.ranks(lost[0])[0], "machine", sentence)


def _rank_order(machine: Machine) -> tuple[float, bool, bool]:
    """Sort by launch.node_rank, then by who has the run's folder, then by who serves the hub."""
    facts = machine.joined
    assert facts is not None
    number = math.inf if facts.node_rank is None else facts.node_rank
    return number, not facts.sees_run, not facts.serves
