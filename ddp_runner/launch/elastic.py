"""Adapter of torch's launcher: how the agents of a run's machines meet, and NUMA binding.

The one private name of torch in here is `_maybe_wrap_with_numa_binding`: torch has no public name
for it. Checked on torch 2.11 and 2.15.
"""

import inspect
import os
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist
import torch.distributed.elastic.rendezvous.registry as rdzv_registry
import torch.numa.binding as numa
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.launcher.api import LaunchConfig

from ddp_runner.config.schema import Config
from ddp_runner.host.streams import notice_if_slow

MONITOR_INTERVAL_S = 0.05
RDZV_TIMEOUT_S = 900  # torchrun's


def worker_spec(config: Config, work: Callable[..., Any]) -> WorkerSpec:
    """Return what this machine's agent starts, and how it meets the agents of other machines."""
    launch = config.launch
    handler: RendezvousHandler = OneMachine(uuid.uuid4().hex)
    master_addr, master_port = None, None
    if launch.nnodes > 1:
        endpoint = launch.rdzv_endpoint or ""
        rank: dict[str, Any] = {} if launch.node_rank is None else {"rank": launch.node_rank}
        if launch.node_rank is not None:
            master_addr, master_port = parse_rendezvous_endpoint(endpoint, default_port=-1)
        with noticed_wait(config):
            handler = rdzv_registry.get_rendezvous_handler(
                RendezvousParameters(
                    backend="c10d" if launch.node_rank is None else "static",
                    endpoint=endpoint,
                    run_id=launch.rdzv_id,
                    min_nodes=launch.nnodes,
                    max_nodes=launch.nnodes,
                    timeout=RDZV_TIMEOUT_S,
                    **rank,
                )
            )
    return WorkerSpec(
        role="default_role",
        local_world_size=config.world_size // launch.nnodes,
        entrypoint=work,
        rdzv_handler=handler,
        max_restarts=launch.max_restarts,
        monitor_interval=MONITOR_INTERVAL_S,
        master_addr=master_addr,
        master_port=master_port,
    )


def noticed_wait(config: Config) -> AbstractContextManager[None]:
    """Return a context that says that this machine waits for the others, if it waits long."""
    launch = config.launch
    text = f"waiting for the other nodes, {launch.nnodes} in all, at {launch.rdzv_endpoint}; "
    text += "start the same command on each of them"
    return notice_if_slow(lambda: text, enabled=launch.nnodes > 1)


def numa_options(config: Config) -> numa.NumaOptions | None:
    """Return how torchrun binds ranks to the cores near their GPUs; None: not at all."""
    return LaunchConfig(
        min_nodes=config.launch.nnodes,
        max_nodes=config.launch.nnodes,
        nproc_per_node=config.world_size // config.launch.nnodes,
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
    ).numa_options


def numa_bound(
    work: Callable[..., Any], local_rank: int, options: numa.NumaOptions | None
) -> Callable[..., Any]:
    """Return `work`, bound to the cores near this rank's GPU."""
    if options is None:
        return work
    bind = numa._maybe_wrap_with_numa_binding
    known = inspect.signature(bind).parameters
    device: dict[str, Any] = {
        "device_index" if "device_index" in known else "gpu_index": local_rank  # as in torch 2.11
    }
    return bind(work, **device, numa_options=options)


class OneMachine(RendezvousHandler):
    """The rendezvous of a single agent with itself: no port, no listening socket, no waiting.

    The c10d one listens on all interfaces, even for one machine.
    """

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id

    def get_backend(self) -> str:
        """Return the name of this kind of rendezvous."""
        return "ddp_runner-one-machine"

    def next_rendezvous(self) -> RendezvousInfo:
        """Return rank 0 of 1, with a store in this process."""
        # Ranks meet through a file and never use the address. The store is public and documented,
        # but torch imports it in a way that type checkers do not accept as an export.
        store = dist.HashStore()  # type: ignore[attr-defined]
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo("localhost", 0))

    def is_closed(self) -> bool:
        """Return False: it is open as long as its agent lives."""
        return False

    def set_closed(self) -> None:
        """Do nothing: nobody else could join."""

    def num_nodes_waiting(self) -> int:
        """Return 0: nobody else can join."""
        return 0

    def get_run_id(self) -> str:
        """Return the id that the launcher chose."""
        return self._run_id

    def shutdown(self) -> bool:
        """Return True: there is nothing to close."""
        return True
