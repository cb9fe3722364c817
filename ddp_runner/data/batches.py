"""The order of samples: the same global batches at every world size and in every mode."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import islice, repeat, tee
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ddp_runner.data.splits import MicroBatch, MicroPlan, NumberedSplit
from ddp_runner.errors import UserError
from ddp_runner.seeds import derive

# Raise it when the order changes: a run cannot resume inside an epoch with another order.
ORDER_VERSION = 2
POOL_BATCHES = 50  # global batches within which sequences are sorted by length
GLOBAL_SIZE = "batch.global_size"


class StepBatch(NamedTuple):
    """One rank's part of one optimizer step."""

    micro_batches: tuple[MicroBatch, ...]  # the same number on every rank: collectives match
    global_count: int  # samples of the global batch, over all ranks
    # Index in the run, as if all epochs had batches of this size; of a stream: in the epoch.
    number: int
    is_last: bool  # last step of the epoch


@dataclass(kw_only=True)
class Batches(ABC):
    """The steps of one share of a training split, epoch after epoch, without an end.

    In most modes each rank has one share. The position can be saved and restored.
    """

    split: Any  # a ``Split``, whose module imports this one
    global_size: int  # most samples of an optimizer step, over all shares
    grad_accum_steps: int  # most micro-batches of a step
    share: int  # the first that this rank computes
    num_shares: int
    seed: int
    # The position after the last step that was taken, where a resumed run continues.
    epoch: int = field(default=0, init=False)  # completed epochs
    step: int = field(default=0, init=False)  # steps in the epoch; 0: the last one ended an epoch
    is_resized: bool = field(default=False, init=False)  # resumed from batches of another size

    @abstractmethod
    def __iter__(self) -> Iterator[StepBatch]:
        """Yield the remaining steps of this epoch, then those of all later epochs.

        The position moves before a step is yielded, so the loop's body may save it.
        """

    @property
    @abstractmethod
    def steps_per_epoch(self) -> int | None:
        """Return the optimizer steps of an epoch; None: the epoch ends when its stream ends."""

    @property
    @abstractmethod
    def order(self) -> Mapping[str, object]:
        """Return the settings that decide which samples remain in an epoch."""

    @property
    def micro_size(self) -> int:
        """Return the most samples of a micro-batch."""
        return math.ceil(self.global_size / (self.num_shares * self.grad_accum_steps))

    @property
    def epoch_number(self) -> int:
        """Return the number of the last step's epoch, from 1; 0 before the first step."""
        return self.epoch + (self.step > 0)

    def state_dict(self) -> dict[str, Any]:
        """Return the position."""
        return {"epoch": self.epoch, "step": self.step, "order": dict(self.order)}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue from a position that ``state_dict`` returned.

        Raises:
            UserError: the position is inside an epoch, and the samples now have another order.
        """
        then, now = saved["order"], self.order
        changed = [key for key in {**now, **then} if then.get(key) != now.get(key)]
        if saved["step"] and changed:
            raise UserError(
                f"it was saved inside epoch {saved['epoch'] + 1} with "
                f"{', '.join(f'{key}={then.get(key)}' for key in changed)}, and this run has "
                f"{', '.join(f'{key}={now.get(key)}' for key in changed)}: some samples would be "
                "used twice and others never",
                "use the checkpoint's values, or let the epoch end before you change them",
            )
        self.epoch, self.step = int(saved["epoch"]), int(saved["step"])
        self.is_resized = GLOBAL_SIZE in changed

    def _advance(self, *, is_last: bool) -> None:
        self.epoch, self.step = (self.epoch + 1, 0) if is_last else (self.epoch, self.step + 1)


@dataclass(kw_only=True)
class NumberedBatches(Batches):
    """The global batches of numbered samples.

    Global batch k of an epoch is the k-th slice of a permutation that depends only on the seed and
    the epoch, or, without `shuffle`, of the dataset's order. The last batch may be smaller. Share r
    takes every ``num_shares``-th sample from r on, as in
    ``torch.utils.data.DistributedSampler``, but without its padding.
    """

    split: NumberedSplit
    shares_per_rank: int = 1  # neighbouring shares, whose micro-batches follow each other
    is_computed: bool = True  # False: other ranks compute, so the steps come without data
    num_randoms: int = 0  # random numbers per sample, for the augmentation
    shuffle: bool = True  # use another order in each epoch
    lengths: Tensor | None = None  # (num_samples,): put samples of similar length in one batch

    def __post_init__(self) -> None:
        """Cache one epoch's permutation."""
        self._permutation: Callable[[int], Tensor] = lru_cache(maxsize=1)(self._permuted)

    def __iter__(self) -> Iterator[StepBatch]:
        """Yield the steps from the position on; skipped steps cost nothing."""
        num_own = math.ceil(self.global_size / self.num_shares) * self.shares_per_rank
        most_ahead = self.split.most_ahead(num_own)
        while True:
            first = self.epoch * self.steps_per_epoch
            numbers = range(first + self.step, first + self.steps_per_epoch)
            planned, ahead = tee(map(self._plan, numbers))
            # The split may load more than a step ahead.
            loaded = self.split.load((plan for plans, _ in ahead for plan in plans), seed=self.seed)
            steps = (
                self._step(plans, loaded, count=count, number=number)
                for number, (plans, count) in zip(numbers, planned, strict=True)
            )
            while batches := [*islice(steps, most_ahead)][::-1]:
                while batches:  # none is kept for longer than its step
                    self._advance(is_last=batches[-1].is_last)
                    yield batches.pop()

    @cached_property
    def num_samples(self) -> int:
        """Return the number of samples of an epoch."""
        return len(self.split)

    @cached_property
    def steps_per_epoch(self) -> int:
        """Return the optimizer steps of an epoch."""
        return math.ceil(self.num_samples / self.global_size)

    def step_at(self, number: int) -> StepBatch:
        """Return this share of a step by the step's number in the run."""
        plans, count = self._plan(number)
        loaded = self.split.load(plans, seed=self.seed)
        return self._step(plans, loaded, count=count, number=number)

    @property
    def order(self) -> Mapping[str, object]:
        """See ``Batches``."""
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
            MicroBatch(next(loaded), plan.num_samples, plan.weight, plan.randoms) for plan in plans
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
        """Return this share's micro-batches of a step, and the samples of all shares."""
        epoch, index = divmod(number, self.steps_per_epoch)
        begin = index * self.global_size
        count = min(self.global_size, self.num_samples - begin)
        if not self.is_computed:
            return (), count
        num_pieces = math.ceil(math.ceil(count / self.num_shares) / self.micro_size)

        def pieces_of(rows: Tensor, begin: int = 0) -> Iterator[Tensor]:
            for share in range(self.share, self.share + self.shares_per_rank):
                own = rows[begin + share : begin + count : self.num_shares]
                yield from own.tensor_split(num_pieces) if num_pieces > 1 else (own,)

        order, first = self._permutation(epoch), None
        randoms: Iterable[Tensor | None] = repeat(None)
        if self.num_randoms:
            # Drawn for the whole global batch, so they are the same at every world size.
            generator = torch.Generator()
            generator.manual_seed(derive(self.seed, "augmentation", epoch, index))
            drawn = torch.rand(count, self.num_randoms, generator=generator)
            first, randoms = drawn[:1], pieces_of(drawn)
        plans = tuple(
            # A share with one sample fewer may lack a piece. The other ranks wait for its backward,
            # so it computes a placeholder.
            self._micro_plan(epoch, piece, piece_randoms)
            if piece.numel()
            else self._micro_plan(epoch, order[begin : begin + 1], first, weight=0.0)
            for piece, piece_randoms in zip(pieces_of(order, begin), randoms, strict=False)
        )
        return plans, count

    def _micro_plan(
        self, epoch: int, indices: Tensor, randoms: Tensor | None, *, weight: float = 1.0
    ) -> MicroPlan:
        if indices.numel() == 1 and self.micro_size > 1:
            # BatchNorm rejects a single sample in training: use it twice with half the weight.
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
