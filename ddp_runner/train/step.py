"""One optimizer step: ordinary PyTorch, the same for every form of parallelism.

Called by ``train``. A loss is a sum over samples divided by the samples of the whole global batch,
so that every world size takes the same steps.
"""

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ddp_runner.config.schema import TrainConfig
from ddp_runner.data.batches import GlobalBatches, MicroBatch, StepBatch
from ddp_runner.data.dataset import Dataset
from ddp_runner.dist_env import DistEnv
from ddp_runner.distributed import sum_over_ranks
from ddp_runner.errors import UserError
from ddp_runner.metric_names import StepPart
from ddp_runner.parallelism.mode import Gradients, Mode
from ddp_runner.rank.cuda import peak_memory_gib
from ddp_runner.train.schedules import Schedule
from ddp_runner.train.step_timer import StepTimer, part_figures

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Trainee:
    """What one rank trains, and with what."""

    module: nn.Module  # the bare model: evaluated and saved
    model: nn.Module  # the same model as its mode wrapped it: trained
    mode: Mode
    loss_fn: Callable[[Tensor, Tensor], Tensor]  # (outputs, targets) -> the sum over samples
    optimizer: torch.optim.Optimizer
    scheduler: Schedule
    scaler: torch.amp.GradScaler
    dataset: Dataset
    batches: GlobalBatches
    eval_batch_size: int
    devices: tuple[torch.device, ...]  # inputs go to the first, targets to the last
    config: TrainConfig
    env: DistEnv  # this rank among those of the loop
    pace: StepTimer
    group: ProcessGroup | None = None  # the ranks of the loop; None: all
    # Where the gradients come from: this rank's own backward, or ranks that serve the loop.
    gradients: Gradients | None = None


def train_step(trainee: Trainee, batch: StepBatch) -> Tensor:
    """Take one optimizer step; return this rank's part of the mean loss, a scalar.

    The parts of all ranks add up to the mean over the global batch. Collective: every rank.
    """
    optimizer, scaler, config = trainee.optimizer, trainee.scaler, trainee.config
    optimizer.zero_grad(set_to_none=True)
    if trainee.gradients is None:
        total = backward(trainee, batch)
    else:
        total = trainee.gradients.collect(step=batch.number)
        trainee.pace.mark(StepPart.COLLECT)
    if config.clip_norm is not None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(trainee.module.parameters(), config.clip_norm)
    scale = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    if scaler.get_scale() >= scale:  # else the gradients overflowed, and no step was taken
        trainee.scheduler.step()
    trainee.pace.mark(StepPart.OPTIMIZER)
    return total


def backward(trainee: Trainee, batch: StepBatch) -> Tensor:
    """Accumulate the gradients of this rank's micro-batches; return its part of the mean loss."""
    total = torch.zeros((), device=trainee.devices[-1])
    for index, micro_batch in enumerate(batch.micro_batches, start=1):
        is_last = index == len(batch.micro_batches)
        with nullcontext() if is_last else trainee.mode.no_sync(trainee.model):
            loss_sum, _ = forward(trainee, trainee.model, micro_batch)
            loss = loss_sum * (micro_batch.weight / batch.global_count)
            # The reduction divides by the shares, and global_count has counted them all already.
            scaled = trainee.scaler.scale(loss * trainee.batches.num_shares)
            trainee.pace.mark(StepPart.FORWARD, ends_on=trainee.devices[-1])
            if trainee.env.world_size > 1:
                scaled.register_hook(lambda _: _at_end_of_backward(trainee.pace))
            scaled.backward()
            trainee.pace.mark(StepPart.COMM if trainee.env.world_size > 1 else StepPart.BACKWARD)
        total += loss.detach()
    return total


def rehearse(trainee: Trainee) -> None:
    """Let the model's wrapper see a backward that counts for nothing. Collective: every rank.

    DDP lines its gradients up anew after its first backward. Where in line a gradient stands
    decides in which order three ranks or more are added, hence how the sum is rounded: a resumed
    run must not take a step with the line that a new one begins with. Call it before the state is
    loaded: random numbers and buffers are not as they were.
    """
    if trainee.model is trainee.module or trainee.env.world_size < 3:
        return  # nothing is wrapped, or the sum has one order only
    trainee.model.train()
    split = trainee.batches.split
    # As many as in a real one: a compiled model is compiled for them.
    few = torch.arange(trainee.batches.micro_size, device=split.inputs.device)
    few = few.clamp(max=len(split) - 1)
    batch = MicroBatch(split.inputs.index_select(0, few), split.targets.index_select(0, few))
    loss, _ = forward(trainee, trainee.model, batch)
    loss.backward()  # the next step drops these gradients, as it does those of any step


def forward(trainee: Trainee, model: nn.Module, batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """Return the loss summed over the batch's samples, and the model's outputs."""
    inputs = trainee.dataset.prepare(batch.inputs, trainee.devices[0], randoms=batch.randoms)
    targets = batch.targets.to(trainee.devices[-1], non_blocking=True)
    with torch.autocast(
        trainee.devices[0].type,
        dtype=DTYPES[trainee.config.precision],
        enabled=trainee.config.precision != "fp32",
    ):
        outputs = model(inputs)
        return trainee.loss_fn(outputs, targets), outputs


def step_figures(trainee: Trainee, loss: Tensor, *, lr: float, step: int) -> dict[str, float]:
    """Return what a line of metrics says of the last step. Collective: every rank must call.

    Args:
        trainee: of this rank.
        loss: this rank's part of the mean loss.
        lr: that the step was taken with.
        step: how many steps have been taken.

    Raises:
        UserError: the loss is NaN or infinite.
    """
    env = trainee.env
    own_loss = loss.item()
    figures, parts = trainee.pace.lap()
    own_comm = parts.get(StepPart.COMM, 0.0)
    comm = [own_comm if rank == env.rank else 0.0 for rank in range(env.world_size)]
    total, *sums = sum_over_ranks([own_loss, *parts.values(), *comm], group=trainee.group)
    means = [value / env.world_size for value in sums[: len(parts)]]
    parts = dict(zip(parts, means, strict=True))
    return {
        "train/loss": finite_loss(total, step=step),
        "train/lr": lr,
        **figures,
        **part_figures(
            parts, comm_by_rank=sums[len(parts) :], step_time_ms=figures["perf/step_time_ms"]
        ),
        "perf/peak_memory_gib": peak_memory_gib(),
        **(trainee.gradients.figures() if trainee.gradients else {}),
    }


def global_loss(trainee: Trainee, loss: Tensor, *, step: int) -> float:
    """Return the loss summed over the ranks' parts. Collective: every rank must call.

    Raises:
        UserError: it is NaN or infinite.
    """
    (total,) = sum_over_ranks([loss.item()], group=trainee.group)
    return finite_loss(total, step=step)


def finite_loss(loss: float, *, step: int) -> float:
    """Return a loss that is a number.

    Raises:
        UserError: it is NaN or infinite.
    """
    if not math.isfinite(loss):
        raise UserError(
            f"train/loss became {loss} by step {step}; it was not saved: start again with a "
            "smaller optimizer.lr or train.clip_norm=1.0, or resume from a checkpoint whose loss "
            "was still small"
        )
    return loss


def _at_end_of_backward(pace: StepTimer) -> None:
    """Mark when the engine has computed all gradients; what DDP still waits for comes after."""
    torch.autograd.Variable._execution_engine.queue_callback(lambda: pace.mark(StepPart.BACKWARD))
