"""Checks that gradients are the mean over ranks, and that all ranks wait for it.

Collective: every rank must call each check, and gets the same finding.
"""

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_runner.check.compare_ranks import (
    TOLERANCES,
    Finding,
    equality,
    split_everywhere,
    tolerance,
)
from ddp_runner.check.shards import whole_copy
from ddp_runner.data.batches import StepBatch
from ddp_runner.device import synchronize
from ddp_runner.distributed import gather_objects
from ddp_runner.errors import listed
from ddp_runner.parallelism.shards import has_shards, whole
from ddp_runner.train.clipping import scale_gradients
from ddp_runner.train.evaluation import forward
from ddp_runner.train.loop import backward, seed_step, token_factor
from ddp_runner.train.state import TrainState
from ddp_runner.train.step import Step

DELAY_S = 0.3  # how much later the last rank begins its backward
# A gradient that is only rounding (a bias before BatchNorm) is compared with this part of the
# model's largest.
SMALLEST_PART = 1e-3
SENT_AS = {"bf16": torch.bfloat16, "fp16": torch.float16}  # by parallelism.comm_hook


def own_gradients(state: TrainState, batch: StepBatch) -> dict[str, Tensor]:
    """Return the gradients of only this rank's samples, without changing the state.

    A whole copy of the model computes them, with the same random numbers. They are scaled like the
    reduced ones. Collective: every rank must call.
    """
    factor, num_tokens = 1.0, torch.zeros((), device=state.setup.devices[-1])
    copied = whole_copy(state).train(_draws_alike(state))  # parameters, without their gradients
    seed_step(state)
    for micro_batch in batch.micro_batches:
        step = forward(state, copied, micro_batch)
        share = micro_batch.weight / batch.global_count * state.setup.batches.num_shares
        (step.loss_sum * share).backward()
        num_tokens += step.count * micro_batch.weight
    if state.setup.config.batch.count == "tokens":
        factor = token_factor(num_tokens, batch, group=state.setup.data_group).item()
    return {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad * factor
        for name, parameter in copied.named_parameters()
        if parameter.requires_grad
    }


def synced_gradients(state: TrainState, batch: StepBatch) -> dict[str, Tensor | None]:
    """Return the gradients that the mode leaves, whole, by parameter name. Collective."""
    _backward(state, batch)
    found = {
        name: parameter.grad
        for name, parameter in state.module.named_parameters()
        if parameter.requires_grad
    }
    for name in split_everywhere(found):
        gradient = found[name]
        found[name] = None if gradient is None else whole(gradient)
    return found


def _backward(state: TrainState, batch: StepBatch) -> None:
    state.model.train(_draws_alike(state))
    state.module.zero_grad(set_to_none=True)
    seed_step(state)
    sums = backward(state, batch)
    if sums.tokens is not None:
        factor = token_factor(sums.tokens, batch, group=state.setup.data_group)
        scale_gradients(state.module.parameters(), factor)


def _draws_alike(state: TrainState) -> bool:
    """Return whether a mode drops the same units as a whole copy, so that both can train.

    For a part of a layer, a rank draws other random numbers than one process for all of it.
    """
    return state.setup.layout.model_ranks == 1


def equal_gradients(synced: Mapping[str, Tensor | None]) -> Finding:
    """Check that all ranks have equal gradients after a backward."""
    detail = f"{len(synced)} of them after backward, bit for bit"
    found = equality("gradients are equal on all ranks", synced, detail)
    unused = [name for name, gradient in synced.items() if gradient is None]
    if found.ok or not unused:
        return found
    # DDP waits for every parameter, so it never finishes the reduction.
    hint = f"the loss does not depend on {listed(unused)}"
    fix = "write parallelism.find_unused_parameters=true"
    return replace(found, detail=f"{found.detail}; {hint}; {fix}")


def mean_gradients(
    state: TrainState, own: Mapping[str, Tensor], synced: Mapping[str, Tensor | None]
) -> Finding:
    """Check that a batch's ``synced_gradients`` are the mean of the ranks' ``own_gradients``.

    A hook that rounds what it sends gets the tolerance of the dtype. One of the user's own gets no
    more than rounding: what it does is not known.
    """
    hook = state.setup.config.parallelism.get("comm_hook")
    own_hook = hook["_target_"] if isinstance(hook, Mapping) else None
    least = 0.0 if hook is None or own_hook else TOLERANCES[SENT_AS[hook]]
    name = "gradients are the mean of the ranks' own, not the sum"
    names = sorted(set.intersection(*map(set, gather_objects(list(own)))))
    distances = torch.zeros(3, len(names), dtype=torch.float64)
    for index, key in enumerate(names):
        total = own[key].detach().to_dense().to(torch.float64, copy=True).contiguous()
        gradient = synced.get(key)
        reduced = torch.zeros_like(total)
        if gradient is not None and gradient.shape == total.shape:
            reduced = gradient.to_dense().to(total)  # it may be offloaded to the CPU
        distances[0, index] = total.abs().max()
        dist.all_reduce(total, group=state.setup.data_group)
        distances[1, index] = (reduced - total / state.setup.batches.num_shares).abs().max()
        distances[2, index] = (reduced - total).abs().max()
    dist.all_reduce(distances, op=dist.ReduceOp.MAX)
    largest, from_mean, from_sum = distances
    scale = largest.clamp(min=SMALLEST_PART * float(largest.max()) or 1.0)
    relative = [max(least, tolerance(state, own[key].dtype)) for key in names]
    allowed = torch.tensor(relative) * scale
    wrong = [key for key, is_near in zip(names, from_mean <= allowed, strict=True) if not is_near]
    index = int((from_mean / scale).argmax())
    how_far = (
        f"{float(from_mean[index]):.2g} off the mean and {float(from_sum[index]):.2g} off the sum"
    )
    if state.setup.batches.num_shares == 1:  # both are the same
        how_far = f"{float(from_mean[index]):.2g} off"
    detail = (
        f"of {len(names)} the farthest is {names[index]}: {how_far}, of up to "
        f"{float(largest[index]):.2g}"
    )
    if has_shards(state.module):
        detail += "; a whole copy of the model computed the ranks' own"
    if not _draws_alike(state):
        detail += ", without dropout"
    if own_hook:
        detail += f"; the comm_hook {own_hook} sent them"
    elif hook is not None:
        detail += f"; comm_hook={hook} may be off by {least:g} of the largest"
    return Finding(name, not wrong, f"not {listed(wrong)}; {detail}" if wrong else detail)


def wait_for_mean(state: TrainState, batch: StepBatch) -> Finding:
    """Check that ranks wait for the mean: delay the last one and time when the others have it."""
    name = "no rank reads a gradient before all have computed theirs"
    env, layout = state.setup.env, state.setup.layout
    if layout.num_shares == 1:
        return Finding(name, True, "not measured: the ranks compute one share, so there is no mean")
    if env.num_nodes > 1:
        return Finding(name, True, f"not measured: {env.num_nodes} machines have no common clock")
    late = env.world_size - 1
    began = 0

    def late_step(model: nn.Module, data: Any) -> Step:
        nonlocal began
        step = state.setup.step(model, data)
        synchronize(state.setup.devices)
        gather_objects(None)  # every rank is about to begin its backward
        if env.rank == late:
            time.sleep(DELAY_S)
        began = time.monotonic_ns()  # all processes of a machine share this clock
        return step

    last = replace(batch, micro_batches=batch.micro_batches[-1:])  # the only one that reduces
    _backward(replace(state, setup=replace(state.setup, step=late_step)), last)
    synchronize(state.setup.devices)
    times = dict(enumerate(gather_objects((began, time.monotonic_ns()))))
    late_began = times.pop(late)[0]
    # Those that take a mean with it; the others of its share hold other parts of layers.
    peers = [rank for rank in times if (late - rank) % layout.model_ranks == 0]
    lead_ms = (late_began - max(times[rank][0] for rank in peers)) / 1e6
    readable, earliest = min((times[rank][1], rank) for rank in peers)
    wait_ms = (readable - late_began) / 1e6
    when = f"{abs(wait_ms):.1f} ms {'after' if wait_ms >= 0 else 'before'}"
    detail = (
        f"rank {late} began its backward {lead_ms:.0f} ms after the others; the first of them, "
        f"rank {earliest}, could read its gradients {when} that"
    )
    return Finding(name, wait_ms >= 0, detail)
