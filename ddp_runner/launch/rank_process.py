"""A rank of our launcher, from its first line to its last."""

import inspect
import os
import pkgutil
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from ddp_runner.config.schema import RunConfig
from ddp_runner.errors import UserError, is_lost_peer
from ddp_runner.host.memory import address_limit
from ddp_runner.host.processes import (
    die_with_parent,
    ignore_stop_signals,
    import_errors,
    release_fork_server,
)
from ddp_runner.host.wire import MOST_BYTES, Wire, cut
from ddp_runner.job import Failure, FailureKind, Job, Outcome

PEER_GRACE_S = 2.0  # a rank that lost a peer waits, so that the peer's end is noticed first


def failure_of(error: BaseException, *, rank: int) -> Failure:
    """Return a rank's exception as a failure."""
    kind: FailureKind = "user"
    sentence = str(error)
    if not isinstance(error, UserError):
        kind = "peer" if is_lost_peer(error) else "crash"
        summary = ": ".join([type(error).__name__, *str(error).splitlines()[:1]])
        notes = getattr(error, "__notes__", [])  # the last names the line in the user's code
        sentence = f"rank {rank} raised {summary}{f' ({notes[-1]})' if notes else ''}"
    sentence = sentence.encode(errors="replace")[: MOST_BYTES // 4].decode(errors="ignore")
    return Failure(rank, kind, sentence, cut("".join(traceback.format_exception(error))))


def run_rank(job: Job, run_task: str, environ: dict[str, str], pipe: Connection) -> NoReturn:
    """Run `run_task` as one rank and send its result or failure; in a child of the fork server."""
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
        task = pkgutil.resolve_name(run_task)
        bound_task = bound_to_cores(task, int(environ["LOCAL_RANK"]), job.config)
        message: tuple[str, Outcome | Failure] = ("result", bound_task(replace(job, wire=wire)))
    except BaseException as error:  # sys.exit in a model ends a rank just as an error does
        failure = failure_of(error, rank=rank)
        message = ("failure", failure)
    for stream in (sys.stdout, sys.stderr):  # first: the launcher may kill this process next
        stream.flush()
    wire.send(*message)
    if failure is not None and failure.kind == "peer":
        time.sleep(PEER_GRACE_S)
    # Skip the interpreter's shutdown: threads may still wait for a lost rank.
    os._exit(0 if failure is None else 1)


def bound_to_cores(
    task: Callable[[Job], Outcome], local_rank: int, config: RunConfig
) -> Callable[[Job], Outcome]:
    """Return `task`, bound to the cores near this rank's GPU, as torchrun does.

    `_maybe_wrap_with_numa_binding` has no public name. Checked on torch 2.11 and 2.15.
    """
    import torch.numa.binding as numa
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    options = LaunchConfig(
        min_nodes=config.launch.nnodes,
        max_nodes=config.launch.nnodes,
        nproc_per_node=config.num_processes // config.launch.nnodes,
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),  # else it creates a log folder
    ).numa_options
    if options is None:
        return task
    bind = numa._maybe_wrap_with_numa_binding
    is_new = "device_index" in inspect.signature(bind).parameters  # torch 2.11: gpu_index
    device: dict[str, Any] = {"device_index" if is_new else "gpu_index": local_rank}
    return bind(task, **device, numa_options=options)
