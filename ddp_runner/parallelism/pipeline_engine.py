"""The engine of a pipeline: the micro-batches of a step in a schedule of torch's.

A stage takes tensors of a fixed shape, so a smaller micro-batch is filled with copies of a sample,
whose outputs the training step does not see.

Source: https://docs.pytorch.org/docs/stable/distributed.pipelining.html
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.utils._pytree import tree_leaves, tree_map_only

from ddp_runner.device import sum_dtype
from ddp_runner.errors import UserError
from ddp_runner.metric_names import StepPart
from ddp_runner.parallelism.mode import Engine, Sums
from ddp_runner.parallelism.stages import stages_of
from ddp_runner.seeds import seed_all

SCHEDULES: Mapping[str, Any] = {
    "1f1b": Schedule1F1B,
    "gpipe": ScheduleGPipe,
    "interleaved": ScheduleInterleaved1F1B,
}
BUCKET_BYTES = 25 * 2**20  # of gradients in one all-reduce, as in DDP


@dataclass
class _Micro:
    """A micro-batch, and what the training step calls the model with."""

    batch: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    autocast: Callable[[], torch.autocast]  # the context of the call
    training: bool  # the model's mode in the call
    size: int = 0  # samples of the inputs

    def filled(self, size: int) -> "_Micro":
        """Return the micro-batch with inputs of `size` samples."""
        count = self.batch.num_samples

        def fill(leaf: Tensor) -> Tensor:
            if count == size or not leaf.ndim or len(leaf) != count:
                return leaf
            return torch.cat([leaf, leaf[:1].expand(size - count, *leaf.shape[1:])])

        args, kwargs = tree_map_only(Tensor, fill, (self.args, self.kwargs))
        return replace(self, args=args, kwargs=kwargs, size=size)

    def own(self, outputs: Any) -> Any:
        """Return the part of the model's outputs that belongs to the micro-batch's samples."""
        count = self.batch.num_samples

        def cut(leaf: Tensor) -> Tensor:
            if not leaf.ndim or len(leaf) != self.size:
                raise UserError(
                    f"a pipeline fills a micro-batch up to {self.size} samples, and the model "
                    f"returns {tuple(leaf.shape)} for them",
                    "return tensors whose first dim is the samples, or write parallelism=fsdp",
                )
            return leaf[:count]

        return outputs if count == self.size else tree_map_only(Tensor, cut, outputs)

    @property
    def shapes(self) -> Sequence[Any]:
        """The shapes and dtypes of the inputs."""
        leaves = tree_leaves((self.args, self.kwargs))
        return [(tuple(leaf.shape), leaf.dtype) for leaf in leaves if isinstance(leaf, Tensor)]


class PipelineEngine(Engine[Any, Any]):
    """Computes the micro-batches of a step in a pipeline's schedule."""

    def __init__(self, module: nn.Module, local: Any, schedule: str) -> None:
        stages = stages_of(module)
        assert stages is not None
        self._module, self._stages, self._local = module, stages, local
        self._class = SCHEDULES[schedule]
        self._shapes: Sequence[Any] | None = None  # of the inputs that the schedule is for
        self._schedule: Any = None

    def backward(self, state: Any, batch: Any) -> Sums:
        """Leave a step's gradients in the module, summed over shares. Collective: every rank.

        Raises:
            UserError: the training step does not call the model once, or the inputs of two
                micro-batches have different shapes.
        """
        count, parts = state.batches.grad_accum_steps, [*batch.micro_batches]
        # The schedule has a fixed number of micro-batches, and an epoch's last step may have fewer.
        parts += [parts[0]._replace(weight=0.0)] * (count - len(parts))
        self._state, self._count, self._seed = state, batch.global_count, torch.initial_seed()
        self._sums: Sums = self._local.new_sums(state)
        micros = [self._recorded(part, index) for index, part in enumerate(parts)]
        size = max(state.batches.micro_size, *(part.num_samples for part in parts))
        self._micros = [micro.filled(size) for micro in micros]
        self._prepare()
        numbers = torch.arange(count)
        try:
            self._schedule.step(index=numbers, target=numbers, return_outputs=False)
        except RuntimeError as error:  # torch hides what failed in a stage
            raise error.__cause__ or error from None
        self._micros = []
        # Replicas first: their buckets differ between stages, and with them the order of addition.
        if self._stages.replicas is not None:
            add_gradients(self._module.parameters(), self._stages.replicas)
        for tied, group in self._stages.ties:
            add_gradients(map(self._module.get_parameter, tied), group)
        sums = self._shared_sums()
        state.timer.mark(StepPart.PIPELINE)
        return sums

    def _recorded(self, part: Any, index: int) -> _Micro:
        """Return a micro-batch with the inputs that the training step gives the model."""
        kind = self._stages.device.type

        def record(*args: Any, **kwargs: Any) -> NoReturn:
            enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
            context = partial(torch.autocast, kind, dtype=dtype, enabled=enabled)
            raise _ModelCallError(_Micro(part, args, kwargs, context, self._module.training))

        seed_all(self._seed, "micro-batch", index)
        try:
            model = _StandIn(self._module, record)
            self._local.micro_loss(self._state, model, part, self._sums, count=self._count)
        except _ModelCallError as call:
            micro: _Micro = call.args[0]
            return micro
        raise _wrong_calls(0)

    def _prepare(self) -> None:
        """Build the schedule for the shapes of these inputs, unless it is built."""
        shapes, *others = (micro.shapes for micro in self._micros)
        if different := [other for other in others if other != shapes]:
            raise UserError(
                f"two micro-batches of a step have inputs of {shapes} and {different[0]}, and a "
                "pipeline sends tensors of one shape",
                "pad all samples to one length, or write parallelism=fsdp",
            )
        if shapes == self._shapes:
            return
        first, stages = self._micros[0], self._stages
        training = [(part, part.training) for part in self._module.modules()]
        self._module.eval()
        with first.autocast(), torch.no_grad():
            stages.forward(*first.args, **first.kwargs)  # to learn the shapes of hidden states
        for part, is_training in training:
            part.training = is_training
        num_stages, loss = len(stages.blocks), torch.empty(1, device="meta")
        metas = [stages.hidden[stage].requires_grad_() for stage in range(num_stages - 1)]
        ends = [(), *((meta,) for meta in metas), (loss.requires_grad_(),)]
        pieces = [
            PipelineStage(
                _Computation(partial(self._compute, stage)),
                stage,
                num_stages,
                stages.device,
                input_args=ends[stage],
                output_args=ends[stage + 1],
                group=stages.group,
            )
            for stage in stages.own
        ]
        self._schedule = self._class(
            pieces if self._class is ScheduleInterleaved1F1B else pieces[0],
            len(self._micros),
            loss_fn=lambda output, _: output.squeeze(0),
            scale_grads=False,
        )
        self._shapes = shapes

    def _compute(self, stage: int, hidden: Tensor | None = None, *, index: Tensor) -> Tensor:
        """Return a stage's output for a micro-batch; that of the last stage is the loss."""
        number = int(index)
        micro = self._micros[number]
        seed_all(self._seed, "stage", number, stage)  # else two stages would drop the same units
        if self._module.training is not micro.training:
            self._module.train(micro.training)
        with micro.autocast():
            output: Tensor = self._stages.compute(stage, hidden, micro.args, micro.kwargs)
        if stage < len(self._stages.blocks) - 1:
            return output.contiguous()
        model = _StandIn(self._module, lambda *_, **__: micro.own(output))
        seed_all(self._seed, "micro-batch", number)  # as when the inputs were recorded
        loss, share = self._local.micro_loss(
            self._state, model, micro.batch, self._sums, count=self._count
        )
        if model.num_calls != 1:
            raise _wrong_calls(model.num_calls)
        part: Tensor = loss * share
        return part.reshape(1).to(torch.get_default_dtype())

    def _shared_sums(self) -> Sums:
        """Return the last stage's sums on every rank of the pipeline. Collective."""
        sums, group, device = self._sums, self._stages.group, self._stages.device
        last, dtype = group.size() - 1, sum_dtype(device)
        # The trial of the first batch has told each rank the names of the scalars.
        packed = torch.empty(2 + len(sums.scalars), device=device, dtype=dtype)
        if group.rank() == last:
            tokens = sums.loss if sums.tokens is None else sums.tokens
            values = [sums.loss, tokens, *sums.scalars.values()]
            packed = torch.stack([value.to(device, dtype) for value in values])
        dist.broadcast(packed, group=group, group_src=last)
        loss, tokens, *scalars = packed.to(sums.loss.dtype)
        by_name = dict(zip(sums.scalars, scalars, strict=True))
        return Sums([loss], None if sums.tokens is None else tokens, by_name)


class _Computation(nn.Module):
    """A stage as torch's pipeline takes it; its parameters stay those of the model."""

    def __init__(self, forward: Callable[..., Tensor]) -> None:
        super().__init__()
        self.forward = forward


class _ModelCallError(BaseException):
    """Ends a training step where it calls the model; ``except Exception`` does not catch it."""


class _StandIn:
    """What the training step gets as its model: it can call it, and switch its mode."""

    def __init__(self, module: nn.Module, call: Callable[..., Any]) -> None:
        self._module, self._call, self.num_calls = module, call, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.num_calls += 1
        return self._call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name in ("train", "eval", "training"):
            return getattr(self._module, name)
        raise UserError(
            f"the training step reads {name} of the model, and a rank of a pipeline has only a "
            "part of it",
            "write a step that only calls the model, or parallelism=fsdp",
        )


def _wrong_calls(count: int) -> UserError:
    return UserError(
        f"the training step calls the model {count} times, and a pipeline computes it once",
        "write a step that calls it once, or parallelism=fsdp",
    )


def add_gradients(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Add gradients over a group; one that no rank has stays None. Collective in the group.

    Raises:
        UserError: a gradient is sparse.
    """
    trained = [parameter for parameter in dict.fromkeys(parameters) if parameter.requires_grad]
    ends = accumulate(parameter.nbytes for parameter in trained)
    kinds = [
        (parameter.dtype, end // BUCKET_BYTES) for parameter, end in zip(trained, ends, strict=True)
    ]
    for kind in dict.fromkeys(kinds):
        bucket = [one for one, its_kind in zip(trained, kinds, strict=True) if its_kind == kind]
        parts = [torch.zeros_like(one) if one.grad is None else one.grad for one in bucket]
        if any(part.is_sparse for part in parts):
            raise UserError(
                "a pipeline adds dense gradients over ranks, and this model has sparse ones",
                "leave out sparse=True in the model, or write parallelism=ddp",
            )
        are_used = [
            part.new_full((1,), one.grad is not None)
            for part, one in zip(parts, bucket, strict=True)
        ]
        flat = torch.cat([*(part.flatten() for part in parts), *are_used])
        dist.all_reduce(flat, group=group)
        *totals, is_used = flat.split([*(part.numel() for part in parts), len(bucket)])
        for parameter, total, used in zip(bucket, totals, is_used, strict=True):
            if parameter.grad is not None:
                parameter.grad.copy_(total.view_as(parameter))
            elif used:
                parameter.grad = total.view_as(parameter).clone()
