"""The batches that a rank gets in a loop of the user's own, and their place in the run's order."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ddp_runner.config.rules import validate_num_samples
from ddp_runner.data.batches import NumberedBatches
from ddp_runner.data.loader import LoaderSplit
from ddp_runner.data.splits import MicroPlan, NumberedSplit
from ddp_runner.data.trees import to_device
from ddp_runner.errors import UserError
from ddp_runner.rank.session import Session
from ddp_runner.seeds import derive, seed_all


def open_loader(
    session: Session,
    dataset: Any,
    *,
    number: int,
    global_size: int | None,
    shuffle: bool,
    **options: Any,
) -> "Loader":
    """Return the loop's loader of this number; for the rest see ``Run.loader``.

    Raises:
        UserError: the dataset is not map-style, has fewer samples than there are ranks, or gives
            them different numbers of batches to evaluate where a forward waits for all ranks.
    """
    layout, device = session.mode.layout(session.env), session.devices[0]
    split, name = dataset, f"loader {number + 1}"
    if not isinstance(dataset, NumberedSplit):
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            raise UserError(
                f"run.loader takes a dataset with __len__ and __getitem__, and {name} got a "
                f"{type(dataset).__name__}; give a map-style torch.utils.data.Dataset"
            )
        split = LoaderSplit(name, dataset, **options)
    validate_num_samples(type(dataset).__name__, len(split), ranks=layout.num_shares)
    batches = NumberedBatches(
        split=split.near(device),
        global_size=global_size or session.config.batch.global_size,
        grad_accum_steps=1,
        share=layout.share,
        num_shares=layout.num_shares,
        seed=derive(session.config.seed, "loader", number),
    )
    num_last = len(split) % batches.global_size  # samples of a smaller last batch
    if layout.forward_is_collective and not shuffle and 0 < num_last < layout.num_shares:
        raise UserError(
            f"{len(split)} samples in batches of {batches.global_size} leave {num_last} for the "
            f"last one, too few for {layout.num_shares} ranks, and in this mode a forward waits "
            "for all ranks; choose another global_size for this loader"
        )
    return Loader(batches, device, shuffle=shuffle)


class Loader:
    """Batches on this rank's device: over all ranks each sample once an epoch.

    A loop over it is an epoch, or the rest of one: after a resume it continues with the batch after
    the last one that was trained on. The global batches are the same for every number of ranks.

    Args:
        batches: this rank's share of the global batches.
        device: where the batches go.
        shuffle: in another order in each epoch. Otherwise in the dataset's order, always from its
            start, for evaluation: a rank may get none of a last, smaller batch, so call no
            collective in that loop, and no module that `Run.wrap` returned.

    Attributes:
        weight: of the current batch, 1.0 if all ranks got equally many samples, as they do but in
            an epoch's last step. Multiply a mean loss by it: then the mean over the ranks, which
            DDP takes of the gradients, is the mean over the global batch.
        num_seen: samples of the global batches so far, without those of earlier sessions.
    """

    def __init__(self, batches: NumberedBatches, device: torch.device, *, shuffle: bool) -> None:
        self.weight, self.num_seen = 1.0, 0
        self._batches, self._device, self._shuffle = batches, device, shuffle
        self._is_at_last = False  # amid the epoch's last step: the loop over it has yet to end

    def __len__(self) -> int:
        """Return the steps of an epoch."""
        return self._batches.steps_per_epoch

    @property
    def epoch(self) -> int:
        """Completed epochs."""
        return self._batches.epoch - self._is_at_last

    @property
    def epoch_number(self) -> int:
        """The number of the epoch of the last batch, from 1; 0 before the first one."""
        return self._batches.epoch_number

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches that are left of the epoch, trees of tensors (batch, ...)."""
        if not self._shuffle:
            yield from self._in_order()
            return
        batches = self._batches
        for step in () if self._is_at_last else batches:
            self._is_at_last = step.is_last  # before the loop's body, which may save
            (batch,) = step.micro_batches
            # A rank without a sample gets one that weighs nothing, and the others wait for it.
            share = batch.weight * batch.num_samples / step.global_count
            self.weight = share * batches.num_shares
            self.num_seen += step.global_count
            epoch, index = divmod(step.number, batches.steps_per_epoch)
            seed_all(batches.seed, "batch", epoch, index + 1, batches.share)
            yield to_device(batch.data, self._device)
            if step.is_last:
                break
        self._is_at_last = False

    def _in_order(self) -> Iterator[Any]:
        batches, split = self._batches, self._batches.split
        numbers = torch.arange(len(split), device=split.device).split(batches.global_size)
        own = [batch[batches.share :: batches.num_shares] for batch in numbers]
        pieces = [MicroPlan(indices) for indices in own if len(indices)]
        for index, data in enumerate(split.load(pieces, seed=batches.seed)):
            seed_all(batches.seed, "batch", index, batches.share)
            yield to_device(data, self._device)

    def rewind(self) -> None:
        """Begin with the first batch of the first epoch."""
        self._batches.epoch = self._batches.step = self.num_seen = 0
        self._is_at_last = False

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the order of samples, equal on all ranks."""
        return {**self._batches.state_dict(), "is_at_last": self._is_at_last}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a place that ``state_dict`` returned.

        Raises:
            UserError: it is amid an epoch, and the samples have another order now.
        """
        self._batches.load_state_dict(state)
        self._is_at_last = state["is_at_last"]
