"""A user's Dataset gives the same batches, random numbers included, however it is loaded."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from orders import steps_of
from own_data import end_workers
from properties import examples
from tiers import first_of, named
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset, default_collate

from ddp_runner.data.batches import NumberedBatches, StepBatch
from ddp_runner.data.loader import LoaderSplit
from ddp_runner.data.splits import EpochShare, MicroPlan, TensorSplit
from ddp_runner.errors import UserError
from ddp_runner.seeds import GENERATORS

NUM_SAMPLES = 23
INPUTS = torch.arange(NUM_SAMPLES * 6.0).reshape(NUM_SAMPLES, 2, 3)
TARGETS = torch.arange(NUM_SAMPLES) % 5
WORKERS = (0, 1, 2)


CREATED: list[LoaderSplit] = []


@pytest.fixture(autouse=True)
def no_worker_left() -> Iterator[None]:
    """End the workers of each split, which an expected exception may still refer to."""
    yield
    while CREATED:
        end_workers(CREATED.pop())


@dataclass
class Drawing(Dataset[dict[str, Any]]):
    """Samples with random numbers, of each generator or of some, in every sample or in some."""

    generators: Sequence[str] = tuple(GENERATORS)
    every: int = 1  # only the samples whose number it divides draw
    length: int = NUM_SAMPLES

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        is_drawn = index % self.every == 0
        noise = [draw(name) if is_drawn else 0.0 for name in self.generators]
        return {"number": index, "noise": torch.tensor(noise)}


class Many(Drawing):
    """Samples that can be fetched together."""

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        """Return the samples, one after the other."""
        return [self[index] for index in indices]


def draw(name: str) -> float:
    """Return a number of a generator; those of a normal distribution come in pairs."""
    if name == "random":
        return random.gauss()
    return float(np.random.standard_normal()) if name == "numpy" else torch.randn(()).item()


def noisy_collate(samples: list[Any]) -> Any:
    """Return a batch with a random number of its own."""
    return default_collate(samples) | {"of batch": torch.rand(2) + random.random()}


def split_of(dataset: Any, **keys: Any) -> LoaderSplit:
    """Return a dataset as a split."""
    CREATED.append(LoaderSplit("train", dataset, **keys))
    return CREATED[-1]


def batches_of(split: Any, **keys: Any) -> NumberedBatches:
    """Return a split's global batches."""
    given = {"global_size": 6, "grad_accum_steps": 1, "share": 0, "num_shares": 1, "seed": 0}
    return NumberedBatches(split=split, **(given | keys))


def flat(batch: Any) -> dict[str, list[Any]]:
    """Return a batch of Drawing as plain numbers."""
    return {key: value.tolist() for key, value in batch.items()}


def steps(batches: Iterator[StepBatch]) -> list[list[dict[str, list[Any]]]]:
    """Return the steps as plain numbers, copied."""
    return [[flat(micro.data) for micro in step.micro_batches] for step in batches]


def sends_batch_numbers(found: list[list[dict[str, list[Any]]]]) -> dict[int, list[float]]:
    """Return the noise of each sample."""
    pairs = [
        pair
        for step in found
        for one in step
        for pair in zip(one["number"], one["noise"], strict=True)
    ]
    return dict(pairs)


def assert_equal_steps(found: StepBatch, expected: StepBatch) -> None:
    """Compare the steps of two splits that hold the same samples."""
    assert (found.global_count, found.number) == (expected.global_count, expected.number)
    assert len(found.micro_batches) == len(expected.micro_batches)
    for one, other in zip(found.micro_batches, expected.micro_batches, strict=True):
        assert (one.num_samples, one.weight) == (other.num_samples, other.weight)
        for part, wanted in zip(one.data, other.data, strict=True):
            assert part.dtype == wanted.dtype
            assert torch.equal(part, wanted)


@pytest.mark.parametrize("num_workers", WORKERS)
def test_batches_are_those_of_tensors_in_memory(num_workers: int) -> None:
    """In training and in evaluation, on one to four ranks; a sample counts once an epoch."""
    whole = TensorSplit(INPUTS, TARGETS)
    split = split_of(TensorDataset(INPUTS, TARGETS), num_workers=num_workers)
    for num_shares in (1, 2, 3, 4):
        seen = torch.zeros(NUM_SAMPLES)
        for share in range(num_shares):
            keys = {"share": share, "num_shares": num_shares, "grad_accum_steps": 2}
            pairs = zip(
                steps_of(batches_of(split, **keys), 1),
                steps_of(batches_of(whole, **keys), 1),
                strict=True,
            )
            for found, expected in pairs:
                assert_equal_steps(found, expected)
                for micro in found.micro_batches:
                    numbers = (micro.data[0][:, 0, 0] / 6).long()
                    seen.index_add_(0, numbers, torch.full((len(numbers),), micro.weight))
            of_eval = EpochShare(4, share, num_shares, seed=0)
            for one, other in zip(split.in_order(of_eval), whole.in_order(of_eval), strict=True):
                assert all(map(torch.equal, one.data, other.data))
        assert torch.equal(seen, torch.ones(NUM_SAMPLES))


@examples(60)
@given(
    num_samples=st.integers(1, 40),
    global_size=st.integers(1, 17),
    accumulated=st.integers(1, 3),
    num_shares=st.integers(1, 4),
    epoch=st.integers(0, 3),
    data=st.data(),
)
def test_property_every_plan_of_batches_loads_as_from_tensors(
    num_samples: int,
    global_size: int,
    accumulated: int,
    num_shares: int,
    epoch: int,
    data: st.DataObject,
) -> None:
    """It may begin at any step of an epoch."""
    numbers = torch.arange(num_samples)
    keys = {
        "global_size": global_size,
        "grad_accum_steps": accumulated,
        "num_shares": num_shares,
        "share": data.draw(st.integers(0, num_shares - 1)),
        "seed": data.draw(st.integers(0, 2**40)),
    }
    expected = list(steps_of(batches_of(TensorSplit(numbers, numbers), **keys), epoch))
    start = data.draw(st.integers(0, len(expected) - 1))
    split = split_of(TensorDataset(numbers, numbers))
    found = steps_of(batches_of(split, **keys), epoch, start=start)
    for one, other in zip(found, expected[start:], strict=True):
        assert_equal_steps(one, other)


DATASETS = {
    "all generators": Drawing(),
    "python": Drawing(["random"]),
    "torch": Drawing(["torch"]),
    "numpy": Drawing(["numpy"]),
    "a few samples": Drawing(every=7),
    "fetched together": Many(every=2),
}


@pytest.mark.parametrize("name", named(DATASETS, quick=("all generators", "fetched together")))
def test_a_samples_random_numbers_depend_on_seed_epoch_and_index_alone(name: str) -> None:
    """Not on the workers, the ranks, the batch or where a resumed run begins."""
    dataset = DATASETS[name]
    expected = sends_batch_numbers(steps(steps_of(batches_of(split_of(dataset)), 3)))
    assert len(expected) == NUM_SAMPLES
    drawing = [value for number, value in expected.items() if number % dataset.every == 0]
    assert len({tuple(one) for one in drawing}) == len(drawing), "the same numbers twice"
    for num_workers in WORKERS:
        split = split_of(dataset, num_workers=num_workers)
        shares = [batches_of(split, share=share, num_shares=3) for share in range(3)]
        found: dict[int, list[float]] = {}
        for share in shares:
            found |= sends_batch_numbers(steps(steps_of(share, 3)))
        assert found == expected
        tail = steps(steps_of(shares[0], 3))[2:]
        assert steps(steps_of(shares[0], 3, start=2)) == tail
        assert (
            steps(steps_of(batches_of(split_of(dataset)), 3, start=2))
            == steps(steps_of(batches_of(split), 3))[2:]
        )
    plain = batches_of(split_of(dataset))
    for other in (steps_of(replace(plain, seed=1), 3), steps_of(plain, 2)):
        found = sends_batch_numbers(steps(other))
        assert all(found[n] != expected[n] for n in expected if n % dataset.every == 0)


def test_a_batchs_random_numbers_depend_on_seed_epoch_and_batch_alone() -> None:
    """The collate function may draw as well, even if no sample does."""
    for dataset in (Drawing(), Drawing([])):
        found = [
            steps(steps_of(batches_of(split_of(dataset, collate_fn=noisy_collate, num_workers=n))))
            for n in WORKERS
        ]
        assert found[0] == found[1] == found[2]
        assert found[0] == steps(steps_of(batches_of(split_of(dataset, collate_fn=noisy_collate))))
        assert len({str(one["of batch"]) for step in found[0] for one in step}) == len(found[0])


@pytest.mark.parametrize("pinned", first_of([True, False]))
@pytest.mark.parametrize("persistent", first_of([True, False]))
@pytest.mark.parametrize("num_workers", WORKERS)
def test_an_abandoned_epoch_leaves_nothing_behind(
    num_workers: int, persistent: bool, pinned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one, and samples by their numbers, are as if it had not been."""
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor, *_: tensor.clone())
    split = split_of(
        Drawing(every=2), num_workers=num_workers, persistent_workers=persistent, pin_memory=pinned
    )
    batches, plain = batches_of(split), batches_of(split_of(Drawing(every=2)))
    expected = {epoch: steps(steps_of(plain, epoch)) for epoch in (0, 1)}
    for left_after in (1, 2, 0):
        epoch = steps_of(batches)
        assert steps(next(epoch) for _ in range(left_after)) == expected[0][:left_after]
        del epoch
        first = steps([next(steps_of(batches, 1))])
        assert first == expected[1][:1]
        two = [one.split.first([3, 99], seed=one.seed) for one in (batches, plain)]
        assert flat(two[0].data) == flat(two[1].data)
        assert steps(steps_of(batches)) == expected[0]


def test_kept_workers_do_not_mix_two_epochs() -> None:
    """They load for the last one alone; to go on with another one is an error."""
    batches = batches_of(split_of(Drawing(), num_workers=1))
    left = steps_of(batches)
    next(left)
    steps(steps_of(batches, 1))
    with pytest.raises(RuntimeError, match="other train samples were loaded during this epoch"):
        next(left)


def test_pinned_memory_is_for_gpus() -> None:
    """Unless the user wants none."""
    for wanted, on_gpu in ((None, True), (True, True), (False, False)):
        split = split_of(Drawing(), pin_memory=wanted)
        assert split.near(torch.device("cpu")).pin_memory is False
        assert split.near(torch.device("cuda", 0)).pin_memory is on_gpu


@dataclass
class Failing(Drawing):
    """Samples of which one cannot be loaded."""

    bad: int = 7

    def __init__(self, bad: int) -> None:
        super().__init__()
        self.bad = bad

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == self.bad:
            raise ZeroDivisionError("no such\npicture")
        return super().__getitem__(index)


class FailingTogether(Failing, Many):
    """The same, fetched together."""


class Moody(Drawing):
    """Samples that fail for half of the random numbers."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        if random.random() < 0.5:
            raise ZeroDivisionError("a bad mood")
        return {"number": index}


def test_whether_a_sample_fails_depends_on_seed_epoch_and_index_alone() -> None:
    """Not on the numbers that the process would draw next, nor on what was loaded before."""
    outcomes = []
    for own in range(6):
        random.seed(own)
        split, found = split_of(Moody()), []
        for seed in range(12):
            try:
                list(split.load([MicroPlan(range(1))], seed=seed))
                found.append(True)
            except UserError:
                found.append(False)
        outcomes.append(found)
    assert outcomes == outcomes[:1] * 6
    assert set(outcomes[0]) == {True, False}


def failing_collate(samples: list[Any]) -> Any:
    """Fail as default_collate does for samples of unequal shapes."""
    return torch.stack([torch.zeros(int(one["number"])) for one in samples])


@pytest.mark.parametrize("num_workers", WORKERS)
def test_a_sample_or_a_batch_that_fails_is_one_line(num_workers: int) -> None:
    """It has the sample's number and the error; the traceback is in the cause."""
    bad_sample = split_of(Failing(7), num_workers=num_workers)
    bad_together = split_of(FailingTogether(7), num_workers=num_workers)
    bad_batch = split_of(Drawing(), num_workers=num_workers, collate_fn=failing_collate)
    of_sample = ("sample 7 cannot be loaded: ZeroDivisionError: no such picture", "the dataset (")
    of_batch = ("samples 1, 3, 7, … (4 of one batch) cannot be loaded: RuntimeE", "collate_fn (")
    cases = [
        (bad_sample, of_sample, "__getitem__"),
        (bad_together, of_sample, "__getitem__"),
        (bad_batch, of_batch, "failing_collate"),
    ]
    pieces = [MicroPlan(torch.tensor(numbers)) for numbers in ([2], [1, 3, 7, 8])]
    for split, parts, place in cases:
        for _ in range(2):  # a failure does not end the workers
            with pytest.raises(UserError) as caught:
                list(split.load(pieces, seed=0))
            sentence = str(caught.value)
            assert all(part in sentence for part in parts)
            assert sentence.isprintable()
            assert place in str(caught.value.__cause__)


def test_what_cannot_be_sent_is_one_line() -> None:
    """A function that is local to another, for example."""
    split = split_of(Drawing(), num_workers=1, collate_fn=lambda samples: lambda: samples)
    with pytest.raises(UserError, match=r"cannot be sent to the rank .*collate_fn, or write"):
        list(split.load([MicroPlan(range(2))], seed=0))
