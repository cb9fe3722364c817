"""The order of samples: the same global batches at every world size and in every mode.

``Batches`` are the steps of one rank's share, from wherever a run stands to no end: it knows its
place, saves it, and goes on from it.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import repeat, tee
from typing import Any

import torch
from torch import Tensor

from ddp_runner.data.splits import MicroBatch, MicroPlan, NumberedSplit, Split
from ddp_runner.errors import UserError
from ddp_runner.seeds import derive

ORDER_VERSION = 2  # of the order of samples; a run cannot resume inside an epoch of another order
POOL_BATCHES = 50  # global batches within which sequences are sorted by length
GLOBAL_SIZE = "batch.global_size"


@dataclass(frozen=True)
class StepBatch:
    """One rank's part of one optimizer step."""

    micro_batches: tuple[MicroBatch, ...]  # equally many on every rank: collectives match
    global_count: int  # samples of the global batch, over all ranks
    # Its index in the run, as if all epochs had batches of this size; of a stream in the epoch.
    number: int
    is_last: bool  # of its epoch


@dataclass(kw_only=True)
class Batches(ABC):
    """One share of a training split's global batches; in most modes each rank has one share."""

    split: Split
    global_size: int  # most samples of an optimizer step, over all shares
    grad_accum_steps: int  # most micro-batches of a step
    share: int
    num_shares: int
    seed: int
    # The place behind the last step that was taken, where a resumed run goes on.
    epoch: int = field(default=0, init=False)  # completed epochs
    step: int = field(default=0, init=False)  # steps in the epoch; 0: the last one ended an epoch
    is_resized: bool = field(default=False, init=False)  # resumed from batches of another size

    @abstractmethod
    def __iter__(self) -> Iterator[StepBatch]:
        """Yield the steps of this epoch that are left, and those of the epochs after it.

        The place is already behind a step when it is yielded: its body may save.
        """

    @property
    @abstractmethod
    def steps_per_epoch(self) -> int | None:
        """Return the optimizer steps of an epoch; None: it ends when its stream ends."""

    @property
    @abstractmethod
    def order(self) -> Mapping[str, object]:
        """Return what decides which samples are still to come in an epoch."""

    @property
    def micro_size(self) -> int:
        """Return the most samples of a micro-batch."""
        return math.ceil(self.global_size / (self.num_shares * self.grad_accum_steps))

    @property
    def epoch_number(self) -> int:
        """Return the number of the epoch of the last step, from 1; 0 before the first one."""
        return self.epoch + (self.step > 0)

    def state_dict(self) -> dict[str, Any]:
        """Return the place."""
        return {"epoch": self.epoch, "step": self.step, "order": dict(self.order)}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on from a place that ``state_dict`` returned.

        Raises:
            UserError: it is amid an epoch, and the samples have another order now.
        """
        then, now = saved["order"], self.order
        changed = [key for key in {**now, **then} if then.get(key) != now.get(key)]
        if saved["step"] and changed:
            raise UserError(
                f"it was saved amid epoch {saved['epoch'] + 1} with "
                f"{', '.join(f'{key}={then.get(key)}' for key in changed)}, and this run has "
                f"{', '.join(f'{key}={now.get(key)}' for key in changed)}, so that some samples "
                "would be used twice and others never; write the values of the checkpoint, or "
                "resume from one between epochs"
            )
        self.epoch, self.step = int(saved["epoch"]), int(saved["step"])
        self.is_resized = GLOBAL_SIZE in changed

    def _advance(self, *, is_last: bool) -> None:
        self.epoch, self.step = (self.epoch + 1, 0) if is_last else (self.epoch, self.step + 1)


@dataclass(kw_only=True)
class NumberedBatches(Batches):
    """The global batches of samples that have numbers.

    Global batch k of an epoch is the k-th slice of a permutation that depends only on the seed and
    the epoch, or of the dataset's own order; the last batch may be smaller. Share r is every
    ``num_shares``-th sample from r on, as in ``torch.utils.data.DistributedSampler``, but without
    its padding.
    """

    split: NumberedSplit
    is_computed: bool = True  # false: by other ranks, so the steps come without data
    num_randoms: int = 0  # random numbers per sample, for the augmentation
    shuffle: bool = True  # in another order in each epoch
    lengths: Tensor | None = None  # (num_samples,): put samples of similar length in one batch

    def __post_init__(self) -> None:
        """Remember an epoch's permutation."""
        self._permutation: Callable[[int], Tensor] = lru_cache(maxsize=1)(self._permuted)

    def __iter__(self) -> Iterator[StepBatch]:
        """Yield the steps from the place on; skipped steps cost nothing."""
        while True:
            indices = range(self.step, self.steps_per_epoch)
            first = self.epoch * self.steps_per_epoch
            planned, ahead = tee(self._plan(first + index) for index in indices)
            # The split may load more than a step ahead.
            loaded = self.split.load((one for plans, _ in ahead for one in plans), seed=self.seed)
            for index, (plans, count) in zip(indices, planned, strict=True):
                batch = self._step(plans, loaded, count=count, number=first + index)
                self._advance(is_last=batch.is_last)
                yield batch

    @property
    def steps_per_epoch(self) -> int:
        """Return the optimizer steps of an epoch."""
        return math.ceil(len(self.split) / self.global_size)

    def step_at(self, number: int) -> StepBatch:
        """Return this share of a step by its number in the run."""
        plans, count = self._plan(number)
        loaded = self.split.load(plans, seed=self.seed)
        return self._step(plans, loaded, count=count, number=number)

    @property
    def order(self) -> Mapping[str, object]:
        """Return what decides which samples are still to come in an epoch."""
        return {
            "seed": self.seed,
            GLOBAL_SIZE: self.global_size,
            "dataset.shuffle": self.shuffle,
            "training samples": len(self.split),
            "the version of the order": ORDER_VERSION,
        }

    def _step(
        self, plans: Iterable[MicroPlan], loaded: Iterator[Any], *, count: int, number: int
    ) -> StepBatch:
        micro_batches = tuple(
            MicroBatch(next(loaded), len(one.indices), one.weight, one.randoms) for one in plans
        )
        is_last = (number + 1) % self.steps_per_epoch == 0
        return StepBatch(micro_batches, global_count=count, number=number, is_last=is_last)

    def _permuted(self, epoch: int) -> Tensor:
        """Return the indices of all samples in the epoch's order, int64 ``(num_samples,)``."""
        if not self.shuffle:
            return torch.arange(len(self.split), device=self.split.device)
        generator = torch.Generator().manual_seed(derive(self.seed, "order", epoch))
        order = torch.randperm(len(self.split), generator=generator)
        if self.lengths is not None:
            order = self._by_length(order, self.lengths, generator)
        return order.to(self.split.device)

    def _plan(self, number: int) -> tuple[tuple[MicroPlan, ...], int]:
        """Return what this share computes of a step, and the samples of all shares."""
        epoch, index = divmod(number, self.steps_per_epoch)
        order = self._permutation(epoch)
        global_batch = order[index * self.global_size : (index + 1) * self.global_size]
        if not self.is_computed:
            return (), len(global_batch)
        share = slice(self.share, None, self.num_shares)
        largest_share = math.ceil(len(global_batch) / self.num_shares)
        num_pieces = math.ceil(largest_share / self.micro_size)
        pieces = global_batch[share].tensor_split(num_pieces)
        first: Tensor | None = None
        randoms: Iterable[Tensor | None] = repeat(None, num_pieces)
        if self.num_randoms:
            # Drawn for the whole global batch, so they are the same at every world size.
            numbers = torch.Generator().manual_seed(derive(self.seed, "augmentation", epoch, index))
            drawn = torch.rand(len(global_batch), self.num_randoms, generator=numbers)
            first, randoms = drawn[:1], drawn[share].tensor_split(num_pieces)
        plans = tuple(
            # A share with one sample fewer may lack a piece. The other ranks wait for its backward,
            # so it computes a placeholder.
            self._part(epoch, piece, its_randoms)
            if len(piece)
            else self._part(epoch, global_batch[:1], first, weight=0.0)
            for piece, its_randoms in zip(pieces, randoms, strict=True)
        )
        return plans, len(global_batch)

    def _part(
        self, epoch: int, indices: Tensor, randoms: Tensor | None, *, weight: float = 1.0
    ) -> MicroPlan:
        if len(indices) == 1 and self.micro_size > 1:
            # The last piece may be a single sample, which BatchNorm refuses in training: take it
            # twice with half the weight.
            indices, weight = indices.repeat(2), weight / 2
            randoms = None if randoms is None else randoms.repeat(2, 1)
        return MicroPlan(indices, epoch, weight, randoms)

    def _by_length(self, order: Tensor, lengths: Tensor, generator: torch.Generator) -> Tensor:
        """Sort by length within pools of batches, then shuffle all batches but a smaller last one.

        Batches need little padding this way, and their composition stays random.
        """
        pools = order.split(POOL_BATCHES * self.global_size)
        order = torch.cat([pool[lengths[pool].argsort(stable=True)] for pool in pools])
        num_whole = len(order) // self.global_size
        whole = order[: num_whole * self.global_size].reshape(num_whole, self.global_size)
        shuffled = whole[torch.randperm(num_whole, generator=generator)].flatten()
        return torch.cat([shuffled, order[num_whole * self.global_size :]])
