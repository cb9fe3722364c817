"""The training loop: epochs, lines of metrics, evaluations and checkpoints.

Called by ``worker`` on each rank with everything built. What an optimizer step is, is in ``step``.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ddp_runner.config.schema import TrainConfig
from ddp_runner.data.batches import eval_batches
from ddp_runner.distributed import (
    StopVote,
    add_over_ranks,
    broadcast_buffers,
    sum_over_ranks,
)
from ddp_runner.job import Status
from ddp_runner.metric_names import StepPart
from ddp_runner.tracking.run_logger import Logger
from ddp_runner.train.classification import classification_metrics, confusion_counts
from ddp_runner.train.step import Trainee, forward, step_figures, train_step


@dataclass
class Position:
    """Where a run stands; a checkpoint holds it, so that a resumed run goes on from there."""

    epoch: int = 0  # epochs that have ended
    step: int = 0  # optimizer steps since the run began
    step_in_epoch: int = 0
    # What was logged of the last step; a checkpoint keeps it in its manifest.
    metrics: dict[str, float] = field(default_factory=dict, compare=False)
    # Batches before this place that have not been computed, numbered since the run began: an
    # asynchronous run takes them as they come. Empty in all others; filled in while saving.
    outstanding: tuple[int, ...] = ()

    def last_step(self, config: TrainConfig, *, steps_per_epoch: int) -> int:
        """Return the step at which the run ends: by its epochs, unless train.max_steps says it.

        Counted from here on, as the epochs before may have had batches of another size.
        """
        if config.max_steps is not None:
            return config.max_steps
        epoch_began = self.step - self.step_in_epoch
        return max(self.step, epoch_began + (config.epochs - self.epoch) * steps_per_epoch)


@dataclass(frozen=True)
class Control:
    """When the loop ends or saves, and whom it tells."""

    max_steps: int
    save_every_steps: int | None
    save_every_epochs: int | None
    save: Callable[[Position, dict[str, float]], None]  # collective: every rank must call
    stop_requested: Callable[[], bool]


def train(trainee: Trainee, *, position: Position, control: Control, logger: Logger) -> str:
    """Train from `position` on; return completed or preempted. Collective: every rank must call.

    Raises:
        UserError: the loss became NaN or infinite; on all ranks at the same step.
    """
    config, metrics, pace = trainee.config, position.metrics, trainee.pace
    steps_per_epoch = trainee.batches.steps_per_epoch
    vote = StopVote(trainee.group)
    # A run that was stopped after the last step of an epoch has the epoch's evaluation before it.
    while position.step < control.max_steps or position.step_in_epoch == steps_per_epoch:
        epoch = position.epoch + 1
        trainee.model.train()
        pace.restart()
        for batch in trainee.batches.epoch(position.epoch, start_step=position.step_in_epoch):
            pace.mark(StepPart.DATA)
            lr = trainee.optimizer.param_groups[0]["lr"]
            loss = train_step(trainee, batch)
            position.step += 1
            position.step_in_epoch += 1
            metrics.clear()  # a checkpoint holds the figures of its own step alone
            pace.add(samples=batch.global_count)
            logger.step_done(step=position.step, epoch=epoch)
            if position.step == 1:
                logger.first_loss(*sum_over_ranks([loss.item()], group=trainee.group))
            finished = position.step == control.max_steps
            if finished or _due(position.step, config.log_every_steps):
                metrics |= step_figures(trainee, loss, lr=lr, step=position.step)
                logger.log(metrics, step=position.step, epoch=epoch)
            # After the last step only the evaluation is left: a stop would lose it.
            if not finished and vote.agreed(control.stop_requested()):
                control.save(position, metrics)
                return Status.PREEMPTED
            if finished or position.step_in_epoch == steps_per_epoch:
                break
            if _due(position.step, control.save_every_steps):
                control.save(position, metrics)
                pace.restart()
            pace.mark(None)
        finished = position.step >= control.max_steps
        if position.step_in_epoch == steps_per_epoch:
            position.epoch, position.step_in_epoch = epoch, 0
        if config.eval_every_epochs and (finished or _due(epoch, config.eval_every_epochs)):
            results, confusion = evaluate(trainee)
            metrics |= results
            trainee.scheduler.evaluated(results)
            logger.log(results, step=position.step, epoch=epoch)
            logger.evaluated(
                None if confusion is None else confusion.long().tolist(), step=position.step
            )
        every_steps, every_epochs = control.save_every_steps, control.save_every_epochs
        if finished or _due(position.step, every_steps) or _due(epoch, every_epochs):
            control.save(position, metrics)
    vote.close()
    return Status.COMPLETED


@torch.no_grad()
def evaluate(trainee: Trainee) -> tuple[dict[str, float], Tensor | None]:
    """Return the metrics of the whole evaluation set and, for classes, their confusion counts.

    Each sample counts exactly once, whatever the world size. Collective: every rank must call.

    Returns:
        eval/loss and, for classes, eval/accuracy, eval/precision, eval/recall and eval/f1; the
        counts as int64 (num_classes, num_classes), a row for each true class. A prediction that is
        none of the classes is wrong, and in no column.
    """
    # The bare module: DDP's forward is a collective, and ranks may have unequal shares.
    broadcast_buffers(trainee.module, group=trainee.group)
    trainee.module.eval()
    num_classes = trainee.dataset.num_classes or 0
    loss_sum = torch.zeros((), dtype=torch.float64, device=trainee.devices[-1])
    shape = num_classes, num_classes + 1
    counts = torch.zeros(shape, dtype=torch.int64, device=trainee.devices[-1])
    num_samples = 0
    for batch in eval_batches(
        trainee.dataset.eval,
        batch_size=trainee.eval_batch_size,
        rank=trainee.env.rank,
        world_size=trainee.env.world_size,
    ):
        batch_loss, outputs = forward(trainee, trainee.module, batch)
        loss_sum += batch_loss
        num_samples += len(batch.inputs)
        if num_classes:
            targets = batch.targets.to(outputs.device)
            counts += confusion_counts(outputs, targets, num_classes=num_classes)
    sums = [loss_sum.item(), num_samples]
    total_loss, total_samples = sum_over_ranks(sums, group=trainee.group)
    results = {"eval/loss": total_loss / total_samples}
    if not num_classes:
        return results, None
    counts = add_over_ranks(counts, group=trainee.group)
    figures = classification_metrics(counts)
    return results | {f"eval/{name}": value for name, value in figures.items()}, counts[:, :-1]


def _due(count: int, every: int | None) -> bool:
    return every is not None and count % every == 0
