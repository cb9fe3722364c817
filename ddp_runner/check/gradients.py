"""Checks that gradients are the mean over ranks, and that all ranks wait for it.

Collective: every rank must call each check, and gets the same verdict.
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
from ddp_runner.parallelism.shards import full_tensor, gathered, has_shards
from ddp_runner.parallelism.single import Single
from ddp_runner.seeds import seed_all
from ddp_runner.train.build_model import one_process_model
from ddp_runner.train.clipping import scale_gradients
from ddp_runner.train.loop import accumulate_gradients, seed_step, token_factor
from ddp_runner.train.state import TrainState
from ddp_runner.train.step import StepOutput

# Largest difference that rounding explains, relative to the largest value: a GPU adds in no fixed
# order.
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 2e-2}
SENT_AS = {"bf16": torch.bfloat16, "fp16": torch.float16}  # by parallelism.comm_hook
# Least scale of a gradient, as a part of the model's largest: the gradient of a bias before
# BatchNorm is only rounding errors.
SMALLEST_PART = 1e-3
DELAY_S = 0.3  # by which the last rank delays its backward


def tolerance(state: TrainState, dtype: torch.dtype) -> float:
    """Return the tolerance for a tensor's dtype, or for autocast's dtype if autocast is on."""
    precision = state.work.config.train.precision
    return TOLERANCES.get(dtype, 2e-2) if precision == "fp32" else 2e-2


def one_process(state: TrainState) -> nn.Module:
    """Return the whole model as a single process builds it."""
    work = state.work
    seed_all(work.config.seed)
    return one_process_model(work.config, work.dataset.model_arguments, work.devices[0])


def own_gradients(state: TrainState, batch: StepBatch) -> dict[str, Tensor]:
    """Return the gradients of only this rank's samples, without changing the state.

    A whole copy of the model computes them with the same random numbers, scaled like the reduced
    gradients. Collective: every rank must call.
    """
    if has_shards(state.module):
        model = one_process(state)
        model.load_state_dict(gathered(state.module.state_dict(), keep=True))
    else:
        model = copy.deepcopy(state.module)
    work = replace(state.work, mode=Single("single"))
    gradients = _gradients(replace(state, work=work, module=model, model=model), batch)
    return {
        name: torch.zeros_like(model.get_parameter(name)) if gradient is None else gradient
        for name, gradient in gradients.items()
    }


def synced_gradients(state: TrainState, batch: StepBatch) -> dict[str, Tensor | None]:
    """Return the whole gradients after the mode's exchange. Collective: every rank must call."""
    gradients = _gradients(state, batch)
    split = split_everywhere(gradients)
    return {
        name: full_tensor(gradient) if gradient is not None and name in split else gradient
        for name, gradient in gradients.items()
    }


def _gradients(state: TrainState, batch: StepBatch) -> dict[str, Tensor | None]:
    """Return a batch's gradients as the optimizer would get them. Collective."""
    tokens = _backward(state, batch).tokens
    if tokens is not None:
        factor = token_factor(tokens, batch, group=state.work.data_group)
        scale_gradients(state.module.parameters(), factor)
    parameters = state.module.named_parameters()
    return {name: parameter.grad for name, parameter in parameters if parameter.requires_grad}


def _backward(state: TrainState, batch: StepBatch) -> Sums:
    """Leave a batch's gradients in the module, as a step does. Collective."""
    state.model.train(_has_whole_layers(state))
    state.module.zero_grad(set_to_none=True)
    seed_step(state)
    return accumulate_gradients(state, batch)


def _has_whole_layers(state: TrainState) -> bool:
    """Return whether dropout draws as in one process; a rank with part of a layer draws less."""
    return state.work.layout.model_ranks == 1


def equal_gradients(synced: Mapping[str, Tensor | None]) -> Verdict:
    """Check that all ranks have equal gradients after a backward."""
    detail = f"{len(synced)} of them after backward, bit for bit"
    verdict = equality("gradients are equal on all ranks", synced, detail)
    unused = [name for name, gradient in synced.items() if gradient is None]
    if verdict.ok or not unused:
        return verdict
    # DDP waits for the gradient of every parameter, so it never finishes the reduction.
    hint = f"the loss does not depend on {listed(unused)}"
    fix = "write parallelism.find_unused_parameters=true"
    return replace(verdict, detail=f"{verdict.detail}; {hint}; {fix}")


def mean_gradients(
    state: TrainState, before: Mapping[str, Tensor], synced: Mapping[str, Tensor | None]
) -> Verdict:
    """Check that a batch's ``synced_gradients`` are the mean of the ranks' ``own_gradients``.

    A hook that sends rounded gradients gets the tolerance of its dtype. A user's hook gets none:
    its effect is unknown.
    """
    work, least, notes = state.work, 0.0, ""
    if has_shards(state.module):
        notes += "; a whole copy of the model computed the ranks' own"
    if not _has_whole_layers(state):
        notes += ", without dropout"
    hook = work.config.parallelism.get("comm_hook")
    if isinstance(hook, Mapping):
        notes += f"; the comm_hook {hook['_target_']} sent them"
    elif hook is not None:
        least = TOLERANCES[SENT_AS[hook]]
        notes += f"; comm_hook={hook} may be off by {least:g} of the largest"
    names = sorted(set.intersection(*map(set, gather_objects(list(before)))))
    distances = torch.stack([_distances(state, before[key], synced.get(key)) for key in names])
    dist.all_reduce(distances, op=dist.ReduceOp.MAX)
    largest, from_mean, from_sum = distances.unbind(dim=1)
    scale = largest.clamp(min=SMALLEST_PART * float(largest.max()) or 1.0)
    relative = torch.tensor([max(least, tolerance(state, before[key].dtype)) for key in names])
    is_near = from_mean <= relative * scale  # false for NaN
    wrong = [key for key, near in zip(names, is_near, strict=True) if not near]
    index = int((from_mean / scale).argmax())
    how_far = f"{from_mean[index]:.2g} off"
    if state.batches.num_shares > 1:  # else mean and sum are the same
        how_far += f" the mean and {from_sum[index]:.2g} off the sum"
    detail = (
        f"the farthest of {len(names)} is {names[index]}: {how_far}, of up to "
        f"{largest[index]:.2g}{notes}"
    )
    name = "gradients are the mean of the ranks' own, not the sum"
    return Verdict(name, not wrong, f"not {listed(wrong)}; {detail}" if wrong else detail)


def _distances(state: TrainState, before: Tensor, synced: Tensor | None) -> Tensor:
    """Return this rank's largest element, and the distance of `synced` from mean and from sum.

    Float64 (3,) on the CPU. A gradient that is missing, or has another shape, counts as zero.
    Collective: every rank must call.
    """
    total = before.detach().to_dense().to(torch.float64, copy=True).contiguous()
    reduced = torch.zeros_like(total)
    if synced is not None and synced.shape == total.shape:
        reduced = synced.to_dense().to(total)  # FSDP may offload it to the CPU
    largest = total.abs().max()
    dist.all_reduce(total, group=state.work.data_group)
    mean = total / state.batches.num_shares
    from_mean, from_sum = (reduced - mean).abs().max(), (reduced - total).abs().max()
    return torch.stack([largest, from_mean, from_sum]).cpu()


def wait_for_mean(state: TrainState, batch: StepBatch) -> Verdict:
    """Check that ranks wait for the mean: delay the last rank and time when the others have it."""
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
        began = time.monotonic_ns()  # all processes on a machine share this clock
        return step

    state.work = replace(work, step_fn=late_step)
    # Only the last micro-batch reduces. No other collective may follow: it would wait.
    _backward(state, replace(batch, micro_batches=batch.micro_batches[-1:]))
    synchronize(work.devices)
    state.work, times = work, gather_objects((began, time.monotonic_ns()))
    # The ranks that take a mean with the late rank; other ranks hold other parts of layers.
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
