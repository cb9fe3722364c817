"""One process's step: the reference, and the bounds of the rounding errors that it may have.

Each rank computes its share on a whole copy of the model, in a plain loop, as if it were the only
rank, and the check itself adds up the shares in float64. Then it recomputes the step with random
rounding errors: what they change is how far a right step may be off. Other orders of summation, or
float64, would tell less: dropout would draw other numbers, BatchNorm needs its batches, and some
constants follow the dtype.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_runner.check.distances import Distance, Key, Stage, call_of, norm, wide
from ddp_runner.check.only_rank import as_only_rank, communicates
from ddp_runner.check.rank_differences import with_other_stages
from ddp_runner.data.batches import StepBatch
from ddp_runner.data.trees import tensors_of
from ddp_runner.distributed import sum_over_ranks
from ddp_runner.errors import UserError
from ddp_runner.parallelism.shards import full_tensor, has_shards
from ddp_runner.parallelism.stages import whole_parameters
from ddp_runner.seeds import derive, seed_all
from ddp_runner.train.build_model import place_alone
from ddp_runner.train.optimizers import freeze
from ddp_runner.train.state import DTYPES, TrainState, Work, forward, restored_after
from ddp_runner.train.step import StepOutput

# Rounding errors of each result and gradient. Right steps used at most 0.22 of the bounds that
# follow from it: see docs/proof.md. The rest is a margin for GPUs and more ranks.
FACTOR = 8.0
NUM_NOISY = 3  # recomputations with random rounding errors
NUM_DRAWS = 1_000_003  # different random errors; a prime, so that no two rows get equal ones
Visit = Callable[[Key, Tensor], object]


def one_process(state: TrainState) -> nn.Module:
    """Return the whole model as a single process builds it.

    Raises:
        UserError: its parameters depend on the number of ranks.
    """
    work = state.work
    seed_all(work.config.seed)
    with as_only_rank():
        model = place_alone(work.config, work.dataset.model_arguments, work.devices[0])
    freeze(model, work.config.params.freeze)
    if any(isinstance(part, nn.SyncBatchNorm) for part in state.module.modules()):
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    shapes, alone = (
        {name: tuple(value.shape) for name, value in whole_parameters(one).items()}
        for one in (state.module, model)
    )
    for name in shapes | alone:
        if (here := shapes.get(name)) != (there := alone.get(name)):
            raise UserError(
                f"{name} of the model has shape {here} here, and {there} in one process",
                "build the model without asking for the rank or the number of ranks",
            )
    return model


def registered_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return a model's parameters and buffers, including those that are not saved."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def whole_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return ``registered_tensors`` of the whole model. Collective: every rank must call."""
    held = with_other_stages(module, registered_tensors(module))
    return {name: full_tensor(value.detach()) for name, value in held.items() if value is not None}


@contextmanager
def watched(
    work: Work, module: nn.Module, visit: Visit, change: Callable[[Any], Any] | None = None
) -> Iterator[Work]:
    """Yield work whose training step shows what all modules get and return, in this order.

    `change` replaces what they return, never what they get. A forward that is repeated in the
    backward, for ``train.activation_checkpointing``, is not shown.
    """
    is_forward, running = False, list[str]()

    def step_fn(model: nn.Module, data: Any) -> StepOutput:
        nonlocal is_forward
        is_forward = True
        running.clear()
        try:
            return work.step_fn(model, data)
        finally:
            is_forward = False

    def show(key: Key, values: Any) -> None:
        for tensor in dict(tensors_of(values)).values():
            if is_forward and tensor.is_floating_point():
                visit(key, tensor.detach())

    def before(_: nn.Module, args: Any, kwargs: Any, *, name: str) -> None:
        show((Stage.INPUT, call_of(name, caller=running[-1] if running else None)), (args, kwargs))
        running.append(name)

    def after(_: nn.Module, _args: Any, result: Any, *, name: str) -> Any:
        running.pop()
        result = change(result) if is_forward and change is not None else result
        show((Stage.OUTPUT, name), result)
        return result

    with ExitStack() as hooks:
        for path, part in module.named_modules():
            show_inputs, show_outputs = partial(before, name=path), partial(after, name=path)
            hooks.enter_context(part.register_forward_pre_hook(show_inputs, with_kwargs=True))
            hooks.enter_context(part.register_forward_hook(show_outputs))
        yield replace(work, step_fn=step_fn)


def rounding(dtype: torch.dtype) -> float:
    """Return the relative error that rounding may cause in a number of this dtype."""
    return FACTOR * torch.finfo(dtype).eps if dtype.is_floating_point else 0.0


class Noise:
    """Adds random rounding errors. It draws no numbers that a model could draw."""

    def __init__(self, state: TrainState) -> None:
        seed = derive(state.work.config.seed, "rounding", state.work.env.rank)
        generator = torch.Generator().manual_seed(seed)
        self._draws = 2 * torch.rand(NUM_DRAWS, generator=generator) - 1
        self._shifts = Random(seed)

    def __call__(self, tensor: Tensor) -> Tensor:
        """Return a tensor with an error of up to FACTOR rounding errors in each element."""
        if not tensor.is_floating_point() or tensor.is_sparse:
            return tensor
        # To draw each error would take longer than to compute most of the tensors.
        draws = self._draws.roll(self._shifts.randrange(NUM_DRAWS))
        draws = draws.repeat(-(-tensor.numel() // NUM_DRAWS))[: tensor.numel()].view(tensor.shape)
        values = tensor.detach()
        # A constant for autograd: a model that checkpoints its layers repeats them without noise,
        # and must save the same number of tensors.
        return tensor + values * draws.to(values).mul_(rounding(values.dtype))


class OneProcess:
    """One process's results of a step, and how far from them rounding may lead.

    Collective: every rank must build it.
    """

    def __init__(self, state: TrainState, batch: StepBatch) -> None:
        self._state, self._batch = state, batch
        self.model = one_process(state)
        has_peers = communicates(state, self.model, batch.micro_batches[0])
        self._place = nullcontext if has_peers else as_only_rank
        self.results = defaultdict[Key, list[Tensor]](list)  # of the calls of a module
        self.bounds = dict[Key, float]()  # L2 norm of the difference
        self.start = dict[Key, Distance]()  # of the whole parameters; replicas are compared before
        is_split = has_shards(state.module) or state.work.layout.has_stages
        if is_split and state.work.config.model.get("weights") is None:
            held = whole_tensors(state.module)
            for name, value in self.model.named_parameters():
                self.start[Stage.START, name] = distance = Distance(0.0)
                distance.add(held[name], value)
        # The next module may change a result in place.
        self._compute(lambda key, value: self.results[key].append(value.clone()))
        parameters = dict(self.model.named_parameters())
        self.own = {name: value.grad for name, value in parameters.items()}  # of this share
        for key, values in self.results.items():
            dtype = parameters[key[1]].dtype if key[0] == Stage.GRADIENT else values[0].dtype
            self.bounds[key] = rounding(dtype) * norm(*values)
        noise = Noise(state)
        for _ in range(NUM_NOISY):
            self._recompute(noise)
        self._add_sent()

    def _add_sent(self) -> None:
        """Widen the bounds by what a hook of DDP rounds that sends gradients in fewer digits."""
        work = self._state.work
        hook = work.config.parallelism.get("comm_hook")
        if not isinstance(hook, str):
            return
        for name, own in self.own.items():
            if own is not None:
                sent = own.to(DTYPES[hook]).div_(work.env.world_size)
                dist.all_reduce(sent, group=work.data_group)
                key = Stage.GRADIENT, name
                distance = norm(wide(sent) - self.results[key][0])
                self.bounds[key] = max(self.bounds[key], FACTOR * distance)

    def _recompute(self, noise: Noise) -> None:
        """Compute the step with rounding errors, and widen the bounds to what they change."""
        num_calls, distances = defaultdict[Key, int](int), defaultdict[Key, float](float)

        def measure(key: Key, value: Tensor) -> None:
            expected = self.results[key][num_calls[key]]
            distances[key] = math.hypot(distances[key], norm(value - expected))
            num_calls[key] += 1

        def change(result: Any) -> Any:
            if isinstance(result, Tensor):
                result = noise(result)
                if result.requires_grad:
                    result.register_hook(noise)
            return result

        self._compute(measure, change)
        for key, distance in distances.items():
            self.bounds[key] = max(self.bounds[key], distance)

    def _compute(self, visit: Visit, change: Callable[[Any], Any] | None = None) -> None:
        """Compute the step from the state's weights, and show `visit` its results."""
        state, batch, model, work = self._state, self._batch, self.model, self._state.work
        held = whole_tensors(state.module)
        with torch.no_grad():
            for name, tensor in registered_tensors(model).items():
                tensor.copy_(held[name])
        # A rank with a part of a layer draws fewer numbers for dropout than one process.
        model.train(work.layout.model_ranks == 1)
        model.zero_grad(set_to_none=True)
        loss, num_tokens = 0.0, 0.0
        num_shares, layout = state.batches.num_shares, work.layout
        size = len(batch.micro_batches) // layout.shares_per_rank
        buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
        watching_step = watched(work, model, visit, change)
        with restored_after(state), self._place(), watching_step as watching:
            for number, micro_batch in enumerate(batch.micro_batches):
                if number % size == 0:  # the first of a share
                    seed_all(work.config.seed, "step", state.step, layout.share + number // size)
                    for buffer, value in buffers:
                        buffer.copy_(value)
                step = forward(watching, model, micro_batch)
                share = micro_batch.weight / batch.global_count
                (step.loss_sum * (share * num_shares)).backward()
                loss += step.loss_sum.item() * share
                num_tokens += float(step.count) * micro_batch.weight
        if work.config.batch.virtual_ranks is None:  # else they are averaged over the shares
            for name, buffer in model.named_buffers():
                visit((Stage.BUFFER, name), buffer)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                own = parameter if parameter.grad is None else parameter.grad
                total = wide(own).clone() if own is parameter.grad else torch.zeros_like(wide(own))
                dist.all_reduce(total, group=work.data_group)
                visit((Stage.GRADIENT, name), total / num_shares)
        loss, num_tokens = sum_over_ranks([loss, num_tokens], group=work.data_group)
        counts_tokens = work.config.batch.count == "tokens"
        self.token_factor = batch.global_count / (num_tokens or 1.0) if counts_tokens else 1.0
        visit((Stage.LOSS, ""), torch.tensor(loss * self.token_factor))
