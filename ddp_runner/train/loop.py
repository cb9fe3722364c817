"""The training loop: optimizer steps, evaluations and checkpoints, in ordinary PyTorch.

A loss is summed over samples and divided by the number of samples in the global batch, so every
world size and every mode of parallelism takes the same steps. The same holds for tokens.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_runner.config.monitors import ensure_monitored
from ddp_runner.data.batches import StepBatch
from ddp_runner.data.splits import MicroBatch
from ddp_runner.distributed import StopVote, sum_over_ranks
from ddp_runner.errors import UserError
from ddp_runner.job import Status
from ddp_runner.metric_names import StepPart
from ddp_runner.parallelism.mode import Engine, Sums
from ddp_runner.seeds import seed_all
from ddp_runner.tracking.run_logger import Logger
from ddp_runner.train.buffers import share_changing
from ddp_runner.train.clipping import has_gradient, scale_and_clip, step_unless_overflowed
from ddp_runner.train.evaluation import evaluate
from ddp_runner.train.progress import count_evaluation
from ddp_runner.train.state import TrainState, forward
from ddp_runner.train.step_metrics import ensure_tried, reduce_step_metrics
from ddp_runner.train.torch_errors import explain


def train(
    state: TrainState,
    *,
    save: Callable[[], None],  # Collective: every rank must call.
    stop_requested: Callable[[], bool],
    logger: Logger,
) -> Status:
    """Train from the state's position to the final step. Collective: every rank must call.

    Returns:
        COMPLETED, or PREEMPTED if a rank was asked to stop; the state is then saved.

    Raises:
        UserError: the loss became NaN or infinite. All ranks raise at the same step.
    """
    work, progress, batches, timer = state.work, state.progress, state.batches, state.timer
    config, vote = work.config.train, StopVote(work.group)
    monitors_training = not (work.config.checkpoint.monitor or "eval/").startswith("eval/")
    state.model.train()
    timer.restart()
    if progress.owes_evaluation:  # the run was stopped after a step, before its evaluation
        _evaluate_and_save(state, vote, save=save, logger=logger)
    steps = iter(batches)
    while not state.has_ended:
        batch = next(steps)
        timer.mark(StepPart.DATA)
        # The last group has the optimizer's own rate; the groups of params.groups come first.
        lr = state.optimizer.param_groups[-1]["lr"]
        sums = take_step(state, batch)
        progress.step += 1
        progress.metrics.clear()  # a checkpoint keeps only the metrics of its own step
        timer.add(samples=batch.global_count)
        logger.step_done(step=progress.step, epoch=batches.epoch_number)
        if progress.step == 1:
            _log_first_loss(state, sums, logger)
        is_final = state.has_ended
        needs_monitor = monitors_training and _checkpoint_is_due(state)
        if is_final or needs_monitor or progress.step % config.log_every_steps == 0:
            progress.metrics |= reduce_step_metrics(state, sums, lr=lr)
            ensure_monitored(work.config, progress.metrics, part="train")
            logger.log(progress.metrics, step=progress.step, epoch=batches.epoch_number)
        if state.profiler is not None:
            state.profiler.step_done(progress.step)
        steps_between, epochs_between = config.eval_every_steps, config.eval_every_epochs
        progress.owes_evaluation = _is_due(state, steps=steps_between, epochs=epochs_between)
        if is_final:
            progress.owes_evaluation = bool(steps_between or epochs_between)
        # After the final step only the evaluation remains, and stopping would delay it.
        elif state.engine.may_stop(vote.agreed(stop_requested)):
            save()
            return Status.PREEMPTED
        _evaluate_and_save(state, vote, save=save, logger=logger)
    vote.settle()
    return Status.COMPLETED


def _evaluate_and_save(
    state: TrainState, vote: StopVote, *, save: Callable[[], None], logger: Logger
) -> None:
    """Evaluate and save if that is due after the step just taken. Collective: every rank."""
    is_evaluated, epoch_ended = state.progress.owes_evaluation, state.batches.step == 0
    if is_evaluated or epoch_ended:
        vote.settle()  # before loader processes are forked
    if is_evaluated:
        _evaluate(state, logger)
    # The evaluation may end the run early.
    if is_saved := state.has_ended or _checkpoint_is_due(state):
        save()
    if is_evaluated or epoch_ended:
        state.model.train()
    if is_evaluated or is_saved or epoch_ended:
        state.timer.restart()
    state.timer.mark(None)


def _checkpoint_is_due(state: TrainState) -> bool:
    config = state.work.config.checkpoint
    return _is_due(state, steps=config.every_steps, epochs=config.every_epochs)


def _is_due(state: TrainState, *, steps: int | None, epochs: int | None) -> bool:
    """Return whether the step just taken ends a period of steps or of epochs; 0, None: never."""
    batches, epoch_ended = state.batches, state.batches.step == 0
    by_steps = steps and state.step % steps == 0
    return bool(by_steps or (epochs and epoch_ended and batches.epoch % epochs == 0))


def _log_first_loss(state: TrainState, sums: Sums, logger: Logger) -> None:
    """Log the loss of the first step, and whether any gradient is nonzero. Collective."""
    work = state.work
    (loss,) = sum_over_ranks([sums.loss.item()], group=work.data_group)
    is_nonzero = has_gradient(state.module.parameters())
    (num_nonzero,) = sum_over_ranks([is_nonzero], group=work.group)
    logger.first_loss(loss, has_gradient=num_nonzero > 0)


def take_step(state: TrainState, batch: StepBatch) -> Sums:
    """Take an optimizer step. Collective: every rank must call.

    Returns:
        This rank's parts of the loss and the scalars, which add up to means over the global batch.
    """
    optimizer, work = state.optimizer, state.work
    seed_step(state)
    share_changing(state)
    optimizer.zero_grad(set_to_none=True)
    sums = state.engine.backward(state, batch)
    factor = None
    if sums.tokens is not None:
        factor = token_factor(sums.tokens, batch, group=work.data_group)
        sums.losses = [sums.loss * factor]
        sums.scalars = {name: value * factor for name, value in sums.scalars.items()}
    sums.grad_norm = scale_and_clip(state, factor)
    try:
        if step_unless_overflowed(optimizer, state.scaler):
            state.schedule.step()
            if state.ema is not None:
                state.ema.update(state.module)
    except (RuntimeError, ValueError) as error:
        name = f"optimizer={work.config.optimizer.get('name')}"
        explain(error, state, name, dense="optimizer=sgd optimizer.weight_decay=0")
        raise
    state.timer.mark(StepPart.OPTIMIZER)
    return sums


def seed_step(state: TrainState) -> None:
    """Seed the next step's random numbers. Ranks that compute one share together draw the same."""
    seed_all(state.work.config.seed, "step", state.step, state.work.layout.share)


def accumulate_gradients(state: TrainState, batch: StepBatch) -> Sums:
    """Accumulate the gradients of the micro-batches, and return the sums of their losses.

    If tokens are counted, gradients and sums have yet to be multiplied by ``token_factor``.
    """
    sums, count = new_sums(state), batch.global_count
    *earlier, last = batch.micro_batches
    for micro_batch in earlier:
        with state.work.mode.no_sync(state.model):
            _add_gradients(state, micro_batch, sums, count=count, reduces=False)
    reduces = state.work.layout.exchanges_in_backward
    _add_gradients(state, last, sums, count=count, reduces=reduces)
    return sums


def _add_gradients(
    state: TrainState, micro_batch: MicroBatch, sums: Sums, *, count: int, reduces: bool
) -> None:
    """Add a micro-batch's gradients; for `count` see ``micro_loss``. Collective if `reduces`."""
    timer = state.timer
    loss, share = micro_loss(state, state.model, micro_batch, sums, count=count)
    # The reduction averages over the shares, but the count is that of all shares.
    scale = torch.full_like(loss, share * state.batches.num_shares)
    timer.mark(StepPart.FORWARD, ends_on=state.work.devices[-1])
    if reduces:
        timer.mark_end_of_backward(loss)
    loss.backward(state.scaler.scale(scale))
    timer.mark(StepPart.COMM if reduces else StepPart.BACKWARD)


def new_sums(state: TrainState) -> Sums:
    """Return sums of zero for a step."""
    counts_tokens = state.work.config.batch.count == "tokens"
    tokens = torch.zeros((), device=state.work.devices[-1]) if counts_tokens else None
    scalars = dict.fromkeys(state.scalars, torch.zeros(())) if state.scalars else {}
    return Sums([], tokens, scalars)


def micro_loss(
    state: TrainState, model: Any, micro_batch: MicroBatch, sums: Sums, *, count: int
) -> tuple[Tensor, float]:
    """Compute a micro-batch, and count it in the step's sums.

    Returns:
        The loss, summed over the samples, with its graph; and the factor that makes it a part of
        the mean over the `count` samples of the global batch.

    Raises:
        UserError: the loss has no gradient.
    """
    step = forward(state.work, model, micro_batch)
    if not step.loss_sum.requires_grad:
        raise UserError(
            "the loss of a batch depends on no parameter of the model",
            "compute it, and the model's outputs, without no_grad, detach or item",
        )
    share = micro_batch.weight / count
    # A product at once: a compiled step may return the same memory again.
    sums.losses.append(step.loss_sum.detach() * share)
    for name, value in step.scalars.items():
        ensure_tried(name, state)
        sums.scalars[name] = sums.scalars.get(name, 0) + value.detach() * share
    if sums.tokens is not None:
        sums.tokens += step.count * micro_batch.weight
    return step.loss_sum, share


def token_factor(
    num_tokens: Tensor, batch: StepBatch, *, group: dist.ProcessGroup | None
) -> Tensor:
    """Return the factor from a mean over the global batch's samples to a mean over its tokens.

    The number of tokens is known only after the forward. Collective: every rank must call.
    """
    dist.all_reduce(num_tokens, group=group)
    return batch.global_count / torch.where(num_tokens > 0, num_tokens, 1.0)


def _evaluate(state: TrainState, logger: Logger) -> None:
    """Evaluate, log the results and count them for early stopping."""
    work, progress = state.work, state.progress
    logger.evaluating()
    share_changing(state)
    results, confusion = evaluate(work, state.evaluated, step=progress.step)
    ensure_monitored(work.config, results, part="eval")
    progress.metrics |= results
    state.schedule.step_on_metrics(results)
    count_evaluation(progress, state.early_stop, results)
    epoch = state.batches.epoch_number
    logger.log(results, step=progress.step, epoch=epoch, confusion=confusion)


class LocalEngine(Engine[TrainState, StepBatch]):
    """Computes this rank's share of a step."""

    def backward(self, state: TrainState, batch: StepBatch) -> Sums:
        """Accumulate over the micro-batches and reduce with the last micro-batch. Collective.

        Raises:
            UserError: DDP waits for gradients of parameters that the loss does not depend on, or
                the mode does not support sparse gradients.
        """
        try:
            return accumulate_gradients(state, batch)
        except (RuntimeError, ValueError) as error:
            mode = f"parallelism={state.work.config.parallelism.get('name')}"
            explain(error, state, mode, dense="parallelism=ddp")
            raise

    new_sums = staticmethod(new_sums)  # for engines that compute the micro-batches in their own way
    micro_loss = staticmethod(micro_loss)


def build_engine(state: TrainState) -> Engine[TrainState, StepBatch]:
    """Return what computes the steps in the state's mode. Collective: every rank must call."""
    return state.work.mode.engine(state, LocalEngine())
