"""A user's ``torch.utils.data.Dataset`` as a split: loaded sample by sample, in worker processes.

A run decides which samples a batch has, so a loader needs no state: to resume, it loads from the
next batch on. What a sample draws at random follows from the seed, the epoch and its index alone.
So it is the same with any number of workers and ranks, and after a resume.
"""

import random
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol, cast

import torch
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

from ddp_runner.data.splits import Piece
from ddp_runner.errors import UserError, typed
from ddp_runner.host.processes import die_with_parent, ignore_stop_signals
from ddp_runner.seeds import derive

Collate = Callable[[list[Any]], Any]  # samples -> batch


class MapDataset(Protocol):
    """What a map-style dataset must have, as torch.utils.data.Dataset describes it."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def __getitem__(self, index: int, /) -> Any:
        """Return a sample: a tree of tensors and numbers, or whatever collate_fn takes."""


@dataclass(frozen=True)
class LoaderSplit:
    """The samples of a map-style dataset; a batch is what `collate_fn` returns."""

    name: str  # in messages: "train", "eval"
    dataset: MapDataset
    collate_fn: Collate = default_collate
    num_workers: int = 0  # processes that load; 0: the rank loads by itself
    prefetch_factor: int = 2  # batches that each worker loads ahead
    persistent_workers: bool = True  # keep the workers from one epoch to the next
    pin_memory: bool | None = None  # None: if the rank has a GPU

    @property
    def device(self) -> torch.device:
        """Return the CPU, where batches are loaded."""
        return torch.device("cpu")

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.dataset)

    def near(self, device: torch.device, *, most_bytes: float) -> "LoaderSplit":
        """Return the split with pinned memory for a GPU, unless the user chose."""
        if self.pin_memory is not None:
            return self
        return replace(self, pin_memory=device.type == "cuda")

    def load(self, pieces: Iterable[Piece], *, seed: int) -> Iterator[Any]:
        """Yield the batch of each piece; the workers load some batches ahead.

        Raises:
            UserError: a sample cannot be loaded, or a worker has died.
        """
        self._orders.pieces = (_Order(seed, piece.epoch, _numbers(piece)) for piece in pieces)
        batches = iter(self._loader)
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                return
            except RuntimeError as error:
                if "DataLoader worker" not in str(error):
                    raise
                raise UserError(
                    f"a process that loads the {self.name} samples has died "
                    f"({typed(error)}), often for want of memory; write a smaller "
                    f"dataset.num_workers ({self.num_workers}) or batch.per_rank"
                ) from error
            if isinstance(batch, _Failure):
                raise UserError(batch.sentence) from RuntimeError(batch.trace)
            yield batch

    @cached_property
    def _orders(self) -> "_Orders":
        return _Orders()

    @cached_property
    def _loader(self) -> "DataLoader[Any]":
        has_workers = self.num_workers > 0
        # Forked workers need not pickle the dataset. They must not touch CUDA, and do not.
        context = "fork" if has_workers and sys.platform == "linux" else None
        return DataLoader(
            _Fetcher(self.name, self.dataset, self.collate_fn),
            batch_sampler=cast(Any, self._orders),  # each order takes the place of a list
            collate_fn=_as_it_is,
            num_workers=self.num_workers,
            prefetch_factor=self.prefetch_factor if has_workers else None,
            persistent_workers=self.persistent_workers and has_workers,
            pin_memory=bool(self.pin_memory),
            worker_init_fn=_start_worker if has_workers else None,
            multiprocessing_context=context,
            generator=torch.Generator(),  # else each epoch takes a number from the model's dropout
        )


@dataclass(frozen=True)
class _Order:
    """One batch to load."""

    seed: int
    epoch: int
    indices: Sequence[int]


@dataclass(frozen=True)
class _Failure:
    """Why a batch could not be loaded; a worker cannot raise it without its traceback's text."""

    sentence: str
    trace: str


class _Orders:
    """The batches that a DataLoader loads next, as its batch_sampler."""

    def __init__(self) -> None:
        self.pieces: Iterator[_Order] = iter(())

    def __iter__(self) -> Iterator[_Order]:
        return self.pieces


class _Fetcher(Dataset[Any]):
    """Loads a batch from a dataset, with random numbers that depend only on its samples.

    Seeding Python's, NumPy's and torch's generators takes about as long as loading a small image.
    So a batch is first loaded as it comes. Only if that has drawn a number is it loaded again, and
    from then on each sample is seeded.
    """

    def __init__(self, name: str, dataset: MapDataset, collate_fn: Collate) -> None:
        self._name, self._dataset, self._collate_fn = name, dataset, collate_fn
        self._fetch_many = getattr(dataset, "__getitems__", None)
        self._draws = False

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, order: _Order) -> Any:
        """Return a batch, or why it cannot be loaded. DataLoader asks for its batches so."""
        before = _random_states()
        try:
            if not self._draws:
                batch = self._batch(order)
                if not _have_drawn(before):
                    return batch
                self._draws = True
            return self._seeded_batch(order)
        except UserError as error:  # of one of our datasets, whose sentence has the file
            return _Failure(str(error), traceback.format_exc())
        except Exception as error:  # of the user's code: any kind
            return _Failure(
                f"the {self._name} samples {_listed(order.indices)} cannot be loaded: "
                f"{typed(error)}; mend the dataset or its collate_fn (the traceback is in logs/)",
                traceback.format_exc(),
            )
        finally:
            if get_worker_info() is None:  # the rank's own generators are the model's
                _restore(before)

    def _batch(self, order: _Order) -> Any:
        if self._fetch_many:
            return self._collate_fn(self._fetch_many(list(order.indices)))
        return self._collate_fn([self._dataset[index] for index in order.indices])

    def _seeded_batch(self, order: _Order) -> Any:
        samples = list[Any]()
        for index in order.indices:
            _seed_all(derive(order.seed, self._name, "sample", order.epoch, index))
            # A dataset may offer to load many at once, but one seed serves one sample.
            samples += self._fetch_many([index]) if self._fetch_many else [self._dataset[index]]
        _seed_all(derive(order.seed, self._name, "batch", order.epoch, *order.indices[:1]))
        return self._collate_fn(samples)


def _numbers(piece: Piece) -> Sequence[int]:
    indices = piece.indices
    return indices if isinstance(indices, range) else indices.tolist()


def _listed(indices: Sequence[int]) -> str:
    """Return the first numbers of a batch, and how many there are."""
    shown = ", ".join(map(str, indices[:3]))
    return shown if len(indices) <= 3 else f"{shown}, … ({len(indices)} of one batch)"


def _as_it_is(batch: Any) -> Any:
    return batch


def _start_worker(worker: int) -> None:
    """Prepare a process that loads: the rank decides when it ends, and takes it along."""
    ignore_stop_signals()
    die_with_parent()


def _random_states() -> tuple[Any, ...]:
    numpy = sys.modules.get("numpy.random")
    return random.getstate(), torch.get_rng_state(), numpy and numpy.get_state()


def _have_drawn(before: tuple[Any, ...]) -> bool:
    """Return whether a generator has advanced since `before`."""
    python, of_torch, of_numpy = before
    now = _random_states()
    if now[0] != python or not torch.equal(now[1], of_torch):
        return True
    if of_numpy is None or now[2] is None:  # NumPy was imported meanwhile, if at all
        return of_numpy is not now[2]
    # Position, cached normal, and the words, which change every 624 numbers.
    return now[2][2:] != of_numpy[2:] or bool((now[2][1] != of_numpy[1]).any())


def _restore(states: tuple[Any, ...]) -> None:
    python, of_torch, of_numpy = states
    random.setstate(python)
    torch.set_rng_state(of_torch)
    if of_numpy is not None:
        sys.modules["numpy.random"].set_state(of_numpy)


def _seed_all(seed: int) -> None:
    random.seed(seed)
    # torch.manual_seed also seeds each GPU, which takes 70 times as long.
    torch.default_generator.manual_seed(seed)
    if (numpy := sys.modules.get("numpy.random")) is not None:
        numpy.seed(seed % 2**32)
