"""This machine's view of a run on several machines: who takes part, and who has failed.

When ranks fail, each machine reports to the hub: all print the failure that came first, and all
restart or all end. Torch's own agent does not fit: it says why ranks failed only after the last
restart, waits 30 s for a rank that does not answer SIGTERM, and never waits for a checkpoint.
"""

import socket
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
from ddp_runner.launch.group import Group, MachineFacts, OneMachine
from ddp_runner.launch.hub import ENDING_S, Hub
from ddp_runner.launch.ranks import POLL_S
from ddp_runner.tracking.run_dir import RunDir

PROBE_S, PAUSE_S = 2.0, 0.5  # for one try to reach the port, and between two tries
ANSWER_S = 10.0  # without a message, after which the hub counts as lost
LOST_S = 30.0  # the same while machines join: the hub's machine was switched off
LEAVE_S = 3.0  # for the other machines to read the hub's last message
OTHER_SERVER = "something else listens there, or it is suspended"


class Machines(OneMachine):
    """This machine's connection to the hub, which it serves if the others look for it here."""

    def __init__(self, job: Job) -> None:
        self._job, self._launch = job, job.config.launch
        self._hub: Hub | None = None
        self._link: Link | None = None
        self._has_met = False  # the hub has answered
        self._reason = ""  # why it could not be reached
        self._rejected: str | None = None  # why the hub rejected this machine
        self._begin(None)

    def _begin(self, group: Group | None) -> None:
        """Forget the last attempt; `group` is the new one, None while its machines are awaited."""
        self.must_end = self.timed_out = self.has_ended = self._is_over = False
        self._verdict: Failure | None = None
        self._missing = self._launch.nnodes - 1
        self._ended_at: float | None = None  # when this machine's ranks had ended well
        self._joined = group  # last: the main thread waits for it

    def join(self, is_stopped: Callable[[], bool]) -> Group | None:
        """Wait for all machines, and print how many are missing; None if stopped first.

        Raises:
            UserError: the machines do not meet, or their settings contradict each other.
        """
        self._begin(None)
        begun_at, shown, joined_link = time.monotonic(), "", None
        fix, limit_s = "start the same command on each machine", self._launch.join_timeout_s
        with socket.create_server(("", 0)) as reserved:  # keeps a port until rank 0 needs it
            while self._joined is None and not is_stopped():
                if self._rejected is not None:
                    raise UserError(self._rejected)
                link, waited_s = self._link, time.monotonic() - begun_at
                if link is None:
                    self._connect()
                elif link is not joined_link:
                    link.send("join", asdict(self._facts(port=reserved.getsockname()[1])))
                    joined_link = link
                elif time.monotonic() > link.heard_at + (LOST_S if self._has_met else ANSWER_S):
                    self._lose(link)
                if waited_s > limit_s:
                    raise UserError(
                        f"waited {limit_s:g} s (launch.join_timeout_s) for {self._awaited()}, and "
                        "they did not come",
                        fix,
                    )
                text = f"{self._awaited()}, up to {limit_s:g} s; {fix}"
                if waited_s > PATIENCE_S and text != shown and self._joined is None:
                    print_line(f"waiting for {text}")
                    shown = text
                time.sleep(POLL_S if self._link else PAUSE_S)
        return self._joined

    def all_ended(self) -> bool | None:
        """Return whether all ranks of the run ended well; None: wait. This machine's have.

        A restart needs all machines, so none leaves before the last has ended, or a time limit has
        passed. If the hub is lost, the run is complete when rank 0 has ended.
        """
        assert self._joined is not None
        if self._ended_at is None:
            self._ended_at = time.monotonic()
            self._send("ended")
        if self._link is None or time.monotonic() > self._link.heard_at + ANSWER_S:
            return self._is_over or self._joined.index == 0
        limit_s = self._job.config.backend.timeout_s + ENDING_S
        return True if self._is_over or time.monotonic() > self._ended_at + limit_s else None

    def agree_on_failure(self, failure: Failure) -> Failure:
        """Send this machine's first failure to the hub; return the run's first failure.

        Its kind is ``machine`` if a machine was lost. Its rank is then the first of that machine,
        or None if the hub is lost as well.
        """
        assert self._joined is not None
        if failure.rank is not None and failure.kind != "user":  # a mistake may name several ranks
            sentence = self._joined.with_host(failure.sentence, failure.rank)
            failure = replace(failure, sentence=sentence)
        begun_at = time.monotonic()
        self._send("failed", asdict(failure))
        while (link := self._link) is not None and self._verdict is None:
            if time.monotonic() > max(begun_at, link.heard_at) + ANSWER_S:
                break
            time.sleep(POLL_S)
        if self._verdict is not None:
            return self._verdict
        return Failure(None, "machine", self._hub_is_lost()) if failure.kind == "peer" else failure

    def close(self) -> None:
        """Leave the other machines; the hub waits until they know how the run ended."""
        if self._hub is not None:
            self._hub.is_leaving = True  # before it sees that this machine has left
        if self._link is not None:
            self._link.socket.close()
        if self._hub is not None:
            self._hub.close(within_s=LEAVE_S)

    def _facts(self, *, port: int) -> MachineFacts:
        """Return what this machine tells the hub; its ranks can meet at the port."""
        job, launch = self._job, self._launch
        return MachineFacts(
            host=socket.gethostname(),
            nnodes=launch.nnodes,
            rdzv_id=launch.rdzv_id,
            node_rank=launch.node_rank,
            num_ranks=None if job.lacks_run else job.config.world_size // launch.nnodes,
            sees_run=job.run_dir is not None and RunDir(job.run_dir).record.exists(),
            serves=self._hub is not None,
            port=port,
        )

    def _connect(self) -> None:
        """Try once to reach the hub.

        The machine with launch.node_rank=0 serves it. Without numbers, the machine that
        launch.rdzv_endpoint names does.

        Raises:
            UserError: the hub was there and is gone, or this machine must serve it and cannot.
        """
        if self._has_met:
            raise UserError(self._hub_is_lost())
        (host, port), number = meeting_place(self._launch), self._launch.node_rank
        try:
            if self._hub is None and (number == 0 or (number is None and is_here(host))):
                server = listener(host, port)
                if server is not None:
                    self._hub = Hub(server, self._launch)
                elif number == 0:
                    raise UserError(
                        f"port {port} of this machine is in use and its launch.node_rank is 0, "
                        "so it holds the rendezvous",
                        "give launch.rdzv_endpoint another port",
                    )
            self._link = Link(socket.create_connection((host, port), PROBE_S))
        except OSError as error:  # not there yet: try again
            self._reason = error.strerror or str(error)
        else:
            Thread(target=self._listen, args=(self._link,), name="hub-link", daemon=True).start()

    def _listen(self, link: Link) -> None:
        try:
            while link is self._link:
                for word, value in link.receive(BEAT_S / 2):
                    self._handle(word, value)
                link.beat()
        except (OSError, ValueError, TypeError, RecursionError):  # gone, or another server
            self._lose(link)

    def _lose(self, link: Link) -> None:
        link.socket.close()
        self._link, self._reason = None, OTHER_SERVER
        # While it joins it has no ranks yet; and once the run is over, the hub may leave.
        self.must_end = self._joined is not None and not self._is_over

    def _handle(self, word: str, value: Any) -> None:
        self._has_met = True
        match word:
            case "beat":
                self._missing = value
            case "group":  # the last attempt's end may have come after this machine joined again
                self._begin(Group(**value))
            case "ended":
                self.has_ended = True
            case "end":
                self.timed_out = value
                self.must_end = True  # last: the main thread then reads `timed_out`
            case "verdict":
                self._verdict = Failure(**value)
            case "over" if self._joined is None:  # a spare machine
                run = f"the run that meets at {self._launch.rdzv_endpoint}"
                self._rejected = f"{run} has ended; start the same command"
            case "over":
                self._is_over = True
            case "rejected":
                self._rejected = value

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
