"""What an evaluation adds up over batches and ranks: the loss, scalars, metrics and confusion."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ddp_runner.config.schema import RunConfig
from ddp_runner.data.dataset import Dataset
from ddp_runner.device import sum_dtype
from ddp_runner.dist_env import DistEnv
from ddp_runner.distributed import (
    add_over_ranks,
    from_rank_zero,
    gather_objects,
    sum_over_ranks,
)
from ddp_runner.errors import UserError
from ddp_runner.metrics.confusion import classification_metrics, confusion_counts, reject_strays
from ddp_runner.metrics.metric import Evaluation, Metric
from ddp_runner.parallelism.mode import Layout
from ddp_runner.train.step import Step, StepFunction


@dataclass(frozen=True, kw_only=True)
class EvalSetup:
    """What a rank evaluates with; a ``Setup`` trains with more."""

    config: RunConfig
    layout: Layout  # of this rank in the run
    devices: tuple[torch.device, ...]  # batches go to the first, outputs are on the last
    dataset: Dataset
    eval_batch_size: int  # samples of one forward of one rank
    step: StepFunction
    metrics: Mapping[str, Metric]  # of evaluations, besides those of every run
    group: ProcessGroup | None  # the ranks of the loop; None: all
    data_group: ProcessGroup | None  # those whose samples together are all of them; None: all

    @property
    def env(self) -> DistEnv:
        """Return the rank's place among the ranks of the loop."""
        return self.layout.env


class EvalTotals:
    """The totals of one evaluation set, split among the ranks, on the device of the outputs."""

    def __init__(self, setup: EvalSetup) -> None:
        device, self._setup = setup.devices[-1], setup
        self._loss, self._count, self._zero = torch.zeros(3, dtype=sum_dtype(device), device=device)
        self._scalars = dict[str, Tensor]()
        self._metrics = Evaluation(setup.metrics, device=device)
        self._num_classes = setup.dataset.num_classes or 0
        size = self._num_classes + 1
        self._confusion = torch.zeros(size, size, dtype=torch.int64, device=device)

    def add(self, step: Step) -> None:
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
        group = self._setup.data_group
        loss, count = sum_over_ranks([self._loss.item(), self._count.item()], group=group)
        if not count:  # of a split whose length is not known
            raise UserError(
                f"dataset={self._setup.dataset.name} has no eval samples; give at least 1"
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
        return from_rank_zero(lambda: (results, counts), group=self._setup.group)


def has_classes(step: Step) -> bool:
    """Return whether a step has what accuracy, precision, recall and F1 are computed from."""
    return isinstance(step.outputs, Tensor) and isinstance(step.targets, Tensor)
