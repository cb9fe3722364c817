"""A mode of parallelism whose model is placed on the meta device, before its tensors are fake."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, contextmanager
from collections.abc import Iterator
from dataclasses import dataclass, field
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from ddp_runner.dist_env import DistEnv
from ddp_runner.errors import UserError
from ddp_runner.parallelism import mesh
from ddp_runner.parallelism.ddp import MIN_BUCKET_MB, DDP
from ddp_runner.parallelism.mode import Layout, Mode, local_engine
from ddp_runner.parallelism.single import Single

META = torch.device("meta")
SENT = {None: None, "bf16": torch.bfloat16, "fp16": torch.float16}  # dtype by comm_hook


@dataclass(frozen=True)
class PlannedMode:
    """Places the model of another mode without numbers, and reduces its gradients."""

    mode: Single | DDP | mesh.Mesh
    _is_local: list[bool] = field(default_factory=list)  # not empty: inside ``no_sync`` of DDP
    engine = staticmethod(local_engine)

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
        ):
            module = self.mode.place(build_on_meta, devices if is_split else (META,))
        return module.to_empty(device=devices[0])

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
        """Let each backward copy the gradients into buckets, and all-reduce a full one.

        DDP's own reducer is in C++, and does not take fake tensors.
        """
        trained = [value for value in module.parameters() if value.requires_grad][::-1]
        limit, dtype = int((mode.bucket_cap_mb or MIN_BUCKET_MB) * 2**20), SENT[mode.comm_hook]
        assigned, _ = dist._compute_bucket_assignment_by_size(
            trained, [limit], [False] * len(trained)
        )
        for numbers in assigned:
            parameters = [trained[number] for number in numbers]
            sizes = [parameter.numel() for parameter in parameters]
            bucket = torch.empty(sum(sizes), dtype=parameters[0].dtype)
            views = zip(parameters, bucket.split(sizes), strict=True)
            view_of = {parameter: part.view(parameter.shape) for parameter, part in views}
            full = set[nn.Parameter]()

            def reduce(
                parameter: Tensor,
                bucket: Tensor = bucket,
                view_of: dict[Tensor, Tensor] = view_of,
                full: set[Tensor] = full,
            ) -> None:
                if self._is_local:
                    return
                parameter.grad = view_of[parameter].copy_(parameter.grad)
                full.add(parameter)
                if len(full) == len(view_of):
                    full.clear()
                    dist.all_reduce(bucket if dtype is None else bucket.to(dtype))

            for parameter in parameters:
                parameter.register_post_accumulate_grad_hook(reduce)
