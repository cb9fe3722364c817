"""A rank's batches in a user's own loop, and the position in the run's order of samples."""

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
    """Return the loop's loader with this number; for the other arguments see ``Run.loader``.

    Raises:
        UserError: the dataset is not map-style, has fewer samples than ranks, or ranks would
            evaluate different numbers of batches in a mode where a forward waits for all ranks.
    """
    layout, device = session.mode.layout(session.env), session.devices[0]
    split, name = dataset, f"loader {number + 1}"
    if not isinstance(dataset, NumberedSplit):
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            raise UserError(
                f"run.loader takes a dataset with __len__ and __getitem__, and {name} got a "
                f"{type(dataset).__name__}",
                "give a map-style torch.utils.data.Dataset",
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
            f"last batch, too few for {layout.num_shares} ranks, and in this mode a forward waits "
            "for all ranks",
            "choose another global_size for this loader",
        )
    return Loader(batches, device, shuffle=shuffle)


class Loader:
    """Batches on this rank's device: over all ranks each sample once an epoch.

    Iterating yields an epoch; after a resume, the rest of the epoch after the last batch that was
    trained on. The global batches are the same for every number of ranks.

    Args:
        batches: this rank's share of the global batches.
        device: where the batches go.
        shuffle: True for another order in each epoch. False for the dataset's order, always from
            its start, for evaluation: a rank may get nothing of a smaller last batch, so call no
            collective in that loop, and no module that `Run.wrap` returned.

    Attributes:
        weight: weight of the current batch: 1.0 if all ranks have the same number of samples, as
            in all but an epoch's last step. Multiply a mean loss by it: then the mean over ranks,
            which DDP takes of the gradients, is the mean over the global batch.
        num_seen: samples of the global batches in this session.
    """

    def __init__(self, batches: NumberedBatches, device: torch.device, *, shuffle: bool) -> None:
        self.weight, self.num_seen = 1.0, 0
        self._batches, self._device, self._shuffle = batches, device, shuffle
        self._is_at_last = False  # the loop's body is processing the epoch's last batch

    def __len__(self) -> int:
        """Return the number of steps in an epoch."""
        return self._batches.steps_per_epoch

    @property
    def epoch(self) -> int:
        """Completed epochs."""
        return self._batches.epoch - self._is_at_last

    @property
    def epoch_number(self) -> int:
        """The number of the last batch's epoch, from 1; 0 before the first batch."""
        return self._batches.epoch_number

    def __iter__(self) -> Iterator[Any]:
        """Yield the remaining batches of the epoch, trees of tensors (batch, ...)."""
        if not self._shuffle:
            yield from self._in_order()
            return
        batches = self._batches
        for step in () if self._is_at_last else batches:
            self._is_at_last = step.is_last  # before the loop's body, which may save
            (batch,) = step.micro_batches
            # A rank without samples gets a batch of weight 0: the other ranks wait for its forward.
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
        shares = [batch[batches.share :: batches.num_shares] for batch in numbers]
        plans = [MicroPlan(indices) for indices in shares if len(indices)]
        for index, data in enumerate(split.load(plans, seed=batches.seed)):
            seed_all(batches.seed, "batch", index, batches.share)
            yield to_device(data, self._device)

    def rewind(self) -> None:
        """Return to the first batch of the first epoch."""
        self._batches.epoch = self._batches.step = self.num_seen = 0
        self._is_at_last = False

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the order of samples, equal on all ranks."""
        return {**self._batches.state_dict(), "is_at_last": self._is_at_last}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the position of a ``state_dict``.

        Raises:
            UserError: the position is inside an epoch, and the samples now have another order.
        """
        self._batches.load_state_dict(state)
        self._is_at_last = state["is_at_last"]
