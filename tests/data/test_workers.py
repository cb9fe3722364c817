"""The processes that load for a rank: how they end, and that what they hand over stays whole."""

import gc
import multiprocessing
import os
import signal
import threading
import time
from collections import namedtuple
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from math import prod
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from commands import wait_for
from hypothesis import given
from hypothesis import strategies as st
from properties import examples
from torch import Tensor

from ddp_runner.data.loader import LoaderSplit
from ddp_runner.data.shared_blocks import BlockReceiver, BlockSender
from ddp_runner.data.splits import Piece
from ddp_runner.data.workers import Workers
from ddp_runner.errors import UserError
from ddp_runner.host.processes import STOP_SIGNALS

Pair = namedtuple("Pair", "left right")


@dataclass
class Packed:
    """An object of a user's, with a tensor inside."""

    values: Tensor
    name: str


@pytest.fixture
def no_worker_left() -> Iterator[None]:
    """End the workers that an expected exception still refers to."""
    yield
    gc.collect()


def with_numbers(value: Any) -> tuple[Any, Tensor]:
    """Return what it gets, and a large tensor."""
    return value, numbers(300_000)


def numbers(size: int) -> Tensor:
    """Return a tensor that no other size has."""
    return torch.full((size,), float(size))


def slow_negative(value: int) -> int:
    """Take longer for odd numbers, so that later results are there first."""
    time.sleep(0.002 * (value % 2))
    return -value


def exit_or_pid(code: int) -> int:
    """Return this process's number for 0; else end with an exit code."""
    if code:
        os._exit(code)
    return os.getpid()


def test_results_come_in_order_from_all_workers() -> None:
    """Also if one worker is faster, and if there are fewer arguments than workers."""
    workers = Workers(slow_negative, number=3, ahead=2)
    for length in (0, 1, 2, 50):
        assert list(workers.map(range(length))) == [-value for value in range(length)]
    assert len(set(Workers(exit_or_pid, number=2, ahead=2).map([0] * 8))) == 2


def test_several_maps_may_be_read_in_turns_or_left() -> None:
    """Each result goes to the map that asked for it."""
    workers = Workers(slow_negative, number=2, ahead=3)
    one, other = workers.map(range(20)), workers.map(range(100, 120))
    left = workers.map(range(500, 520))
    next(left)
    found = [(next(one), next(other)) for _ in range(10)]
    del left
    found += zip(one, other, strict=True)
    assert found == [(-value, -100 - value) for value in range(20)]


@pytest.mark.parametrize("has_blocks", [True, False])
def test_arguments_and_results_larger_than_a_pipe_holds_pass(
    has_blocks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither side waits for the other while both are sending; also without shared memory."""
    for module in ("shared_blocks", "workers"):
        monkeypatch.setattr(f"ddp_runner.data.{module}.HAS_BLOCKS", has_blocks)
    large = [bytes([number]) * 2_000_000 for number in range(6)]
    workers = Workers(with_numbers, number=1, ahead=3)
    for (found, tensor), expected in zip(workers.map(large), large, strict=True):
        assert found == expected
        assert torch.equal(tensor, numbers(300_000))


def test_what_is_kept_is_not_overwritten() -> None:
    """Memory is used again only when all tensors in it are gone, even their views."""
    workers = Workers(numbers, number=2, ahead=2)
    kept, views = [], []
    for index, found in enumerate(workers.map([1000] * 40 + [3000] * 10 + [10] * 10)):
        size = 1000 if index < 40 else 3000 if index < 50 else 10
        kept.append(found) if index % 3 else views.append(found[2:5])
        assert torch.equal(found, numbers(size))
        del found
    assert all(torch.equal(one, numbers(len(one))) for one in kept)
    assert [one.tolist() for one in views[:13]] == [[1000.0] * 3] * 13


def test_what_is_dropped_is_used_again() -> None:
    """A long run maps as much memory as a short one."""
    workers = Workers(numbers, number=1, ahead=2)
    places = {found.data_ptr() for found in workers.map([1000] * 100)}
    assert len(places) <= 4


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.complex64]
DTYPES += [torch.int64, torch.uint8, torch.bool]


def tensor_of(dtype: torch.dtype, shape: list[int], is_transposed: bool) -> Tensor:
    """Return a tensor that counts up, with its strides in either order."""
    tensor = torch.arange(prod(shape)).reshape(shape).to(dtype)
    return tensor.mT.contiguous().mT if is_transposed and len(shape) > 1 else tensor


LEAVES = st.one_of(
    st.none(),
    st.text(max_size=3),
    st.integers(),
    st.builds(
        tensor_of,
        st.sampled_from(DTYPES),
        st.lists(st.integers(0, 3), max_size=3),
        st.booleans(),
    ),
)
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3)
        | st.tuples(inner, inner).map(lambda two: Pair(*two))
    ),
    max_leaves=6,
)


def assert_same(one: Any, other: Any) -> None:
    """Compare two trees: values, types, shapes and strides."""
    assert type(one) is type(other)
    if isinstance(one, Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
        assert one.stride() == torch.empty_like(other).stride()
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for first, second in zip(one, other, strict=True):
            assert_same(first, second)
    else:
        assert one == other


def sent(*values: Any) -> list[Any]:
    """Send values through a pipe of this process; return what comes out."""
    with ExitStack() as stack:
        own, other = map(stack.enter_context, Pipe())
        sender, receiver, found = BlockSender(other), BlockReceiver(own), list[Any]()
        for ticket, value in enumerate(values):
            sender.release(receiver.take_dropped())
            sender.send(ticket, value)
            received, result = receiver.receive()
            assert received == ticket
            found.append(result)
        return found


@examples(80)
@given(st.lists(TREES, min_size=1, max_size=4))
def test_property_every_tree_comes_out_as_it_went_in(trees: list[Any]) -> None:
    """Whatever it holds and however it is nested, and all of them at the same time."""
    for found, tree in zip(sent(*trees), trees, strict=True):
        assert_same(found, tree)


def test_tensors_that_are_more_than_their_bytes_come_out_as_they_went_in() -> None:
    """And those that overlap, are cut out of others, or lie inside objects."""
    base = torch.arange(12.0).reshape(3, 4)
    images = torch.rand(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    parameter = torch.nn.Parameter(base.clone())
    trees: list[Any] = [base[:, 1], base.expand(2, 3, 4), images, parameter]
    for found, tree in zip(sent(*trees), trees, strict=True):
        assert_same(found.detach(), tree.detach()) if tree is parameter else assert_same(
            found, tree
        )
    (sparse,) = sent(base.to_sparse())
    assert torch.equal(sparse.to_dense(), base)
    (conjugate,) = sent(torch.tensor([1 + 2j]).conj())
    assert conjugate.tolist() == [1 - 2j]
    (packed, text) = sent(Packed(base, "a"), ["long" * 9000, base])
    assert text[0] == "long" * 9000
    assert torch.equal(text[1], base)
    assert torch.equal(packed.values, base)
    assert packed.name == "a"
    (pair,) = sent((base, base))
    pair[0].add_(1)  # as of any other batch
    assert not pair[0]._is_view()
    pair[1].requires_grad_()


class Local:
    """A dataset that cannot be pickled, and the process that loads it."""

    def __init__(self, mark: Path | None = None) -> None:
        self.lock, self.mark, self.function = threading.Lock(), mark, lambda value: value + 1

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> tuple[int, int]:
        if self.mark is not None and index == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.function(index), os.getpid()


def load_some(split: LoaderSplit, *indices: int) -> list[list[int]]:
    """Return a batch of two of each index."""
    pieces = [Piece(range(index, index + 2)) for index in indices]
    return [[one.tolist() for one in batch] for batch in split.load(pieces, seed=0)]


def test_a_dataset_that_cannot_be_pickled_is_loaded() -> None:
    """Workers are forked on Linux."""
    found = load_some(LoaderSplit("train", Local(), num_workers=2), 0, 10, 20)
    assert [values for values, _ in found] == [[1, 2], [11, 12], [21, 22]]
    assert os.getpid() not in {pid for _, pids in found for pid in pids}


@pytest.mark.usefixtures("no_worker_left")
def test_a_worker_that_dies_is_one_line(tmp_path: Path) -> None:
    """Killed for its memory, for example, or ended by a library."""
    split = LoaderSplit("train", Local(tmp_path), num_workers=2)
    with pytest.raises(
        UserError, match="loads the train samples ended by SIGKILL, often"
    ) as caught:
        load_some(split, *range(0, 40, 4))
    assert "\n" not in str(caught.value)
    for code in (0, 3):
        left = Workers(partial(end_with, code), number=1, ahead=2)
        with pytest.raises(Exception, match=f"ended with exit code {code}"):
            list(left.map([0, 0, 0]))


def end_with(code: int, _: int) -> None:
    """End this process."""
    os._exit(code)


def test_stop_signals_do_not_end_a_worker() -> None:
    """They may reach every process of a run at once, and the rank still has to take a step."""
    split = LoaderSplit("train", Local(), num_workers=1)
    ((_, (pid, _)),) = load_some(split, 0)
    for signum in STOP_SIGNALS:
        os.kill(pid, signum)
    assert load_some(split, 10) == [[[11, 12], [pid, pid]]]


def wait_with_workers(pipe: Any, how: str) -> None:
    """Start workers, send their numbers, and end or be ended while they work."""
    split = LoaderSplit("train", Local(), num_workers=2)
    loaded = split.load((Piece(range(index, index + 2)) for index in range(900)), seed=0)
    pipe.send(sorted({next(loaded)[1][0].item() for _ in range(4)}))
    if how == "wait":
        time.sleep(600)
    globals()["kept"] = (split, loaded)  # still there at the end of the process


@pytest.mark.parametrize("how", ["wait", "end"])
def test_workers_end_with_their_rank(how: str) -> None:
    """However it ends: killed, or ordinarily with an epoch still open."""
    own, other = Pipe()
    context: Any = multiprocessing.get_context("fork")
    rank = context.Process(target=wait_with_workers, args=(other, how))
    rank.start()
    pids = own.recv()
    assert len(pids) == 2
    if how == "wait":
        assert all(map(psutil.pid_exists, pids))
        rank.kill()
    rank.join(60)
    assert rank.exitcode == (-signal.SIGKILL if how == "wait" else 0)
    wait_for(lambda: not any(map(is_alive, pids)))


def is_alive(pid: int) -> bool:
    """Return whether a process runs; an orphan may stay a zombie for a while."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
