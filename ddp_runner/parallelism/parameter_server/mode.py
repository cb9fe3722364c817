"""A parameter server: rank 0 holds the parameters, the others compute gradients for it.

A trainer receives the parameters, computes the gradients of a batch and sends them; the server
takes the optimizer's step. The server runs the training loop: where other modes call backward, it
collects gradients. Messages are torch.distributed's point-to-point ones, on CPU tensors.

Each batch's gradients are applied exactly once, even if trainers are lost or the run is stopped and
resumed. In async they are applied as they arrive, so two runs with the same seed differ; the
checkpoint lists the batches that trainers were still computing.

Sources: https://pytorch.org/tutorials/intermediate/rpc_param_server_tutorial.html, whose RPC
transport torch no longer develops; for sync and async, Dean et al., Large Scale Distributed Deep
Networks (2012).
"""

import time
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_runner.dist_env import DistEnv
from ddp_runner.errors import UserError
from ddp_runner.job import Status
from ddp_runner.parallelism.mode import Duties, Role, no_context, place_on_first, unwrapped
from ddp_runner.parallelism.parameter_server.messages import (
    ALIVE,
    STATUS_OF,
    copy_parts,
    flatten_gradients,
    flatten_state,
)
from ddp_runner.parallelism.parameter_server.server import Server

SERVER = 0


@dataclass(frozen=True)
class ParameterServer:
    """A server and its trainers; in sync a step waits for all trainers, in async for any."""

    name: str
    mode: str
    place = staticmethod(place_on_first)
    wrap = staticmethod(unwrapped)  # the parameters come with each batch
    no_sync = staticmethod(no_context)  # a trainer sends gradients after its last micro-batch

    def role(self, env: DistEnv) -> Role:
        """Return the role of server or trainer; in async a trainer computes global batches."""
        num_shares = env.world_size - 1 if self.mode == "sync" else 1
        if env.rank == SERVER:
            loop = replace(env, world_size=1, local_world_size=1)
            return Role(share=0, num_shares=num_shares, loop=loop, gradients=self.start_server)
        share = (env.rank - 1) % num_shares
        return Role(share=share, num_shares=num_shares, loop=None, serve=self.run_trainer)

    def start_server(self, duties: Duties) -> Server:
        """Return the loop's source of gradients. Collective with ``run_trainer``."""
        groups = _connect(duties.timeout_s)
        return Server(duties, groups=groups, waits_for_all=self.mode == "sync")

    def run_trainer(self, duties: Duties) -> Status:
        """Compute gradients to the end of the run; return its status. Collective with the server.

        Raises:
            UserError: no parameter has a gradient.
        """
        (group,) = _connect(duties.timeout_s)
        module = duties.module
        number, values = torch.zeros(1).long(), flatten_state(module)
        pushed_at = time.perf_counter()
        while (step := _receive_number(number, group)) >= 0:
            dist.recv(values, src=SERVER, group=group)
            copy_parts(values, [*module.parameters(), *module.buffers()])
            waited_s = time.perf_counter() - pushed_at
            module.zero_grad(set_to_none=True)
            loss = duties.compute(step)
            if all(parameter.grad is None for parameter in module.parameters()):
                raise UserError(
                    "no parameter of the model has a gradient; there is nothing to push"
                )
            if any(one.grad is not None and one.grad.is_sparse for one in module.parameters()):
                raise UserError(
                    f"parallelism={self.name} cannot push sparse gradients; leave out sparse=True "
                    "in the model, or write parallelism=ddp"
                )
            numbers = torch.tensor([waited_s, float(loss), *duties.sums()], dtype=torch.float64)
            dist.send(flatten_gradients(module, numbers), dst=SERVER, group=group)
            pushed_at = time.perf_counter()
        return STATUS_OF[step]


def _connect(timeout_s: float) -> list[dist.ProcessGroup]:
    """Return the server's groups with each trainer, or a trainer's group with the server.

    They are groups of two, since gloo closes a group when a rank leaves it. Collective: every rank
    must call.
    """
    groups = [
        dist.new_group([SERVER, trainer], backend="gloo", timeout=timedelta(seconds=timeout_s))
        for trainer in range(1, dist.get_world_size())
    ]
    return [group for group in groups if isinstance(group, dist.ProcessGroup)]


def _receive_number(buffer: Tensor, group: dist.ProcessGroup) -> int:
    """Wait for the number of the next batch, or of the run's status."""
    dist.recv(buffer, src=SERVER, group=group)
    while int(buffer) == ALIVE:
        dist.recv(buffer, src=SERVER, group=group)
    return int(buffer)
