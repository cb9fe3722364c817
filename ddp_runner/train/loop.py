"""The training loop: optimizer steps, evaluations and checkpoints, in ordinary PyTorch.

A loss is summed over samples and divided by the number of samples in the global batch, so every
world size and every mode of parallelism takes the same steps. The same holds for tokens.
"""

from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_runner.config.monitors import ensure_monitored
from ddp_runner.config.training import EarlyStopConfig
from ddp_runner.data.batches import StepBatch
from ddp_runner.distributed import StopVote, sum_over_ranks
from ddp_runner.errors import UserError
from ddp_runner.job import Status
from ddp_runner.metric_names import StepPart
from ddp_runner.parallelism.mode import Sums
from ddp_runner.seeds import seed_all
from ddp_runner.tracking.run_logger import Logger
from ddp_runner.train.buffers import share_changing
from ddp_runner.train.clipping import has_gradient, scale_and_clip, step_unless_overflowed
from ddp_runner.train.evaluation import evaluate
from ddp_runner.train.optimizers import refuse_sparse
from ddp_runner.train.progress import (
    count_evaluation,
    early_stop_of,
    evaluation_is_due,
    is_due,
    stop_reason,
)
from ddp_runner.train.state import TrainState
from ddp_runner.train.step_metrics import ensure_known, step_metrics
from ddp_runner.train.work import forward


def train(
    state: TrainState,
    *,
    save: Callable[[], None],  # Collective: every rank must call.
    stop_requested: Callable[[], bool],
    logger: Logger,
) -> Status:
    """Train from where the state stands to the last step. Collective: every rank must call.

    Returns:
        COMPLETED, or PREEMPTED if a rank was asked to stop; the state is then saved.

    Raises:
        UserError: the loss became NaN or infinite. All ranks raise at the same step.
    """
    work, progress = state.work, state.progress
    config, checkpoint, batches = work.config.train, work.config.checkpoint, state.batches
    timer, vote, steps = state.timer, StopVote(work.group), iter(batches)
    early_stop = early_stop_of(work.config.early_stop, work.metrics)
    saves = {"every_steps": checkpoint.every_steps, "every_epochs": checkpoint.every_epochs}
    watches_training = not (checkpoint.monitor or "eval/").startswith("eval/")
    state.model.train()
    timer.restart()
    while progress.owes_evaluation or not _is_over(state, early_stop):
        if not progress.owes_evaluation:  # else the run was stopped before it
            batch = next(steps)
            timer.mark(StepPart.DATA)
            lr = state.optimizer.param_groups[-1]["lr"]
            sums = train_step(state, batch)
            progress.step += 1
            progress.metrics.clear()  # a checkpoint keeps only its own step's metrics
            timer.add(samples=batch.global_count)
            logger.step_done(step=progress.step, epoch=batches.epoch_number)
            if progress.step == 1:
                _log_first(state, sums, logger)
            is_over = _is_over(state, early_stop)
            is_saved = is_due(batches, progress, **saves)
            # A checkpoint that is compared by a metric of training needs that of its step.
            is_judged = is_saved and watches_training
            if is_over or is_judged or progress.step % config.log_every_steps == 0:
                progress.metrics |= step_metrics(state, sums, lr=lr)
                ensure_monitored(work.config, progress.metrics, part="train")
                logger.log(progress.metrics, step=progress.step, epoch=batches.epoch_number)
            state.profiler.step_done(progress.step)
            progress.owes_evaluation = evaluation_is_due(batches, progress, config, is_over=is_over)
            # After the last step only the evaluation is left; stopping now would delay it.
            if not is_over and state.engine.may_stop(vote.agreed(stop_requested())):
                save()
                return Status.PREEMPTED
        if is_evaluated := progress.owes_evaluation:
            vote.settle()  # before processes are forked that load
            _evaluate(state, early_stop, logger)
            state.model.train()
        if is_saved := _is_over(state, early_stop) or is_due(batches, progress, **saves):
            save()
        if has_ended := batches.step == 0:  # the next step begins another epoch
            vote.settle()
            state.model.train()
        if is_evaluated or is_saved or has_ended:
            timer.restart()
        timer.mark(None)
    vote.settle()
    return Status.COMPLETED


def _is_over(state: TrainState, early_stop: EarlyStopConfig) -> bool:
    """Return whether the run has taken its last step, or no longer improves."""
    return state.is_done or stop_reason(state.progress, early_stop) is not None


def _log_first(state: TrainState, sums: Sums, logger: Logger) -> None:
    """Log the loss of the first step, and whether it taught anything. Collective."""
    work = state.work
    (first,) = sum_over_ranks([sums.loss.item()], group=work.data_group)
    found = has_gradient(state.module.parameters())
    (num_taught,) = sum_over_ranks([found], group=work.group)
    logger.first_loss(first, teaches=num_taught > 0)


def train_step(state: TrainState, batch: StepBatch) -> Sums:
    """Take an optimizer step. Collective: every rank must call.

    Returns:
        This rank's parts of the loss and the scalars, which add up to means over the global batch.
    """
    optimizer, scaler, work = state.optimizer, state.scaler, state.work
    seed_step(state)
    share_changing(state)
    optimizer.zero_grad(set_to_none=True)
    sums = state.engine.backward(state, batch)
    factor = None
    if sums.tokens is not None:
        factor = token_factor(sums.tokens, batch, group=work.data_group)
        sums.loss = sums.loss * factor
        sums.scalars = {name: one * factor for name, one in sums.scalars.items()}
    sums.grad_norm = scale_and_clip(state, factor)
    try:
        took_step = step_unless_overflowed(optimizer, scaler)
    except RuntimeError as error:
        named = f"optimizer={work.config.optimizer.get('name')}"
        refuse_sparse(error, named, instead="optimizer=sgd optimizer.weight_decay=0")
        raise
    if took_step:
        state.schedule.step()
        if state.ema is not None:
            state.ema.update(state.module)
    state.timer.mark(StepPart.OPTIMIZER)
    return sums


def seed_step(state: TrainState) -> None:
    """Seed what the next step draws. Ranks that compute one share together draw the same."""
    seed_all(state.work.config.seed, "step", state.step, state.work.layout.share)


def backward(state: TrainState, batch: StepBatch) -> Sums:
    """Accumulate the micro-batches' gradients, and return what they add up.

    If tokens are counted, all of it has yet to be multiplied by ``token_factor``.

    Raises:
        UserError: the loss has no gradient.
    """
    work = state.work
    timer, has_peers = state.timer, work.env.world_size > 1
    total = torch.zeros((), device=work.devices[-1])
    num_tokens = torch.zeros_like(total) if work.config.batch.count == "tokens" else None
    scalars = dict.fromkeys(state.scalars, torch.zeros(())) if state.scalars else {}
    for index, micro_batch in enumerate(batch.micro_batches, start=1):
        is_last = index == len(batch.micro_batches)
        with nullcontext() if is_last else work.mode.no_sync(state.model):
            step = forward(state.work, state.model, micro_batch)
            if not step.loss_sum.requires_grad:
                raise UserError(
                    "the loss of a batch depends on no parameter of the model; compute it, and the "
                    "model's outputs, without no_grad, detach or item"
                )
            share = micro_batch.weight / batch.global_count
            loss = step.loss_sum * share
            # The reduction averages over the shares, but global_count already counts them all.
            scaled = state.scaler.scale(loss * state.batches.num_shares)
            timer.mark(StepPart.FORWARD, ends_on=work.devices[-1])
            exchanges = is_last and has_peers and not work.layout.forward_is_collective
            if exchanges:
                timer.mark_end_of_backward(scaled)
            scaled.backward()
            timer.mark(StepPart.COMM if exchanges else StepPart.BACKWARD)
        total += loss.detach()
        for name, value in step.scalars.items():
            ensure_known(name, state)
            scalars[name] = scalars.get(name, 0) + value.detach() * share
        if num_tokens is not None:
            num_tokens += step.count * micro_batch.weight
    return Sums(total, num_tokens, scalars)


def token_factor(
    num_tokens: Tensor, batch: StepBatch, *, group: dist.ProcessGroup | None
) -> Tensor:
    """Return what turns a mean over the global batch's samples into one over its tokens.

    How many tokens there are is known only after the forward. Collective: every rank must call.
    """
    dist.all_reduce(num_tokens, group=group)
    return batch.global_count / torch.where(num_tokens > 0, num_tokens, 1.0)


def _evaluate(state: TrainState, early_stop: EarlyStopConfig, logger: Logger) -> None:
    """Evaluate, log the results and count them."""
    work, progress = state.work, state.progress
    logger.evaluating()
    share_changing(state)
    results, confusion = evaluate(work, state.evaluated, step=progress.step)
    ensure_monitored(work.config, results, part="eval")
    progress.metrics |= results
    state.schedule.evaluated(results)
    count_evaluation(progress, early_stop, results)
    epoch = state.batches.epoch_number
    logger.log(results, step=progress.step, epoch=epoch, confusion=confusion)
