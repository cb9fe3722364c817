"""``task=predict``: write a run's predictions for each sample into a file, in sample order."""

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from ddp_runner.data.load_dataset import build_source
from ddp_runner.data.splits import EpochShare
from ddp_runner.data.stream import Split
from ddp_runner.distributed import StopVote, broadcast_tensors
from ddp_runner.errors import UserError
from ddp_runner.inference.model import TrainedModel, open_model
from ddp_runner.inference.predictions import Columns, columns_of, joined, write_table
from ddp_runner.job import Status
from ddp_runner.rank.session import Session
from ddp_runner.tracking.run_logger import Logger
from ddp_runner.tracking.run_record import write_run_record
from ddp_runner.tracking.start_block import shown_path
from ddp_runner.train.evaluation import together
from ddp_runner.train.state import forward


class _StoppedError(Exception):
    """A rank got a stop request. Raised on all ranks, so that no partial file is kept."""


def run_prediction(session: Session, stop_requested: Callable[[], bool]) -> Status:
    """Write the predictions of ``inference.split`` into the run folder, each sample once.

    The file is the same at every world size: the batches have the same samples, and rank 0 writes
    them in order. Collective: every rank must call.
    """
    model = open_model(session)
    if model is None:
        return Status.COMPLETED
    rounds = {name: _num_rounds(model, split) for name, split in model.splits.items()}
    with model.open_logger(session, num_rounds=sum(rounds.values())) as logger:
        path = session.run_dir.path / f"predictions.{session.config.inference.format}"
        tables = _tables(model, logger, rounds, stop_requested)
        status = Status.COMPLETED
        try:
            if session.env.is_rank_zero:
                write_table(path, tables)
                write_run_record(session.run_dir, predictions=path.name)
                session.log(f"predictions are in {shown_path(path)}")
            else:
                deque(tables, maxlen=0)  # compute; only rank 0 gets the tables
        except _StoppedError:
            status = Status.PREEMPTED
        logger.finish(status, step=model.weights.step, epoch=model.epoch)
    return status


def _tables(
    model: TrainedModel,
    logger: Logger,
    rounds: Mapping[str, int],
    stop_requested: Callable[[], bool],
) -> Iterator[Columns]:
    """Compute round by round, and yield each round's rows on rank 0. Collective.

    In a round every rank computes at most one batch. `rounds` has the number of rounds per split.
    """
    work, num_done, vote = model.work, 0, StopVote(model.work.group)
    is_first, num_rounds = work.env.is_rank_zero, sum(rounds.values())
    broadcast_tensors([*model.module.buffers()], group=work.group)
    names, like = _sample_names(model) if is_first else {}, None
    for name in model.splits:
        for rows in _rank_rows(model, name, num_rounds=rounds[name]):
            by_rank: list[Columns | None] = [None] * work.env.world_size
            dist.gather_object(rows, by_rank if is_first else None, dst=0, group=work.group)
            if parts := [part for part in by_rank if part is not None]:
                like = like or parts[0]
                yield joined(parts, names.get(name), like=like)
            num_done += 1
            logger.step_done(step=num_done, epoch=1)
            if num_done != num_rounds and vote.agreed(stop_requested):
                raise _StoppedError
    vote.settle()


def _sample_names(model: TrainedModel) -> Mapping[str, Sequence[str | int]]:
    """Return the names of the samples by split; empty if the dataset has no names."""
    config = model.work.config
    source = build_source(config)
    names = source.sample_names(Path(config.data_root)) if hasattr(source, "sample_names") else {}
    counts = {name: split.num_samples for name, split in model.splits.items()}
    num_names = {name: len(names[name]) for name in counts if name in names}
    if names and num_names != counts:
        raise UserError(
            f"sample_names of dataset={source.name} must return a mapping with a name for each "
            f"sample of {', '.join(counts)} ({', '.join(map(str, counts.values()))}), not "
            f"{num_names or type(names).__name__}"
        )
    return names


def _num_rounds(model: TrainedModel, split: Split) -> int:
    """Return the number of rounds for a split; 0 for a stream, where it is unknown."""
    work = model.work
    if split.num_samples is not None:
        round_size = work.config.batch.eval_size * work.layout.eval_share[1]
        return math.ceil(split.num_samples / round_size)
    if work.env.world_size > 1 or getattr(split, "num_workers", 0) > 1:
        raise UserError(
            f"dataset={work.dataset.name} is a stream, and only a single reader keeps its order",
            "write world_size=1 dataset.num_workers=0",
        )
    return 0


@torch.no_grad()
def _rank_rows(model: TrainedModel, name: str, *, num_rounds: int) -> Iterator[Columns | None]:
    """Yield this rank's rows, a batch per round; None in rounds without a batch."""
    work, module, split = model.work, model.module.eval(), model.splits[name]
    size, (share, num_shares) = work.config.batch.eval_size, work.layout.eval_share
    is_first = work.env.rank % work.layout.model_ranks == 0  # of the ranks that share a batch
    num_batches, part = 0, EpochShare(size, share, num_shares, work.config.seed)
    for batch in together(split.in_order(part, takes_turns=True), split, work):
        step, start = forward(work, module, batch), (num_batches * num_shares + share) * size
        num_batches += 1
        if not (batch.weight and is_first):
            yield None
            continue
        numbers = range(start, start + batch.num_samples)
        yield columns_of(step, split=name, numbers=numbers, num_classes=work.dataset.num_classes)
    yield from [None] * (num_rounds - num_batches)
