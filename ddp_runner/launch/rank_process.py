"""One rank of our launcher, from its first line to its last, and how it tells of its end."""

import os
import pkgutil
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import NoReturn

from ddp_runner.errors import UserError, is_lost_peer
from ddp_runner.host.machine_load import address_limit
from ddp_runner.host.processes import (
    die_with_parent,
    ignore_stop_signals,
    import_errors,
    release_fork_server,
)
from ddp_runner.host.wire import MOST_BYTES, Wire, cut
from ddp_runner.job import Failure, Job

PEER_GRACE_S = 2.0  # a rank that lost a peer waits, so that the peer's end is noticed first


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


def run_rank(job: Job, work: str, environ: dict[str, str], pipe: Connection) -> NoReturn:
    """Run one rank from its first line to its last, in a child of the fork server."""
    os.environ.update(environ)
    ignore_stop_signals()  # Ctrl-C reaches every process of a terminal; the launcher decides
    if sys.platform == "linux":
        die_with_parent()
        release_fork_server()
    rank, wire, failure = int(environ["RANK"]), Wire(pipe), None
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
