"""Modes that split a model over a mesh of ranks: FSDP2, HSDP, tensor parallelism, and both at once.

The axes of the mesh are, from the outermost: ``replicate``, whose ranks hold equal shards;
``shard``, whose ranks hold a shard of each parameter; and ``tensor``, whose ranks compute parts of
the same layer for the same samples. Batches are split over the first two.

Sources: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html and
https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from ddp_runner.dist_env import DistEnv
from ddp_runner.errors import UserError
from ddp_runner.parallelism.initial_weights import initialise
from ddp_runner.parallelism.mode import Role, unwrapped
from ddp_runner.parallelism.module_names import matched

# A tensor over two axes is put together in two steps. Torch warns that this is slow; it is done to
# save, and for a norm. The ranks agree: those of an axis have equal results after each step.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
WHOLE, SPLIT = Replicate(), Shard(1)  # of activations (batch, length, features)


@dataclass(frozen=True)
class Mesh:
    """A model whose parameters are split over ranks; see the YAML of the mode for its keys."""

    name: str
    num_replicas: int
    tensor_parallel_size: int | None
    reshard_after_forward: bool | int
    cpu_offload: bool
    sequence_parallel: bool
    precision: str
    meta_init: bool
    blocks: Sequence[str]
    plan: Mapping[str, str]
    wrap = staticmethod(unwrapped)  # ``place`` has split the model already

    def role(self, env: DistEnv) -> Role:
        """Return the role of a rank; those of one group of tensor parallelism have equal shares."""
        size = self.tensor_parallel_size or env.world_size
        return Role(
            share=env.rank // size,
            num_shares=env.world_size // size,
            loop=env,
            model_ranks=size,
            has_collective_forward=True,
        )

    def place(self, build: Callable[..., nn.Module], devices: Sequence[torch.device]) -> nn.Module:
        """Build the model and keep this rank's shards. Collective: every rank must call.

        With ``meta_init`` no rank ever holds more than its shards and one whole module's own
        parameters; else each holds the whole model while it is built.

        Raises:
            UserError: a pattern matches no module, the model does not fit its plan, or it cannot
                be built without values.
        """
        mesh = self._mesh(devices[0])
        with torch.device("meta" if self.meta_init else "cpu"):
            module = build()
        is_meta = any(one.is_meta for one in module.parameters())
        if not is_meta:
            module = module.to(devices[0]).to(memory_format=torch.contiguous_format)
            for tensor in (*module.parameters(), *module.buffers()):
                dist.broadcast(tensor.detach(), src=0)  # else each would keep a part of its own
        if "tensor" in (mesh.mesh_dim_names or ()):
            _split_layers(
                module, mesh["tensor"], self.plan, is_sequence_split=self.sequence_parallel
            )
        if "shard" in (mesh.mesh_dim_names or ()):
            self._shard(module, mesh, devices[0])
        if is_meta:
            module.to_empty(device="cpu" if self.cpu_offload else devices[0])
            initialise(module)
        return module

    @contextmanager
    def _unsynced(self, model: nn.Module) -> Iterator[None]:
        shards = model if isinstance(model, FSDPModule) else None
        if shards is not None:
            shards.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            if shards is not None:
                shards.set_requires_gradient_sync(True)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context whose backward keeps whole gradients, for a later one to reduce."""
        return self._unsynced(model)

    def _mesh(self, device: torch.device) -> DeviceMesh:
        num_ranks = dist.get_world_size()
        tensor = self.tensor_parallel_size or num_ranks
        sizes = {
            "replicate": self.num_replicas,
            "shard": num_ranks // (self.num_replicas * tensor),
            "tensor": tensor,
        }
        axes = {axis: size for axis, size in sizes.items() if size > 1}
        return _new_mesh(dist.group.WORLD, device.type, tuple((axes or {"shard": 1}).items()))

    def _shard(self, module: nn.Module, mesh: DeviceMesh, device: torch.device) -> None:
        """Shard each block's parameters, and then what is left as one more group."""
        axes = tuple(axis for axis in mesh.mesh_dim_names or () if axis != "tensor")
        settings: dict[str, Any] = {
            "mesh": mesh[axes],
            "reshard_after_forward": self.reshard_after_forward,
            "offload_policy": CPUOffloadPolicy() if self.cpu_offload else OffloadPolicy(),
        }
        # Blocks of a transformer are gathered in half the bytes; autocast gives each operator its
        # dtype, as without shards. What is outside of them, and BatchNorm, needs fp32.
        halved = MixedPrecisionPolicy()
        if self.precision == "bf16":
            halved = MixedPrecisionPolicy(
                param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
            )
        for pattern in self.blocks:
            for block in matched(module, pattern, key="model.blocks").values():
                fully_shard(block, mp_policy=halved, **settings)
        fully_shard(module, **settings)


@lru_cache(maxsize=1)
def _new_mesh(
    world: dist.ProcessGroup, device_type: str, axes: tuple[tuple[str, int], ...]
) -> DeviceMesh:
    """Return the mesh of these axes and sizes. Its groups are made once for each `world`."""
    names, sizes = zip(*axes, strict=True)
    return init_device_mesh(device_type, sizes, mesh_dim_names=names)


def _split_layers(
    module: nn.Module, mesh: DeviceMesh, plan: Mapping[str, str], *, is_sequence_split: bool
) -> None:
    """Split the layers that the plan names over the ranks of the mesh.

    Raises:
        UserError: there is none, a name matches no module, or a word is unknown.
    """
    if not plan:
        raise UserError(
            "parallelism.tensor_parallel_size needs a model that says how its layers are split; "
            "write model.tensor_parallel={PATTERN:colwise}, or parallelism=fsdp"
        )
    styles = _styles(is_sequence_split=is_sequence_split)
    for pattern, word in plan.items():
        if word not in _styles(is_sequence_split=True):
            raise UserError(
                f"model.tensor_parallel ({pattern}: {word}) must be one of "
                f"{', '.join(_styles(is_sequence_split=True))}"
            )
        found = matched(module, pattern, key="model.tensor_parallel")
        for name, layer in found.items() if word in styles else ():
            _validate_size(name, layer, word, size=mesh.size())
            parallelize_module(layer, mesh, styles[word]())


def _validate_size(name: str, layer: nn.Module, word: str, *, size: int) -> None:
    """Reject a layer that the ranks cannot split into equal parts."""
    weight, axis = getattr(layer, "weight", None), {"colwise": 0, "rowwise": 1}.get(word)
    if axis is not None and isinstance(weight, Tensor) and weight.shape[axis] % size:
        sides = ("outputs", "inputs")
        raise UserError(
            f"{name} has {weight.shape[axis]} {sides[axis]}, which {size} ranks cannot split into "
            "equal parts; choose a parallelism.tensor_parallel_size that divides it"
        )


def _styles(*, is_sequence_split: bool) -> Mapping[str, Callable[[], ParallelStyle]]:
    """Return what the words of a plan mean. Between layers activations are whole or split."""
    between = SPLIT if is_sequence_split else WHOLE
    styles: dict[str, Callable[[], ParallelStyle]] = {
        "colwise": ColwiseParallel,
        "rowwise": lambda: RowwiseParallel(output_layouts=between),
    }
    if not is_sequence_split:
        return styles
    return styles | {"sequence": SequenceParallel, "gather": _Gather, "split": _Split}


class _Gather(ParallelStyle):
    """Gives a module the whole of its first argument, of which each rank has a part."""

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        def gather(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return _laid_out(args[0], mesh, SPLIT, WHOLE), *args[1:]

        module.register_forward_pre_hook(gather)
        return module


class _Split(ParallelStyle):
    """Leaves each rank a part of a module's output, of which all have the whole."""

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        def split(_: nn.Module, args: Any, output: Tensor) -> Tensor:
            if output.shape[1] % mesh.size():
                raise UserError(
                    f"parallelism.sequence_parallel=true splits sequences of {output.shape[1]} "
                    f"over {mesh.size()} ranks; choose a length that they divide"
                )
            return _laid_out(output, mesh, WHOLE, SPLIT)

        module.register_forward_hook(split)
        return module


def _laid_out(value: Tensor, mesh: DeviceMesh, given: Placement, wanted: Placement) -> Tensor:
    """Return this rank's part of an activation in another layout over the mesh."""
    if not isinstance(value, DTensor):
        value = DTensor.from_local(value, mesh, [given], run_check=False)
    return value.redistribute(placements=[wanted]).to_local()
