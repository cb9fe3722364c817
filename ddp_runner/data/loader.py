"""A user's ``torch.utils.data.Dataset`` as a split: loaded sample by sample, in worker processes.

A run decides which samples a batch has, so a loader needs no state: to resume, it loads from the
next batch on. A sample's random numbers follow from the seed, the epoch and its index alone. So it
is the same with any number of workers and ranks, and after a resume.
"""

import io
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple, Self, TypeVar, cast

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from ddp_runner.data.splits import MicroPlan, NumberedSplit
from ddp_runner.device import has_streams
from ddp_runner.errors import UserError, typed
from ddp_runner.host.processes import die_with_parent, ignore_stop_signals
from ddp_runner.seeds import GENERATORS, derive, generator_states, moved, seed_generators

T = TypeVar("T")
Collate = Callable[[list[Any]], Any]  # samples -> batch
CALM_S = 0.02  # wait between the last collective and the start of workers


@dataclass(frozen=True)
class Loading:
    """How the samples of a split are loaded; a batch is the result of `collate_fn`."""

    name: str  # in messages: "train", "eval"
    dataset: Any  # map-style, as torch.utils.data.Dataset describes it, or an iterable
    collate_fn: Collate = default_collate
    transform: Callable[[Any], Any] | None = None  # of a sample, before collate_fn
    num_workers: int = 0  # processes that load; 0: the rank itself loads
    prefetch_factor: int = 2  # batches that each worker loads ahead
    pin_memory: bool | None = None  # for a GPU; None: yes

    def near(self, device: torch.device) -> Self:
        """Return the split with pinned memory if it is for a GPU, unless the user turned it off."""
        return replace(self, pin_memory=has_streams(device) and self.pin_memory is not False)


@dataclass(frozen=True)
class LoaderSplit(Loading, NumberedSplit):
    """The samples of a map-style dataset."""

    persistent_workers: bool = True  # keep the workers from one epoch to the next

    def __len__(self) -> int:
        return len(self.dataset)

    def load(self, plans: Iterable[MicroPlan], *, seed: int = 0) -> Iterator[Any]:
        """Yield the batch of each plan; the workers load some batches ahead.

        Persistent workers serve one iterator at a time, the newest.

        Raises:
            UserError: a sample cannot be loaded, or a worker has died.
        """
        orders = cast(_Orders, self._loader.batch_sampler)
        orders.next = mine = (_Order(seed, plan.epoch, _numbers(plan)) for plan in plans)
        for batch in start_loading(self._loader, name=self.name):
            yield batch
            if self._loader.persistent_workers and orders.next is not mine:
                raise RuntimeError(f"other {self.name} samples were loaded during this epoch")

    @cached_property
    def _loader(self) -> "DataLoader[Any]":
        return DataLoader(
            _Fetcher(self),
            batch_sampler=cast(Any, _Orders()),  # an order instead of a list of indices
            persistent_workers=self.persistent_workers and self.num_workers > 0,
            **loader_options(self),
        )


class _Order(NamedTuple):
    seed: int
    epoch: int
    indices: Sequence[int]


class _Orders:
    """A batch_sampler that yields the orders of the current iterator."""

    def __init__(self) -> None:
        self.next: Iterator[_Order] = iter(())

    def __iter__(self) -> Iterator[_Order]:
        return self.next


class _Fetcher(Dataset[Any]):
    """Loads a batch from a dataset, with random numbers that depend only on its samples.

    Seeding a generator takes a tenth of the time of loading a small image. So a batch is first
    loaded without a seed. If that has drawn from one of the global generators, the batch is loaded
    again, and from then on each sample seeds this generator.
    """

    def __init__(self, split: LoaderSplit) -> None:
        self._name, self._dataset = split.name, split.dataset
        self._transform, self._collate_fn = split.transform, split.collate_fn
        self._fetch_many = getattr(split.dataset, "__getitems__", None)
        self._sends = split.num_workers > 0  # to another process
        self._drawn = set[str]()  # the generators that samples draw from
        self._current: int | None = None  # the sample that is being loaded
        self._is_first = True

    def __getitems__(self, order: _Order) -> Any:
        """Return a batch, or the reason why it cannot be loaded. DataLoader calls this method."""
        before = generator_states(GENERATORS.keys() - self._drawn)
        while True:
            self._current = None
            load = self._seeded_batch if self._drawn else self._batch
            result = load_safely(partial(load, order), partial(self._sentence, order))
            if not (newly := moved(before)):
                break
            self._drawn |= newly  # so that even a failure depends on the samples alone
            before = {name: state for name, state in before.items() if name not in newly}
        if self._sends and self._is_first:
            self._is_first, result = False, sendable(result, name=self._name)
        return result

    def _batch(self, order: _Order) -> Any:
        if self._fetch_many is None:
            return self._collate_fn([self._sample(index) for index in order.indices])
        samples = self._fetch_many(list(order.indices))
        if self._transform is not None:
            numbered = zip(order.indices, samples, strict=False)
            samples = [self._transformed(sample, index) for index, sample in numbered]
        return self._collate_fn(samples)

    def _seeded_batch(self, order: _Order) -> Any:
        samples = list[Any]()
        for index in order.indices:
            seed = derive(order.seed, self._name, "sample", order.epoch, index)
            seed_generators(seed, self._drawn)
            samples.append(self._sample(index))
        first = order.indices[:1]
        seed = derive(order.seed, self._name, "batch", order.epoch, *first)
        seed_generators(seed, self._drawn)
        return self._collate_fn(samples)

    def _sample(self, index: int) -> Any:
        self._current = index
        # A dataset may offer to load many at once, but a seed is for a single sample.
        sample = self._fetch_many([index])[0] if self._fetch_many else self._dataset[index]
        return self._transformed(sample, index)

    def _transformed(self, sample: Any, index: int) -> Any:
        self._current = index
        sample = sample if self._transform is None else self._transform(sample)
        self._current = None
        return sample

    def _sentence(self, order: _Order, fault: str) -> str:
        subject, culprit = f"sample {self._current}", "the dataset"
        if self._current is None:
            numbers = ", ".join(map(str, order.indices[:3]))
            if len(order.indices) > 3:
                numbers += f", … ({len(order.indices)} of one batch)"
            subject, culprit = f"samples {numbers}", "the dataset or its collate_fn"
        return (
            f"the {self._name} {subject} cannot be loaded: {fault}; fix {culprit} (the traceback "
            "is in logs/)"
        )


def _numbers(plan: MicroPlan) -> Sequence[int]:
    indices = plan.indices
    return indices if isinstance(indices, range) else indices.tolist()


@dataclass(frozen=True)
class LoadFailure:
    """The reason why a batch could not be loaded, with the traceback as text: it is pickled."""

    sentence: str
    trace: str


def load_safely(load: Callable[[], T], sentence: Callable[[str], str]) -> T | LoadFailure:
    """Return the result of `load`, or why it failed: `sentence` gets the error's type and text.

    A UserError, from a dataset of ours, brings its own sentence.
    """
    try:
        return load()
    except Exception as error:  # the user's code raises any kind
        text = str(error) if isinstance(error, UserError) else sentence(typed(error))
        return LoadFailure(text, "".join(traceback.format_exception(error)))


def start_loading(loader: "DataLoader[Any]", *, name: str) -> Iterator[Any]:
    """Return the loader's batches; its workers start now, unless they have been kept.

    Python 3.11 hangs in a fork if a thread of torch calls Python for the first time at that moment,
    as happens right after a collective: it takes the lock of all thread states without the GIL,
    and the child waits for that lock before it makes a new lock. Python 3.12 fixed this.

    Raises:
        UserError: on a batch: a sample cannot be loaded, or a worker has died.
    """
    is_kept = loader.persistent_workers and loader._iterator is not None
    if loader.num_workers > 0 and not is_kept and sys.version_info < (3, 12):
        time.sleep(CALM_S)
    return _checked(iter(loader), name=name, num_workers=loader.num_workers)


def _checked(batches: Iterator[Any], *, name: str, num_workers: int) -> Iterator[Any]:
    try:
        for batch in batches:
            if isinstance(batch, LoadFailure):
                raise UserError(batch.sentence) from RuntimeError(batch.trace)
            yield batch
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise UserError(
            f"a process that loads the {name} samples has died ({typed(error)}), often for lack of "
            "memory",
            f"use a smaller dataset.num_workers ({num_workers}) or batch.per_rank",
        ) from error


def loader_options(split: Loading) -> dict[str, Any]:
    """Return the keywords of a DataLoader that gets whole batches from its dataset."""
    has_workers = split.num_workers > 0
    return {
        "collate_fn": _identity,
        "num_workers": split.num_workers,
        "prefetch_factor": split.prefetch_factor if has_workers else None,
        "pin_memory": bool(split.pin_memory),
        "worker_init_fn": start_worker if has_workers else None,
        # Forked workers need not pickle the dataset. They must not touch CUDA, and do not.
        "multiprocessing_context": "fork" if has_workers and sys.platform == "linux" else None,
        "generator": torch.Generator(),  # workers begin with the same seeds in each run
    }


def _identity(batch: Any) -> Any:
    return batch


def start_worker(worker: int) -> None:
    """Prepare a worker process: it ends when its rank ends it, or with the rank.

    A stop signal may reach every process at once. Only the rank's own SIGTERM counts, by which a
    DataLoader ends its workers.
    """
    ignore_stop_signals()
    die_with_parent()
    if sys.platform != "linux":
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        return
    rank = os.getppid()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])

    def end_with_rank() -> None:
        while signal.sigwaitinfo([signal.SIGTERM]).si_pid != rank:
            continue
        os._exit(0)  # torch reports any other code in the rank

    threading.Thread(target=end_with_rank, name="sigterm-watch", daemon=True).start()


def sendable(batch: Any, *, name: str) -> Any:
    """Return the batch, or a failure if it cannot be pickled: a DataLoader would hang."""
    failure = load_safely(
        lambda: _WithoutTensors(io.BytesIO()).dump(batch),
        lambda fault: (
            f"a batch of the {name} samples cannot be sent to the rank ({fault}); return tensors, "
            "numbers and texts from the dataset's collate_fn, or write dataset.num_workers=0"
        ),
    )
    return failure or batch


class _WithoutTensors(pickle.Pickler):
    def persistent_id(self, obj: Any) -> str | None:
        return "tensor" if isinstance(obj, torch.Tensor) else None
