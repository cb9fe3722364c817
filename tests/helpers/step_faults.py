"""Faults of one training step, put into a state whose step task=check compares with one process's.

Each changes what the product calls or what a module returns; none edits the product. What a fault
changes outside its state, it restores when its stack ends.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from own_steps import WORDS
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from train_states import build, compose_config, with_work

from ddp_runner.check.check_task import run_checks
from ddp_runner.data.batches import StepBatch
from ddp_runner.data.splits import MicroBatch
from ddp_runner.dist_env import DistEnv
from ddp_runner.parallelism.shards import own_part
from ddp_runner.seeds import seed_all
from ddp_runner.train import clipping, loop
from ddp_runner.train.state import TrainState
from ddp_runner.train.step import StepOutput

Inject = Callable[[TrainState, ExitStack], TrainState | None]
WORLD = {"single": 1, "ddp": 2, "ddp_mp": 2, "fsdp": 2, "tp": 2, "hsdp": 4, "fsdp_tp": 4}
TEXT = (
    "model=gpt", "dataset=text", "dataset.sequence_length=16", "dataset.eval_fraction=0.0005",
    "model.num_layers=2", "model.width=32", "model.num_heads=2", "batch.global_size=16",
    "train.grad_accum_steps=2",
)  # fmt: skip
DROPOUT = (*TEXT, "model.dropout=0.1")
IMAGES = ("dataset=fake_images", "dataset.num_samples=60", "batch.global_size=16")
# The only batch has 11 samples: shares and micro-batches of different sizes.
SMALLER = (
    "model=toy", "dataset.num_samples=11", "batch.global_size=16", "train.grad_accum_steps=2",
)  # fmt: skip
BY_TOKENS = (*WORDS, "batch.global_size=8")
NORMED = ("model=convnet", *IMAGES)
UP, DOWN = "blocks.1.mlp.up", "blocks.1.mlp.down"
DATA = ("ddp", "fsdp", "hsdp", "fsdp_tp")  # modes with several shares
SHARDED = ("fsdp", "hsdp", "tp", "fsdp_tp")
ALL = ("single", "ddp", *SHARDED)


def is_last(state: TrainState) -> bool:
    """Return whether this is the last rank."""
    return state.work.env.rank == state.work.env.world_size - 1


def after_backward(change: Callable[[TrainState], object]) -> Inject:
    """Return a fault that changes the gradients when the backward has reduced them."""

    def inject(state: TrainState, stack: ExitStack) -> None:
        backward = loop.LocalEngine.backward

        def changed(self: loop.LocalEngine, state: TrainState, batch: StepBatch) -> Any:
            sums = backward(self, state, batch)
            with torch.no_grad():
                change(state)
            return sums

        stack.enter_context(patch.object(loop.LocalEngine, "backward", changed))

    return inject


def of_batch(change: Callable[[TrainState, StepBatch], StepBatch]) -> Inject:
    """Return a fault that changes what the loop accumulates over."""

    def inject(state: TrainState, stack: ExitStack) -> None:
        accumulate = loop.accumulate_gradients

        def changed(state: TrainState, batch: StepBatch) -> Any:
            return accumulate(state, change(state, batch))

        stack.enter_context(patch.object(loop, "accumulate_gradients", changed))

    return inject


def of_module(name: str, change: Callable[[TrainState, nn.Module, Any], Any]) -> Inject:
    """Return a fault that changes the result of a module."""

    def inject(state: TrainState, stack: ExitStack) -> None:
        module = state.module.get_submodule(name)
        hook = module.register_forward_hook(lambda part, _, result: change(state, part, result))
        stack.callback(hook.remove)

    return inject


def of_input(name: str, change: Callable[[TrainState, Tensor], Tensor]) -> Inject:
    """Return a fault between two modules: a tensor changes before another module gets it."""

    def inject(state: TrainState, stack: ExitStack) -> None:
        module = state.module.get_submodule(name)
        hook = module.register_forward_pre_hook(lambda _, args: (change(state, args[0]), *args[1:]))
        stack.callback(hook.remove)

    return inject


def of_step(change: Callable[[StepOutput], StepOutput]) -> Inject:
    """Return a fault of the user's own step, which one process takes as well."""

    def inject(state: TrainState, stack: ExitStack) -> TrainState:
        step = state.work.step_fn
        return with_work(state, step_fn=lambda model, data: change(step(model, data)))

    return inject


def of_group(key: str, factor: float) -> Inject:
    """Return a fault that changes a setting of the optimizer on the last rank."""

    def inject(state: TrainState, stack: ExitStack) -> None:
        if is_last(state):
            for group in state.optimizer.param_groups:
                group[key] *= factor

    return inject


def scaled(state: TrainState, factor: float, *, name: str = "") -> None:
    """Multiply the gradients of the parameters with a name by a factor."""
    for full_name, parameter in state.module.named_parameters():
        if parameter.grad is not None and name in full_name:
            own_part(parameter.grad).mul_(factor)


def local_norm(state: TrainState, stack: ExitStack) -> None:
    """Clip by the norm of this rank's shards."""

    def norm_of(its: TrainState) -> Tensor:
        grads = [own_part(one.grad) for one in its.module.parameters() if one.grad is not None]
        return nn.utils.get_total_norm(grads)

    stack.enter_context(patch.object(clipping, "gradient_norm", norm_of))


def local_tokens(state: TrainState, stack: ExitStack) -> None:
    """Divide by this rank's own tokens."""

    def factor(num_tokens: Tensor, batch: StepBatch, **_: Any) -> Tensor:
        return batch.global_count / (num_tokens * state.batches.num_shares)

    stack.enter_context(patch.object(loop, "token_factor", factor))


def ignored(name: str) -> Inject:
    """Return a fault that keeps DDP from reducing a parameter."""

    def inject(state: TrainState, stack: ExitStack) -> TrainState:
        keep: Any = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
        keep(state.module, [f"{name}.weight"])
        return replace(state, model=state.work.mode.wrap(state.module, state.work.devices))

    return inject


def never_synced(state: TrainState, stack: ExitStack) -> None:
    """Compute the last micro-batch under no_sync, too."""
    add_gradients = loop._add_gradients

    def changed(state: TrainState, *args: Any, **named: Any) -> None:
        with state.work.mode.no_sync(state.model):
            add_gradients(state, *args, **named)

    stack.enter_context(patch.object(loop, "_add_gradients", changed))


def other_seed(state: TrainState, stack: ExitStack) -> None:
    """Draw other random numbers on the last rank."""
    if is_last(state):
        stack.enter_context(patch.object(loop, "seed_step", lambda _: seed_all(7)))


def unclipped(state: TrainState, stack: ExitStack) -> None:
    """Leave out the clipping on the last rank."""
    if is_last(state):
        stack.enter_context(patch.object(clipping, "scale_gradients", lambda *_: None))


def not_zeroed(state: TrainState, stack: ExitStack) -> None:
    """Accumulate onto gradients of an earlier step."""
    for parameter in state.module.parameters():
        parameter.grad = torch.ones_like(parameter) / 100
    stack.enter_context(patch.object(state.optimizer, "zero_grad", lambda **_: None))


def skipped_group(state: TrainState, stack: ExitStack) -> None:
    """Never give a layer to the optimizer."""
    layer = state.module.get_submodule(DOWN)
    for group in state.optimizer.param_groups:
        group["params"] = [one for one in group["params"] if one is not layer.weight]


def swapped_shards(state: TrainState, stack: ExitStack) -> None:
    """Exchange the shards of a layer between the first and the last rank."""
    shard = own_part(state.module.get_submodule(UP).weight.detach())
    both = [torch.empty_like(shard) for _ in range(state.work.env.world_size)]
    dist.all_gather(both, shard.contiguous())
    if (other := {0: -1, len(both) - 1: 0}.get(state.work.env.rank)) is not None:
        shard.copy_(both[other])


def other_weights(state: TrainState, stack: ExitStack) -> None:
    """Begin with another weight on the last rank."""
    if is_last(state):
        own_part(state.module.get_submodule(UP).weight.detach()).mul_(1.01)


def without_autocast(state: TrainState, stack: ExitStack) -> None:
    """Compute in float32 on the last rank."""
    forward = state.module.forward

    def plain(*args: Any, **keys: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            return forward(*args, **keys)

    if is_last(state):
        state.module.forward = plain


def left_in_eval(state: TrainState, stack: ExitStack) -> None:
    """Leave a dropout layer in evaluation mode."""
    layer: Any = state.module.get_submodule("blocks.1.dropout")
    layer.eval()
    layer.train = lambda mode=True: layer


def other_momentum(state: TrainState, stack: ExitStack) -> None:
    """Average the statistics of a layer differently on the last rank."""
    if is_last(state):
        state.module.get_submodule("layer2.1").momentum = 0.3


def first_twice(state: TrainState, batch: StepBatch) -> StepBatch:
    """Compute the first sample twice, and the second never."""

    def doubled(micro_batch: MicroBatch) -> MicroBatch:
        inputs, targets = micro_batch.data
        rows = torch.arange(len(inputs))
        rows[1:2] = 0
        return micro_batch._replace(data=(inputs[rows], targets[rows]))

    first, *others = batch.micro_batches
    return batch._replace(micro_batches=(doubled(first), *others))


def equal_weights(state: TrainState, batch: StepBatch) -> StepBatch:
    """Take the mean of the means of micro-batches, which have different sizes."""
    count = batch.global_count / state.batches.num_shares / len(batch.micro_batches)
    parts = [one._replace(weight=count / one.num_samples) for one in batch.micro_batches]
    return batch._replace(micro_batches=tuple(parts))


def from_last_rank(state: TrainState) -> None:
    """Send the last rank's buffers."""
    for buffer in state.module.buffers():
        dist.broadcast(buffer, src=state.work.env.world_size - 1)


def stale(state: TrainState) -> None:
    """Forget a layer's new statistics."""
    state.module.get_buffer("layer2.1.running_mean").zero_()


def halved(state: TrainState, part: nn.Module, result: Any) -> Any:
    """Lose half of an output on the last rank."""
    return result / 2 if is_last(state) else None


def detached(state: TrainState, part: nn.Module, result: Any) -> Any:
    """Cut a module off the backward."""
    return result.detach()


def detached_on_last(state: TrainState, part: nn.Module, result: Any) -> Any:
    """Cut a module off the backward on the last rank."""
    return result.detach() if is_last(state) else None


def divided(step: StepOutput) -> StepOutput:
    """Divide the loss by the number of ranks, as scripts for other frameworks do."""
    return replace(step, loss_sum=step.loss_sum / dist.get_world_size())


def doubled_by_rank(step: StepOutput) -> StepOutput:
    """Double the loss on the second rank."""
    return replace(step, loss_sum=step.loss_sum * (1 + (dist.get_rank() == 1)))


@dataclass(frozen=True)
class StepFault:
    """A fault, the modes in which it can happen, and the words of the verdict in each."""

    inject: Inject
    words: Mapping[str, str]
    keys: tuple[str, ...] = TEXT


def each(modes: tuple[str, ...], words: str, **others: str) -> dict[str, str]:
    """Return the words for each mode; `others` have words of their own."""
    return dict.fromkeys(modes, words) | others


WHOLE = "the same factor in all"
FAULTS: dict[str, StepFault] = {
    "clipped by the local norm": StepFault(local_norm, each(SHARDED, "as the optimizer gets it")),
    "not clipped on a rank": StepFault(unclipped, each(("ddp",), "as the optimizer gets it")),
    "local tokens": StepFault(local_tokens, each(("ddp", "fsdp"), "as the optimizer"), BY_TOKENS),
    "unreduced tied embedding": StepFault(
        ignored("tokens"), {"ddp": "tokens: the gradient of its weight is this rank's own"}
    ),
    "unreduced parameter": StepFault(
        ignored(UP), {"ddp": f"{UP}: the gradient of its weight is this rank's own"}
    ),
    "unequal replicas": StepFault(
        other_weights,
        each(("fsdp", "hsdp", "tp"), UP, ddp=f"{UP}.weight on rank 1 is not rank 0's"),
    ),
    "no sync": StepFault(never_synced, each(DATA[:3], "") | {"ddp_mp": ""}),
    "sum for mean": StepFault(
        after_backward(lambda state: scaled(state, state.batches.num_shares)),
        each((*DATA, "ddp_mp"), f"(a sum where a mean belongs?); {WHOLE}"),
    ),
    "mean twice": StepFault(
        after_backward(lambda state: scaled(state, 1 / state.batches.num_shares)),
        each((*DATA, "ddp_mp"), f"(a mean where a sum belongs?); {WHOLE}"),
    ),
    "random state": StepFault(
        other_seed, each(("ddp", "fsdp", "hsdp"), "the first wrong module is "), DROPOUT
    ),
    "dropped micro-batch": StepFault(
        of_batch(lambda _, batch: batch._replace(micro_batches=batch.micro_batches[1:])),
        each(ALL, "first wrong module is tokens"),
    ),
    "sample twice": StepFault(of_batch(first_twice), each(ALL, "module is tokens: its output")),
    "scaled gradient": StepFault(
        after_backward(partial(scaled, factor=1.5, name=UP)),
        each(ALL, f"{UP}: the gradient of its weight is 1.5 times"),
    ),
    "skipped group": StepFault(skipped_group, each(ALL, f"{DOWN}: given its gradient, the update")),
    "decay twice": StepFault(
        of_group("weight_decay", 2), each(ALL[1:], "given its gradient, the update of its weight")
    ),
    "learning rate": StepFault(
        of_group("lr", 2), each(ALL, "given its gradient, the update of its weight")
    ),
    "stale buffer": StepFault(
        after_backward(stale), each(("single", "ddp", "fsdp"), "layer2.1: its buffer"), NORMED
    ),
    "buffers of another rank": StepFault(
        after_backward(from_last_rank), each(("ddp", "fsdp"), "on rank 0: its buffer"), NORMED
    ),
    "momentum": StepFault(
        other_momentum, each(("ddp", "fsdp"), "layer2.1 on rank 1: its buffer"), NORMED
    ),
    "no autocast": StepFault(
        without_autocast, each(("ddp",), "on rank 1"), (*TEXT, "train.precision=bf16")
    ),
    "left in eval": StepFault(
        left_in_eval,
        each(("single", "ddp", "fsdp", "hsdp"), "module is blocks.1.dropout: its"),
        DROPOUT,
    ),
    "detached": StepFault(
        of_module("blocks.1.mlp.gate", detached),
        each(ALL, "blocks.1.mlp.gate: the gradient of its weight is missing"),
    ),
    "swapped shards": StepFault(swapped_shards, each(SHARDED, UP)),
    "smaller batch": StepFault(
        of_batch(equal_weights), each(("single", *DATA), "net2: the gradient of its"), SMALLER
    ),
    "halved output": StepFault(
        of_module("blocks.0.attention.out", halved), each(ALL, "module is blocks.0.attention.out")
    ),
    "between modules": StepFault(
        of_input("blocks.1.mlp", lambda state, values: values * (2 if is_last(state) else 1)),
        each(
            ("ddp", "fsdp", "hsdp"),
            "the first wrong module is blocks.1 on rank ",
            single="the first wrong module is blocks.1: what it gives blocks.1.mlp is 2 times",
        ),
    ),
    "detached on a rank": StepFault(
        of_module("blocks.1.mlp.gate", detached_on_last),
        {"ddp": "on rank 1 the loss does not depend on blocks.1.mlp.gate.weight, and on another"},
    ),
    "divided by the ranks": StepFault(
        of_step(divided), each(DATA, f"(a mean where a sum belongs?); {WHOLE}")
    ),
    "asks for its rank": StepFault(of_step(doubled_by_rank), each(("ddp", "fsdp"), "the gradient")),
    "not zeroed": StepFault(not_zeroed, each(("single", "tp"), "modules are wrong")),
}


def first_faults(env: DistEnv, cases: list[tuple[str, str]]) -> list[str]:
    """Return the sentence about what is first wrong of each fault and mode; empty: nothing is."""
    sentences = []
    for name, mode in cases:
        fault = FAULTS[name]
        keys = [*fault.keys, f"parallelism={mode}"]
        if mode == "ddp_mp":
            keys[:] = ["model=toy_mp", "batch.global_size=8", "dataset.num_samples=27", keys[-1]]
        with ExitStack() as stack:
            state = build(env, compose_config(*keys, world_size=env.world_size))
            state = fault.inject(state, stack) or state
            wrong = [verdict for verdict in run_checks(state) if not verdict.ok]
            sentences.append(f"{wrong[0].name}: {wrong[0].detail}" if wrong else "")
    return sentences
