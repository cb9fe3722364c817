"""Pipeline parallelism: ranks compute stages of the model, for micro-batches one after another.

``stages`` cuts the model, and ``pipeline_engine`` computes the steps.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from ddp_runner.dist_env import DistEnv
from ddp_runner.distributed import broadcast_tensors
from ddp_runner.parallelism.mode import Engine, Layout, one_share_for
from ddp_runner.parallelism.modules import initialise
from ddp_runner.parallelism.pipeline_engine import PipelineEngine
from ddp_runner.parallelism.single import Single
from ddp_runner.parallelism.stages import Stages, drop_others, plan_cut, remember_whole, tie_groups


@dataclass(frozen=True)
class Pipeline(Single):
    """A model that ``place`` cuts into stages over neighbouring ranks; its YAML explains the keys.

    The engine reduces the gradients.
    """

    pipeline_size: int | None
    schedule: str
    stages_per_rank: int
    split: Sequence[int] | None
    meta_init: bool
    blocks: Sequence[str]
    ends: Mapping[str, Sequence[str]]

    def layout(self, env: DistEnv) -> Layout:
        """Return a rank's part; the ranks of a pipeline have the same share."""
        layout = one_share_for(env, self.pipeline_size)
        return replace(layout, backward_is_collective=False, has_stages=True)

    def place(self, build: Callable[..., nn.Module], devices: Sequence[torch.device]) -> nn.Module:
        """Build the model and keep this rank's stages. Collective: every rank must call.

        With ``meta_init`` no rank holds more than its stages; else each holds the whole model
        while it is built.

        Raises:
            UserError: the model cannot be cut so.
        """
        world, device, per_rank = dist.group.WORLD, devices[0], self.stages_per_rank
        assert world is not None
        num_ranks = world.size()
        size = self.pipeline_size or num_ranks
        rank, firsts = world.rank() % size, range(0, num_ranks, size)
        with torch.device("meta" if self.meta_init else "cpu"):
            module = build()
        keys: dict[str, Any] = {"patterns": self.blocks, "ends": self.ends, "split": self.split}
        blocks, users = plan_cut(module, size * per_rank, **keys)
        remember_whole(module)
        shared = tie_groups(users, dict(module.named_parameters()), size)
        own = frozenset(range(rank, size * per_rank, size))
        drop_others(module, lambda name: bool(users[name] & own))
        if any(parameter.is_meta for parameter in module.parameters()):
            initialise(module.to_empty(device=device))
        module = module.to(device)
        ties = [(names, _subgroup(world, firsts, holders)) for holders, names in shared.items()]
        ties = [(names, group) for names, group in ties if group is not None]
        replicas = _subgroup(world, range(size), firsts) if num_ranks > size else None
        for names, group in ties:
            broadcast_tensors([module.get_parameter(name).data for name in names], group=group)
        if replicas is not None:
            tensors = [*module.parameters(), *module.buffers()]
            broadcast_tensors([tensor.data for tensor in tensors], group=replicas)
        stages = Stages(
            module,
            blocks,
            _subgroup(world, firsts, range(size)),
            replicas,
            device,
            ties,
            frozenset(n for n, _ in module.named_parameters() if min(users[n]) % size != rank),
        )
        cast(Any, module).pipeline_stages = stages
        module.forward = stages.forward
        return module

    def engine(self, state: Any, local: Engine[Any, Any]) -> "PipelineEngine":
        """Return the engine that runs the schedule."""
        return PipelineEngine(state.module, local, self.schedule)


@lru_cache(maxsize=8)
def _subgroup(world: dist.ProcessGroup, firsts: Sequence[int], offsets: Sequence[int]) -> Any:
    """Return this rank's group of those with the offsets from each of the first ranks, or None.

    It is made once for each `world`, the group of all ranks.
    """
    parts = [[first + offset for offset in offsets] for first in firsts]
    return dist.new_subgroups_by_enumeration(parts)[0]
