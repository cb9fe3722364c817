"""A mode of parallelism whose model is placed on the meta device, before its tensors are fake."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from ddp_runner.dist_env import DistEnv
from ddp_runner.parallelism import mesh, pipeline
from ddp_runner.parallelism.ddp import DDP, MIN_BUCKET_MB
from ddp_runner.parallelism.mode import Engine, Layout, Mode
from ddp_runner.parallelism.modules import matched
from ddp_runner.parallelism.shards import spec_of
from ddp_runner.parallelism.stages import Stages, stages_of
from ddp_runner.planning.fake_ranks import NumberlessTensors
from ddp_runner.train.state import DTYPES

META = torch.device("meta")


@dataclass(frozen=True)
class PlannedMode:
    """Places the model of another mode without numbers, and reduces its gradients."""

    mode: Mode

    def layout(self, env: DistEnv) -> Layout:
        """Return the layout of the mode."""
        return self.mode.layout(env)

    def place(self, build: Callable[..., nn.Module], devices: Sequence[torch.device]) -> nn.Module:
        """Place the model on the meta device, then leave it empty on this rank's device.

        Thousands of ranks have millions of shards, which take minutes as fake tensors.
        """

        def build_on_meta() -> nn.Module:
            with META:
                return build()

        is_split = isinstance(self.mode, mesh.Mesh)
        with (
            _disable_current_modes(),
            patch.object(nn.Module, "to_empty", lambda module, **_: module),
            patch.object(mesh, "initialise", lambda _: None),
            patch.object(pipeline, "initialise", lambda _: None),
        ):
            module = self.mode.place(build_on_meta, devices if is_split else (META,))
            if (stages := stages_of(module)) is not None:
                assert isinstance(self.mode, pipeline.Pipeline)
                _learn_shapes(stages, build_on_meta(), self.mode.blocks[0], devices[0])
        return module.to_empty(device=devices[0])

    def engine(self, state: Any, local: Engine[Any, Any]) -> Engine[Any, Any]:
        """Return the engine of the mode."""
        return self.mode.engine(state, local)

    def wrap(self, module: nn.Module, devices: Sequence[torch.device]) -> nn.Module:
        """Return the module; under DDP it has the buckets of the reducer."""
        if isinstance(self.mode, DDP):
            cast(Any, module).require_backward_grad_sync = True  # see ``no_sync``
            trained: list[Tensor] = [value for value in module.parameters() if value.requires_grad]
            trained.reverse()
            limit = int((self.mode.bucket_cap_mb or MIN_BUCKET_MB) * 2**20)
            assigned, _ = dist._compute_bucket_assignment_by_size(trained, [limit])
            for numbers in assigned:
                parameters = [trained[number] for number in numbers]
                _fill_bucket(module, parameters, DTYPES.get(str(self.mode.comm_hook)))
        return module

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return the mode's context."""
        if isinstance(self.mode, DDP):
            return DistributedDataParallel.no_sync(cast(Any, model))
        return self.mode.no_sync(model)


def _learn_shapes(stages: Stages, whole: nn.Module, pattern: str, device: torch.device) -> None:
    """Let stages learn the shapes of hidden states from a whole model: no other rank sends any."""
    blocks = iter(matched(whole, pattern, key="model.blocks").values())
    copies = [[*islice(blocks, len(own))] for own in stages.blocks]
    model = replace(stages, module=whole, blocks=copies)
    stages.device = device

    def forward(*args: Any, **kwargs: Any) -> None:
        found, hidden = list[Tensor](), None
        with _disable_current_modes():
            with NumberlessTensors():
                whole.to_empty(device=device)
                on_device = partial(spec_of, device=device)
                args, kwargs = tree_map_only(Tensor, on_device, (args, kwargs))
                for stage in range(len(copies)):
                    found.append(hidden := model.compute(stage, hidden, args, kwargs))
            stages.hidden |= dict(enumerate(map(spec_of, found)))

    cast(Any, stages).forward = forward


def _fill_bucket(
    module: nn.Module, parameters: Sequence[Tensor], sent_dtype: torch.dtype | None
) -> None:
    """Let each backward copy gradients into a bucket, and reduce it once it is full.

    DDP's own reducer is in C++ and takes no fake tensors.
    """
    sizes = [parameter.numel() for parameter in parameters]
    buffer = torch.empty(sum(sizes), dtype=parameters[0].dtype)
    views = dict(zip(parameters, buffer.split(sizes), strict=True))
    filled = set[Tensor]()

    def fill(parameter: Tensor) -> None:
        if not module.require_backward_grad_sync:
            return
        assert parameter.grad is not None
        parameter.grad = views[parameter].view(parameter.shape).copy_(parameter.grad)
        filled.add(parameter)
        if len(filled) == len(views):
            filled.clear()
            dist.all_reduce(buffer.to(sent_dtype or buffer.dtype))

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(fill)
