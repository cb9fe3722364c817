"""What the elastic agent needs to know about a gang; imported by ``launch`` once torch is there."""

import uuid
from pathlib import Path

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.launcher.api import LaunchConfig

from ddp_runner.config import Config

ONE_MACHINE = "ddp_runner-one-machine"
MONITOR_INTERVAL_S = 0.05


def launch_config(config: Config, scratch: Path) -> LaunchConfig:
    """Return how the agent starts this machine's share of the gang."""
    launch = config.launch
    rdzv_configs: dict[str, int] = {}
    if launch.nnodes == 1:
        backend = ONE_MACHINE
        if ONE_MACHINE not in rendezvous_handler_registry._registry:
            rendezvous_handler_registry.register(ONE_MACHINE, OneMachine)
    elif launch.node_rank is None:
        backend = "c10d"
    else:
        backend, rdzv_configs = "static", {"rank": launch.node_rank}
    return LaunchConfig(
        min_nodes=launch.nnodes,
        max_nodes=launch.nnodes,
        nproc_per_node=config.world_size // launch.nnodes,
        run_id=uuid.uuid4().hex if launch.nnodes == 1 else launch.rdzv_id,
        rdzv_backend=backend,
        rdzv_endpoint=launch.rdzv_endpoint or "",
        rdzv_configs=rdzv_configs,
        max_restarts=launch.max_restarts,
        monitor_interval=MONITOR_INTERVAL_S,
        start_method="forkserver",
        logs_specs=DefaultLogsSpecs(log_dir=str(scratch)),
        # The launcher handles the signals of users itself; the agent would only pass them on.
        signals_to_handle="SIGUSR2",
    )


class OneMachine(RendezvousHandler):
    """The rendezvous of a single agent with itself: no port, no listening socket, no waiting.

    The c10d one listens on all interfaces, even for one machine.
    """

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._run_id = parameters.run_id

    def get_backend(self) -> str:
        """Return the name under which this handler is registered."""
        return ONE_MACHINE

    def next_rendezvous(self) -> RendezvousInfo:
        """Return rank 0 of 1, with a store inside this process."""
        # Workers meet through a file and never use the address.
        store = dist.HashStore()  # type: ignore[attr-defined]  # documented, but not in torch's stubs
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo("localhost", 0))

    def is_closed(self) -> bool:
        """Return False: it lives as long as its agent."""
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
