"""``task=predict``: what a run's model gives for each sample, in one file in the samples' order."""

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from ddp_runner.data.dataset import NamedSamples
from ddp_runner.data.load_dataset import build_source
from ddp_runner.data.splits import EpochShare, Split
from ddp_runner.distributed import StopVote, broadcast_buffers
from ddp_runner.errors import UserError
from ddp_runner.inference.model import TrainedModel, open_model
from ddp_runner.inference.predictions import Columns, columns_of, joined, write_table
from ddp_runner.job import Status
from ddp_runner.rank.session import Session
from ddp_runner.tracking.run_logger import Logger
from ddp_runner.tracking.run_record import write_run_record
from ddp_runner.tracking.start_block import shown_path
from ddp_runner.train.evaluation import together
from ddp_runner.train.work import forward


class _StoppedError(Exception):
    """A rank was asked to stop; raised on all ranks, so that no half of a file is kept."""


def run_prediction(session: Session, stop_requested: Callable[[], bool]) -> Status:
    """Write the predictions of ``inference.split`` into the run folder, each sample once.

    The batches have the same samples at every world size, and rank 0 writes them in their order, so
    the file is the same. Collective: every rank must call.

    Raises:
        UserError: see ``open_model`` and ``columns_of``; or the file cannot be written.
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
                deque(tables, maxlen=0)  # computes; the tables are on rank 0
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

    In a round every rank has one batch, or none; `rounds` has how many each split takes.
    """
    work, num_done, vote = model.work, 0, StopVote(model.work.group)
    is_first, num_rounds = work.env.is_rank_zero, sum(rounds.values())
    broadcast_buffers(model.module, group=work.group)
    names, like = _sample_names(model) if is_first else {}, None
    for name in model.splits:
        for own in _own_rows(model, name, num_rounds=rounds[name]):
            box: list[Columns | None] = [None] * work.env.world_size
            dist.gather_object(own, box if is_first else None, dst=0, group=work.group)
            if found := [rows for rows in box if rows is not None]:
                like = like or found[0]
                yield joined(found, names.get(name), like=like)
            num_done += 1
            logger.step_done(step=num_done, epoch=1)
            # After the last round nothing is left to stop.
            if num_done != num_rounds and vote.agreed(stop_requested()):
                raise _StoppedError
    vote.settle()


def _sample_names(model: TrainedModel) -> Mapping[str, Sequence[str | int]]:
    """Return by split what a user calls the samples; nothing if the dataset has only numbers."""
    config = model.work.config
    source = build_source(config)
    names = source.sample_names(Path(config.data_root)) if isinstance(source, NamedSamples) else {}
    counts = {name: split.num_samples for name, split in model.splits.items()}
    found = {name: len(names[name]) for name in counts if name in names}
    if names and found != counts:
        raise UserError(
            f"sample_names of dataset={source.name} must return a mapping with a name for each "
            f"sample of {', '.join(counts)} ({', '.join(map(str, counts.values()))}), not "
            f"{found or type(names).__name__}"
        )
    return names


def _num_rounds(model: TrainedModel, split: Split) -> int:
    """Return in how many rounds the ranks take a split; 0: nobody knows, for a stream."""
    work = model.work
    if split.num_samples is not None:
        return math.ceil(
            split.num_samples / (work.config.batch.eval_size * work.layout.eval_share[1])
        )
    if work.env.world_size > 1 or getattr(split, "num_workers", 0) > 1:
        raise UserError(
            f"dataset={work.dataset.name} is a stream, whose samples have no numbers, so that "
            "only one reader keeps their order; write world_size=1 dataset.num_workers=0"
        )
    return 0


@torch.no_grad()
def _own_rows(model: TrainedModel, name: str, *, num_rounds: int) -> Iterator[Columns | None]:
    """Yield this rank's rows, one batch a round; None once it has no more while others have."""
    work, module, split = model.work, model.module.eval(), model.splits[name]
    size, (share, num_shares) = work.config.batch.eval_size, work.layout.eval_share
    is_first = work.env.rank % work.layout.model_ranks == 0  # of those that compute it together
    num_own, part = 0, EpochShare(size, share, num_shares, work.config.seed)
    for batch in together(split.in_order(part, takes_turns=True), split, work):
        step, start = forward(work, module, batch), (num_own * num_shares + share) * size
        num_own += 1
        if not (batch.weight and is_first):
            yield None
            continue
        numbers = range(start, start + batch.num_samples)
        yield columns_of(step, split=name, numbers=numbers, num_classes=work.dataset.num_classes)
    yield from [None] * (num_rounds - num_own)
