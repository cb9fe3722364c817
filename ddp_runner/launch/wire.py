"""A rank's end of the pipe to its launcher: requests come in, facts and the end go out.

A rank sends ``claimed, folder`` on several machines, ``began, step`` once it has restored its
state, ``ready`` when the training loop begins, ``saving, flag`` around each checkpoint, and last
``result, value`` or ``failure, Failure``. The launcher sends ``stop`` and ``stack``, answered by
``stack, time_ns, text``. A thread takes these, so that a rank answers even while it is in a
collective.
"""

import os
import pkgutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from ddp_runner.errors import UserError, is_lost_peer
from ddp_runner.host.load import address_limit
from ddp_runner.host.processes import (
    SERVER_GRACE_S,
    die_with_parent,
    ignore_stop_signals,
    import_errors,
    release_fork_server,
)
from ddp_runner.job import Failure, Job

PEER_GRACE_S = 2.0  # a rank that lost a peer waits, so that the peer's end is noticed first
# The longest text in a message. A message of up to 16 kB leaves in one write. Between two writes, a
# rank may be stopped or killed, and the launcher would wait for the rest.
MOST_BYTES = 12_000


class PipeWire:
    """The pipe of one rank; safe to use from any of its threads."""

    def __init__(self, pipe: Connection) -> None:
        self.stop = False  # whether to finish the step, save and end
        self._pipe, self._sending = pipe, threading.Lock()
        threading.Thread(target=self._listen, name="launcher", daemon=True).start()

    def send(self, *message: Any) -> None:
        """Send a message. If the launcher is gone, so is its pipe: ``_listen`` ends this rank."""
        with self._sending, suppress(OSError):
            self._pipe.send(message)

    def claimed(self, folder: Path) -> None:
        """Tell the run folder; a launcher of one machine has claimed it itself."""
        self.send("claimed", folder)

    def began(self, step: int) -> None:
        """Tell the step from which this attempt continues."""
        self.send("began", step)

    def ready(self) -> None:
        """Tell that the training loop begins."""
        self.send("ready")

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Ask the launcher to wait for the end of this block before it ends the rank."""
        self.send("saving", True)
        try:
            yield
        finally:
            self.send("saving", False)

    def _listen(self) -> None:
        while True:
            try:
                (word,) = self._pipe.recv()
            except (EOFError, OSError):
                time.sleep(SERVER_GRACE_S if sys.platform == "linux" else 0.0)
                os._exit(128 + signal.SIGKILL)
            if word == "stop":
                self.stop = True
            elif word == "stack":
                frame = sys._current_frames().get(threading.main_thread().ident or 0)
                stack = "".join(traceback.format_stack(frame)) if frame else ""
                self.send("stack", time.time_ns(), cut(stack))


def failure_of(error: BaseException, *, rank: int) -> Failure:
    """Return why a rank fails."""
    if isinstance(error, UserError):
        kind, sentence = "user", str(error)
    else:
        kind = "peer" if is_lost_peer(error) else "crash"
        what = [type(error).__name__, *str(error).splitlines()[:1]]
        notes = getattr(error, "__notes__", [])  # the place in the user's own code, if known
        place = f" ({notes[-1]})" if notes else ""
        sentence = f"rank {rank} raised {': '.join(what)}{place}"
    text = cut("".join(traceback.format_exception(error)))
    sentence = sentence.encode(errors="replace")[: MOST_BYTES // 4].decode(errors="ignore")
    return Failure(rank=rank, kind=kind, sentence=sentence, traceback=text)


def cut(text: str) -> str:
    """Return the end of a text, where a stack has its innermost frame; the logs have all of it."""
    data = text.encode(errors="replace")
    if len(data) <= MOST_BYTES:
        return text
    return f"(the beginning is in logs/)\n{data[-MOST_BYTES:].decode(errors='ignore')}"


def run_rank(job: Job, work: str, environ: dict[str, str], pipe: Connection) -> NoReturn:
    """Run one rank from its first line to its last, in a child of the fork server."""
    os.environ.update(environ)
    ignore_stop_signals()  # Ctrl-C reaches every process of a terminal; the launcher decides
    if sys.platform == "linux":
        die_with_parent()
        release_fork_server()
    rank, wire, failure = int(environ["RANK"]), PipeWire(pipe), None
    try:
        if import_errors:
            reason = address_limit() or f"{import_errors[0]}; repair the installation"
            raise UserError(f"torch cannot be imported: {reason}")
        from ddp_runner.rank.numa import bound_to_cores  # imports torch, as the server has

        bound = bound_to_cores(pkgutil.resolve_name(work), int(environ["LOCAL_RANK"]), job.config)
        last = ("result", bound(replace(job, wire=wire)))
    except BaseException as error:  # sys.exit in a model ends a rank just as an error does
        failure = failure_of(error, rank=rank)
        last = ("failure", failure)
    for stream in (sys.stdout, sys.stderr):  # before the launcher knows: it may end this process
        with suppress(Exception):
            stream.flush()
    wire.send(*last)
    if failure is not None and failure.kind == "peer":
        time.sleep(PEER_GRACE_S)
    # Skips the interpreter's own shutdown: threads may still wait for a lost rank.
    os._exit(0 if failure is None else 1)
