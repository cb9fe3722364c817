"""A loader gives each sample once an epoch over all ranks, and continues where it stopped."""

from itertools import zip_longest
from typing import Any

import pytest
import torch
from torch import Tensor

from ddp_runner.data.batches import NumberedBatches
from ddp_runner.data.splits import TensorSplit
from ddp_runner.errors import UserError
from ddp_runner.own_loop.rank_batches import Loader

CPU = torch.device("cpu")
NUM_SAMPLES = 13  # with batches of 6: the last one has a single sample


def loader(rank: int = 0, world_size: int = 2, *, shuffle: bool = True, **changes: Any) -> Loader:
    """Return a rank's loader of the numbers 0 to 12."""
    numbers = torch.arange(NUM_SAMPLES)
    settings: dict[str, Any] = {"global_size": 6, "seed": 0} | changes
    batches = NumberedBatches(
        split=TensorSplit(numbers, numbers),
        grad_accum_steps=1,
        share=rank,
        num_shares=world_size,
        **settings,
    )
    return Loader(batches, CPU, shuffle=shuffle)


def epoch_of(one: Loader) -> list[Tensor]:
    """Return the numbers in each batch that is left of an epoch."""
    return [numbers for numbers, _ in one]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_weighted_means_of_the_ranks_add_up_to_the_mean_of_all(world_size: int) -> None:
    """In each step, also in the last one, whose sample most ranks do not have."""
    ranks = [loader(rank, world_size) for rank in range(world_size)]
    means = [
        sum(
            one.weight * numbers.double().mean()
            for one, (numbers, _) in zip(ranks, batches, strict=True)
        )
        / world_size
        for batches in zip(*ranks, strict=True)
    ]
    whole = [numbers.double().mean() for numbers in epoch_of(loader(0, 1))]
    assert len(means) == len(ranks[0]) == 3
    assert torch.stack(means) == pytest.approx(torch.stack(whole))
    assert [one.num_seen for one in ranks] == [NUM_SAMPLES] * world_size


def test_each_epoch_has_another_order() -> None:
    """And each of its samples once."""
    one = loader(0, 1)
    epochs = [torch.cat(epoch_of(one)[:2]) for _ in range(2)]
    assert not torch.equal(*epochs)
    assert one.epoch == 2
    assert len(set(epochs[0].tolist())) == 12


@pytest.mark.parametrize("taken", [1, 2, 3])
def test_a_restored_loader_continues_with_the_next_batch(taken: int) -> None:
    """Saved in the loop's body; after the last batch, what is left of the epoch is its end."""
    one, whole = loader(), epoch_of(loader())
    for _, _ in zip(range(taken), one, strict=False):
        state = one.state_dict()
    again = loader()
    again.load_state_dict(state)
    assert (again.epoch, again.epoch_number) == (0, 1)
    rest = epoch_of(again)
    assert [numbers.tolist() for numbers in rest] == [one.tolist() for one in whole[taken:]]
    assert (again.epoch, again.epoch_number) == (1, 1)


def test_an_order_may_change_between_epochs_only() -> None:
    """Amid one, samples would be used twice and others never."""
    one = loader()
    between = one.state_dict()
    next(iter(one))
    amid = one.state_dict()
    other = loader(global_size=4)
    other.load_state_dict(between)
    with pytest.raises(UserError, match=r"global_size=6, and this run has batch\.global_size=4: "):
        other.load_state_dict(amid)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_for_evaluation_batch_k_is_the_same_samples_at_every_world_size(world_size: int) -> None:
    """In order, each once, and always from the start; the last one may be on some ranks alone."""
    ranks = [loader(rank, world_size, shuffle=False) for rank in range(world_size)]
    for _ in range(2):
        batches = list(zip_longest(*map(epoch_of, ranks), fillvalue=torch.zeros(0)))
        found = [sorted(torch.cat(of_ranks).int().tolist()) for of_ranks in batches]
        assert found == [[*range(6)], [*range(6, 12)], [12]]
    assert ranks[0].state_dict()["epoch"] == ranks[0].num_seen == 0
