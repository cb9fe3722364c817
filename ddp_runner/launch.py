"""From a resolved config to a gang of workers on this machine, and to an exit code.

Called by ``__main__`` for each job. Workers are forked from a server that has imported torch
already, so that a gang is up in a tenth of a second; torch's elastic agent watches and restarts
them. The server starts before this process imports torch, so that the two imports overlap.
"""

import logging
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from multiprocessing import forkserver
from pathlib import Path

from ddp_runner.config import Config
from ddp_runner.failures import Failure, first_failure, late_rank
from ddp_runner.gang import RankLostError, run_gang
from ddp_runner.interrupts import SIGNALS, Interrupts, born_deaf
from ddp_runner.job import EXIT_COMPLETED, EXIT_FAILED, EXIT_USER_ERROR, STOP, Job, Outcome
from ddp_runner.record import write_run_record


def start_fork_server() -> None:
    """Start the process that workers are forked from, once; returns at once.

    It must never start threads or touch CUDA: neither survives a fork.
    """
    multiprocessing.set_forkserver_preload(["ddp_runner.preload"])
    with born_deaf(OPENBLAS_NUM_THREADS="1"):
        forkserver.ensure_running()


def launch(job: Job) -> Outcome:
    """Start a gang on this machine, wait for its end, and return how it ended."""
    start_fork_server()
    # One shared store for rendezvous and process group would keep the keys of a gang that was
    # killed, and the restarted gang fails over them now and then.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    config, slot, oom_kills_before = job.config, job.slot, _oom_kills()
    scratch = Path(tempfile.mkdtemp(prefix="ddp_runner-"))
    if slot is not None:
        (scratch / STOP).symlink_to(slot.folder / STOP)  # one request stops the gangs of all slots
    try:
        with Interrupts(
            scratch,
            timeout_s=config.launch.shutdown_timeout_s,
            running=lambda: [job.run_dir] if job.run_dir else [],
            signals=() if slot else SIGNALS,  # a slot's come from who started it
        ) as interrupts:
            # A signal during these seconds of imports is answered like any other.
            from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
            from torch.distributed.launcher.api import elastic_launch

            from ddp_runner.rendezvous import launch_config
            from ddp_runner.worker import work

            _quiet_agent()
            job = replace(job, scratch=scratch)
            try:
                if _outlives_trainers(config):
                    result = run_gang(job, work)
                else:
                    agent = elastic_launch(launch_config(config, scratch), work)
                    result = next(iter(agent(job).values()))
            except (ChildFailedError, RankLostError) as error:
                if isinstance(error, RankLostError):
                    rank, exit_code = error.rank, error.exit_code
                else:
                    rank, seen = error.get_first_failure()
                    exit_code = seen.exitcode
                oom = _oom_kills() > oom_kills_before
                failure = _explain(rank, exit_code, scratch, config, oom=oom)
                return _failed(failure, job.run_dir)
        received = interrupts.received or signal.SIGTERM
        return Outcome(
            status=result["status"],
            exit_code=EXIT_COMPLETED if result["status"] == "completed" else 128 + received,
            run_dir=Path(result["run_dir"]),
        )
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _failed(failure: Failure, run_dir: Path | None) -> Outcome:
    if run_dir is not None:
        write_run_record(
            run_dir,
            status="failed",
            finished_at=time.time(),
            error={"rank": failure.rank, "kind": failure.kind, "sentence": failure.sentence},
        )
        if failure.traceback:
            (run_dir / "logs").mkdir(exist_ok=True)
            (run_dir / "logs" / "failure.txt").write_text(failure.traceback, encoding="utf-8")
    exit_code = EXIT_USER_ERROR if failure.kind == "user" else EXIT_FAILED
    return Outcome(status="failed", exit_code=exit_code, run_dir=run_dir, failure=failure)


def _outlives_trainers(config: Config) -> bool:
    """Return whether the run goes on when a rank that serves the loop is lost."""
    return config.parallelism.get("mode") == "async" and config.launch.nnodes == 1


def _explain(rank: int, exit_code: int, scratch: Path, config: Config, *, oom: bool) -> Failure:
    """Return the failure that came first: a rank's own words, or the signal that killed it."""
    attempt, timeout_s = config.launch.max_restarts, config.backend.timeout_s
    told = first_failure(scratch, attempt=attempt)
    if told is not None and told.kind == "peer" and "imed out" in told.sentence:
        late = late_rank(
            scratch, attempt=attempt, timeout_s=timeout_s, world_size=config.world_size
        )
        return late or told
    if told is not None and (told.kind != "peer" or exit_code >= 0):
        return told
    sentence = f"rank {rank} ended with exit code {exit_code}"
    if exit_code < 0:
        sentence = f"rank {rank} was killed by {signal.Signals(-exit_code).name}"
    if exit_code == -signal.SIGKILL:
        sentence += (
            ": likely out of memory, the kernel says; use a smaller batch.per_rank"
            if oom
            else " from outside, or by the kernel for want of memory"
        )
    return Failure(rank=rank, kind="signal", sentence=sentence)


def _quiet_agent() -> None:
    """Silence the agent's own report of a failure, which ours replaces, unless LOGLEVEL is set."""
    if "LOGLEVEL" not in os.environ:
        for name in list(logging.root.manager.loggerDict):
            if name.startswith(("torch.distributed.elastic", "torch.multiprocessing")):
                logging.getLogger(name).setLevel(logging.CRITICAL)


def _oom_kills() -> int:
    """Return how often the kernel has killed a process of this control group for memory."""
    try:
        events = Path("/sys/fs/cgroup/memory.events").read_text()
    except OSError:
        return 0
    counts: Mapping[str, str] = dict(line.split() for line in events.splitlines())
    return int(counts.get("oom_kill", 0))
