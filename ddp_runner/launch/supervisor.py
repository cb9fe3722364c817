"""Watches the ranks of this machine and restarts them: torch's elastic agent.

Torch's ``SimpleElasticAgent`` handles what concerns several machines: rendezvous, ranks, restarts.
We start, watch and end the processes ourselves, through its documented extension points, because
its own ``LocalElasticAgent`` waits 30 s for a suspended rank, restarts ranks whose failure is bound
to repeat, and knows one rank's exit code only.
"""

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)

from ddp_runner.errors import UserError
from ddp_runner.host.load import oom_kills
from ddp_runner.host.patience import StoppedError, patiently
from ddp_runner.host.processes import adopt_orphans, fork_server_is_gone, start_fork_server
from ddp_runner.job import Failure, Job
from ddp_runner.launch.blame import Ends, Stack, first_failure
from ddp_runner.launch.machines import Machines
from ddp_runner.launch.rank_processes import RankProcesses
from ddp_runner.launch.ranks import ASYNC_ERROR_HANDLING
from ddp_runner.launch.reports import LOST, REPORT_S, Reports
from ddp_runner.launch.scratch import Scratch
from ddp_runner.tracking.run_dir import RunDir

MONITOR_INTERVAL_S = 0.05
BARRIER_S = 10.0  # for all machines to notice that all have ended
JOIN_GRACE_S = 10.0  # beyond launch.join_timeout_s, for the store itself to notice


def supervise(job: Job, scratch: Scratch) -> dict[str, Any] | Failure | None:
    """Run this machine's ranks to their end, with restarts.

    Returns:
        The result of the first rank; the failure that came first, if the last attempt failed; None
        if a stop was requested while the machines were waiting for each other.

    Raises:
        UserError: the machines of the run do not meet.
    """
    adopt_orphans()
    supervisor = Supervisor(job, scratch)
    try:
        result = supervisor.run()
    except StoppedError:
        return None
    except NotMetError as error:
        if not supervisor.has_begun:
            raise UserError(str(error)) from error
        return Failure(rank=-1, kind="machine", sentence=str(error))
    finally:
        supervisor.get_worker_group().spec.rdzv_handler.shutdown()
    if supervisor.failure is not None:
        return supervisor.failure
    assert result is not None  # ``_rendezvous`` says why if the machines have not met
    first: dict[str, Any] = result.return_values[min(result.return_values)]
    return first


class NotMetError(Exception):
    """The machines did not meet, or not again."""


class Supervisor(SimpleElasticAgent):
    """Torch's agent, with processes that are forked from our server.

    Beside its extension points it uses `_worker_group` and `_remaining_restarts` of the agent,
    which torch 2.11 and 2.15 have.
    """

    def __init__(self, job: Job, scratch: Scratch) -> None:
        launch, num_ranks = job.config.launch, job.config.world_size // job.config.launch.nnodes
        known = None if job.lacks_run else num_ranks
        self._machines = Machines(launch, num_ranks=known, sees_run=self._sees_run)
        super().__init__(
            WorkerSpec(
                role="default_role",
                local_world_size=num_ranks,
                entrypoint="ddp_runner.worker",  # for torch's log; RankProcesses starts the ranks
                rdzv_handler=self._machines,
                max_restarts=launch.max_restarts,
                monitor_interval=MONITOR_INTERVAL_S,
            )
        )
        self.failure: Failure | None = None  # of the last attempt
        self._job, self._scratch = job, scratch
        self._ranks = RankProcesses(job, scratch)
        self._oom_kills = 0
        self.has_begun = False  # ranks have been started
        self._ending_since: float | None = None  # when the first ranks had ended well

    @property
    def _attempt(self) -> int:
        return self._worker_group.spec.max_restarts - self._remaining_restarts

    @property
    def _reports(self) -> Reports:
        """What the machines tell each other in this round."""
        assert self._machines.reports is not None, "the machines have met"
        return self._machines.reports

    def _sees_run(self) -> bool:
        folder = self._scratch.run_folder() or self._job.run_dir
        return folder is not None and RunDir(folder).record.exists()

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        limit_s = self._job.config.launch.join_timeout_s + JOIN_GRACE_S
        try:
            patiently(
                partial(super()._rendezvous, worker_group),
                limit_s=limit_s,
                stop_requested=self._scratch.stop.exists,
                notice=self._machines.waiting,
            )
        except LOST as error:
            before = f"{self.failure.sentence}; " if self.failure else ""
            raise NotMetError(before + self._machines.why_not_met(error)) from error

    def _assign_worker_ranks(
        self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        assert self._machines.num_ranks is not None, "the machines have met"
        spec.local_world_size = self._machines.num_ranks
        workers: list[Worker] = super()._assign_worker_ranks(
            store, group_rank, group_world_size, spec
        )
        return workers

    def _exit_barrier(self) -> None:
        """Wait for the other machines, of which one holds the store."""
        with suppress(*LOST):  # the run is complete, whatever became of them
            patiently(super()._exit_barrier, limit_s=BARRIER_S)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._scratch.begin_attempt()
        start_fork_server()  # if it was killed
        self._oom_kills = oom_kills()
        self.failure, self.has_begun, self._ending_since = None, True, None
        begun_in = self._scratch.run_folder()
        run_dir = self._job.run_dir or begun_in
        self._job = replace(self._job, run_dir=run_dir, begun_in=begun_in)
        environs = [
            _rank_environ(one, worker_group, attempt=self._attempt) for one in worker_group.workers
        ]
        return self._ranks.start(self._job, environs)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        reports = self._reports
        exit_codes, results = self._ranks.exit_codes(), self._ranks.results()
        lost = {
            rank: exit_code
            for rank, exit_code in exit_codes.items()
            if exit_code is not None and rank not in results
        }
        if lost or reports.have_come:
            return self._failed(lost)
        if self._ending_since is None and (results or reports.ranks_have_ended):
            self._ending_since = time.monotonic()
        limit_s = self._job.config.backend.timeout_s
        if None in exit_codes.values():
            # Nobody waits for such a rank in a collective, where it would be noticed.
            is_late = self._ending_since and time.monotonic() > self._ending_since + limit_s
            if is_late and (suspended := self._ranks.suspended()):
                return self._failed(lost, suspended=suspended[0])
            return RunResult(state=WorkerState.HEALTHY)
        is_over = reports.all_ended(limit_s=limit_s + REPORT_S)
        if is_over is None:
            return RunResult(state=WorkerState.HEALTHY)
        if not is_over:
            return self._failed({})
        return RunResult(state=WorkerState.SUCCEEDED, return_values=dict(results))

    def _failed(self, lost: Mapping[int, int], *, suspended: int | None = None) -> RunResult:
        reports = self._reports
        ends = Ends(
            ranks=list(self._ranks.exit_codes()),
            exit_codes=lost,
            out_of_memory=oom_kills() > self._oom_kills,
            server_is_gone=fork_server_is_gone(),
            peers_waited_in_vain=reports.are_of_late_peers,
        )
        self._shutdown()  # late ranks record their stacks only now
        stacks = {
            rank: Stack(path.stat().st_mtime_ns, path.read_text(encoding="utf-8"))
            for rank, path in self._scratch.stacks(attempt=self._attempt).items()
        }
        recorded = self._scratch.failures(attempt=self._attempt)
        self.failure = first_failure(ends, recorded, stacks, self._job.config)
        if suspended is not None:
            limit_s = self._job.config.backend.timeout_s
            sentence = (
                f"rank {suspended} is suspended, and has not ended within backend.timeout_s "
                f"({limit_s:g} s) of the others"
            )
            self.failure = Failure(rank=suspended, kind="late", sentence=sentence)
        self.failure = reports.first_failure(self.failure)
        self._scratch.record_cause(self.failure, attempt=self._attempt)
        if self.failure.kind == "user" or self.failure.rank < 0:
            self._remaining_restarts = 0  # it would only fail again, or there is nowhere to meet
        return RunResult(state=WorkerState.FAILED)

    def _shutdown(self, *_: Any, **__: Any) -> None:
        """End the ranks, and all that they have started."""
        self._ranks.end()

    _stop_workers = _shutdown


def _rank_environ(one: Worker, group: WorkerGroup, *, attempt: int) -> dict[str, str]:
    """Return the variables that torchrun sets for a rank."""
    spec = group.spec
    variables = {
        "RANK": one.global_rank,
        "LOCAL_RANK": one.local_rank,
        "WORLD_SIZE": one.world_size,
        "LOCAL_WORLD_SIZE": spec.local_world_size,
        "GROUP_RANK": group.group_rank,
        "GROUP_WORLD_SIZE": group.group_world_size,
        "MASTER_ADDR": group.master_addr,
        "MASTER_PORT": group.master_port,
        "TORCHELASTIC_RESTART_COUNT": attempt,
        "TORCHELASTIC_MAX_RESTARTS": spec.max_restarts,
        "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
        "TORCHELASTIC_USE_AGENT_STORE": spec.rdzv_handler.use_agent_store,
        # Torch's agent sets it too: a rank that waits too long in NCCL is aborted.
        ASYNC_ERROR_HANDLING: os.environ.get(ASYNC_ERROR_HANDLING, "1"),
    }
    return {name: str(value) for name, value in variables.items()}
