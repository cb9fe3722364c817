"""Opens and closes a rank's process group and the store where the ranks meet."""

import os
import socket
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

import torch.distributed as dist
from torch.distributed import distributed_c10d

from ddp_runner.config.sections import BackendConfig
from ddp_runner.dist_env import FROM_ENVIRONMENT, DistEnv, prints_errors
from ddp_runner.errors import UserError, os_errors
from ddp_runner.host.hardware import FOR_CPU
from ddp_runner.host.network import is_here, outer_interface
from ddp_runner.host.streams import print_line

HOST = "127.0.0.1"
POLL_S = 0.02
PROBE_S = 2.0  # timeout of an attempt to reach rank 0
STORES: Any = dist  # torch documents its stores, but its stubs lack them
# Keep each group until the process ends. Otherwise DDP's reducer may destroy the group: it holds
# the GIL while it joins the group's threads, and they need the GIL to release the last tensors.
_groups_until_exit: list[dist.ProcessGroup | None] = []


@contextmanager
def process_group(
    env: DistEnv, *, backend: BackendConfig, init_method: str | None = None
) -> Iterator[None]:
    """Keep the default process group open. Collective: every rank must call.

    On GPUs the group also has gloo for CPU tensors: small facts must not wait for a kernel.

    Raises:
        UserError: this torch lacks the backend, or the ranks cannot meet at the address.
    """
    if backend.name == "mpi" and not dist.is_mpi_available():
        raise UserError(
            "backend=mpi needs a torch built with MPI, and this torch is not (PyPI's wheels never "
            "are)",
            "write backend=gloo, or build torch from source with an MPI library",
        )
    _validate_host(env, init_method)
    is_local, timeout = _choose_interface(env, init_method), timedelta(seconds=backend.timeout_s)
    has_store = backend.name != "mpi"
    # Groups and meshes that are made later have torch's default, half an hour, in place of ours.
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        setattr(distributed_c10d, name, timeout)
    with_gloo = f"cpu:gloo,{backend.device}:{backend.name}"
    try:
        store = _open_store(env, init_method, timeout, is_local=is_local) if has_store else None
        dist.init_process_group(
            backend.name if backend.name in FOR_CPU else with_gloo,
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
            f"the network interface {interface} (GLOO_SOCKET_IFNAME) has no address",
            f"bring it up (ip link set {interface} up), or set another interface",
        ) from error
    _groups_until_exit.append(dist.group.WORLD)
    yield
    # Only on success: a rank that fails must end without waiting for others in a collective.
    dist.destroy_process_group()


def _choose_interface(env: DistEnv, init_method: str | None) -> bool:
    """Choose the network interface unless the user has; return whether gloo uses loopback.

    gloo's default may be loopback, which other machines cannot reach.
    """
    if env.num_nodes == 1:
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)
        return os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback) == loopback
    host = _address(init_method)[0] or os.environ.get("MASTER_ADDR")
    if host and (name := outer_interface(host)) is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    return False


def _open_store(
    env: DistEnv, init_method: str | None, timeout: timedelta, *, is_local: bool
) -> Any:
    """Return the store where the ranks meet; None: torch opens it itself. Collective."""
    host, port = _address(init_method)
    if host is None or port is None:
        return None
    is_env = init_method == FROM_ENVIRONMENT
    if is_env and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return fresh_store(env, host, port, timeout=timeout)
    if is_local:
        return loopback_store(env, port, timeout=timeout)
    return store_of_rank_zero(env, host, port, timeout=timeout) if is_env else None


def _address(init_method: str | None) -> tuple[str | None, int | None]:
    """Return the host and the port of env:// or tcp://; None where it names none."""
    if init_method == FROM_ENVIRONMENT:
        port = os.environ.get("MASTER_PORT")
        return os.environ.get("MASTER_ADDR"), int(port) if port else None
    url = urlsplit(init_method or "")
    return url.hostname, url.port


def _validate_host(env: DistEnv, init_method: str | None) -> None:
    """Reject ranks on several machines whose variables, set by hand, describe a single machine.

    They would wait on this machine for ranks that are on others.
    """
    host, _ = _address(init_method)
    has_layout = env.launcher != "environment" or env.num_nodes > 1 or env.world_size == 1
    if host is None or has_layout:
        return
    with suppress(OSError):  # an unknown host name
        if is_here(host):
            return
    error = UserError(
        f"RANK and WORLD_SIZE describe {env.world_size} ranks on one machine, but {host}, where "
        "they meet, is another",
        "on several machines set LOCAL_RANK and LOCAL_WORLD_SIZE too, on a "
        "single machine let the ranks meet at 127.0.0.1",
    )
    if not prints_errors():  # rank 0, on another machine, has no error to print
        print_line(f"error: {error}", stream=sys.stderr)
    raise error


def store_of_rank_zero(env: DistEnv, host: str, port: int, *, timeout: timedelta) -> Any:
    """Return the store that rank 0 serves at an address. Collective.

    Without rank 0, torch's own client prints C++ stack traces; if rank 0 is suspended, it waits
    forever.

    Raises:
        torch.distributed.DistNetworkError: rank 0 does not answer in time.
    """
    timeout_s, reason, stores = timeout.total_seconds(), "", list[Any]()
    deadline = time.monotonic() + timeout_s
    connect = partial(STORES.TCPStore, host, port, env.world_size, timeout=timeout)
    if env.is_rank_zero:
        return connect(is_master=True, multi_tenant=True)

    def join() -> None:
        with suppress(RuntimeError):  # rank 0 has ended
            stores.append(connect(is_master=False))

    while time.monotonic() < deadline:
        try:
            socket.create_connection((host, port), timeout=min(PROBE_S, timeout_s)).close()
        except OSError as error:  # rank 0 does not listen yet
            reason = error.strerror or str(error)
        else:
            reason = "it may be suspended"
            thread = Thread(target=join, daemon=True)  # the call has no timeout
            thread.start()
            thread.join(timeout_s)
            if stores:
                return stores[0]
        time.sleep(POLL_S)
    raise STORES.DistNetworkError(
        f"timed out after {timeout_s:g} s (backend.timeout_s): rank 0 does not answer at "
        f"{host}:{port} ({reason})"
    )


def loopback_store(env: DistEnv, port: int, *, timeout: timedelta) -> Any:
    """Return a store that only this machine can reach, at a port. Collective.

    torch's own server listens on every interface and has no authentication.

    Raises:
        UserError: rank 0, which serves the store, cannot listen on the port.
    """
    connect = partial(STORES.TCPStore, HOST, port, env.world_size, timeout=timeout)
    if not env.is_rank_zero:
        return connect(is_master=False)
    rule = f"rank 0 cannot listen on port {port}, where the ranks meet"
    fix = "give every rank another port, in MASTER_PORT or launch.init_method"
    with os_errors(rule, fix=fix), socket.socket() as listener:
        # A restart takes the same port.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((HOST, port))
        listener.listen(env.world_size)
        descriptor = listener.detach()
    return connect(is_master=True, master_listen_fd=descriptor)


def fresh_store(env: DistEnv, host: str, port: int, *, timeout: timedelta) -> Any:
    """Return torchrun's store under a prefix that only this worker group uses. Collective.

    torchrun keeps one store for all its worker groups, and the next group would take a killed
    group's keys for the addresses of its ranks ("connectFullMesh failed"). So each rank writes a
    random greeting, and rank 0 answers with a new prefix until every rank has confirmed it: a
    greeting may come from a rank that is gone.

    Raises:
        torch.distributed.DistStoreError: a rank did not arrive in time.
    """
    store = STORES.TCPStore(host, port, is_master=False, timeout=timeout)
    shared = STORES.PrefixStore("ddp_runner", store)
    if env.rank > 0:
        greeting = uuid.uuid4().hex
        shared.set(f"greeting/{env.rank}", greeting)
        prefix = shared.get(f"answer/{greeting}").decode()  # blocks until rank 0 answers
        shared.set(f"{prefix}/{greeting}", "received")
    else:
        prefix = _answered_prefix(shared, env.world_size, timeout)
    return STORES.PrefixStore(prefix, store)


def _answered_prefix(shared: Any, world_size: int, timeout: timedelta) -> str:
    """Return a new prefix once every other rank has confirmed it. Rank 0 only."""
    prefix = f"group-{uuid.uuid4().hex}"
    deadline = time.monotonic() + timeout.total_seconds()
    # The answered greetings of each unconfirmed rank.
    missing: dict[int, list[str]] = {rank: [] for rank in range(1, world_size)}
    while missing:
        for rank, answered in list(missing.items()):
            if not shared.check([f"greeting/{rank}"]):
                continue
            greeting = shared.get(f"greeting/{rank}").decode()
            # Check first: a confirmed rank may have restarted with a new greeting.
            if any(shared.check([f"{prefix}/{text}"]) for text in answered):
                del missing[rank]
            elif greeting not in answered:
                shared.set(f"answer/{greeting}", prefix)
                answered.append(greeting)
        if missing and time.monotonic() > deadline:
            raise STORES.DistStoreError(
                f"ranks {', '.join(map(str, missing))} did not arrive at the rendezvous "
                f"within backend.timeout_s ({timeout.total_seconds():g} s)"
            )
        time.sleep(POLL_S)
    return prefix
