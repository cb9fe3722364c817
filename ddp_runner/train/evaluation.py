"""The evaluation of whole splits, while training and afterwards: sums over batches and ranks."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain, islice, repeat

import torch
from torch import Tensor, nn

from ddp_runner.data.splits import EpochShare, MicroBatch, Split
from ddp_runner.device import sum_dtype
from ddp_runner.distributed import (
    add_over_ranks,
    broadcast_buffers,
    from_rank_zero,
    gather_objects,
    sum_over_ranks,
)
from ddp_runner.errors import UserError
from ddp_runner.metrics.confusion import classification_metrics, confusion_counts, reject_strays
from ddp_runner.metrics.metric import Evaluation
from ddp_runner.parallelism.shards import reshard
from ddp_runner.seeds import seed_all
from ddp_runner.train.step import StepOutput
from ddp_runner.train.work import Work, forward


@torch.no_grad()
def evaluate(
    work: Work, module: nn.Module, *splits: Split, step: int, most_batches: int | None = None
) -> tuple[dict[str, float], list[list[int]] | None]:
    """Evaluate a model on whole splits; each sample counts once, at every world size.

    A model that draws random numbers draws those of the step, so the same weights give the same
    metrics whenever they are evaluated on as many ranks. Collective: every rank of the loop must
    call.

    Args:
        work: of this rank.
        module: bare: DDP's forward is a collective, and ranks may have unequal numbers of batches.
        splits: without any, the evaluation set.
        step: the optimizer steps that made the weights.
        most_batches: each rank evaluates only so many, to try it.

    Returns:
        Metrics: eval/loss, the scalars of the training step, the configured metrics and, if the
        dataset has classes, eval/accuracy, eval/precision, eval/recall and eval/f1. Confusion
        counts (num_classes, num_classes), a row per true class, or None without classes. A
        prediction outside the classes counts as wrong and is in no column.
    """
    seed, totals = work.config.seed, EvalTotals(work)
    broadcast_buffers(module, group=work.group)
    module.eval()
    for split in splits or (work.dataset.eval,):
        share, num_shares = work.layout.eval_share
        batches = split.in_order(EpochShare(work.config.batch.eval_size, share, num_shares, seed))
        for index, batch in enumerate(together(islice(batches, most_batches), split, work)):
            # For each batch, since loading one may draw in this process.
            seed_all(seed, "eval", step, share, index)
            found = forward(work, module, batch)
            if batch.weight:
                totals.add(found)
    reshard(module)
    return totals.compute()


def together(batches: Iterable[MicroBatch], split: Split, work: Work) -> Iterator[MicroBatch]:
    """Yield batches, and placeholders of weight 0 while other ranks still have some.

    Only where a forward waits for the other ranks; else the batches are yielded as they come.
    Collective there: every rank must take all of them.
    """
    if not work.layout.forward_is_collective:
        yield from batches
        return
    placeholder: MicroBatch | None = None
    for batch in chain(batches, repeat(None)):
        (num_left,) = sum_over_ranks([batch is not None], group=work.group)
        if not num_left:
            return
        if batch is None and placeholder is None:
            samples = split.first(seed=work.config.seed)
            placeholder = replace(samples, num_samples=0, weight=0.0)
        one = placeholder if batch is None else batch
        assert one is not None
        yield one


class EvalTotals:
    """The totals of one evaluation set, split among the ranks, on the device of the outputs."""

    def __init__(self, work: Work) -> None:
        device, self._work = work.devices[-1], work
        self._loss, self._count, self._zero = torch.zeros(3, dtype=sum_dtype(device), device=device)
        self._scalars = dict[str, Tensor]()
        self._metrics = Evaluation(work.metrics, device=device)
        self._num_classes = work.dataset.num_classes or 0
        size = self._num_classes + 1
        self._confusion = torch.zeros(size, size, dtype=torch.int64, device=device)

    def add(self, step: StepOutput) -> None:
        """Add what the training step returned for a batch.

        Raises:
            UserError: a metric cannot take the outputs.
        """
        self._loss += step.loss_sum
        self._count += step.count
        for name, value in step.scalars.items():
            self._scalars[name] = self._scalars.get(name, self._zero) + value
        self._metrics.update(step.outputs, step.targets)
        if self._num_classes and has_classes(step):
            targets = step.targets.to(step.outputs.device)
            self._confusion += confusion_counts(
                step.outputs, targets, num_classes=self._num_classes
            )

    def compute(self) -> tuple[dict[str, float], list[list[int]] | None]:
        """Return the metrics and the confusion counts of all ranks; see ``evaluate``. Call it once.

        Collective: every rank of the loop must call.

        Raises:
            UserError: there was no sample, a target is no class, or a metric computes no number.
        """
        group = self._work.data_group
        loss, count = sum_over_ranks([self._loss.item(), self._count.item()], group=group)
        if not count:  # of a split whose length is not known
            raise UserError(
                f"dataset={self._work.dataset.name} has no eval samples; give at least 1"
            )
        results = {"eval/loss": loss / count}
        # A rank without a batch does not know the names.
        own = {name: value.item() for name, value in self._scalars.items()}
        for of_rank in gather_objects(own, group=group):
            for name, part in of_rank.items():
                results[f"eval/{name}"] = results.get(f"eval/{name}", 0.0) + part / count
        results |= self._metrics.compute(group=group)
        confusion, counts = add_over_ranks(self._confusion, group=group), None
        reject_strays(confusion[-1, 0], num_classes=self._num_classes)
        confusion = confusion[:-1]
        if confusion.any():
            matches = classification_metrics(confusion)
            results |= {f"eval/{name}": value for name, value in matches.items()}
            counts = confusion[:, :-1].tolist()
        # Groups of the same samples may differ in the last digit, and all ranks must stop together.
        return from_rank_zero(lambda: (results, counts), group=self._work.group)


def has_classes(step: StepOutput) -> bool:
    """Return whether a step has what accuracy, precision, recall and F1 are computed from."""
    return isinstance(step.outputs, Tensor) and isinstance(step.targets, Tensor)
