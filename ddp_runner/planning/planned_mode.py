"""A mode of parallelism whose model is placed on the meta device, before its tensors are fake."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from ddp_runner.dist_env import DistEnv
from ddp_runner.parallelism import mesh, pipeline
from ddp_runner.parallelism.ddp import DDP, MIN_BUCKET_MB
from ddp_runner.parallelism.mode import Engine, Layout, Mode
from ddp_runner.parallelism.modules import matched
from ddp_runner.parallelism.stages import Stages, stages_of
from ddp_runner.planning.fake_ranks import NumberlessTensors

META = torch.device("meta")
SENT = {"None": None, "bf16": torch.bfloat16, "fp16": torch.float16}  # dtype by comm_hook


@dataclass(frozen=True)
class PlannedMode:
    """Places the model of another mode without numbers, and reduces its gradients."""

    mode: Mode
    _is_local: list[bool] = field(default_factory=list)  # not empty: inside ``no_sync`` of DDP

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
            self._fill_buckets(module, self.mode)
        return module

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return the mode's context."""
        return self._unreduced() if isinstance(self.mode, DDP) else self.mode.no_sync(model)

    @contextmanager
    def _unreduced(self) -> Iterator[None]:
        self._is_local.append(True)
        yield
        self._is_local.clear()

    def _fill_buckets(self, module: nn.Module, mode: DDP) -> None:
        """Let each backward copy its gradients into the buckets of DDP."""
        trained: list[Tensor] = [value for value in module.parameters() if value.requires_grad]
        trained.reverse()
        limit = int((mode.bucket_cap_mb or MIN_BUCKET_MB) * 2**20)
        assigned, _ = dist._compute_bucket_assignment_by_size(
            trained, [limit], [False] * len(trained)
        )
        dtype = SENT[str(mode.comm_hook)]
        for numbers in assigned:
            bucket = _Bucket([trained[number] for number in numbers], sent_dtype=dtype)
            for number in numbers:
                trained[number].register_post_accumulate_grad_hook(partial(self._fill, bucket))

    def _fill(self, bucket: "_Bucket", parameter: Tensor) -> None:
        if not self._is_local:
            bucket.fill(parameter)


def _learn_shapes(stages: Stages, whole: nn.Module, pattern: str, device: torch.device) -> None:
    """Let stages learn the shapes of hidden states from a whole model: no other rank sends any."""
    blocks = iter(matched(whole, pattern, key="model.blocks").values())
    copies = [[*islice(blocks, len(own))] for own in stages.blocks]
    model = replace(stages, module=whole, blocks=copies)
    stages.device = device

    def forward(*args: Any, **kwargs: Any) -> None:
        found = list[tuple[torch.Size, torch.dtype]]()
        with _disable_current_modes():
            with NumberlessTensors():
                whole.to_empty(device=device)
                args, kwargs = tree_map_only(Tensor, _empty_like, (args, kwargs))
                hidden = None
                for stage in range(len(copies)):
                    hidden = model.compute(stage, hidden, args, kwargs)
                    found.append((hidden.shape, hidden.dtype))
            for stage, (shape, dtype) in enumerate(found):
                stages.hidden[stage] = torch.empty(shape, dtype=dtype, device=META)

    cast(Any, stages).forward = forward


def _empty_like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


class _Bucket:
    """A bucket of DDP's reducer, which is in C++ and takes no fake tensors."""

    def __init__(self, parameters: Sequence[Tensor], *, sent_dtype: torch.dtype | None) -> None:
        sizes = [parameter.numel() for parameter in parameters]
        self._buffer = torch.empty(sum(sizes), dtype=parameters[0].dtype)
        views = zip(parameters, self._buffer.split(sizes), strict=True)
        self._views = {parameter: part.view(parameter.shape) for parameter, part in views}
        self._filled = set[Tensor]()
        self._sent_dtype = sent_dtype or self._buffer.dtype

    def fill(self, parameter: Tensor) -> None:
        """Take over the gradient; reduce the bucket once it is full."""
        assert parameter.grad is not None
        parameter.grad = self._views[parameter].copy_(parameter.grad)
        self._filled.add(parameter)
        if len(self._filled) == len(self._views):
            self._filled.clear()
            dist.all_reduce(self._buffer.to(self._sent_dtype))
