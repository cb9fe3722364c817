"""Lets the ranks of torchrun meet through its agent's store, restart after restart.

torchrun keeps one store for its rendezvous and for all worker groups that it starts. A killed group
leaves its keys there, and the next one would read them as its peers' addresses ("connectFullMesh
failed"). So each group agrees on a prefix that is new.
"""

import os
import time
import uuid
from datetime import timedelta
from typing import Any

import torch.distributed

from ddp_runner.dist_env import DistEnv

dist: Any = torch.distributed  # its stores are documented, but not in torch's stubs
POLL_S = 0.02


def serves_ranks() -> bool:
    """Return whether the ranks meet at a store that outlives their worker group."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def fresh_store(env: DistEnv, *, timeout: timedelta) -> Any:
    """Return the agent's store under a prefix of this worker group only. Collective: every rank.

    Each rank writes a random greeting, and rank 0 answers it with the prefix. The first greeting
    may be of a rank that is gone, so rank 0 answers until each rank has confirmed the prefix.

    Raises:
        torch.distributed.DistStoreError: a rank did not arrive in time.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(host, port, is_master=False, timeout=timeout)
    shared = dist.PrefixStore("ddp_runner", store)
    if env.rank > 0:
        greeting = uuid.uuid4().hex
        shared.set(f"greeting/{env.rank}", greeting)
        prefix = shared.get(f"answer/{greeting}").decode()  # waits for it
        shared.set(f"{prefix}/{greeting}", "received")
        return dist.PrefixStore(prefix, store)
    prefix = f"group-{uuid.uuid4().hex}"
    deadline = time.monotonic() + timeout.total_seconds()
    missing = set(range(1, env.world_size))
    greetings: dict[int, list[str]] = {rank: [] for rank in missing}  # that have an answer
    while missing:
        for rank in sorted(missing):
            if not shared.check([f"greeting/{rank}"]):
                continue
            greeting = shared.get(f"greeting/{rank}").decode()
            # First: a rank that has confirmed may have been restarted, with a new greeting.
            if any(shared.check([f"{prefix}/{one}"]) for one in greetings[rank]):
                missing.discard(rank)
            elif greeting not in greetings[rank]:
                shared.set(f"answer/{greeting}", prefix)
                greetings[rank].append(greeting)
        if missing and time.monotonic() > deadline:
            raise dist.DistStoreError(
                f"ranks {', '.join(map(str, sorted(missing)))} did not arrive at the rendezvous "
                f"within backend.timeout_s ({timeout.total_seconds():g} s)"
            )
        time.sleep(POLL_S)
    return dist.PrefixStore(prefix, store)
