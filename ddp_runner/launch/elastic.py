"""Adapter of torch's launcher: how the agents of a run's machines meet, and NUMA binding.

Two private names of torch are in here, since torch has no public ones: the state of a rendezvous,
and `_maybe_wrap_with_numa_binding`. Checked on torch 2.11 and 2.15.
"""

import inspect
import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch.distributed as dist
import torch.distributed.elastic.rendezvous as rdzv
import torch.numa.binding as numa
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.launcher.api import LaunchConfig

from ddp_runner import worker
from ddp_runner.config.schema import RunConfig
from ddp_runner.host.streams import notice_if_slow

MONITOR_INTERVAL_S = 0.05
RDZV_TIMEOUT_S = 900  # torchrun's


def worker_spec(config: RunConfig) -> WorkerSpec:
    """Return what this machine's agent starts, and how it meets the agents of other machines."""
    launch = config.launch
    master_addr, master_port = None, None
    if launch.nnodes > 1 and launch.node_rank is not None:
        master_addr, master_port = parse_rendezvous_endpoint(launch.rdzv_endpoint, default_port=-1)
    return WorkerSpec(
        role="default_role",
        local_world_size=config.world_size // launch.nnodes,
        entrypoint=worker.work,
        rdzv_handler=_rendezvous_handler(config),
        max_restarts=launch.max_restarts,
        monitor_interval=MONITOR_INTERVAL_S,
        master_addr=master_addr,
        master_port=master_port,
    )


def _rendezvous_handler(config: RunConfig) -> rdzv.RendezvousHandler:
    launch = config.launch
    if launch.nnodes == 1:
        return OneMachine("localhost", 0, rank=0, world_size=1, run_id=uuid.uuid4().hex, timeout=0)
    parameters = rdzv.RendezvousParameters(
        backend="c10d" if launch.node_rank is None else "static",
        endpoint=launch.rdzv_endpoint or "",
        run_id=launch.rdzv_id,
        min_nodes=launch.nnodes,
        max_nodes=launch.nnodes,
        timeout=RDZV_TIMEOUT_S,
        rank=launch.node_rank,
    )
    with noticed_wait(config):
        return rdzv.rendezvous_handler_registry.create_handler(parameters)


@contextmanager
def noticed_wait(
    config: RunConfig, handler: rdzv.RendezvousHandler | None = None
) -> Iterator[None]:
    """Print that this machine waits for the others, if it waits long.

    The handler of a c10d rendezvous knows how many have come; that of a static one does not.
    """
    num_nodes = config.launch.nnodes

    def text() -> str:
        holder = getattr(handler, "_state_holder", None)
        num_missing = num_nodes - (len(holder.state.participants) if holder else 0)
        is_known = 0 < num_missing < num_nodes
        count = f"{num_missing} of {num_nodes} missing" if is_known else f"{num_nodes} in all"
        return (
            f"waiting for the other nodes, {count}, at {config.launch.rdzv_endpoint}; start the "
            "same command on each of them"
        )

    with notice_if_slow(text) if num_nodes > 1 else nullcontext():
        yield


def numa_options(config: RunConfig) -> numa.NumaOptions | None:
    """Return how torchrun binds ranks to the cores near their GPUs; None: not at all."""
    return LaunchConfig(
        min_nodes=config.launch.nnodes,
        max_nodes=config.launch.nnodes,
        nproc_per_node=config.world_size // config.launch.nnodes,
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),  # else it makes a folder for logs
    ).numa_options


def numa_bound(
    work: Callable[..., Any], local_rank: int, options: numa.NumaOptions | None
) -> Callable[..., Any]:
    """Return `work`, bound to the cores near this rank's GPU."""
    if options is None:
        return work
    bind = numa._maybe_wrap_with_numa_binding
    is_new = "device_index" in inspect.signature(bind).parameters  # not so in torch 2.11
    device: dict[str, Any] = {"device_index" if is_new else "gpu_index": local_rank}
    return bind(work, **device, numa_options=options)


class OneMachine(StaticTCPRendezvous):
    """The rendezvous of a single agent with itself: no port, no listening socket, no waiting.

    The c10d one listens on all interfaces, even for one machine.
    """

    @property
    def use_agent_store(self) -> bool:
        """Return False: ranks meet through a file, and never use the address."""
        return False

    def next_rendezvous(self) -> rdzv.RendezvousInfo:
        """Return rank 0 of 1, with a store in this process."""
        address = rdzv.RendezvousStoreInfo(self.master_addr, self.master_port)
        return rdzv.RendezvousInfo(dist.HashStore(), self.rank, self.world_size, address)
