"""The evaluation of whole splits, while training and afterwards: sums over batches and ranks."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice, repeat
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ddp_runner.data.splits import EpochShare, MicroBatch
from ddp_runner.data.stream import Split
from ddp_runner.device import sum_dtype
from ddp_runner.distributed import (
    add_over_ranks,
    broadcast_tensors,
    from_rank_zero,
    gather_objects,
    sum_over_ranks,
)
from ddp_runner.errors import UserError
from ddp_runner.metrics.metric import Evaluation
from ddp_runner.metrics.shipped import classification_metrics, confusion_counts, reject_strays
from ddp_runner.parallelism.shards import reshard
from ddp_runner.seeds import seed_all
from ddp_runner.train.state import Work, forward
from ddp_runner.train.step import StepOutput


@torch.no_grad()
def evaluate(
    work: Work, module: nn.Module, *splits: Split, step: int, most_batches: int | None = None
) -> tuple[dict[str, float], list[list[int]] | None]:
    """Evaluate a model on whole splits; each sample counts once, at every world size.

    Random numbers are seeded by the step, so the same weights on the same number of ranks always
    give the same metrics. Collective: every rank of the loop must call.

    The module is the bare model: DDP's forward is a collective, and ranks may have other numbers of
    batches. By default the split is the evaluation set. `step` is the optimizer steps behind the
    weights. `most_batches` limits the batches on each rank, for a trial.

    Returns:
        Metrics: eval/loss, the scalars of the training step, the configured metrics and, if the
        dataset has classes, eval/accuracy, eval/precision, eval/recall and eval/f1. Confusion
        counts (num_classes, num_classes), a row per true class, or None without classes. A
        prediction outside the classes counts as wrong and is in no column.
    """
    seed, size = work.config.seed, work.config.batch.eval_size
    own_shares, num_shares = work.layout.eval_shares
    broadcast_tensors([*module.buffers()], group=work.buffer_group)
    module.eval()
    # A row and a column for each class, and for what is not a class.
    shape = 2 * ((work.dataset.num_classes or 0) + 1,)
    confusion = torch.zeros(shape, dtype=torch.int64, device=work.devices[-1])
    packed = list[Packed]()
    for share in own_shares:
        # One share at a time: a metric may hold a network.
        totals = EvalTotals(work, confusion)
        for split in splits or (work.dataset.eval,):
            batches = split.in_order(EpochShare(size, share, num_shares, seed))
            for index, batch in enumerate(together(islice(batches, most_batches), split, work)):
                # For each batch: loading may draw random numbers in this process.
                seed_all(seed, "eval", step, share, index)
                output = forward(work, module, batch)
                if batch.weight:
                    totals.add(output)
        packed.append(totals.packed())
    reshard(module)
    return _over_ranks(work, totals.metrics, packed, confusion)


def together(batches: Iterable[MicroBatch], split: Split, work: Work) -> Iterator[MicroBatch]:
    """Yield batches, and placeholders of weight 0 while other ranks still have batches.

    Placeholders come only where a forward waits for the other ranks; then it is a collective, and
    every rank must iterate to the end.
    """
    if not work.layout.forward_is_collective:
        yield from batches
        return
    placeholder: MicroBatch | None = None
    for batch in chain(batches, repeat(None)):
        (num_ranks,) = sum_over_ranks([batch is not None], group=work.group)
        if not num_ranks:
            return
        if batch is not None:
            yield batch
            continue
        if placeholder is None:
            samples = split.first(seed=work.config.seed)
            placeholder = samples._replace(num_samples=0, weight=0.0)
        yield placeholder


class Packed(NamedTuple):
    """The sums of a share of an evaluation set, for the other ranks."""

    loss: float
    num_counted: float
    scalars: dict[str, float]  # a share without a batch has none
    metrics: dict[str, bytes]


class EvalTotals:
    """Adds up a share of an evaluation set on the device of the outputs."""

    def __init__(self, work: Work, confusion: Tensor) -> None:
        device, self._confusion = work.devices[-1], confusion
        self._loss, self._count, self._zero = torch.zeros(3, dtype=sum_dtype(device), device=device)
        self._scalars = dict[str, Tensor]()
        self.metrics = Evaluation(work.metrics, device=device)
        self._num_classes = work.dataset.num_classes or 0

    def add(self, step: StepOutput) -> None:
        """Add a batch's result of the training step."""
        self._loss += step.loss_sum
        self._count += step.count
        for name, value in step.scalars.items():
            self._scalars[name] = self._scalars.get(name, self._zero) + value
        self.metrics.update(step.outputs, step.targets)
        if self._num_classes and has_classes(step):
            self._confusion += step_confusion(step, num_classes=self._num_classes)

    def packed(self) -> Packed:
        """Return all sums but the confusion counts."""
        scalars = {name: value.item() for name, value in self._scalars.items()}
        return Packed(self._loss.item(), self._count.item(), scalars, self.metrics.packed())


def _over_ranks(
    work: Work, metrics: Evaluation, own: Sequence[Packed], confusion: Tensor
) -> tuple[dict[str, float], list[list[int]] | None]:
    """Return the metrics and the confusion counts of all ranks; see ``evaluate``.

    The shares are added in their order, so it does not matter how many of them a rank has.
    Collective: every rank of the loop must call.

    Raises:
        UserError: there was no sample, a target is not a class, or a metric does not compute a
            number.
    """
    shares = list(chain.from_iterable(gather_objects(own, group=work.data_group)))
    if not (count := sum(share.num_counted for share in shares)):  # an empty stream
        raise UserError(f"dataset={work.dataset.name} has no eval samples", "give at least 1")
    results = {"eval/loss": sum(share.loss for share in shares) / count}
    for share in shares:
        for name, value in share.scalars.items():
            results[f"eval/{name}"] = results.get(f"eval/{name}", 0.0) + value / count
    results |= metrics.over([share.metrics for share in shares])
    confusion, counts = add_over_ranks(confusion, group=work.data_group), None
    reject_strays(confusion[-1, 0], num_classes=work.dataset.num_classes or 0)
    confusion = confusion[:-1]
    if confusion.any():
        class_metrics = classification_metrics(confusion)
        results |= {f"eval/{name}": value for name, value in class_metrics.items()}
        counts = confusion[:, :-1].tolist()
    # Groups with the same samples may differ in the last digit, but ranks must stop together.
    return from_rank_zero(lambda: (results, counts), group=work.group)


def has_classes(step: StepOutput) -> bool:
    """Return whether outputs and targets are tensors, as accuracy, precision and so on need."""
    return isinstance(step.outputs, Tensor) and isinstance(step.targets, Tensor)


def step_confusion(step: StepOutput, *, num_classes: int) -> Tensor:
    """Return the confusion counts of a batch; see ``confusion_counts``."""
    targets = step.targets.to(step.outputs.device)
    return confusion_counts(step.outputs, targets, num_classes=num_classes)
