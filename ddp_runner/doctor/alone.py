"""All looks at one machine, each within its limit. Torch-free, but for the look at torch."""

import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

from ddp_runner.doctor import gpus, machine, network, storage
from ddp_runner.doctor.finding import LIMIT_S, Finding, ok, problem, warning, within
from ddp_runner.errors import typed
from ddp_runner.host.hardware import detect
from ddp_runner.host.network import host_address, interfaces

TORCH_LIMIT_S = 300.0  # its files may come from a slow disk
SLOW_S = 60.0


def examine(outputs: Path) -> list[Finding]:
    """Return what is found on this machine.

    Args:
        outputs: the folder of the runs, which need not exist yet.
    """
    looks: dict[str, Callable[[], Iterable[Finding]]] = {
        "software": machine.software,
        "GPUs": gpus.gpus,
        "cores": machine.cores,
        "memory": machine.memory,
        "shared memory": machine.shared_memory,
        "limits": machine.limits,
        "temp folder": machine.temp,
        "leftovers": machine.leftovers,
        "variables": partial(machine.variables, os.environ),
        "network": _network,
        "outputs": partial(storage.space, outputs),
        "disk": partial(storage.behaviour, outputs),
    }
    advice = "the machine does not answer this as others do; look into it by hand"
    found = [
        finding
        for name, look in looks.items()
        for finding in within(LIMIT_S, name, look, advice=advice)
    ]
    advice = "its disk is slow or not there: install the environment on a local one"
    return [*found, *within(TORCH_LIMIT_S, "torch", _torch, advice=advice)]


def _network() -> Iterator[Finding]:
    name, found = socket.gethostname(), interfaces()
    address = host_address(name)
    yield from network.show(found)
    yield from network.own_name(name, address, found)
    yield from network.chosen(os.environ, address, found, has_gpus=detect().num_gpus > 0)


def _torch() -> Iterator[Finding]:
    """Yield whether torch can be imported, how fast, and with which backends."""
    started = time.perf_counter()
    try:
        import torch
        import torch.distributed as dist
    except Exception as error:  # a missing library makes it raise OSError, among others
        yield problem("torch", typed(error), "install torch anew, with all that it needs")
        return
    took_s = time.perf_counter() - started
    backends = ["gloo"] if dist.is_gloo_available() else []
    if dist.is_nccl_available() and torch.cuda.is_available():
        backends.append("NCCL " + ".".join(map(str, torch.cuda.nccl.version())))
    backends += ["MPI"] if dist.is_mpi_available() else []
    value = f"imported in {took_s:.1f} s, with {', '.join(backends) or 'no backend'}"
    if "gloo" not in backends:
        yield problem("torch", value, "install a torch with gloo, by which ranks agree")
    elif took_s > SLOW_S:
        yield warning("torch", value, "every start takes as long: use a faster disk for it")
    else:
        yield ok("torch", value)
