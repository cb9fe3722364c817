"""Watches the ranks of this machine and restarts them: torch's elastic agent.

Torch's ``SimpleElasticAgent`` handles what concerns several machines: rendezvous, ranks, restarts.
We start, watch and end the processes ourselves, through its documented extension points, because
its own ``LocalElasticAgent`` waits 30 s for a suspended rank, restarts ranks whose failure is bound
to repeat, and knows one rank's exit code only.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
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
from ddp_runner.host.patience import StoppedError, patiently
from ddp_runner.host.processes import adopt_orphans
from ddp_runner.job import Failure, Job
from ddp_runner.launch.machines import Machines
from ddp_runner.launch.ranks import Ranks
from ddp_runner.launch.reports import LOST, REPORT_S, Reports
from ddp_runner.launch.stop_requests import StopRequests
from ddp_runner.launch.wire import rank_environ
from ddp_runner.tracking.run_dir import RunDir

MONITOR_INTERVAL_S = 0.05
BARRIER_S = 10.0  # for all machines to notice that all have ended
JOIN_GRACE_S = 10.0  # beyond launch.join_timeout_s, for the store itself to notice


def supervise(
    job: Job, stop: StopRequests, note_run: Callable[[Path, bool], list[int]]
) -> dict[str, Any] | Failure | None:
    """Run this machine's ranks to their end, with restarts.

    Args:
        job: with its temporary folder.
        stop: asks for the end of the run.
        note_run: gets the run folder once rank 0 has claimed it, and whether that rank is here;
            it returns the processes that it has started, which are no rank's.

    Returns:
        The result of the first rank; the failure that came first, if the last attempt failed; None
        if a stop was requested while the machines were waiting for each other.

    Raises:
        UserError: the machines of the run do not meet.
    """
    adopt_orphans()
    supervisor = Supervisor(job, stop, note_run)
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

    def __init__(
        self, job: Job, stop: StopRequests, note_run: Callable[[Path, bool], list[int]]
    ) -> None:
        launch, num_ranks = job.config.launch, job.config.world_size // job.config.launch.nnodes
        known = None if job.lacks_run else num_ranks
        self._machines = Machines(launch, num_ranks=known, sees_run=self._sees_run)
        super().__init__(
            WorkerSpec(
                role="default_role",
                local_world_size=num_ranks,
                entrypoint="ddp_runner.worker",  # for torch's log; Ranks starts them
                rdzv_handler=self._machines,
                max_restarts=launch.max_restarts,
                monitor_interval=MONITOR_INTERVAL_S,
            )
        )
        self.failure: Failure | None = None  # of the last attempt
        self._job, self._stop, self._note_run = job, stop, note_run
        self._ranks = Ranks(job, stop)
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
        folder = self._job.begun_in or self._job.run_dir
        return folder is not None and RunDir(folder).record.exists()

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        limit_s = self._job.config.launch.join_timeout_s + JOIN_GRACE_S
        try:
            patiently(
                partial(super()._rendezvous, worker_group),
                limit_s=limit_s,
                stop_requested=lambda: self._stop.is_asked,
                notice=self._machines.waiting,
            )
        except LOST as error:
            if self._stop.is_asked:  # what was lost since, as with another machine, is no news
                raise StoppedError from error
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
        self.failure, self.has_begun, self._ending_since = None, True, None
        self._ranks, spec = Ranks(self._job, self._stop), worker_group.spec
        node_rank, address = worker_group.group_rank, worker_group.master_addr
        assert node_rank is not None, "the machines have met"
        environs = [
            rank_environ(
                one.global_rank,
                self._job.config,
                attempt=self._attempt,
                run_id=spec.rdzv_handler.get_run_id(),
                local_world_size=spec.local_world_size,
                node_rank=node_rank,
                address=(str(address), int(worker_group.master_port or 0)),
            )
            for one in worker_group.workers
        ]
        self._ranks.start(environs)
        return {one.local_rank: one.global_rank for one in worker_group.workers}

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        reports = self._reports
        lost, results = self._ranks.poll(), self._ranks.results
        claimed = self._ranks.claimed
        if claimed is not None and self._job.begun_in is None:
            self._ranks.spare(self._note_run(claimed, worker_group.group_rank == 0))
            self._job = replace(self._job, begun_in=claimed, run_dir=self._job.run_dir or claimed)
        if lost or reports.have_come:
            return self._failed(lost)
        if self._ending_since is None and (results or reports.ranks_have_ended):
            self._ending_since = time.monotonic()
        limit_s = self._job.config.backend.timeout_s
        if not self._ranks.all_ended():
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
        failure = self._ranks.failed(
            lost, suspended=suspended, peers_waited_in_vain=reports.are_of_late_peers
        )
        self._shutdown()
        self.failure = reports.first_failure(failure)
        earlier = (*self._job.earlier, (self._ranks.first_step, self.failure.sentence))
        self._job = replace(self._job, earlier=earlier)
        if self.failure.kind == "user" or self.failure.rank < 0:
            self._remaining_restarts = 0  # it would only fail again, or there is nowhere to meet
        return RunResult(state=WorkerState.FAILED)

    def _shutdown(self, *_: Any, **__: Any) -> None:
        """End the ranks, and all that they have started."""
        self._ranks.end()

    _stop_workers = _shutdown
