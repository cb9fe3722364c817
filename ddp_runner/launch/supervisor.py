"""Watches the ranks of this machine and restarts them: torch's elastic agent.

Torch's ``SimpleElasticAgent`` handles what concerns several machines: rendezvous, ranks, restarts.
We start, watch and end the processes ourselves, through its documented extension points, because
its own ``LocalElasticAgent`` waits 30 s for a suspended rank, restarts ranks whose failure is bound
to repeat, and knows one rank's exit code only.
"""

import sys
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

from ddp_runner.config.schema import is_asynchronous
from ddp_runner.errors import UserError
from ddp_runner.host.load import oom_kills
from ddp_runner.host.patience import StoppedError, patiently
from ddp_runner.host.processes import adopt_orphans, fork_server_is_gone, start_fork_server
from ddp_runner.host.streams import print_line
from ddp_runner.job import Failure, Job, Status
from ddp_runner.launch.blame import Ends, Stack, first_failure
from ddp_runner.launch.elastic import rank_environ, worker_spec
from ddp_runner.launch.machines import Machines
from ddp_runner.launch.rank_processes import RankProcesses
from ddp_runner.launch.reports import LOST, REPORT_S, Reports
from ddp_runner.launch.scratch import Scratch
from ddp_runner.tracking.run_dir import RunDir

SERVING_GRACE_S = 10.0  # from the end of rank 0 to that of the ranks that only serve it
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
        supervisor.say_goodbye()
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
        super().__init__(worker_spec(job, sees_run=self._sees_run))
        self.failure: Failure | None = None  # of the last attempt
        self._job, self._scratch = job, scratch
        self._ranks = RankProcesses(job, scratch)
        self._oom_kills = 0
        self.has_begun = False  # ranks have been started
        self._ending_since: float | None = None  # when the first ranks had ended well
        self._is_leaving = False  # this machine ends, and the others may go on
        # Whether the run goes on when a rank that serves the loop is lost.
        is_alone = job.config.launch.most_nodes == 1
        self._outlives_trainers = is_alone and is_asynchronous(job.config.parallelism)

    @property
    def _attempt(self) -> int:
        return self._worker_group.spec.max_restarts - self._remaining_restarts

    @property
    def _machines(self) -> Machines | None:
        """The rendezvous of several machines; None: there is one machine."""
        handler = self._worker_group.spec.rdzv_handler
        return handler if isinstance(handler, Machines) else None

    @property
    def _reports(self) -> Reports | None:
        return self._machines.reports if self._machines else None

    def _sees_run(self) -> bool:
        folder = self._scratch.run_folder() or self._job.run_dir
        return folder is not None and RunDir(folder).record.exists()

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        meet, machines = partial(super()._rendezvous, worker_group), self._machines
        if machines is None:
            meet()
            return
        limit_s = self._job.config.launch.join_timeout_s + JOIN_GRACE_S
        try:
            patiently(
                meet,
                limit_s=limit_s,
                stop_requested=self._scratch.stop.exists,
                notice=machines.waiting,
            )
        except LOST as error:
            before = f"{self.failure.sentence}; " if self.failure else ""
            raise NotMetError(before + machines.why_not_met(error)) from error

    def say_goodbye(self) -> None:
        """Let the other machines go on without this one, if they are to."""
        if self._machines is not None and self._is_leaving:
            self._machines.leave()

    def _assign_worker_ranks(
        self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        if self._machines is not None and self._machines.num_ranks is not None:
            spec.local_world_size = self._machines.num_ranks
        workers: list[Worker] = super()._assign_worker_ranks(
            store, group_rank, group_world_size, spec
        )
        return workers

    def _exit_barrier(self) -> None:
        """Wait for the other machines, of which one holds the store."""
        if self._machines is not None and not self._is_leaving:
            with suppress(*LOST):  # the run is complete, whatever became of them
                patiently(super()._exit_barrier, limit_s=BARRIER_S)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._scratch.begin_attempt(self._attempt)
        start_fork_server()  # if it was killed
        self._oom_kills = oom_kills()
        self.failure, self.has_begun, self._ending_since = None, True, None
        begun_in = self._scratch.run_folder()
        run_dir = self._job.run_dir or begun_in
        self._job = replace(self._job, run_dir=run_dir, begun_in=begun_in)
        environs = [
            rank_environ(one, worker_group, attempt=self._attempt) for one in worker_group.workers
        ]
        return self._ranks.start(self._job, environs)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        exit_codes, results = self._ranks.exit_codes(), self._ranks.results()
        lost = {
            rank: exit_code
            for rank, exit_code in exit_codes.items()
            if exit_code is not None and rank not in results
        }
        if self._outlives_trainers and self._scratch.ready.exists():
            for rank in lost:
                self._scratch.record_end(rank=rank)
            lost = {rank: exit_code for rank, exit_code in lost.items() if rank == 0}
        reports = self._reports
        if lost or (reports is not None and reports.have_come):
            return self._failed(lost)
        is_elastic = self._job.config.launch.is_elastic
        if is_elastic and reports is not None and reports.is_wanted:
            self._scratch.regroup.touch()  # all ranks save and end; then the machines meet anew
        needed = [0] if self._outlives_trainers else list(exit_codes)
        if self._ending_since is None and (results or (reports and reports.ranks_have_ended)):
            self._ending_since = time.monotonic()
        limit_s = self._job.config.backend.timeout_s
        if any(exit_codes[rank] is None for rank in needed):
            # Nobody waits for such a rank in a collective, where it would be noticed.
            is_late = self._ending_since and time.monotonic() > self._ending_since + limit_s
            if is_late and (suspended := self._ranks.suspended()):
                return self._failed(lost, suspended=suspended[0])
            return RunResult(state=WorkerState.HEALTHY)
        results = self._ranks.results(wait_s=SERVING_GRACE_S)
        values = {rank: results.get(rank) for rank in exit_codes}
        is_preempted = any(one["status"] == Status.PREEMPTED for one in results.values())
        if is_elastic and is_preempted:
            # The machines that were not asked to stop go on without the others.
            self._is_leaving = self._scratch.stop.exists()
            if not self._is_leaving:
                is_wanted = reports is not None and reports.is_wanted
                return self._regrouping(f"a machine {'joins' if is_wanted else 'leaves'}")
        is_over = reports is None or reports.all_ended(limit_s=limit_s + REPORT_S)
        if is_over is None:
            return RunResult(state=WorkerState.HEALTHY)
        if not is_over:
            return self._failed({})
        return RunResult(state=WorkerState.SUCCEEDED, return_values=values)

    def _regrouping(self, reason: str) -> RunResult:
        """Return what lets torch's agent meet the machines anew, without counting a restart."""
        self._remaining_restarts += 1
        print_line(f"{reason}: the machines meet again, and the run goes on", stream=sys.stdout)
        return RunResult(state=WorkerState.FAILED)

    def _failed(self, lost: Mapping[int, int], *, suspended: int | None = None) -> RunResult:
        reports = self._reports
        ends = Ends(
            ranks=list(self._ranks.exit_codes()),
            exit_codes=lost,
            out_of_memory=oom_kills() > self._oom_kills,
            server_is_gone=fork_server_is_gone(),
            peers_waited_in_vain=reports is not None and reports.are_of_late_peers,
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
        if reports is not None:
            self.failure = reports.first_failure(self.failure)
        self._scratch.record_cause(self.failure, attempt=self._attempt)
        if self.failure.kind == "user" or self.failure.rank < 0:
            self._remaining_restarts = 0  # it would only fail again, or there is nowhere to meet
        elif self.failure.kind == "machine" and self._job.config.launch.is_elastic:
            return self._regrouping(self.failure.sentence)
        return RunResult(state=WorkerState.FAILED)

    def _shutdown(self, *_: Any, **__: Any) -> None:
        """End the ranks, and all that they have started."""
        self._ranks.end()

    _stop_workers = _shutdown
