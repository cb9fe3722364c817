"""Splits a model's layers over the ranks of a mesh axis, by the plan in the model's YAML.

Source: https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from ddp_runner.errors import UserError
from ddp_runner.parallelism.modules import matched
from ddp_runner.seeds import seed_all

WHOLE, SPLIT = Replicate(), Shard(1)  # of activations (batch, length, features)
OF_SEQUENCES = ("sequence", "split")  # styles that count only if sequences are split
PARAMETERS_SPLIT = ("colwise", "rowwise", "sequence")  # styles that replace parameters


def split_layers(
    module: nn.Module, mesh: DeviceMesh, plan: Mapping[str, str], *, is_sequence_split: bool
) -> None:
    """Split the layers that the plan names over the ranks of the mesh.

    Raises:
        UserError: the plan is empty, a pattern matches no module, a style is unknown, or a layer
            cannot be split.
    """
    if not plan:
        raise UserError(
            "parallelism.tensor_parallel_size needs a model that says how its layers are split",
            "write model.tensor_parallel={PATTERN:colwise}, or parallelism=fsdp",
        )
    between, numbers = SPLIT if is_sequence_split else WHOLE, _RankNumbers(mesh)
    styles: Mapping[str, Callable[[], ParallelStyle]] = {
        "colwise": ColwiseParallel,
        "rowwise": lambda: RowwiseParallel(output_layouts=between),
        "gather": lambda: _Gather(between),
        "sequence": SequenceParallel,
        "split": _Split,
    }
    module.register_forward_pre_hook(numbers.begin)
    names_of = defaultdict[nn.Parameter, list[str]](list)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names_of[parameter].append(name)
    for pattern, word in plan.items():
        if word not in styles:
            raise UserError(
                f"model.tensor_parallel ({pattern}: {word}) must be one of {', '.join(styles)}"
            )
        layers = matched(module, pattern, key="model.tensor_parallel")
        for name, layer in layers.items() if is_sequence_split or word not in OF_SEQUENCES else ():
            _validate_layer(name, layer, word, size=mesh.size())
            if word in PARAMETERS_SPLIT:
                _validate_ties([names_of[tensor] for tensor in layer.parameters(recurse=False)])
            parallelize_module(layer, mesh, styles[word]())
            numbers.between(layer, word)


class _RankNumbers:
    """Gives each rank random numbers of its own between a colwise and a rowwise layer.

    There each rank has other features, and dropout must not drop the same units of different heads;
    elsewhere all ranks must draw the same numbers.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._rank = mesh.get_local_rank()
        self._seed: int | None = None  # for all ranks, once the part has ended

    def begin(self, *_: Any) -> None:
        """Reset the seed: an earlier forward may have ended inside the part."""
        self._seed = None

    def between(self, layer: nn.Module, word: str) -> None:
        """Hook a layer that begins or ends the part."""
        if word == "colwise":
            layer.register_forward_hook(self._diverge)
        elif word == "rowwise":
            layer.register_forward_pre_hook(self._meet)

    def _diverge(self, layer: nn.Module, *_: Any) -> None:
        if layer.training and self._seed is None and not torch.compiler.is_compiling():
            self._seed = int(torch.randint(2**62, ()))  # the same on all ranks
            seed_all(self._seed, "split", self._rank)

    def _meet(self, *_: Any) -> None:
        if self._seed is not None:
            seed_all(self._seed)
            self._seed = None


def _validate_layer(name: str, layer: nn.Module, word: str, *, size: int) -> None:
    """Reject a layer that cannot be split into equal parts."""
    axis = {"colwise": 0, "rowwise": 1}.get(word)
    if axis is None:
        return
    if not isinstance(layer, nn.Linear | nn.Embedding):
        raise UserError(
            f"model.tensor_parallel ({name}: {word}) needs a linear layer or an embedding, and "
            f"{name} is a {type(layer).__name__}",
            "leave it out",
        )
    weight = layer.weight
    if weight.shape[axis] % size:
        sides = ("outputs", "inputs")
        raise UserError(
            f"{name} has {weight.shape[axis]} {sides[axis]}, which {size} ranks cannot split into "
            "equal parts",
            "choose a parallelism.tensor_parallel_size that divides it",
        )


def _validate_ties(names: Iterable[Sequence[str]]) -> None:
    """Reject a parameter that several modules share: torch would split it in only one of them."""
    for tied in names:
        if len(tied) > 1:
            raise UserError(
                f"model.tensor_parallel splits {tied[0]}, which is one parameter with {tied[1]}, "
                "and torch would make them two",
                "leave both layers out of it, or write parallelism=fsdp",
            )


class _Gather(ParallelStyle):
    """Gathers a module's first argument, once for all of its layers.

    Its gradients are added on each rank first, then over the ranks in one all-reduce.
    """

    def __init__(self, placement: Placement) -> None:
        self._placement = placement

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        has_parameters = any(True for _ in module.parameters(recurse=False))

        def gather(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            first = _redistribute(args[0], mesh, self._placement, WHOLE)
            return first.to_local() if has_parameters else first, *args[1:]

        module.register_forward_pre_hook(gather)
        return module


class _Split(ParallelStyle):
    """Keeps a part of a module's output on each rank, which computes the whole output."""

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        def split(_: nn.Module, args: Any, output: Tensor) -> Tensor:
            if output.shape[1] % mesh.size():
                raise UserError(
                    f"parallelism.sequence_parallel=true splits sequences of {output.shape[1]} "
                    f"over {mesh.size()} ranks",
                    "choose a length that they divide",
                )
            return _redistribute(output, mesh, WHOLE, SPLIT).to_local()

        module.register_forward_hook(split)
        return module


def _redistribute(value: Tensor, mesh: DeviceMesh, old: Placement, new: Placement) -> DTensor:
    """Return an activation with a new placement over the mesh."""
    if not isinstance(value, DTensor):
        value = DTensor.from_local(value, mesh, [old], run_check=False)
    return value.redistribute(placements=[new])
