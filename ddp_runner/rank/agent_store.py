"""Lets the ranks that torchrun started meet through its agent's store, restart after restart.

torchrun keeps one store for its rendezvous and for all worker groups that it starts. A group that
was killed leaves its keys there, and the next one would take them for its peers' addresses
("connectFullMesh failed"). So each group agrees on a prefix that nobody has used before.
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
    """Return the agent's store under a prefix of this worker group alone. Collective: every rank.

    Each rank writes a greeting that it has just drawn, and rank 0 answers each with the prefix. It
    may first find the greeting of a rank that is gone: it goes on to answer until each rank has
    confirmed the prefix.

    Raises:
        torch.distributed.DistStoreError: a rank did not come in time.
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
    answered: dict[int, list[str]] = {rank: [] for rank in missing}
    while missing:
        for rank in sorted(missing):
            if not shared.check([f"greeting/{rank}"]):
                continue
            greeting = shared.get(f"greeting/{rank}").decode()
            # Before a new greeting is answered: a rank that has confirmed greets next time anew.
            if any(shared.check([f"{prefix}/{one}"]) for one in answered[rank]):
                missing.discard(rank)
            elif greeting not in answered[rank]:
                shared.set(f"answer/{greeting}", prefix)
                answered[rank].append(greeting)
        if missing and time.monotonic() > deadline:
            raise dist.DistStoreError(
                f"ranks {', '.join(map(str, sorted(missing)))} did not come to the rendezvous "
                f"within backend.timeout_s ({timeout.total_seconds():g} s)"
            )
        time.sleep(POLL_S)
    return dist.PrefixStore(prefix, store)
