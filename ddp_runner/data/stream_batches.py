"""The steps of a stream: each rank reads its part, and all agree on each step and on the end.

Nobody knows beforehand how many samples a rank's part has. So before each step the ranks exchange
how many they have loaded for it. A rank whose part has ended takes placeholders until all have
ended: no collective hangs, and every sample counts.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ddp_runner.data.batches import Batches, StepBatch
from ddp_runner.data.splits import MicroBatch, Part
from ddp_runner.data.stream import OpenStream, StreamSplit
from ddp_runner.distributed import add_over_ranks
from ddp_runner.errors import UserError
from ddp_runner.metric_names import StepPart


@dataclass(kw_only=True)
class StreamBatches(Batches):
    """One share of the steps of a training stream.

    A step has up to ``global_size`` samples. Towards the end of an epoch it has fewer, since the
    parts of ranks and workers end at different times. Collective: every rank must take all steps,
    or as many as the others.
    """

    split: StreamSplit
    mark: Callable[[StepPart], None] = field(repr=False)  # of the timer
    group: ProcessGroup | None = None  # one rank of each share; None: all
    # Where this rank's readers are; None between two epochs.
    _readers: Mapping[str, Any] | None = field(default=None, init=False, repr=False)

    def __iter__(self) -> Iterator[StepBatch]:
        """Yield the steps from the place on.

        Raises:
            UserError: the stream has no sample in an epoch, on any rank.
        """
        while True:
            part = Part(
                self.micro_size,
                self.share,
                self.num_shares,
                seed=self.seed,
                epoch=self.epoch,
                doubles_single=True,
            )
            stream = self.split.open(part, state=self._readers)
            step = self._load(stream)
            if not step.global_count:
                where, fix = f"epoch {self.epoch + 1}", "its __iter__ must begin anew each time"
                if self.step:
                    where, fix = f"{where} after step {self.step}", "it is shorter than it was"
                raise UserError(f"the {self.split.name} stream has no sample in {where}; {fix}")
            while step.global_count:
                following = self._load(stream)  # one step ahead, so is_last is known
                is_last, number = not following.global_count, self.step
                self._advance(is_last=is_last)
                self._readers = None if is_last else step.readers
                yield StepBatch(self._padded(step), step.global_count, number, is_last)
                step = following

    @property
    def steps_per_epoch(self) -> None:
        """Return None: an epoch ends when the stream ends."""

    @property
    def order(self) -> Mapping[str, object]:
        """Return what decides which samples are still to come in an epoch."""
        return {
            "seed": self.seed,
            "ranks with samples of their own": self.num_shares,
            "dataset.num_workers": self.split.num_workers,
            "samples of a micro-batch": self.micro_size,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the place, with this rank's readers: amid an epoch it differs between ranks."""
        return {**super().state_dict(), "readers": self._readers}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """See ``Batches``."""
        super().load_state_dict(saved)
        self._readers = saved["readers"]

    def _load(self, stream: OpenStream) -> "_Loaded":
        """Load this rank's part of the next step, and exchange its size. Collective."""
        loaded = tuple(islice(stream, self.grad_accum_steps))
        parts = tuple(
            MicroBatch(one.data, one.num_samples * one.copies, 1 / one.copies) for one in loaded
        )
        sizes = torch.zeros(self.num_shares, 2, dtype=torch.int64)
        sizes[self.share] = torch.tensor([sum(one.num_samples for one in loaded), len(loaded)])
        self.mark(StepPart.DATA)  # the ranks meet here, so a slow one lets the others wait
        all_sizes = add_over_ranks(sizes, self.group)
        self.mark(StepPart.WAIT)
        return _Loaded(parts, all_sizes, stream.state())

    def _padded(self, step: "_Loaded") -> tuple[MicroBatch, ...]:
        """Return as many micro-batches as the rank with the most has: collectives match."""
        num_missing = int(step.sizes[:, 1].max()) - len(step.parts)
        return step.parts + num_missing * (self._placeholder,) if num_missing else step.parts

    @cached_property
    def _placeholder(self) -> MicroBatch:
        """Two samples without weight; one if all micro-batches have one."""
        return replace(self.split.first(range(min(2, self.micro_size))), weight=0.0)


@dataclass(frozen=True)
class _Loaded:
    """This rank's part of a step."""

    parts: tuple[MicroBatch, ...]
    sizes: Tensor  # samples and micro-batches of each share, int64 (num_shares, 2)
    readers: Mapping[str, Any]  # where they are after it

    @property
    def global_count(self) -> int:
        """Return the samples over all shares."""
        return int(self.sizes[:, 0].sum())
