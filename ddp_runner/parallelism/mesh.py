"""Modes that split a model over a mesh of ranks: FSDP2, HSDP, tensor parallelism, FSDP with TP."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
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
from torch.nn.modules.batchnorm import _BatchNorm

from ddp_runner.dist_env import DistEnv
from ddp_runner.errors import UserError
from ddp_runner.host.memory import return_freed_memory
from ddp_runner.parallelism.mode import Layout, one_share_for
from ddp_runner.parallelism.modules import blocks_of, initialise
from ddp_runner.parallelism.single import Single
from ddp_runner.parallelism.tensor_parallel import split_layers
from ddp_runner.parallelism.tree import Tree, TreeReduceScatter


class GlooReduceScatter:
    """Sends each rank only its part, and adds there: half of the bytes of an all-reduce.

    It computes FSDP2's sums and means; other operations use torch's reduce-scatter.
    """

    allocate = staticmethod(torch.empty)  # as FSDP2 asks for buffers

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Fill the output vector with this rank's part of all inputs, reduced by `op`.

        Collective: every rank of the group must call. Return the work if `async_op`, else None.
        """
        if async_op or op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            return dist.reduce_scatter_tensor(
                output_tensor, input_tensor, op=op, group=group, async_op=async_op
            )
        parts = torch.empty_like(input_tensor)
        dist.all_to_all_single(parts, input_tensor, group=group)
        torch.sum(parts.view(group.size(), -1), dim=0, out=output_tensor)
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(group.size())
        return None


# A tensor over two axes is gathered in two steps. Torch warns that this is slow and that ranks may
# disagree. It happens only for a save and a norm, and an axis has equal results after each step.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
# It repeats errors that are raised anyway.
logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)


@dataclass(frozen=True)
class Mesh(Single):
    """A model that ``place`` splits over ranks; the mode's YAML explains the keys."""

    num_replicas: int
    tensor_parallel_size: int | None
    reshard_after_forward: bool | int
    cpu_offload: bool
    return_memory: bool
    sequence_parallel: bool
    precision: str
    meta_init: bool
    blocks: Sequence[str]
    plan: Mapping[str, str]
    tree: Tree | None = None  # of virtual ranks, which add gradients in a fixed order

    def layout(self, env: DistEnv) -> Layout:
        """Return a rank's part; ranks of a tensor-parallel group have the same share."""
        return one_share_for(env, self.tensor_parallel_size)

    def place(self, build: Callable[..., nn.Module], devices: Sequence[torch.device]) -> nn.Module:
        """Build the model and keep this rank's shards. Collective: every rank must call.

        With ``meta_init`` no rank ever holds more than its shards and a single module's whole
        parameters; else each holds the whole model while it is built.

        Raises:
            UserError: a pattern matches no module, the model does not fit its plan or cannot be
                built without values, or memory cannot be returned.
        """
        if self.return_memory and not return_freed_memory():
            raise UserError(
                "parallelism.return_memory=true needs glibc, the C library of most Linux systems, "
                "and this machine has another",
                "leave it out",
            )
        mesh = self._mesh(devices[0])
        with torch.device("meta" if self.meta_init else "cpu"):
            module = build()
        is_meta = any(parameter.is_meta for parameter in module.parameters())
        if not is_meta:
            module = module.to(devices[0])
            for tensor in (*module.parameters(), *module.buffers()):
                tensor.data = tensor.data.contiguous()  # as FSDP requires
                dist.broadcast(tensor.data, src=0)  # each rank keeps a part of the same values
        axes = mesh.mesh_dim_names or ()
        if "tensor" in axes:
            split_layers(
                module, mesh["tensor"], self.plan, is_sequence_split=self.sequence_parallel
            )
        if "shard" in axes:
            self._shard(module, mesh, devices[0])
        if is_meta:
            module.to_empty(device="cpu" if self.cpu_offload else devices[0])
            initialise(module)
        if "shard" in axes and self.tree is None:
            _average_scalars(module, mesh)
        return module

    def adding_in(self, tree: Tree) -> "Mesh":
        """Return the mode with gradients that are added in a tree.

        Weights are gathered in fp32: autocast rounds them as in a single process.
        """
        return replace(self, tree=tree, precision="fp32")

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Keep whole gradients in the block; a later backward reduces them."""
        module = getattr(model, "_orig_mod", model)  # torch.compile's wrapper
        if not isinstance(module, FSDPModule):
            yield
            return
        module.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            module.set_requires_gradient_sync(True)

    def _mesh(self, device: torch.device) -> DeviceMesh:
        num_ranks = dist.get_world_size()
        tensor = self.tensor_parallel_size or num_ranks
        sizes = {
            "replicate": self.num_replicas,
            "shard": num_ranks // (self.num_replicas * tensor),
            "tensor": tensor,
        }
        axes = {axis: size for axis, size in sizes.items() if size > 1}
        if axes.keys() != {"tensor"}:  # FSDP averages the gradients, so it needs its axis
            axes = {axis: size for axis, size in sizes.items() if size > 1 or axis == "shard"}
        return _new_mesh(dist.group.WORLD, device.type, tuple(axes.items()))

    def _shard(self, module: nn.Module, mesh: DeviceMesh, device: torch.device) -> None:
        """Shard each block's parameters, then all remaining parameters as a last group."""
        settings: dict[str, Any] = {
            # In a tree, the replicas of HSDP are added after the shards, by the same function.
            "mesh": mesh[_data_axes(mesh)] if self.tree is None else mesh["shard"],
            "ignored_params": set(filter(_is_scalar, module.parameters())),
            "offload_policy": CPUOffloadPolicy() if self.cpu_offload else OffloadPolicy(),
        }
        # bf16 halves the bytes of gathering a transformer's blocks; autocast gives each operator
        # its dtype, as without shards. BatchNorm, and parameters outside blocks, need fp32.
        halved = MixedPrecisionPolicy()
        if self.precision == "bf16":
            halved = MixedPrecisionPolicy(
                param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
            )
        # The backward begins with the last block and parameters outside blocks: keep them whole.
        blocks = blocks_of(module, self.blocks)
        _validate_ties(module, blocks)
        for block in blocks:
            has_statistics = any(isinstance(part, _BatchNorm) for part in block.modules())
            policy = MixedPrecisionPolicy() if has_statistics else halved
            reshard = self.reshard_after_forward if block is not blocks[-1] else False
            fully_shard(block, mp_policy=policy, reshard_after_forward=reshard, **settings)
        fully_shard(module, reshard_after_forward=False, **settings)
        is_gloo = device.type == "cpu" and dist.get_backend(mesh["shard"].get_group()) == "gloo"
        has_replicas = "replicate" in (mesh.mesh_dim_names or ())
        replicas = mesh["replicate"].get_group() if has_replicas else None
        for part in module.modules():
            if isinstance(part, FSDPModule) and (is_gloo or self.tree is not None):
                comm: Any = GlooReduceScatter()  # torch's base class is private
                if self.tree is not None:
                    comm = TreeReduceScatter(self.tree, replicas)
                part.set_custom_reduce_scatter(comm)


def _validate_ties(module: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Reject a parameter that two blocks share: FSDP2 gathers it with only one of them."""
    # Inner blocks come first and overwrite outer blocks here.
    block_of = {part: block for block in reversed(blocks) for part in block.modules()}
    first = dict[nn.Parameter, tuple[str, nn.Module | None]]()
    for prefix, part in module.named_modules():
        for name, parameter in part.named_parameters(prefix, recurse=False):
            other_name, block = first.setdefault(parameter, (name, block_of.get(part)))
            if block is not block_of.get(part) and not _is_scalar(parameter):
                raise UserError(
                    f"model.blocks puts {other_name} and {name}, which are one parameter, into "
                    "different groups, and FSDP2 gathers it with one of them",
                    "leave their blocks out of model.blocks, or write parallelism=ddp",
                )


def _data_axes(mesh: DeviceMesh) -> tuple[str, ...]:
    """Return the axes over which gradients are averaged."""
    return tuple(axis for axis in mesh.mesh_dim_names or () if axis != "tensor")


def _is_scalar(parameter: nn.Parameter) -> bool:
    """Return whether a parameter has no dimensions, so that FSDP2 cannot shard it."""
    return not parameter.ndim


def _average_scalars(module: nn.Module, mesh: DeviceMesh) -> None:
    """Let each backward average the gradients of scalar parameters, which FSDP2 ignores.

    A gradient may include the average of earlier micro-batches, which does not change.
    """
    groups = [mesh[axis].get_group() for axis in _data_axes(mesh)]

    def average(parameter: Tensor) -> None:
        assert parameter.grad is not None
        for group in groups:
            dist.all_reduce(parameter.grad, group=group)
            parameter.grad /= group.size()

    for scalar in filter(_is_scalar, module.parameters()):
        if scalar.requires_grad:
            scalar.register_post_accumulate_grad_hook(average)


@lru_cache(maxsize=1)
def _new_mesh(
    world: dist.ProcessGroup, device_type: str, axes: tuple[tuple[str, int], ...]
) -> DeviceMesh:
    """Return the mesh of these axes and sizes; its groups are made once for each `world`."""
    names, sizes = zip(*axes, strict=True)
    return init_device_mesh(device_type, sizes, mesh_dim_names=names)
