"""Streams: which reader takes which samples, and how it goes on from a state."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from configs import config_error
from own_streams import (
    Broken,
    InDrawnOrder,
    NotCopied,
    NotPlain,
    Plain,
    Sharded,
    Stateful,
    WithIterator,
    sample_of,
)
from tiers import first_of
from torch import Tensor

from ddp_runner.data.loader import LoaderSplit
from ddp_runner.data.sources.torch_dataset import TorchDataset
from ddp_runner.data.splits import EpochShare
from ddp_runner.data.stream import StreamSplit
from ddp_runner.errors import UserError

SIZE, BATCH = 23, 3
STREAMS = {
    "plain": Plain(SIZE),
    "stateful": Stateful(SIZE),
    "iterator": WithIterator(SIZE),
    "drawn order": InDrawnOrder(SIZE),
    "sharded": Sharded([1, 9, 2, 5, 0, 6]),
}


def read(split: StreamSplit, *, rank: int = 0, num_ranks: int = 1, **keys: Any) -> list[Any]:
    """Return one rank's batches of an epoch."""
    return list(split.open(EpochShare(BATCH, share=rank, num_shares=num_ranks, seed=7, **keys)))


def numbers(batches: list[Any]) -> list[int]:
    """Return the numbers of the samples in batches."""
    return [int(one) for batch in batches for one in batch.data[1].flatten()]


def tensors(batches: list[Any]) -> Tensor:
    """Return all that batches hold as one tensor."""
    return torch.cat([torch.cat(batch.data, dim=1) for batch in batches])


@pytest.mark.parametrize(("num_ranks", "num_workers"), first_of([(3, 0), (1, 0), (2, 2)]))
@pytest.mark.parametrize("kind", STREAMS)
def test_all_readers_take_each_sample_once(kind: str, num_ranks: int, num_workers: int) -> None:
    """Whether the dataset gives out shards or each reader takes every n-th sample."""
    split = StreamSplit("train", STREAMS[kind], num_workers=num_workers, shuffle_buffer=7)
    of_ranks = [read(split, rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)]
    found = [number for batches in of_ranks for number in numbers(batches)]
    assert sorted(found) == list(range(SIZE))
    assert sum(batch.num_samples for batches in of_ranks for batch in batches) == SIZE


@pytest.mark.parametrize(
    ("kind", "num_workers", "shuffle_buffer"),
    [
        *((kind, 0, buffer) for kind in STREAMS for buffer in (0, 8)),
        *((kind, 2, 0) for kind in ("plain", "iterator", "sharded")),
    ],
)
def test_a_reader_goes_on_from_each_state(kind: str, num_workers: int, shuffle_buffer: int) -> None:
    """After no batch, after each, and after the last: with the same samples and draws."""
    split = StreamSplit(
        "train",
        STREAMS[kind],
        transform=noisy,
        num_workers=num_workers,
        shuffle_buffer=shuffle_buffer,
    )
    part = EpochShare(BATCH, share=1, num_shares=2, seed=7, epoch=2)
    whole = list(split.open(part))
    # With workers each state is tried once; one in three is enough of the slow ones.
    for taken in range(0, len(whole) + 1, 3 if num_workers else 1):
        stream = split.open(part)
        before = [next(stream) for _ in range(taken)]
        state = stream.state()
        next(stream, None)  # what is loaded ahead is not in the state
        after = list(split.open(part, state=state))
        assert torch.equal(tensors([*before, *after]), tensors(whole))


def test_a_worker_whose_shard_has_ended_gives_nothing_twice() -> None:
    """Its three samples are whole batches, and the other worker goes on."""
    split = StreamSplit("train", Sharded([3, 15]), num_workers=2)
    part = EpochShare(BATCH, share=0, num_shares=1, seed=7)
    stream = split.open(part)
    before = [next(stream) for _ in range(3)]
    after = list(split.open(part, state=stream.state()))
    assert numbers([*before, *after]) == numbers(list(split.open(part)))


@pytest.mark.parametrize("kind", STREAMS)
def test_a_reader_is_resumed_again_and_again(kind: str) -> None:
    """After each batch, within a block of three and beyond; a state is never used up."""
    split, part = (
        StreamSplit("train", STREAMS[kind], shuffle_buffer=9),
        EpochShare(BATCH, 0, 1, seed=7),
    )
    found, state = list[Any](), None
    while batch := next(stream := split.open(part, state=state), None):
        found.append(batch)
        state = stream.state()
    assert torch.equal(tensors(found), tensors(list(split.open(part))))


def noisy(sample: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Add what a random augmentation would."""
    features, number = sample
    return features + torch.rand(()), number


def test_a_state_after_the_end_begins_nothing_anew() -> None:
    """A rank whose part ended first has nothing left when the run is resumed."""
    split = StreamSplit("train", Plain(SIZE))
    stream, part = (
        split.open(EpochShare(BATCH, share=0, num_shares=1, seed=7)),
        EpochShare(BATCH, 0, 1, seed=7),
    )
    assert len(list(stream)) == 8
    assert list(split.open(part, state=stream.state())) == []


def test_epochs_seeds_and_readers_draw_other_numbers() -> None:
    """The same samples come with other noise."""
    split = StreamSplit("train", Plain(SIZE))
    parts = [
        EpochShare(BATCH, share=0, num_shares=1, seed=7),
        EpochShare(BATCH, share=0, num_shares=1, seed=8),
        EpochShare(BATCH, share=0, num_shares=1, seed=7, epoch=1),
    ]
    firsts = [next(split.open(part)).data[0] for part in parts]
    assert not torch.equal(firsts[0], firsts[1])
    assert not torch.equal(firsts[0], firsts[2])
    assert torch.equal(firsts[0], next(split.open(parts[0])).data[0])


def test_the_dataset_learns_the_epoch() -> None:
    """set_epoch is called on each reader's part."""
    split = StreamSplit("train", Sharded([2, 3]))
    assert numbers(read(split)) == [0, 1, 2, 3, 4]
    assert numbers(read(split, epoch=1)) == [2, 3, 4, 0, 1]


def test_a_shuffle_buffer_mixes_blocks_of_samples() -> None:
    """Each block has its own samples, in an order that follows from the epoch."""
    split = StreamSplit("train", Plain(SIZE), shuffle_buffer=10)  # whole batches: 9 samples
    found, other = numbers(read(split)), numbers(read(split, epoch=1))
    assert sorted(found[:9]) == list(range(9))
    assert found[:9] != list(range(9))
    assert found != other
    assert found == numbers(read(split))


def test_a_single_sample_comes_twice_if_asked() -> None:
    """BatchNorm rejects a batch of one; the batch says that it counts as one."""
    split = StreamSplit("train", Plain(4))
    *_, last = read(split, doubles_single=True)
    assert (last.num_samples, last.weight, len(last.data[0])) == (2, 0.5, 2)
    *_, last = read(split)
    assert (last.num_samples, last.weight, len(last.data[0])) == (1, 1.0, 1)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_first_samples_are_read_beside_the_stream(num_workers: int) -> None:
    """By number, as often as asked; past the end it is the last one; nothing is used up."""
    split = StreamSplit("train", Stateful(SIZE, draws=False), num_workers=num_workers)
    _, found = split.first([1, 0, 1]).data
    assert found.flatten().tolist() == [1, 0, 1]
    assert StreamSplit("train", Plain(2, draws=False)).first([0, 5]).data[1].flatten().tolist() == [
        0,
        1,
    ]
    assert numbers(read(split)) == list(range(SIZE))


def test_an_evaluation_reads_each_sample_once() -> None:
    """In batches of any size over the ranks, and in each evaluation anew."""
    split = StreamSplit("eval", Plain(SIZE))
    for _ in range(2):
        found = [
            int(number)
            for rank in range(2)
            for batch in split.in_order(EpochShare(4, rank, 2, seed=0))
            for number in batch.data[1]
        ]
        assert sorted(found) == list(range(SIZE))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_in_a_stream_is_one_line(num_workers: int) -> None:
    """With the exception and where it was; the samples before it come first."""
    stream = StreamSplit("train", Broken(5), num_workers=num_workers).open(
        EpochShare(2, share=0, num_shares=1, seed=0)
    )
    next(stream)
    next(stream)
    message = r"the train stream failed near sample 4: KeyError: 'image'; fix the dataset"
    with pytest.raises(UserError, match=message):
        next(stream)


def test_a_state_that_no_checkpoint_can_hold_is_an_error() -> None:
    """It is found with the first batch, and not when the run is resumed."""
    with pytest.raises(UserError, match=r"train stream\['seen'\] is a set, which a checkpoint "):
        read(StreamSplit("train", NotPlain(4)))


def test_a_dataset_that_cannot_be_copied_needs_a_worker() -> None:
    """The message has the fix, and the fix works."""
    with pytest.raises(UserError, match=r"cannot be copied .* or write dataset\.num_workers=1"):
        read(StreamSplit("train", NotCopied(4)))
    assert numbers(read(StreamSplit("train", NotCopied(4), num_workers=1))) == [0, 1, 2, 3]


def test_a_missing_library_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """It names the extra to install."""
    monkeypatch.setitem(sys.modules, "torchdata", None)
    with pytest.raises(UserError, match=r'needs torchdata; write pip install "ddp-runner\[streams'):
        read(StreamSplit("train", Plain(4)))


def test_a_stream_says_how_it_is_read() -> None:
    """A line about parity, and one if every reader reads everything."""
    plain = StreamSplit("train", Plain(4), num_workers=2)
    assert len(plain.notes(1)) == 2
    assert "each of 4 readers" in plain.notes(2)[1]
    assert len(StreamSplit("train", Plain(4)).notes(1)) == 1
    sharded = StreamSplit("train", Sharded([1, 1, 1]))
    assert len(sharded.notes(3)) == 1
    assert len(sharded.notes(4)) == 2  # too few shards: each reads everything


def test_loading_tells_streams_from_numbered_samples(tmp_path: Path) -> None:
    """By what the dataset has."""

    def opened(train: Any, **keys: Any) -> Any:
        dataset = TorchDataset("mine", train, **keys).open(tmp_path)
        assert dataset is not None
        return dataset.train

    assert isinstance(opened(Plain(4)), StreamSplit)
    assert isinstance(opened([sample_of(0)]), LoaderSplit)
    with pytest.raises(UserError, match=r"is a int, which lacks __len__ or __getitem__"):
        opened(3)
    with pytest.raises(UserError, match=r"dataset\.shuffle_buffer \(4\) is for streams"):
        opened([1], shuffle_buffer=4)
    wrong = config_error("dataset=torch_dataset", "dataset.shuffle_buffer=-1")
    assert wrong == "dataset.shuffle_buffer (-1) must be 0 or greater"
