"""The steps of a stream: each rank reads its part, and all agree on each step and on the end.

Nobody knows beforehand how many samples a rank's part has. So before each step the ranks exchange
how many they have loaded for it. A rank whose part has ended takes placeholders until all have
ended: no collective hangs, and every sample counts.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ddp_runner.data.batches import MicroBatch, StepBatch, first_batch
from ddp_runner.data.stream_reader import Part
from ddp_runner.data.streams import OpenStream, StreamSplit
from ddp_runner.distributed import add_over_ranks
from ddp_runner.errors import UserError
from ddp_runner.metric_names import StepPart


@dataclass(frozen=True)
class StreamBatches:
    """One rank's share of the steps of a training stream; the same interface as GlobalBatches.

    A step has up to ``global_size`` samples. Towards the end of an epoch it has fewer, since the
    parts of ranks and workers end at different times.
    """

    split: StreamSplit
    global_size: int  # most samples of an optimizer step, over all shares
    grad_accum_steps: int  # most micro-batches of a step
    share: int
    num_shares: int
    seed: int
    mark: Callable[[StepPart], None] = field(repr=False)  # of the timer
    group: ProcessGroup | None = None  # one rank of each share; None: all
    resumed: Mapping[str, Any] | None = None  # this rank's state in a checkpoint
    _now: dict[str, Any] = field(default_factory=dict, repr=False)  # the state after the last step

    @property
    def steps_per_epoch(self) -> None:
        """Return None: an epoch ends when the stream ends."""

    @property
    def micro_size(self) -> int:
        """Return the most samples of a micro-batch."""
        return math.ceil(self.global_size / (self.num_shares * self.grad_accum_steps))

    @property
    def state(self) -> dict[str, Any] | None:
        """Return what this rank needs to go on after the last step; None before the first."""
        return self._now.get("state")

    def epoch(self, epoch: int, *, start_step: int = 0) -> Iterator[StepBatch]:
        """Yield the steps of an epoch, from ``resumed`` on if some were taken before.

        Collective: every rank must take all steps, or as many as the others.

        Raises:
            UserError: the stream has no sample in this epoch, on any rank.
        """
        part = Part(
            self.micro_size,
            rank=self.share,
            num_ranks=self.num_shares,
            seed=self.seed,
            epoch=epoch,
            doubles_single=True,
        )
        stream = self.split.open(part, state=self.resumed if start_step else None)
        step, number = self._load(stream), start_step
        if not start_step and not step.global_count:
            raise UserError(
                f"the {self.split.name} stream has no sample in epoch {epoch + 1}; its __iter__ "
                "must begin anew each time"
            )
        while step.global_count:
            following = self._load(stream)
            self._now["state"] = step.state
            yield StepBatch(
                self._padded(step),
                global_count=step.global_count,
                number=number,
                is_last=not following.global_count,
            )
            step, number = following, number + 1

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
        samples = first_batch(self.split, range(min(2, self.micro_size)), seed=self.seed)
        return replace(samples, weight=0.0)


@dataclass(frozen=True)
class _Loaded:
    """This rank's part of a step."""

    parts: tuple[MicroBatch, ...]
    sizes: Tensor  # samples and micro-batches of each share, int64 (num_shares, 2)
    state: dict[str, Any]  # of the stream after it

    @property
    def global_count(self) -> int:
        """Return the samples over all shares."""
        return int(self.sizes[:, 0].sum())
