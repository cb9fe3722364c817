"""Run a test's function on several ranks, each in a process of its own.

The processes stay alive between tests: each call gets the state of a new process, a process group
of its own, and the caller's folder and environment. A call that fails or leaves something behind
ends all of them, so the next call gets new ones. They are forked from a server that has imported
torch.
"""

import gc
import itertools
import os
import pickle
import random
import resource
import select
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from warm import WarmProcess, receive, send

from ddp_runner.config.sections import BackendConfig
from ddp_runner.dist_env import DistEnv
from ddp_runner.host.processes import die_with_parent

GLOO = BackendConfig(name="gloo", device="cpu", timeout_s=240)
MOST_CALLS = 50  # of a process: torch keeps threads of each process group
TESTS = str(Path(__file__).parents[1])
# Modules whose names may not change between two calls, besides our own.
WATCHED = (
    "os",
    "time",
    "socket",
    "torch",
    "torch.cuda",
    "torch.accelerator",
    "torch.distributed",
    "torch.optim",
)

LIMITS = (resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE)

_waiting = list[WarmProcess]()  # by rank


class RankFailedError(Exception):
    """The first failing rank's traceback, or how its process ended."""


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: object,
    backend: BackendConfig | None = GLOO,
    timeout_s: float = 300.0,
    fresh: bool = False,
) -> list[Any]:
    """Run function(env, *args) on every rank in a process of its own; return the values by rank.

    Args:
        function: defined at the top of a module, as are the types of the args.
        world_size: number of ranks, all on this machine.
        args: pickled for each rank.
        backend: of the process group that is open during the call; None for no group.
        timeout_s: the ranks are killed after this time.
        fresh: in processes that have run nothing else and end afterwards.

    Raises:
        RankFailedError: a rank raised, ended or ran out of time; the others are killed.
    """
    __tracebackhide__ = True  # the rank's own traceback is what matters
    processes = [] if fresh else _waiting
    while len(processes) < world_size:
        processes.append(WarmProcess(partial(_serve, len(processes))))
    is_clean = False
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        # By value: torch's own pickling shares memory with a process that is about to end.
        call = pickle.dumps((function, args, world_size, backend, Path(folder).as_uri()))
        try:
            for process in processes[:world_size]:
                send(process.link, (sys.path, dict(os.environ), str(Path.cwd()), folder, call))
            values, is_clean = _collect(processes[:world_size], time.monotonic() + timeout_s)
            return values
        finally:
            if fresh or not is_clean:
                end_ranks(processes)
            for output in sorted(Path(folder).glob("output-*")):
                print(output.read_text(errors="replace"), end="")  # pytest shows it on a failure


def end_ranks(processes: list[WarmProcess] = _waiting) -> None:
    """End the processes that wait for the next call."""
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()
    processes.clear()


def rank_pids() -> list[int]:
    """Return the processes that wait for the next call."""
    return [process.pid for process in _waiting]


def _collect(processes: Sequence[WarmProcess], deadline: float) -> tuple[list[Any], bool]:
    """Return the values by rank, and whether no rank has left anything behind."""
    __tracebackhide__ = True
    ranks = {process.link: rank for rank, process in enumerate(processes)}
    values, is_clean = dict[int, Any](), True
    while len(values) < len(processes):
        waited_for = [link for link, rank in ranks.items() if rank not in values]
        ready, _, _ = select.select(waited_for, [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            late = sorted(ranks[link] for link in waited_for)
            raise RankFailedError(f"no result from ranks {late} in time; they were killed")
        answers = []
        for link in ready:
            rank = ranks[link]
            try:
                moment, failure, value, left = receive(link)
                answers.append((moment, failure, value, rank))
                is_clean = is_clean and not left
            except (EOFError, pickle.UnpicklingError):  # it was killed in the middle
                text = f"ended with exit code {processes[rank].wait(60)}"
                answers.append((time.monotonic_ns(), text, None, rank))
        for _, failure, value, rank in sorted(answers, key=lambda answer: answer[0]):
            if failure is not None:
                raise RankFailedError(f"rank {rank}: {failure}")
            values[rank] = pickle.loads(value)
    return [values[rank] for rank in range(len(processes))], is_clean


def _serve(rank: int, link: socket.socket) -> None:
    """Answer one call after another, until the client ends."""
    import numpy as np
    import torch

    die_with_parent()
    gc.freeze()  # so that a collection after each call looks at what the call left, not at torch
    torch.set_num_threads(1)
    first = _state(torch)
    handlers = {signum: signal.getsignal(signum) for signum in signal.valid_signals()}
    draws = torch.get_rng_state(), random.getstate(), np.random.get_state()
    for num_calls in range(1, MOST_CALLS + 1):
        try:
            sys.path[:], environ, cwd, folder, call = receive(link)
        except EOFError:
            return
        os.environ.clear()
        os.environ.update(environ)
        os.chdir(cwd)
        torch.set_rng_state(draws[0])
        random.setstate(draws[1])
        np.random.set_state(draws[2])
        descriptor = os.open(f"{folder}/output-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.close(descriptor)
        answer = _answer(rank, call)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        _forget()
        torch.set_default_dtype(torch.float32)
        torch.set_num_threads(1)
        for signum, handler in handlers.items():
            if signal.getsignal(signum) != handler:
                signal.signal(signum, handler)
        now = _state(torch)
        left = [
            name for name, part in first.items() if not part.items() <= now.get(name, {}).items()
        ]
        left += [] if num_calls < MOST_CALLS else ["its number of calls"]
        send(link, (*answer, left))
        first = {name: part | first.get(name, {}) for name, part in now.items()}


def _answer(rank: int, call: bytes) -> tuple[int, str | None, bytes | None]:
    from ddp_runner.distributed import sum_over_ranks
    from ddp_runner.rank.process_group import process_group

    try:
        function, args, world_size, backend, store = pickle.loads(call)
        env = DistEnv(rank, rank, world_size, world_size)
        with ExitStack() as stack:
            if backend is not None:
                stack.enter_context(
                    process_group(env, backend=backend, init_method=f"{store}/store")
                )
                # Wait until all are connected: a rank that ends earlier would break their work.
                sum_over_ranks([0.0])
            value = function(env, *args)
        return time.monotonic_ns(), None, pickle.dumps(value)
    except BaseException:
        return time.monotonic_ns(), traceback.format_exc(), None


def _forget() -> None:
    """Forget the tests' own modules and what our functions remember, and free what is unused."""
    for name, module in [*sys.modules.items()]:
        file = getattr(module, "__file__", None) or ""
        if file.startswith(TESTS) and name not in (__name__, "warm", "configs", "__main__"):
            del sys.modules[name]
        elif name.startswith("ddp_runner"):
            for value in vars(module).values():
                if callable(getattr(value, "cache_clear", None)):
                    value.cache_clear()
    gc.collect()


def _state(torch: Any) -> dict[str, dict[str, object]]:
    """Return what a call may not change: settings, threads, and what the names of modules mean.

    A call may add names. Each part is a dictionary, so that one comparison covers all its names.
    """
    from ddp_runner.rank import process_group

    state: dict[str, dict[str, object]] = {
        "": {
            "threads": frozenset(thread.name for thread in threading.enumerate()),
            "process group": torch.distributed.is_initialized(),
            "gradients": torch.is_grad_enabled(),
            "determinism": torch.are_deterministic_algorithms_enabled(),
            "precision": torch.get_float32_matmul_precision(),
            "umask": _umask(),
            "limits": tuple(resource.getrlimit(one) for one in LIMITS),
            # DTensor remembers how it computed, with the groups of meshes that are gone.
            "meshes": any(
                isinstance(one, torch.distributed.DeviceMesh) for one in gc.get_objects()
            ),
        }
    }
    for module_name, module in [*sys.modules.items()]:
        is_ours = module_name.partition(".")[0] == "ddp_runner"
        if not is_ours and module_name not in WATCHED:
            continue
        state[module_name] = names = dict[str, object](_ids(module))
        for name, value in [*vars(module).items()] if is_ours else ():
            if isinstance(value, list | dict | set):
                if value is not process_group._groups_until_exit:  # it only grows
                    names[name] = id(value), len(value)
            elif isinstance(value, itertools.count):
                names[name] = repr(value)
            elif isinstance(value, type) and value.__module__ == module_name:
                state[f"{module_name}.{name}"] = _ids(value)
    return state


def _ids(owner: object) -> dict[str, object]:
    names = dict(vars(owner))
    return dict(zip(names, map(id, names.values()), strict=True))


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
