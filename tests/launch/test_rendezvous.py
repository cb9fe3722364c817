"""The rendezvous of several machines: who takes part, and the sentence if they do not meet."""

import json
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
import torch.distributed.elastic.rendezvous as rdzv

from ddp_runner.config.sections import LaunchConfig
from ddp_runner.errors import UserError
from ddp_runner.launch.machines import Machines
from ddp_runner.launch.meeting import Meeting

STORES: Any = dist
LAUNCH = LaunchConfig(nnodes=2, rdzv_endpoint="n1:1")


def rendezvous(store: Any) -> Machines:
    """Return the rendezvous of a machine that has met the others at a store."""
    machines = Machines(LAUNCH, num_ranks=1, sees_run=lambda: False)
    met = Meeting(store, "127.0.0.1", is_served_here=True)
    with patch("ddp_runner.launch.machines.open_meeting", return_value=met):
        machines._open(deadline=0.0)
    return machines


def test_a_spare_machine_hears_that_the_run_is_over() -> None:
    """Nothing was lost."""
    error = rdzv.RendezvousGracefulExitError("closed")
    sentence = rendezvous(STORES.HashStore()).why_not_met(error)
    assert sentence.startswith("the run that meets at n1:1 was over on its other machines before")


def test_machines_with_one_host_name_are_two_nodes() -> None:
    """Containers may have one process id as well."""
    store, nodes = STORES.HashStore(), set[str]()
    for _ in range(2):
        machines = rendezvous(store)
        nodes.add(machines._handler._this_node.addr)
    assert len(nodes) == 2


@pytest.mark.parametrize("facts", [{"version": "0.0.9"}, {"unknown": 1}])
def test_machines_run_one_version(facts: dict[str, Any]) -> None:
    """What another one tells is not read: it may have other fields."""
    store, machines = STORES.HashStore(), rendezvous(STORES.HashStore())
    store.set("machine/1", json.dumps({"host": "n2", **facts}))
    info: Any = SimpleNamespace(rank=0, world_size=2, store=store)  # of torch
    with pytest.raises(UserError, match=r"and n2 (0\.0\.9|another); install the same version"):
        machines._introduced(info)
