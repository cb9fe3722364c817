"""Checks that gradients are the mean over ranks, and that all ranks wait for it.

Collective: every rank must call each check, and gets the same finding.
"""

import copy
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_runner.check.rank_differences import Verdict, equality, split_everywhere
from ddp_runner.data.batches import StepBatch
from ddp_runner.device import synchronize
from ddp_runner.distributed import gather_objects
from ddp_runner.errors import listed
from ddp_runner.parallelism.mode import Sums
from ddp_runner.parallelism.shards import gathered, has_shards, whole
from ddp_runner.parallelism.single import Single
from ddp_runner.seeds import seed_all
from ddp_runner.train.build_model import one_process_model
from ddp_runner.train.clipping import scale_gradients
from ddp_runner.train.loop import backward, seed_step, token_factor
from ddp_runner.train.state import TrainState
from ddp_runner.train.step import StepOutput

# How far apart results may be if they differ only by rounding, relative to the largest value: a GPU
# adds in no fixed order.
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 2e-2}
SENT_AS = {"bf16": torch.bfloat16, "fp16": torch.float16}  # by parallelism.comm_hook
# A gradient that is only rounding (a bias before BatchNorm) is compared with this part of the
# model's largest.
SMALLEST_PART = 1e-3
DELAY_S = 0.3  # how much later the last rank begins its backward


def tolerance(state: TrainState, dtype: torch.dtype) -> float:
    """Return the tolerance for a tensor's dtype, or for autocast's if that is on."""
    precision = state.work.config.train.precision
    return TOLERANCES.get(dtype, 2e-2) if precision == "fp32" else 2e-2


def one_process(state: TrainState) -> nn.Module:
    """Return the whole model as a process on its own builds it."""
    work = state.work
    seed_all(work.config.seed)
    return one_process_model(work.config, work.dataset.model_arguments, work.devices[0])


def own_gradients(state: TrainState, batch: StepBatch) -> dict[str, Tensor]:
    """Return the gradients of only this rank's samples, without changing the state.

    A whole copy of the model computes them, with the same random numbers. They are scaled like the
    reduced ones. Collective: every rank must call.
    """
    if has_shards(state.module):
        copied = one_process(state)
        copied.load_state_dict(gathered(state.module.state_dict(), keep=True))
    else:
        copied = copy.deepcopy(state.module)  # parameters, without their gradients
    work = replace(state.work, mode=Single("single"))  # nobody exchanges them
    found = _gradients(replace(state, work=work, module=copied, model=copied), batch)
    return {
        name: torch.zeros_like(copied.get_parameter(name)) if one is None else one
        for name, one in found.items()
    }


def synced_gradients(state: TrainState, batch: StepBatch) -> dict[str, Tensor | None]:
    """Return the gradients that the mode leaves, whole. Collective: every rank must call."""
    found = _gradients(state, batch)
    split = split_everywhere(found)
    return {
        name: whole(one) if one is not None and name in split else one
        for name, one in found.items()
    }


def _gradients(state: TrainState, batch: StepBatch) -> dict[str, Tensor | None]:
    """Return a batch's gradients as the optimizer would get them. Collective."""
    tokens = _backward(state, batch).tokens
    if tokens is not None:
        factor = token_factor(tokens, batch, group=state.work.data_group)
        scale_gradients(state.module.parameters(), factor)
    named = state.module.named_parameters()
    return {name: one.grad for name, one in named if one.requires_grad}


def _backward(state: TrainState, batch: StepBatch) -> Sums:
    """Leave a batch's gradients in the module, as a step does. Collective."""
    state.model.train(_draws_alike(state))
    state.module.zero_grad(set_to_none=True)
    seed_step(state)
    return backward(state, batch)


def _draws_alike(state: TrainState) -> bool:
    """Return whether a mode drops the same units as a whole copy, so that both can train.

    For a part of a layer, a rank draws other random numbers than one process for all of it.
    """
    return state.work.layout.model_ranks == 1


def equal_gradients(synced: Mapping[str, Tensor | None]) -> Verdict:
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
) -> Verdict:
    """Check that a batch's ``synced_gradients`` are the mean of the ranks' ``own_gradients``.

    A hook that rounds what it sends gets the tolerance of the dtype. One of the user's own gets no
    more than rounding: what it does is not known.
    """
    work, least, notes = state.work, 0.0, ""
    if has_shards(state.module):
        notes += "; a whole copy of the model computed the ranks' own"
    if not _draws_alike(state):
        notes += ", without dropout"
    hook = work.config.parallelism.get("comm_hook")
    if isinstance(hook, Mapping):
        notes += f"; the comm_hook {hook['_target_']} sent them"
    elif hook is not None:
        least = TOLERANCES[SENT_AS[hook]]
        notes += f"; comm_hook={hook} may be off by {least:g} of the largest"
    names = sorted(set.intersection(*map(set, gather_objects(list(own)))))
    distances = torch.stack([_distances(state, own[key], synced.get(key)) for key in names])
    dist.all_reduce(distances, op=dist.ReduceOp.MAX)
    largest, from_mean, from_sum = distances.unbind(dim=1)
    scale = largest.clamp(min=SMALLEST_PART * float(largest.max()) or 1.0)
    relative = torch.tensor([max(least, tolerance(state, own[key].dtype)) for key in names])
    is_near = from_mean <= relative * scale  # false for NaN
    wrong = [key for key, near in zip(names, is_near, strict=True) if not near]
    index = int((from_mean / scale).argmax())
    how_far = f"{from_mean[index]:.2g} off"
    if state.batches.num_shares > 1:  # else both are the same
        how_far += f" the mean and {from_sum[index]:.2g} off the sum"
    detail = (
        f"of {len(names)} the farthest is {names[index]}: {how_far}, of up to "
        f"{largest[index]:.2g}{notes}"
    )
    name = "gradients are the mean of the ranks' own, not the sum"
    return Verdict(name, not wrong, f"not {listed(wrong)}; {detail}" if wrong else detail)


def _distances(state: TrainState, own: Tensor, synced: Tensor | None) -> Tensor:
    """Return a rank's own largest element, and how far a gradient is from mean and sum.

    Float64 (3,) on the CPU. A gradient that is missing, or has another shape, counts as zero.
    Collective: every rank must call.
    """
    total = own.detach().to_dense().to(torch.float64, copy=True).contiguous()
    reduced = torch.zeros_like(total)
    if synced is not None and synced.shape == total.shape:
        reduced = synced.to_dense().to(total)  # it may be offloaded to the CPU
    largest = total.abs().max()
    dist.all_reduce(total, group=state.work.data_group)
    mean = total / state.batches.num_shares
    distances = [(reduced - one).abs().max() for one in (mean, total)]
    return torch.stack([largest, *distances]).cpu()


def wait_for_mean(state: TrainState, batch: StepBatch) -> Verdict:
    """Check that ranks wait for the mean: delay the last one and time when the others have it."""
    name, work = "no rank reads a gradient before all have computed theirs", state.work
    env, layout = work.env, work.layout
    if layout.num_shares == 1:
        return Verdict(name, True, "not measured: the ranks compute one share, so there is no mean")
    if env.num_nodes > 1:
        return Verdict(name, True, f"not measured: {env.num_nodes} machines have no common clock")
    late, began = env.world_size - 1, 0

    def late_step(model: nn.Module, data: Any) -> StepOutput:
        nonlocal began
        step = work.step_fn(model, data)
        synchronize(work.devices)
        gather_objects(None)  # every rank is about to begin its backward
        if env.rank == late:
            time.sleep(DELAY_S)
        began = time.monotonic_ns()  # all processes of a machine share this clock
        return step

    state.work = replace(work, step_fn=late_step)
    # The last micro-batch is the only one that reduces. After it no collective may come: it waits.
    _backward(state, replace(batch, micro_batches=batch.micro_batches[-1:]))
    synchronize(work.devices)
    state.work, times = work, gather_objects((began, time.monotonic_ns()))
    # Those that take a mean with it; the others of its share hold other parts of layers.
    peers = range(late % layout.model_ranks, late, layout.model_ranks)
    lead_ms = (times[late][0] - max(times[rank][0] for rank in peers)) / 1e6
    readable, earliest = min((times[rank][1], rank) for rank in peers)
    wait_ms = (readable - times[late][0]) / 1e6
    when = f"{abs(wait_ms):.1f} ms {'after' if wait_ms >= 0 else 'before'}"
    detail = (
        f"rank {late} began its backward {lead_ms:.0f} ms after the others; the first of them, "
        f"rank {earliest}, could read its gradients {when} that"
    )
    return Verdict(name, wait_ms >= 0, detail)
