"""Run a test's function on several ranks, each in its own process.

The ranks are forked from a server that conftest.py starts and that has imported torch, so a worker
group costs some tenths of a second. They import the function by name from pytest's path, which they
inherit.
"""

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from ddp_runner.config.schema import BackendConfig
from ddp_runner.dist_env import DistEnv
from ddp_runner.distributed import sum_over_ranks
from ddp_runner.host.processes import die_with_launcher
from ddp_runner.rank.process_group import process_group

GLOO = BackendConfig(name="gloo", device="cpu", timeout_s=240)


class RankFailedError(Exception):
    """The first failing rank's traceback, or how its process ended."""


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: object,
    backend: BackendConfig | None = GLOO,
    timeout_s: float = 300.0,
) -> list[Any]:
    """Run function(env, *args) on every rank in a process of its own; return the values by rank.

    Args:
        function: defined at the top of a module, as are the types of the args.
        world_size: number of ranks, all on this machine.
        args: pickled for each rank.
        backend: of the process group that is open during the call; None for no group.
        timeout_s: the ranks are killed after this time.

    Raises:
        RankFailedError: a rank raised, ended or ran out of time; the others are killed.
    """
    __tracebackhide__ = True  # the rank's own traceback is what matters
    context = multiprocessing.get_context("forkserver")
    processes, pipes = [], {}
    with tempfile.TemporaryDirectory(prefix="ddp_runner-ranks-") as folder:
        store = (Path(folder) / "store").as_uri()
        # By value: torch's own pickling shares memory with a process that is about to end.
        call = pickle.dumps((function, args, backend, store, dict(os.environ)))
        try:
            for rank in range(world_size):
                env = DistEnv(rank, rank, world_size, world_size)
                receiver, sender = context.Pipe(duplex=False)
                output = Path(folder) / f"output-{rank}"
                process = context.Process(target=_run_rank, args=(env, call, sender, output))
                process.start()
                sender.close()  # so that the pipe ends when the rank does
                processes.append(process)
                pipes[receiver] = rank
            return _collect(pipes, processes, time.monotonic() + timeout_s)
        finally:
            for process in processes:
                process.kill()  # the fork server's children ignore SIGTERM
                process.join()
            for output in sorted(Path(folder).glob("output-*")):
                print(output.read_text(errors="replace"), end="")  # pytest shows it on a failure


def _collect(pipes: dict[Connection, int], processes: list[Any], deadline: float) -> list[Any]:
    __tracebackhide__ = True
    results: dict[int, Any] = {}
    while len(results) < len(processes):
        open_pipes = [pipe for pipe, rank in pipes.items() if rank not in results]
        ready = wait(open_pipes, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            late = sorted(pipes[pipe] for pipe in open_pipes)
            raise RankFailedError(f"no result from ranks {late} in time; they were killed")
        answers = []
        for pipe in ready:
            rank = pipes[pipe]
            try:
                answers.append((*pickle.loads(pipe.recv_bytes()), rank))
            except EOFError:
                processes[rank].join()
                text = f"ended with exit code {processes[rank].exitcode}"
                answers.append((time.monotonic_ns(), text, None, rank))
        for _, failure, value, rank in sorted(answers, key=lambda answer: answer[0]):
            if failure is not None:
                raise RankFailedError(f"rank {rank}: {failure}")
            results[rank] = value
    for process in processes:
        process.join(timeout=60)
    return [results[rank] for rank in range(len(processes))]


def _run_rank(env: DistEnv, call: bytes, pipe: Connection, output: Path) -> None:
    die_with_launcher()
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    try:
        function, args, backend, store, environ = pickle.loads(call)
        os.environ.update(environ)  # the fork server has those of its own start
        torch.set_num_threads(1)
        with ExitStack() as stack:
            if backend is not None:
                stack.enter_context(process_group(env, backend=backend, init_method=store))
                # Wait until all are connected: a rank that ends earlier would break their setup.
                sum_over_ranks([0.0])
            value = function(env, *args)
        answer = pickle.dumps((time.monotonic_ns(), None, value))
    except BaseException:
        answer = pickle.dumps((time.monotonic_ns(), traceback.format_exc(), None))
    pipe.send_bytes(answer)
