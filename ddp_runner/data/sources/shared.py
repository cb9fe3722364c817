"""What sources share: checks of fields, the split, changed files, and loading all samples once."""

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddp_runner.data.dataset import Dataset, TensorSource, splits
from ddp_runner.data.loader import LoaderSplit
from ddp_runner.data.splits import MicroPlan, Split
from ddp_runner.data.tokenizer import SETTINGS_FILE, TOKENIZER_FILE, VOCABULARY_FILE
from ddp_runner.data.trees import shape_of
from ddp_runner.errors import UserError, os_errors
from ddp_runner.seeds import generator_states, moved

KEPT_FILE = f"tokenizer/{TOKENIZER_FILE}"  # in the run's folder
KEPT = f"file:{KEPT_FILE}"  # the key of the tensor with its bytes


def image_dataset(source: Any, tensors: Mapping[str, Tensor]) -> Dataset:
    """Return the dataset of a source's tensors; its pixels are to be normalised."""
    return with_facts(source, *splits(tensors))


def with_facts(source: Any, train: Split, evaluation: Split) -> Dataset:
    """Return the dataset of two splits, with those of its facts that are fields of the source."""
    names = ("name", "num_classes", "mean", "std", "augmentation")
    facts = {name: getattr(source, name) for name in names}
    return Dataset(train=train, eval=evaluation, **facts)


def require_at_least(source: TensorSource, **least: int) -> None:
    """Reject fields of a source that are too small.

    Raises:
        UserError: a field is below its smallest value.
    """
    for name, smallest in least.items():
        if getattr(source, name) < smallest:
            raise UserError(
                f"dataset.{name} ({getattr(source, name)}) must be at least {smallest}; use "
                f"{smallest} or more"
            )


def require_eval_fraction(fraction: float) -> None:
    """Reject a fraction that would leave a split empty, however large the dataset is.

    Raises:
        UserError: it is not between 0 and 1.
    """
    if not 0 < fraction < 1:
        raise UserError(f"dataset.eval_fraction ({fraction}) must be between 0 and 1; use 0.1")


def shuffled_split(
    num_samples: int, eval_fraction: float, *, seed: int, noun: str, place: str | Path
) -> dict[str, list[int]]:
    """Return the numbers of the samples of ``train`` and of ``eval``, in a random order.

    Raises:
        UserError: a split would be empty; `noun` and `place` are words of the message.
    """
    num_eval = round(num_samples * eval_fraction)
    if not 0 < num_eval < num_samples:
        raise UserError(
            f"dataset.eval_fraction ({eval_fraction}) of the {num_samples} {noun} in {place} "
            f"leaves a split empty; use 0.5, or add {noun}"
        )
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(num_samples, generator=generator).tolist()
    return {"train": order[num_eval:], "eval": order[:num_eval]}


def stamps(paths: Sequence[Path]) -> dict[str, object]:
    """Return size (bytes) and modification time (ns) of each file by name; None: missing."""
    found: dict[str, object] = {path.name: None for path in paths}
    for path in paths:
        with suppress(OSError):  # the build reports it
            stat = path.stat()
            found[path.name] = [stat.st_size, stat.st_mtime_ns]
    return found


def files_digest(place: Path, *, with_times: bool = False) -> str:
    """Return a digest of the names and sizes of the files in a folder, also behind links.

    So a copy on another machine has the same one. With times, another copy has another. Without any
    file it is that of an empty folder.

    Raises:
        UserError: something in the folder cannot be read.
    """
    digest = hashlib.sha256()
    with os_errors(f"{place.absolute()} cannot be read", fix="make it readable, or remove it"):
        for path in sorted(_files(str(place))) if place.exists() else ():
            stat = Path(path).stat()  # of a dangling link it fails
            time = stat.st_mtime_ns if with_times else None
            name = path.removeprefix(str(place))
            digest.update(os.fsencode(f"{name}\0{stat.st_size}\0{time}\n"))
    return digest.hexdigest()


def _files(place: str) -> Iterator[str]:
    """Yield the files below a folder; of a million pathlib would make objects for a minute."""
    for entry in os.scandir(place):
        if entry.is_dir():
            yield from _files(entry.path)
        else:
            yield entry.path


def tokenizer_stamps(folder: str) -> dict[str, object]:
    """Return size and modification time of each file that a tokenizer may be read from."""
    names = (TOKENIZER_FILE, VOCABULARY_FILE, SETTINGS_FILE)
    return stamps([Path(folder, name) for name in names])


def kept_tensors(tokenizer: bytes) -> dict[str, Tensor]:
    """Return the tensor in which the cache keeps the content of a tokenizer.json."""
    return {KEPT: torch.frombuffer(bytearray(tokenizer), dtype=torch.uint8)}


def kept_files(tensors: Mapping[str, Tensor]) -> dict[str, bytes]:
    """Return the tokenizer of ``kept_tensors`` as the file that a run keeps."""
    return {KEPT_FILE: tensors[KEPT].numpy().tobytes()}


PREPARED_AT_ONCE = 256  # samples
FALSE = "write dataset.prepare=false"


def first_batch(split: Split) -> tuple[Any, bool]:
    """Return a batch of the first sample, and whether that draws random numbers."""
    if not isinstance(split, LoaderSplit):
        raise UserError(getattr(split, "fix", f"a stream has no samples to prepare; {FALSE}"))
    before = generator_states()
    batch = next(replace(split, num_workers=0).load([MicroPlan(range(1))]))
    return batch, bool(moved(before))


def prepared(split: Split, room: float) -> list[Tensor]:
    """Return the inputs and the targets of a split, each in one tensor; `room` is in bytes."""
    first, draws = first_batch(split)
    assert isinstance(split, LoaderSplit)
    if draws:
        raise UserError(
            f"the {split.name} samples draw random numbers, and prepared they would be the same in "
            f"each epoch; {FALSE}, or leave that to dataset.augmentation"
        )
    is_pair = isinstance(first, list | tuple) and len(first) == 2
    if not is_pair or not all(isinstance(one, Tensor) for one in first):
        raise UserError(
            f"a {split.name} sample becomes a batch of type {type(first).__name__}, and only pairs "
            f"of tensors (input, target) are prepared; {FALSE}"
        )
    needed = sum(one.nbytes for one in first) * len(split)
    if needed > room:
        raise UserError(
            f"the {len(split):,} {split.name} samples take {needed / 2**30:.1f} GiB, and half of "
            f"the memory leaves {room / 2**30:.1f} GiB; {FALSE}, or make them smaller"
        )
    whole = [torch.empty((len(split), *one.shape[1:]), dtype=one.dtype) for one in first]
    starts = range(0, len(split), PREPARED_AT_ONCE)
    plans = [MicroPlan(range(start, min(start + PREPARED_AT_ONCE, len(split)))) for start in starts]
    for start, batch in zip(starts, split.load(plans), strict=True):
        for tensor, part in zip(whole, batch, strict=True):
            if (part.shape[1:], part.dtype) != (tensor.shape[1:], tensor.dtype):
                raise UserError(
                    f"the {split.name} samples from {start} on are {shape_of(part[0])}, and the "
                    f"first {shape_of(tensor[0])}; let all be alike, or {FALSE}"
                )
            tensor[start : start + len(part)] = part
    return whole
