"""Adapter of torch's launcher: what an agent starts, its own rendezvous, NUMA binding.

Torch has no public name for `_maybe_wrap_with_numa_binding`. Checked on torch 2.11 and 2.15.
"""

import inspect
import os
import uuid
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
import torch.distributed.elastic.rendezvous as rdzv
import torch.numa.binding as numa
from torch.distributed.elastic.agent.server.api import Worker, WorkerGroup, WorkerSpec
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.launcher.api import LaunchConfig

from ddp_runner.config.schema import RunConfig
from ddp_runner.job import Job
from ddp_runner.launch.machines import Machines
from ddp_runner.launch.meeting import Meeting

MONITOR_INTERVAL_S = 0.05
ASYNC_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


def worker_spec(
    job: Job, *, meeting: Meeting | None = None, sees_run: Callable[[], bool]
) -> WorkerSpec:
    """Return what this machine's agent starts, and how it meets the agents of other machines.

    Args:
        job: of this machine.
        meeting: where the machines of a sweep have met; None: they meet for this job.
        sees_run: returns whether this machine has the folder of the run that goes on.
    """
    config, launch = job.config, job.config.launch
    num_ranks = config.world_size // launch.most_nodes
    handler: rdzv.RendezvousHandler
    if launch.most_nodes == 1:
        run_id = uuid.uuid4().hex
        handler = OneMachine("localhost", 0, rank=0, world_size=1, run_id=run_id, timeout=0)
    else:
        known = None if job.lacks_run else num_ranks
        handler = Machines(launch, num_ranks=known, sees_run=sees_run, meeting=meeting)
    return WorkerSpec(
        role="default_role",
        local_world_size=num_ranks,
        entrypoint="ddp_runner.worker",  # for torch's log only: RankProcesses starts the ranks
        rdzv_handler=handler,
        max_restarts=launch.max_restarts,
        monitor_interval=MONITOR_INTERVAL_S,
    )


def rank_environ(one: Worker, group: WorkerGroup, *, attempt: int) -> dict[str, str]:
    """Return the variables that torchrun sets for a rank."""
    spec = group.spec
    variables = {
        "RANK": one.global_rank,
        "LOCAL_RANK": one.local_rank,
        "WORLD_SIZE": one.world_size,
        "LOCAL_WORLD_SIZE": spec.local_world_size,
        "GROUP_RANK": group.group_rank,
        "GROUP_WORLD_SIZE": group.group_world_size,
        "MASTER_ADDR": group.master_addr,
        "MASTER_PORT": group.master_port,
        "TORCHELASTIC_RESTART_COUNT": attempt,
        "TORCHELASTIC_MAX_RESTARTS": spec.max_restarts,
        "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
        "TORCHELASTIC_USE_AGENT_STORE": spec.rdzv_handler.use_agent_store,
        # Torch's agent sets it too: a rank that waits too long in NCCL is aborted.
        ASYNC_ERROR_HANDLING: os.environ.get(ASYNC_ERROR_HANDLING, "1"),
    }
    return {name: str(value) for name, value in variables.items()}


def numa_options(config: RunConfig) -> numa.NumaOptions | None:
    """Return how torchrun binds ranks to the cores near their GPUs; None: not at all."""
    return LaunchConfig(
        min_nodes=config.launch.fewest_nodes,
        max_nodes=config.launch.most_nodes,
        nproc_per_node=config.world_size // config.launch.most_nodes,
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
