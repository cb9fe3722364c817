"""Starts the ranks of this machine, watches them, and starts them anew: torch's elastic agent.

Torch's ``SimpleElasticAgent`` does what concerns several machines: rendezvous, ranks, restarts. How
processes are started, watched and ended is ours, by its documented extension points, because its
own ``LocalElasticAgent`` waits 30 s for a rank that is stopped, restarts what can only fail again,
and knows one rank's exit code alone.
"""

import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from typing import Any

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.numa.binding import NumaOptions

from ddp_runner.config.schema import Config
from ddp_runner.errors import UserError
from ddp_runner.host.children import adopt_orphans, children, end_adopted
from ddp_runner.host.load import oom_kills
from ddp_runner.job import Failure, Job
from ddp_runner.launch.blame import Ends, explain
from ddp_runner.launch.elastic import noticed_wait, numa_bound, numa_options, worker_spec
from ddp_runner.launch.fork_server import fork_server_is_gone, start_fork_server
from ddp_runner.rank.stop import FAILED_GROUP_GRACE_S
from ddp_runner.scratch import (
    READY,
    SAVING,
    SAVING_FACTOR,
    SAVING_POLL_S,
    is_renewed,
    note_cause,
    note_end,
    record_failure,
)

# From SIGTERM to SIGKILL: a rank ends itself after its own grace, unless it is stopped.
END_S = FAILED_GROUP_GRACE_S + 1.0
GONE_S = 2.0  # from SIGKILL on; a rank in uninterruptible sleep stays, and is left behind
PEER_GRACE_S = 2.0  # a rank that lost a peer waits: the peer's own end shall be noticed first
LAST_WORDS_S = 10.0  # from the end of rank 0 to that of the ranks that only serve it


class RanksFailedError(Exception):
    """The ranks of this machine have failed for good."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.sentence)
        self.failure = failure


@dataclass(frozen=True)
class _Rank:
    rank: int
    process: ForkServerProcess
    result: Connection


def supervise(job: Job, work: Callable[[Job], dict[str, Any]]) -> dict[str, Any]:
    """Run this machine's ranks to their end, with restarts; return the result of its first one.

    Raises:
        RanksFailedError: with the failure that came first.
        UserError: the machines of the run do not come together.
    """
    adopt_orphans()
    spec = worker_spec(job.config, work)
    supervisor = Supervisor(spec, job, work)
    try:
        result = supervisor.run()
    except RendezvousError as error:
        raise UserError(
            f"the machines of the run did not come together at launch.rdzv_endpoint "
            f"({job.config.launch.rdzv_endpoint}): {error}; start the same command on each of them"
        ) from error
    finally:
        spec.rdzv_handler.shutdown()
    if supervisor.failure is not None:
        raise RanksFailedError(supervisor.failure)
    if result is None:
        raise UserError("the run was over on its other machines; start the command on all at once")
    first: dict[str, Any] = result.return_values[min(result.return_values)]
    return first


class Supervisor(SimpleElasticAgent):
    """Torch's agent, with processes that are forked from our server."""

    def __init__(self, spec: WorkerSpec, job: Job, work: Callable[[Job], dict[str, Any]]) -> None:
        super().__init__(spec)
        assert job.scratch is not None
        self.failure: Failure | None = None  # of the last attempt
        self._job, self._scratch, self._work = job, job.scratch, work
        self._ranks: list[_Rank] = []
        self._results: dict[int, Any] = {}
        self._own_children: set[int] = set()
        self._oom_kills = 0

    @property
    def _attempt(self) -> int:
        return self._worker_group.spec.max_restarts - self._remaining_restarts

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        with noticed_wait(self._job.config):
            super()._rendezvous(worker_group)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, int]:
        self._scratch.mkdir(parents=True, exist_ok=True)
        # Of an earlier attempt; one that a machine joined or left has the same number.
        said = (f"failure-{self._attempt}-*", f"stack-{self._attempt}-*", "ended-*", READY, SAVING)
        for path in [path for name in said for path in self._scratch.glob(name)]:
            path.unlink(missing_ok=True)
        start_fork_server()  # if it was killed
        self._own_children, self._oom_kills = children(), oom_kills()
        self.failure = None
        options = numa_options(self._job.config)
        pids = {}
        for worker in worker_group.workers:
            local_rank: int = worker.local_rank
            environ = {
                "RANK": worker.global_rank,
                "LOCAL_RANK": local_rank,
                "WORLD_SIZE": worker.world_size,
                "LOCAL_WORLD_SIZE": worker_group.spec.local_world_size,
                "GROUP_RANK": worker_group.group_rank,
                "GROUP_WORLD_SIZE": worker_group.group_world_size,
                "MASTER_ADDR": worker_group.master_addr,
                "MASTER_PORT": worker_group.master_port,
                "TORCHELASTIC_RESTART_COUNT": self._attempt,
                "TORCHELASTIC_MAX_RESTARTS": worker_group.spec.max_restarts,
                "TORCHELASTIC_RUN_ID": worker_group.spec.rdzv_handler.get_run_id(),
                "TORCHELASTIC_USE_AGENT_STORE": worker_group.spec.rdzv_handler.use_agent_store,
                # As torch's agent sets it: a rank that waits in NCCL too long is aborted.
                "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get(
                    "TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"
                ),
            }
            receiver, sender = get_context("forkserver").Pipe(duplex=False)
            process = get_context("forkserver").Process(
                target=_run_rank,
                args=(
                    *(self._job, self._work, options),
                    {key: str(one) for key, one in environ.items()},
                    sender,
                ),
            )
            process.start()
            sender.close()
            self._ranks.append(_Rank(worker.global_rank, process, receiver))
            assert process.pid is not None
            pids[local_rank] = process.pid
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        ended = {one.rank: one.process.exitcode for one in self._ranks}
        self._collect()
        lost = {
            rank: exit_code
            for rank, exit_code in ended.items()
            if exit_code is not None and rank not in self._results
        }
        if _outlives_trainers(self._job.config) and (self._scratch / READY).exists():
            for rank in lost:
                note_end(self._scratch, rank=rank)
            lost = {rank: exit_code for rank, exit_code in lost.items() if rank == 0}
        if lost:
            return self._failed(lost)
        vital = [0] if _outlives_trainers(self._job.config) else list(ended)
        if any(ended[rank] is None for rank in vital):
            return RunResult(state=WorkerState.HEALTHY)
        _wait_for([one.process for one in self._ranks], LAST_WORDS_S)
        values = {rank: self._results.get(rank) for rank in ended}
        return RunResult(state=WorkerState.SUCCEEDED, return_values=values)

    def _collect(self) -> None:
        """Take the results of the ranks whose work has returned."""
        for one in self._ranks:
            with suppress(EOFError):  # it ended without one
                if one.rank not in self._results and one.result.poll():
                    self._results[one.rank] = one.result.recv()

    def _failed(self, lost: Mapping[int, int]) -> RunResult:
        ends = Ends(
            ranks=[one.rank for one in self._ranks],
            exit_codes=lost,
            out_of_memory=oom_kills() > self._oom_kills,
            server_is_gone=fork_server_is_gone(),
        )
        self._shutdown()  # only now the late ones have said where they stood
        self.failure = explain(ends, self._scratch, self._job.config, attempt=self._attempt)
        note_cause(self._scratch, self.failure, attempt=self._attempt)
        if self.failure.kind == "user":
            self._remaining_restarts = 0  # it would only fail again
        return RunResult(state=WorkerState.FAILED)

    def _stop_workers(self, worker_group: WorkerGroup, *_: Any, **__: Any) -> None:
        self._shutdown()

    def _shutdown(self, *_: Any, **__: Any) -> None:
        """End the ranks that live, and what ranks have started; then nothing of them is left."""
        processes = [one.process for one in self._ranks]
        for process in processes:
            if process.is_alive():
                process.terminate()
        _wait_for(processes, END_S)
        deadline = time.monotonic() + SAVING_FACTOR * self._job.config.launch.shutdown_timeout_s
        # A restart goes on from a checkpoint that is being written.
        while is_renewed(self._scratch) and time.monotonic() < deadline:
            if _wait_for(processes, SAVING_POLL_S):
                break
        for process in processes:
            if process.is_alive():
                process.kill()
        _wait_for(processes, GONE_S)
        for one in self._ranks:
            one.result.close()
        self._ranks, self._results = [], {}
        end_adopted(self._own_children)


def _wait_for(processes: list[ForkServerProcess], timeout_s: float) -> bool:
    """Return whether all have ended within the time."""
    deadline = time.monotonic() + timeout_s
    while sentinels := [one.sentinel for one in processes if one.is_alive()]:
        if not wait(sentinels, timeout=max(0.0, deadline - time.monotonic())):
            return False
    return True


def _outlives_trainers(config: Config) -> bool:
    """Return whether the run goes on when a rank that serves the loop is lost."""
    return config.parallelism.get("mode") == "async" and config.launch.nnodes == 1


def _run_rank(
    job: Job,
    work: Callable[[Job], dict[str, Any]],
    options: NumaOptions | None,
    environ: dict[str, str],
    sender: Connection,
) -> None:
    os.environ.update(environ)
    assert job.scratch is not None
    failure = None
    try:
        sender.send(numa_bound(work, int(environ["LOCAL_RANK"]), options)(job))
    except BaseException as error:  # sys.exit in a model ends a rank as much as any error
        attempt = int(environ["TORCHELASTIC_RESTART_COUNT"])
        failure = record_failure(
            job.scratch, rank=int(environ["RANK"]), attempt=attempt, error=error
        )
    sys.stdout.flush()
    sys.stderr.flush()
    if failure is not None and failure.kind == "peer":
        time.sleep(PEER_GRACE_S)
    # Not by way of the interpreter's own end: threads may still talk to a lost rank.
    os._exit(0 if failure is None else 1)
