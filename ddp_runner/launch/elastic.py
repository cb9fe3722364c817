"""Adapter of torch's launcher: what an agent starts, its own rendezvous, NUMA binding.

Torch has no public name for `_maybe_wrap_with_numa_binding`. Checked on torch 2.11 and 2.15.
"""

import os
from collections.abc import Callable

from torch.distributed.elastic.agent.server.api import Worker, WorkerGroup, WorkerSpec

from ddp_runner.job import Job
from ddp_runner.launch.machines import Machines

MONITOR_INTERVAL_S = 0.05
ASYNC_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


def worker_spec(job: Job, *, sees_run: Callable[[], bool]) -> WorkerSpec:
    """Return what this machine's agent starts, and how it meets the agents of other machines.

    Args:
        job: of this machine.
        sees_run: returns whether this machine has the folder of the run that goes on.
    """
    config, launch = job.config, job.config.launch
    num_ranks = config.world_size // launch.most_nodes
    known = None if job.lacks_run else num_ranks
    handler = Machines(launch, num_ranks=known, sees_run=sees_run)
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
