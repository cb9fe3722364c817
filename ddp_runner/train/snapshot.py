"""Saves the train state in a checkpoint, and restores it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.optim.lr_scheduler import LambdaLR

from ddp_runner.checkpoint.saved_objects import Saver
from ddp_runner.train.same_data import RunData
from ddp_runner.train.state import TrainState, forward
from ddp_runner.train.step import modules_of


def snapshot(state: TrainState, *, copies: set[int] | None = None) -> dict[str, Any]:
    """Return everything that the next step depends on. Collective: every rank must call.

    `copies` collects the addresses of tensors that are already copies; see ``gathered``.
    """
    return _saver(state).snapshot(state.step, copies=copies)


def restore(state: TrainState, folder: Path, *, log: Callable[[str], None]) -> int | None:
    """Load a folder's newest valid checkpoint, if there is any. Collective: every rank must call.

    Returns:
        The step that the run continues from; None if it starts at step 0.

    Raises:
        UserError: the checkpoint belongs to another model, optimizer or dataset, or every
            checkpoint is damaged. All ranks raise the same error.
    """
    checkpoint = _saver(state).restore(
        folder,
        is_resumed=state.work.config.resume is not None,
        log=log,
        before=lambda: rehearse(state),
    )
    if checkpoint is None:
        return None
    step, state.progress.metrics = checkpoint
    _set_rates(state)
    return step


def rehearse(state: TrainState) -> None:
    """Run backwards, so that DDP rebuilds its buckets. Collective: every rank must call.

    DDP rebuilds its buckets after its first backward, with a static graph after the second. A
    gradient's position in its bucket decides the order in which three or more ranks are added, and
    so the rounding of the sum. A resumed run must therefore not take its first step with the
    initial buckets. Call this before loading the state, since it changes buffers.
    """
    if state.model is state.module or state.work.env.world_size < 3:
        return  # the mode wraps nothing, or the sum has only one order
    state.model.train()
    # The real batch size, since torch.compile compiles for it.
    samples = state.first(range(state.batches.micro_size))
    for _ in range(2 if getattr(state.model, "static_graph", False) else 1):
        state.module.zero_grad(set_to_none=True)
        step = forward(state.work, state.model, samples)
        step.loss_sum.backward()  # the next step sets these gradients to None


def saved_objects(state: TrainState) -> dict[str, Any]:
    """Return the content of a checkpoint by name, the data first: a mismatch there says most."""
    work = state.work
    return {
        "data": RunData(work.dataset, state.samples, seed=work.config.seed),
        "batches": state.batches,
        "progress": state.progress,
        "model": state.module,
        "optimizer": state.optimizer,
        "scheduler": state.schedule.scheduler,
        "scaler": state.scaler,
        **({} if state.ema is None else {"ema": state.ema.averaged}),
        **modules_of(work.step_fn),
    }


def _saver(state: TrainState) -> Saver:
    work = state.work
    return Saver(
        saved_objects(state),
        state.settings,
        task="train",
        num_shares=work.layout.num_shares,
        group=work.group,
        is_sharded=work.config.checkpoint.format == "sharded",
        takes_all=work.layout.runs_loop,
    )


def _set_rates(state: TrainState) -> None:
    """Recompute the learning rates of a schedule that is a function of the step.

    In a run of train.epochs with a new batch size, count the past epochs' steps at the new size.
    """
    batches, scheduler = state.batches, state.schedule.scheduler
    if not isinstance(scheduler, LambdaLR):
        return
    is_in_epochs = state.work.config.train.max_steps is None
    if batches.is_resized and is_in_epochs and batches.steps_per_epoch is not None:
        scheduler.last_epoch = batches.epoch * batches.steps_per_epoch
    for group, factor in zip(scheduler.optimizer.param_groups, scheduler.lr_lambdas, strict=True):
        group["lr"] = group["initial_lr"] * factor(scheduler.last_epoch)
