"""The programs of programs.py with processes and process groups."""

import ctypes
import os
import resource
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import simgpu
import torch
import torch.distributed as dist

DEVICE = torch.device("simgpu", 0)
TIMEOUT = timedelta(seconds=60)


def in_a_fork(function: Callable[[], Any]) -> int:
    """Return the exit code of a function in a forked process, or minus its signal."""
    if pid := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        function()
        os._exit(0)
    except RuntimeError as error:
        os._exit(3 if "forked subprocess" in str(error) else 4)


def host_reads() -> Any:
    """The host reads a device's memory, and pinned memory."""
    device, pinned = torch.ones(4, device=DEVICE), torch.ones(4).pin_memory()
    torch.accelerator.synchronize()
    addresses = [device.data_ptr(), pinned.data_ptr()]
    return [in_a_fork(partial(ctypes.string_at, address, 16)) for address in addresses]


def forks() -> Any:
    """A forked process makes a tensor, and uses its parent's."""
    tensor = torch.ones(4, device=DEVICE)
    return [in_a_fork(lambda: torch.ones(4, device=DEVICE)), in_a_fork(lambda: tensor + 1)]


def two_ranks(store: str) -> Any:
    """Collectives of two ranks; the processes part before either has used a device."""
    if child := os.fork():
        found = one_of_two(store, rank=0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        return found
    code = 1
    try:
        one_of_two(store, rank=1)
        code = 0
    finally:
        os._exit(code)  # as the ranks of a run end


def one_of_two(store: str, *, rank: int) -> Any:
    """Return what a rank got from each collective."""
    os.environ["RANK"] = str(rank)
    torch.accelerator.set_device_index(rank)
    backend = dist.get_default_backend_for_device("simgpu")
    dist.init_process_group(
        backend, store=dist.FileStore(store, 2), rank=rank, world_size=2, timeout=TIMEOUT
    )
    device = torch.device("simgpu", rank)
    mean = torch.full((4,), float(rank), device=device)
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    on_root = torch.full((4,), float(rank), device=device)
    dist.reduce(on_root, 0, op=dist.ReduceOp.AVG)
    whole = torch.full((4,), 3 * rank, device=device)
    dist.all_reduce(whole, op=dist.ReduceOp.AVG)
    share = torch.empty(2, device=device)
    dist.reduce_scatter_tensor(share, torch.arange(4.0, device=device))
    waits = simgpu.waits()
    gathered = torch.empty(4, device=device)
    dist.all_gather_into_tensor(gathered, share)
    sent = torch.full((1,), float(rank + 5), device=device)
    dist.recv(sent, 1) if rank == 0 else dist.send(sent, 0)
    try:
        dist.broadcast(torch.ones(4, 2, device=device).t(), 0)
    except ValueError as error:
        gaps = str(error)
    found = [tensor.tolist() for tensor in (mean, on_root, whole, share, gathered, sent)]
    dist.barrier(device_ids=[rank])
    dist.destroy_process_group()
    return {"backend": backend, "values": found, "waits": waits, "gaps": gaps}


def collective(store: str) -> Any:
    """A collective of a tensor that is not there yet; wait() in another stream."""
    dist.init_process_group("simccl", store=dist.FileStore(store, 1), rank=0, world_size=1)
    side = torch.Stream(DEVICE)
    simgpu.reset_waits()
    with simgpu.held(side):
        with side:
            tensor = torch.ones(4, device=DEVICE)
            work = dist.all_reduce(tensor, async_op=True)
        before = (tensor * 1)[0].item()
        is_done = work.is_completed()
        waits = simgpu.waits()
        work.wait()
        after = tensor * 1
        waits = {name: n - waits.get(name, 0) for name, n in simgpu.waits().items()}
    found = [before, is_done, sum(waits.values()), after[0].item()]
    dist.destroy_process_group()
    return found
