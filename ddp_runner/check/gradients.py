"""Whether gradients are the mean over ranks, and whether all wait for it; called by ``check``.

Collective: every rank must call each check, and gets the same finding.
"""

import copy
import time
from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_runner.check.compare_ranks import Finding, differences, listed, told, tolerance
from ddp_runner.data.batches import StepBatch
from ddp_runner.distributed import gather_objects
from ddp_runner.train.loop import backward, forward
from ddp_runner.train.state import TrainState

DELAY_S = 0.3  # by which one rank begins its backward late
# Where a gradient is zero but for rounding (a bias before BatchNorm), the model's largest counts.
SMALLEST_PART = 1e-3


def own_gradients(state: TrainState, batch: StepBatch) -> dict[str, Tensor]:
    """Return the gradients of this rank's samples alone, by a twin of the model; leaves no trace.

    Random numbers are drawn as the next backward will draw them.
    """
    twin = copy.deepcopy(state.module).train()
    total: dict[str, Tensor] = {}
    cuda = [device for device in state.setup.devices if device.type == "cuda"]
    with torch.random.fork_rng(devices=cuda):
        for piece in batch.micro_batches:
            loss, _ = forward(state, twin, piece)
            scale = piece.weight / batch.global_count * state.setup.batches.num_shares
            # Asked for after the forward, which may have made some.
            parameters = {name: one for name, one in twin.named_parameters() if one.requires_grad}
            found = torch.autograd.grad(loss * scale, list(parameters.values()), allow_unused=True)
            for name, gradient in zip(parameters, found, strict=True):
                part = torch.zeros_like(parameters[name]) if gradient is None else gradient
                total[name] = total[name] + part if name in total else part
    return total


def synced_gradients(state: TrainState, batch: StepBatch) -> dict[str, Tensor | None]:
    """Return the gradients that the mode leaves on this rank."""
    state.model.train()
    state.module.zero_grad(set_to_none=True)
    backward(state, batch)
    return {
        name: parameter.grad
        for name, parameter in state.module.named_parameters()
        if parameter.requires_grad
    }


def equal_gradients(synced: Mapping[str, Tensor | None]) -> Finding:
    """Compare the gradients after a backward."""
    name, found = "gradients are equal on all ranks", differences(synced)
    if not found:
        return Finding(name, True, f"{len(synced)} of them after backward, bit for bit")
    detail = told(found)
    if idle := [key for key, gradient in synced.items() if gradient is None]:
        # DDP waits for every parameter, and so never finishes the reduction.
        detail += (
            f"; the loss does not depend on {listed(idle)}: parallelism.find_unused_parameters=true"
        )
    return Finding(name, False, detail)


def mean_gradients(
    state: TrainState, own: Mapping[str, Tensor], synced: Mapping[str, Tensor | None]
) -> Finding:
    """Compare the gradients after a backward with the mean of what each rank alone computes."""
    name = "gradients are the mean of the ranks' own, not the sum"
    names = sorted(set.intersection(*map(set, gather_objects(list(own)))))
    figures = torch.zeros(3, len(names), dtype=torch.float64)
    for index, key in enumerate(names):
        total = own[key].detach().to_dense().to(torch.float64, copy=True).contiguous()
        gradient = synced.get(key)
        found = torch.zeros_like(total) if gradient is None else gradient.to_dense().double()
        figures[0, index] = total.abs().max()
        dist.all_reduce(total)
        figures[1, index] = (found - total / state.setup.batches.num_shares).abs().max()
        figures[2, index] = (found - total).abs().max()
    dist.all_reduce(figures, op=dist.ReduceOp.MAX)
    largest, from_mean, from_sum = figures
    scale = largest.clamp(min=SMALLEST_PART * float(largest.max()) or 1.0)
    allowed = torch.tensor([tolerance(state, own[key].dtype) for key in names]) * scale
    wrong = [key for key, one in zip(names, from_mean <= allowed, strict=True) if not one]
    index = int((from_mean / scale).argmax())
    detail = (
        f"of {len(names)} the farthest is {names[index]}: {float(from_mean[index]):.2g} off the "
        f"mean and {float(from_sum[index]):.2g} off the sum, of up to {float(largest[index]):.2g}"
    )
    return Finding(name, not wrong, f"not {listed(wrong)}; {detail}" if wrong else detail)


def waiting(state: TrainState, batch: StepBatch, *, num_nodes: int) -> Finding:
    """Let the last rank begin its backward late, and see when the others can read gradients."""
    name = "no rank reads a gradient before all have computed theirs"
    if num_nodes > 1:
        return Finding(name, True, f"not measured: {num_nodes} machines have no common clock")
    late = state.setup.env.world_size - 1
    began = 0

    def late_loss(outputs: Tensor, targets: Tensor) -> Tensor:
        nonlocal began
        loss = state.setup.loss_fn(outputs, targets)
        _finish_kernels(state)
        gather_objects(None)  # every rank stands before its backward
        if state.setup.env.rank == late:
            time.sleep(DELAY_S)
        began = time.monotonic_ns()  # the same clock for all processes of a machine
        return loss

    last = replace(batch, micro_batches=batch.micro_batches[-1:])  # the one whose backward reduces
    synced_gradients(replace(state, setup=replace(state.setup, loss_fn=late_loss)), last)
    _finish_kernels(state)
    times = gather_objects((began, time.monotonic_ns()))
    late_began = times.pop(late)[0]
    waits_ms = [(readable - late_began) / 1e6 for _, readable in times]
    lead_ms = min((late_began - began_at) / 1e6 for began_at, _ in times)
    earliest = min(range(len(times)), key=lambda rank: waits_ms[rank])
    when = f"{abs(waits_ms[earliest]):.1f} ms {'after' if waits_ms[earliest] >= 0 else 'before'}"
    detail = (
        f"rank {late} began its backward {lead_ms:.0f} ms after the others; the first of them, "
        f"rank {earliest}, could read its gradients {when} that"
    )
    return Finding(name, waits_ms[earliest] >= 0, detail)


def _finish_kernels(state: TrainState) -> None:
    for device in state.setup.devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
