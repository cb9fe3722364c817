"""Finds batch.per_rank=auto: the most samples whose steps fit into the memory of every rank's GPU.

Each rank takes real steps on a state of its own, which is dropped, so a run is the same as with
this number on its command line. Ranks run out of memory at different sizes, so none of these steps
may wait for other ranks.
"""

import gc
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ddp_runner.config.schema import AUTO, RunConfig, config_hash
from ddp_runner.data.streams import num_samples
from ddp_runner.distributed import gather_objects
from ddp_runner.errors import UserError
from ddp_runner.rank.session import Session
from ddp_runner.tracking.run_record import write_run_record
from ddp_runner.train.build import build_session_state
from ddp_runner.train.evaluation import forward
from ddp_runner.train.state import TrainState

MULTIPLE = 8  # of the sizes above it; tensor cores want it
# Of a GPU's memory: the rest is for what torch does not count, such as NCCL's buffers, and for
# longer runs, whose memory is more fragmented.
USED_FRACTION = 0.9


def with_largest_batch(session: Session) -> Session:
    """Return the session with a number in place of batch.per_rank=auto. Collective.

    The search builds the state and drops it; the caller builds it again with the number.

    Raises:
        UserError: not even one sample fits, or the parallelism cuts the model over ranks.
    """
    config = session.config
    if config.batch.per_rank != AUTO:
        return session
    with _limited_memory(session):
        found, most = _search(session, config)
    if not found:
        raise UserError(
            f"batch.per_rank=auto: a step of one sample needs more than {USED_FRACTION:.0%} of the "
            f"memory of {session.devices[0]}; use a smaller model, or train.precision=bf16"
        )
    session.log(
        f"batch.per_rank=auto: {found} samples a rank in each micro-step, of at most {most}"
    )
    config = _with_size(config, found)
    if session.env.is_rank_zero:
        write_run_record(session.run_dir, config_hash=config_hash(config))
    return replace(session, job=replace(session.job, config=config))


def largest_that_fits(fits: Callable[[int], bool], *, most: int) -> int:
    """Return the largest size that fits: by doubling, then by halving the rest; 0: none does.

    From ``MULTIPLE`` on it is a multiple of it, at most an eighth below the largest. What fits is
    tried from two on: BatchNorm cannot train on one sample.
    """
    best, size = 0, 2
    while size <= most and fits(size):
        best, size = size, 2 * size
    if not best:
        return int(fits(1))
    step = max(MULTIPLE, best // 8) if best >= MULTIPLE else 1
    others = range(best + step, min(size, most + 1), step)
    count = bisect_left(others, True, key=lambda other: not fits(other))
    return others[count - 1] if count else best


def _search(session: Session, config: RunConfig) -> tuple[int, int]:
    """Return the largest size that fits on every rank, and the most that was allowed."""
    state = build_session_state(session, _with_size(config, 1))
    validate_independent(state)
    for group in state.optimizer.param_groups:
        group["lr"] = 0.0  # the weights stay, so that no step diverges
    num_parts = config.batch.global_size  # one sample each
    # The global batch is at most the training set.
    count, most = num_samples(state.setup.batches.split), config.batch.max_per_rank
    if count is not None:
        whole = math.ceil(count / num_parts)
        most = min(whole, most or whole)
    if most is None:
        raise UserError(
            f"batch.per_rank=auto needs a limit, since dataset={state.setup.dataset.name} is a "
            "stream of unknown length; write batch.max_per_rank"
        )
    return min(gather_objects(largest_that_fits(partial(step_fits, state), most=most))), most


def step_fits(state: TrainState, size: int) -> bool:
    """Take steps with so many samples on this rank alone; return whether its memory suffices."""
    batches, setup = state.setup.batches, state.setup
    order: Sequence[int] = range(size)
    if setup.dataset.padding_id is not None:
        order = setup.dataset.lengths().argsort(descending=True)[:size].tolist()  # the longest
    # With several ranks the wrapper's forward and backward would wait for the others.
    model = state.model if setup.env.world_size == 1 else state.module
    model.train()
    try:
        batch = batches.samples(order)
        if setup.dataset.num_randoms:
            batch = replace(batch, randoms=torch.zeros(size, setup.dataset.num_randoms))
        # The optimizer's first step makes its state, so only the second one shows the whole need.
        for _ in range(1 if state.optimizer.state else 2):
            step = forward(state, model, batch)
            state.scaler.scale(step.loss_sum / size).backward()
            state.scaler.step(state.optimizer)
            state.scaler.update()
            state.optimizer.zero_grad(set_to_none=True)
        return True
    except torch.OutOfMemoryError:
        return False
    finally:
        state.optimizer.zero_grad(set_to_none=True)


def _with_size(config: RunConfig, size: int) -> RunConfig:
    """Return a config of batch.per_rank=auto with a number."""
    batch = config.batch
    return replace(
        config, batch=replace(batch, per_rank=size, global_size=size * batch.global_size)
    )


def validate_independent(state: TrainState) -> None:
    """Reject a model whose forward or backward waits for other ranks.

    Raises:
        UserError: its parameters are parts of what is cut over the ranks, or BatchNorm is synced.
    """
    is_cut = any(isinstance(one, DTensor) for one in state.module.parameters())
    is_synced = any(isinstance(one, nn.SyncBatchNorm) for one in state.module.modules())
    if state.setup.env.world_size > 1 and (is_cut or is_synced):
        name = state.setup.config.parallelism.get("name")
        raise UserError(
            f"batch.per_rank=auto tries steps on each rank alone, and under parallelism={name} "
            "this model's ranks wait for each other in a step; write a number"
        )


@contextmanager
def _limited_memory(session: Session) -> Iterator[None]:
    """Leave a part of the GPUs' memory free in the block, and give all of it back afterwards."""
    devices = [device for device in session.devices if device.type == "cuda"]
    for device in devices:
        torch.cuda.set_per_process_memory_fraction(USED_FRACTION, device)
    try:
        yield
    finally:
        gc.collect()  # a model may refer to itself
        for device in devices:
            torch.cuda.set_per_process_memory_fraction(1.0, device)
        if devices:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
