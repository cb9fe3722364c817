"""The machines of a run, as one of their launchers sees them: who takes part, and who has failed.

Each machine runs its ranks as a run on one machine does. They learn who they are as under torchrun,
and meet at rank 0. When ranks fail, the hub hears it from each machine: all name the failure that
came first, and all start again or all end.

Torch's own agent would not do: it says why ranks failed only after the last restart, it waits 30 s
for a rank that does not answer SIGTERM, and it waits for no checkpoint.
"""

import socket
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from threading import Thread
from typing import Any

from ddp_runner.config.sections import meeting_place
from ddp_runner.errors import UserError
from ddp_runner.host.network import BEAT_S, Link, is_here, listener
from ddp_runner.host.streams import PATIENCE_S, print_line
from ddp_runner.job import Failure, Job
from ddp_runner.launch.group import Group, OneMachine
from ddp_runner.launch.hub import ENDING_S, Hub
from ddp_runner.launch.ranks import POLL_S
from ddp_runner.tracking.run_dir import RunDir

PROBE_S, PAUSE_S = 2.0, 0.5  # of a try to reach the port, and between two
ANSWER_S = 10.0  # for the hub's first word; and a hub that is silent for so long is hardly there
LOST_S = 30.0  # of silence while machines are awaited: the hub's machine was switched off
LEAVE_S = 3.0  # for the other machines to read the hub's last word
OTHER_SERVER = "something else listens there, or it is suspended"


class Machines(OneMachine):
    """This machine's connection to the hub. If the others look for it here, it serves the hub."""

    def __init__(self, job: Job) -> None:
        self._job, self._launch = job, job.config.launch
        self._hub: Hub | None = None
        self._link: Link | None = None
        self._has_met = False  # the hub has answered
        self._reason = ""  # why it could not be reached
        self._refused: str | None = None
        self._reset()

    def _reset(self) -> None:
        self.must_end = self.timed_out = self.has_ended = self._is_over = False
        self._joined: Group | None = None
        self._verdict: Failure | None = None
        self._missing = self._launch.nnodes - 1
        self._ended_at: float | None = None  # when the ranks of this machine had ended well

    def join(self, is_stopped: Callable[[], bool]) -> Group | None:
        """Wait until all machines have come, and say what is missing; None: it was stopped.

        Raises:
            UserError: the machines do not meet, or do not fit together.
        """
        self._reset()
        begun_at, shown, joined = time.monotonic(), "", None
        reserved = socket.create_server(("", 0))  # keeps a port until rank 0 needs it
        with reserved:
            while self._joined is None and not is_stopped():
                if self._refused is not None:
                    raise UserError(self._refused)
                link, waited_s = self._link, time.monotonic() - begun_at
                if link is None:
                    self._connect()
                elif link is not joined:
                    link.send("join", self._facts(port=reserved.getsockname()[1]))
                    joined = link
                elif time.monotonic() > link.heard_at + (LOST_S if self._has_met else ANSWER_S):
                    self._lose(link, OTHER_SERVER)
                again = "start the same command on each machine"
                if waited_s > self._launch.join_timeout_s:
                    raise UserError(
                        f"waited {self._launch.join_timeout_s:g} s (launch.join_timeout_s) for "
                        f"{self._awaited()}, and they did not come; {again}"
                    )
                text = f"{self._awaited()}, up to {self._launch.join_timeout_s:g} s; {again}"
                if waited_s > PATIENCE_S and text != shown and self._joined is None:
                    print_line(f"waiting for {text}", stream=sys.stdout)
                    shown = text
                time.sleep(POLL_S if self._link else PAUSE_S)
        return self._joined

    def all_ended(self) -> bool | None:
        """Return whether all ranks of the run have ended well, as this machine's have; None: wait.

        A run that restarts needs all machines again, so none leaves before the last has ended, or
        before a while has passed. If the hub is lost, only the end of rank 0 counts: the run is
        complete with it.
        """
        assert self._joined is not None
        if self._ended_at is None:
            self._ended_at = time.monotonic()
            self._send("ended")
        if self._link is None or time.monotonic() > self._link.heard_at + ANSWER_S:
            return self._is_over or self._joined.place == 0
        limit_s = self._job.config.backend.timeout_s + ENDING_S
        return True if self._is_over or time.monotonic() > self._ended_at + limit_s else None

    def first_failure(self, own: Failure) -> Failure:
        """Tell the hub how ranks of this machine failed; return what failed first.

        Its kind is ``machine`` if one was lost; its rank is then the first of that machine, or -1
        if the hub is lost as well.
        """
        assert self._joined is not None
        if own.kind != "user":  # which may name several ranks, or none
            own = replace(own, sentence=self._joined.with_host(own.sentence, own.rank))
        begun_at = time.monotonic()
        self._send("failed", asdict(own))
        while (link := self._link) is not None and self._verdict is None:
            if time.monotonic() > max(begun_at, link.heard_at) + ANSWER_S:
                break
            time.sleep(POLL_S)
        if self._verdict is not None:
            return self._verdict
        return Failure(-1, "machine", self._hub_is_lost()) if own.kind == "peer" else own

    def close(self) -> None:
        """Leave the others; the hub waits until they know how the run has ended."""
        if self._hub is not None:
            self._hub.is_leaving = True  # before it sees that this machine has left
        if self._link is not None:
            self._link.socket.close()
        if self._hub is not None:
            self._hub.close(within_s=LEAVE_S)

    def _facts(self, *, port: int) -> dict[str, object]:
        """Return what the hub must know of this machine, whose ranks can meet at the port."""
        job, launch = self._job, self._launch
        return {
            "host": socket.gethostname(),
            "nnodes": launch.nnodes,
            "rdzv_id": launch.rdzv_id,
            "number": launch.node_rank,
            "num_ranks": None if job.lacks_run else job.config.world_size // launch.nnodes,
            "sees_run": job.run_dir is not None and RunDir(job.run_dir).record.exists(),
            "serves": self._hub is not None,
            "port": port,
        }

    def _connect(self) -> None:
        """Try once to reach the hub.

        The machine with launch.node_rank=0 serves it; without numbers, that of
        launch.rdzv_endpoint.

        Raises:
            UserError: the hub was there and is gone, or this machine must serve it and cannot.
        """
        if self._has_met:
            raise UserError(self._hub_is_lost())
        (host, port), number = meeting_place(self._launch), self._launch.node_rank
        try:
            if self._hub is None and (number == 0 or (number is None and is_here(host))):
                served = listener(host, port)
                if served is not None:
                    self._hub = Hub(served, self._launch)
                elif number == 0:
                    raise UserError(
                        f"port {port} of this machine is in use and its launch.node_rank is 0, "
                        "so it holds the rendezvous; give launch.rdzv_endpoint another port"
                    )
            self._link = Link(socket.create_connection((host, port), PROBE_S))
        except OSError as error:
            self._reason = error.strerror or str(error)
        else:
            Thread(target=self._listen, args=(self._link,), name="hub-link", daemon=True).start()

    def _listen(self, link: Link) -> None:
        try:
            while link is self._link:
                for word, value in link.receive(BEAT_S / 2):
                    self._take(word, value)
                link.beat()
        except (OSError, ValueError, TypeError):  # it has ended, or is another server
            self._lose(link, OTHER_SERVER)

    def _lose(self, link: Link, reason: str) -> None:
        link.socket.close()
        self._link, self._reason = None, reason
        # While it joins it has no ranks yet; and once the run is over, the hub may leave.
        self.must_end = self._joined is not None and not self._is_over

    def _take(self, word: str, value: Any) -> None:
        self._has_met = True
        match word:
            case "beat":
                self._missing = value
            case "group":
                # The end of an attempt may have come late, after this machine had joined again.
                self.must_end = self.timed_out = self.has_ended = self._is_over = False
                self._verdict, self._joined = None, Group(**value)
            case "ended":
                self.has_ended = True
            case "end":
                self.timed_out = value
                self.must_end = True  # last: the main thread then looks at the other
            case "verdict":
                self._verdict = Failure(**value)
            case "over" if self._joined is None:  # a spare machine
                place = self._launch.rdzv_endpoint
                self._refused = f"the run that meets at {place} has ended; start the same command"
            case "over":
                self._is_over = True
            case "refused":
                self._refused = value

    def _send(self, word: str, value: object = None) -> None:
        if (link := self._link) is not None:
            link.send(word, value)

    def _hub_is_lost(self) -> str:
        return (
            f"{self._launch.rdzv_endpoint}, where the machines meet, is lost: its machine was "
            "switched off, its launcher has ended, or the network is down"
        )

    def _awaited(self) -> str:
        nnodes, endpoint = self._launch.nnodes, self._launch.rdzv_endpoint
        if not self._has_met:
            reason = f" ({self._reason})" if self._reason else ""
            return f"{endpoint}, where the {nnodes} machines of the run meet{reason}"
        if self._missing == 0:
            return f"a place at {endpoint}, where a run has its {nnodes} machines"
        return f"{self._missing} of {nnodes} machines at {endpoint}"
