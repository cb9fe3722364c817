"""A parameter server: rank 0 holds the parameters, the others compute gradients for it.

A trainer pulls the parameters, computes the gradients of one batch and pushes them; the server
takes the optimizer's step. It is the server that runs the training loop: where other modes call
backward, it collects. Messages are torch.distributed's point-to-point ones, on CPU tensors.

Each batch's gradients are applied exactly once, also where trainers are lost and where the run is
stopped and goes on. In async they are applied in the order of their arrival, so that two runs of
one seed differ; what the server had handed out when it saved is in the checkpoint.

Source: https://pytorch.org/tutorials/intermediate/rpc_param_server_tutorial.html, whose RPC
transport torch no longer develops; the two ways to step: Dean et al., Large Scale Distributed Deep
Networks (2012).
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_runner.dist_env import DistEnv
from ddp_runner.errors import UserError
from ddp_runner.job import Status
from ddp_runner.parallelism.mode import Duties, Role, count_devices, rank_devices
from ddp_runner.parallelism.parameter_server.messages import ALIVE, STATUS_OF, copy_parts, packed
from ddp_runner.parallelism.parameter_server.server import Server
from ddp_runner.seeds import derive

SERVER = 0


@dataclass(frozen=True)
class ParameterServer:
    """One server; `mode` is sync (a step waits for all trainers) or async (for any one)."""

    name: str
    devices_per_rank: int
    num_servers: int
    mode: str

    def role(self, env: DistEnv) -> Role:
        """Return server or trainer; in async a trainer computes whole global batches."""
        is_server = env.rank == SERVER
        num_shares = env.world_size - 1 if self.mode == "sync" else 1
        return Role(
            share=0 if is_server or num_shares == 1 else env.rank - 1,
            num_shares=num_shares,
            loop=DistEnv(SERVER, env.local_rank, 1, 1, env.node_rank, env.restart_count)
            if is_server
            else None,
            gradients=self.hand_out if is_server else None,
            serve=None if is_server else self.compute,
        )

    def devices(self, env: DistEnv, *, kind: str) -> tuple[torch.device, ...]:
        """Return the one device of this rank."""
        return rank_devices(env, kind=kind)

    def num_devices(self, env: DistEnv, *, kind: str) -> int:
        """Return one device a rank, the server's included."""
        return count_devices(env, kind=kind)

    def place(
        self, build: Callable[..., nn.Module], devices: tuple[torch.device, ...]
    ) -> nn.Module:
        """Build the model and move it to this rank's device."""
        return build().to(devices[0])

    def wrap(self, module: nn.Module, devices: tuple[torch.device, ...]) -> nn.Module:
        """Return the model as it is: the parameters come with each batch."""
        return module

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return an empty context: a push comes after the last micro-batch."""
        return nullcontext()

    def hand_out(self, duties: Duties) -> Server:
        """Return the source of gradients of the loop. Rank 0 only, while the others compute."""
        links = _connect(duties.timeout_s)
        return Server(duties, links=links, waits=self.mode == "sync")

    def compute(self, duties: Duties) -> Status:
        """Compute gradients until the server ends; return the run's status. Trainers only.

        Raises:
            UserError: no parameter has a gradient.
        """
        (link,) = _connect(duties.timeout_s)
        module = duties.module
        order, values, pushed_at = torch.zeros(1).long(), packed(module), time.perf_counter()
        while (step := _received(order, link)) >= 0:
            dist.recv(values, src=SERVER, group=link)
            copy_parts(values, list(module.parameters()))
            waited_s = time.perf_counter() - pushed_at
            # Dropout depends on the step alone, so a resumed run draws what this one would draw.
            torch.manual_seed(derive(duties.seed, "trainer", step, dist.get_rank()))
            module.zero_grad(set_to_none=True)
            loss = duties.compute(step)
            if all(parameter.grad is None for parameter in module.parameters()):
                raise UserError(
                    "no parameter of the model has a gradient; there is nothing to push"
                )
            facts = torch.tensor([float(loss), waited_s], dtype=torch.float64)
            dist.send(packed(module, gradients=True, facts=facts), dst=SERVER, group=link)
            pushed_at = time.perf_counter()
        return STATUS_OF[step]


def _connect(timeout_s: float) -> list[dist.ProcessGroup]:
    """Return a group of two for each trainer: gloo closes the whole group that a rank leaves.

    Collective: every rank must call. The server gets all of them, a trainer its own.
    """
    groups = [
        dist.new_group([SERVER, trainer], backend="gloo", timeout=timedelta(seconds=timeout_s))
        for trainer in range(1, dist.get_world_size())
    ]
    return [group for group in groups if isinstance(group, dist.ProcessGroup)]


def _received(box: Tensor, link: dist.ProcessGroup) -> int:
    """Wait for the next batch or the end, as long as the server says that it is alive."""
    dist.recv(box, src=SERVER, group=link)
    while int(box) == ALIVE:
        dist.recv(box, src=SERVER, group=link)
    return int(box)
