"""Starts the ranks of this machine, watches them and restarts them: torch's elastic agent.

Torch's ``SimpleElasticAgent`` handles what concerns several machines: rendezvous, ranks, restarts.
We start, watch and end the processes ourselves, through its documented extension points, because
its own ``LocalElasticAgent`` waits 30 s for a suspended rank, restarts ranks whose failure is bound
to repeat, and knows one rank's exit code only.
"""

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.rendezvous import RendezvousError

from ddp_runner.config.schema import Config
from ddp_runner.errors import UserError
from ddp_runner.host.children import adopt_orphans, children
from ddp_runner.host.fork_server import fork_server_is_gone, start_fork_server
from ddp_runner.host.load import oom_kills
from ddp_runner.job import Job
from ddp_runner.launch.blame import Ends, first_failure
from ddp_runner.launch.elastic import noticed_wait, numa_options, worker_spec
from ddp_runner.launch.rank_processes import RankProcess, end_ranks, start_rank, wait_for
from ddp_runner.scratch import Failure

SERVING_GRACE_S = 10.0  # from the end of rank 0 to that of the ranks that only serve it


class RanksFailedError(Exception):
    """The ranks of this machine have failed for good."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.sentence)
        self.failure = failure


def supervise(job: Job, work: Callable[[Job], dict[str, Any]]) -> dict[str, Any]:
    """Run this machine's ranks to their end, with restarts; return the result of its first rank.

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
    """Torch's agent, with processes that are forked from our server.

    Beside its extension points it uses `_worker_group` and `_remaining_restarts` of the agent,
    which torch 2.11 and 2.15 have.
    """

    def __init__(self, spec: WorkerSpec, job: Job, work: Callable[[Job], dict[str, Any]]) -> None:
        super().__init__(spec)
        assert job.scratch is not None
        self.failure: Failure | None = None  # of the last attempt
        self._job, self._scratch, self._work = job, job.scratch, work
        self._ranks: list[RankProcess] = []
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
        self._scratch.begin_attempt(self._attempt)
        start_fork_server()  # if it was killed
        self._own_children, self._oom_kills = children(), oom_kills()
        self.failure = None
        options = numa_options(self._job.config)
        for worker in worker_group.workers:
            environ = self._environ(worker, worker_group)
            self._ranks.append(start_rank(self._job, self._work, environ=environ, options=options))
        pids = (one.process.pid for one in self._ranks)
        local_ranks = (worker.local_rank for worker in worker_group.workers)
        return {rank: pid for rank, pid in zip(local_ranks, pids, strict=True) if pid is not None}

    def _environ(self, worker: Worker, group: WorkerGroup) -> dict[str, object]:
        return {
            "RANK": worker.global_rank,
            "LOCAL_RANK": worker.local_rank,
            "WORLD_SIZE": worker.world_size,
            "LOCAL_WORLD_SIZE": group.spec.local_world_size,
            "GROUP_RANK": group.group_rank,
            "GROUP_WORLD_SIZE": group.group_world_size,
            "MASTER_ADDR": group.master_addr,
            "MASTER_PORT": group.master_port,
            "TORCHELASTIC_RESTART_COUNT": self._attempt,
            "TORCHELASTIC_MAX_RESTARTS": group.spec.max_restarts,
            "TORCHELASTIC_RUN_ID": group.spec.rdzv_handler.get_run_id(),
            "TORCHELASTIC_USE_AGENT_STORE": group.spec.rdzv_handler.use_agent_store,
            # Torch's agent sets it too: a rank that waits too long in NCCL is aborted.
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get(
                "TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"
            ),
        }

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        exit_codes = {one.rank: one.process.exitcode for one in self._ranks}
        self._collect()
        lost = {
            rank: exit_code
            for rank, exit_code in exit_codes.items()
            if exit_code is not None and rank not in self._results
        }
        if _outlives_trainers(self._job.config) and self._scratch.ready.exists():
            for rank in lost:
                self._scratch.record_end(rank=rank)
            lost = {rank: exit_code for rank, exit_code in lost.items() if rank == 0}
        if lost:
            return self._failed(lost)
        needed = [0] if _outlives_trainers(self._job.config) else list(exit_codes)
        if any(exit_codes[rank] is None for rank in needed):
            return RunResult(state=WorkerState.HEALTHY)
        wait_for([one.process for one in self._ranks], SERVING_GRACE_S)
        values = {rank: self._results.get(rank) for rank in exit_codes}
        return RunResult(state=WorkerState.SUCCEEDED, return_values=values)

    def _collect(self) -> None:
        """Receive the results of the ranks whose work has returned."""
        for one in self._ranks:
            with suppress(EOFError):  # the rank ended without a result
                if one.rank not in self._results and one.result.poll():
                    self._results[one.rank] = one.result.recv()

    def _failed(self, lost: Mapping[int, int]) -> RunResult:
        ends = Ends(
            ranks=[one.rank for one in self._ranks],
            exit_codes=lost,
            out_of_memory=oom_kills() > self._oom_kills,
            server_is_gone=fork_server_is_gone(),
        )
        self._shutdown()  # late ranks record their stacks only now
        self.failure = first_failure(ends, self._scratch, self._job.config, attempt=self._attempt)
        self._scratch.record_cause(self.failure, attempt=self._attempt)
        if self.failure.kind == "user":
            self._remaining_restarts = 0  # it would only fail again
        return RunResult(state=WorkerState.FAILED)

    def _stop_workers(self, worker_group: WorkerGroup, *_: Any, **__: Any) -> None:
        self._shutdown()

    def _shutdown(self, *_: Any, **__: Any) -> None:
        patience_s = self._job.config.launch.shutdown_timeout_s
        end_ranks(self._ranks, self._scratch, self._own_children, patience_s=patience_s)
        self._ranks, self._results = [], {}


def _outlives_trainers(config: Config) -> bool:
    """Return whether the run goes on when a rank that serves the loop is lost."""
    return config.parallelism.get("mode") == "async" and config.launch.nnodes == 1
