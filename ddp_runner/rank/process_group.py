"""Opens and closes the process group of a rank."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta

import torch.distributed as dist

from ddp_runner.config.schema import BackendConfig
from ddp_runner.dist_env import FROM_ENVIRONMENT, DistEnv, validate_rendezvous
from ddp_runner.errors import UserError
from ddp_runner.host.streams import notice_if_slow
from ddp_runner.rank.agent_store import fresh_store, serves_ranks
from ddp_runner.rank.loopback_store import loopback_store

# References that keep each group until the process ends. A group's threads take the GIL to release
# the last collective's tensors. If the group ended with DDP's reducer, which joins these threads
# while it holds the GIL, both would wait for ever.
_groups_until_exit: list[dist.ProcessGroup | None] = []


@contextmanager
def process_group(
    env: DistEnv, *, backend: BackendConfig, init_method: str | None = None
) -> Iterator[None]:
    """Keep the default process group open. Collective: every rank must call.

    On CUDA the group has two backends: small facts travel as CPU tensors over gloo, so that they
    never wait for a kernel.

    Raises:
        UserError: this torch was built without the backend.
    """
    if backend.name == "mpi" and not dist.is_mpi_available():
        raise UserError(
            "backend=mpi needs a torch built with MPI, and this one is not (PyPI's wheels never "
            "are); write backend=gloo, or build torch from source beside an MPI library"
        )
    validate_rendezvous(env, init_method=init_method, backend=backend.name)
    is_local = False
    if env.num_nodes == 1:
        # Ranks of one machine need only the loopback interface, and listen on no other.
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)
        is_local = os.environ["GLOO_SOCKET_IFNAME"] == loopback  # unless the user set another
    timeout = timedelta(seconds=backend.timeout_s)
    waiting = f"rank {env.rank} waits for the other ranks, {env.world_size} in all"
    is_first_of_node = env.num_nodes > 1 and env.local_rank == 0
    try:
        with notice_if_slow(lambda: waiting) if is_first_of_node else nullcontext():
            store = None
            if init_method == FROM_ENVIRONMENT and serves_ranks():
                store = fresh_store(env, timeout=timeout)
            elif is_local and backend.name != "mpi":
                store = loopback_store(env, init_method=init_method, timeout=timeout)
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if backend.name == "nccl" else backend.name,
                init_method=None if store is not None else init_method,
                store=store,
                rank=env.rank,
                world_size=env.world_size,
                timeout=timeout,
            )
    except (RuntimeError, ValueError) as error:
        if "Unable to find address for" not in str(error):
            raise
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "of this machine")
        raise UserError(
            f"the network interface {interface} (GLOO_SOCKET_IFNAME) has no address; "
            f"bring it up (ip link set {interface} up), or set the variable to one that has"
        ) from error
    _groups_until_exit.append(dist.group.WORLD)
    yield
    # On success only: a rank that fails while its peers sit in a collective must die, not wait.
    dist.destroy_process_group()
