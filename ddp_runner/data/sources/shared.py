"""Helpers of sources: checks of fields, splits, and file digests."""

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddp_runner.data.dataset import Dataset, splits
from ddp_runner.data.stream import Split
from ddp_runner.data.tokenizer import SETTINGS_FILE, TOKENIZER_FILE, VOCABULARY_FILE
from ddp_runner.errors import UserError, os_errors

KEPT_FILE = f"tokenizer/{TOKENIZER_FILE}"  # path in the run folder
KEPT = f"file:{KEPT_FILE}"  # the key of the tensor that holds its bytes


def image_dataset(source: Any, tensors: Mapping[str, Tensor]) -> Dataset:
    """Return the dataset of a source's tensors of images."""
    return with_facts(source, *splits(tensors))


def with_facts(source: Any, train: Split, evaluation: Split) -> Dataset:
    """Return the dataset of two splits; its other facts are fields of the source."""
    names = ("name", "num_classes", "mean", "std", "augmentation")
    facts = {name: getattr(source, name) for name in names}
    return Dataset(train=train, eval=evaluation, **facts)


def validate_fields(source: Any, vocabularies: Sequence[str], **least: int) -> None:
    """Raise a UserError if a field of a source of texts is too small, or not a vocabulary."""
    for name, smallest in least.items():
        if getattr(source, name) < smallest:
            raise UserError(
                f"dataset.{name} ({getattr(source, name)}) must be at least {smallest}",
                "increase it",
            )
    if source.vocabulary not in vocabularies:
        raise UserError(
            f"dataset.vocabulary ({source.vocabulary}) must be one of {', '.join(vocabularies)}"
        )


def shuffled_split(
    num_samples: int, eval_fraction: float, *, seed: int, noun: str, origin: str | Path
) -> dict[str, list[int]]:
    """Return the numbers of the samples of ``train`` and of ``eval``, in a random order.

    Raises:
        UserError: a split would be empty; `noun` and `origin` describe the samples.
    """
    num_eval = round(num_samples * eval_fraction)
    if not 0 < num_eval < num_samples:
        raise UserError(
            f"dataset.eval_fraction ({eval_fraction}) of the {num_samples} {noun} in {origin} "
            "leaves a split empty",
            f"use 0.5, or add {noun}",
        )
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(num_samples, generator=generator).tolist()
    return {"train": order[num_eval:], "eval": order[:num_eval]}


def stamps(paths: Sequence[Path]) -> dict[str, object]:
    """Return size (bytes) and modification time (ns) of each file by name; None: missing."""
    by_name = dict[str, object]()
    for path in paths:
        stat = path.stat() if os.access(path, os.F_OK) else None  # the build reports it
        by_name[path.name] = stat and [stat.st_size, stat.st_mtime_ns]
    return by_name


def files_digest(folder: Path, *, with_times: bool = False) -> str:
    """Return a digest of the names and sizes of the files in a folder, also behind links.

    A copy on another machine has the same digest, unless it is taken with the modification times. A
    missing folder counts as empty.

    Raises:
        UserError: something in the folder cannot be read.
    """
    digest = hashlib.sha256()
    with os_errors(f"{folder.absolute()} cannot be read", fix="make it readable, or remove it"):
        walk = os.walk(folder, followlinks=True, onerror=_fail) if folder.exists() else ()
        for path in sorted(f"{root}/{name}" for root, _, names in walk for name in names):
            stat = Path(path).stat()  # fails for a dangling link
            time = stat.st_mtime_ns if with_times else None
            name = path.removeprefix(str(folder))
            digest.update(os.fsencode(f"{name}\0{stat.st_size}\0{time}\n"))
    return digest.hexdigest()


def _fail(error: OSError) -> None:
    raise error


def tokenizer_facts(folder: str | None) -> dict[str, object]:
    """Return the ``stamps`` of the files that a source's tokenizer may be read from."""
    names = (TOKENIZER_FILE, VOCABULARY_FILE, SETTINGS_FILE)
    return {} if folder is None else {"tokenizer": stamps([Path(folder, name) for name in names])}


def kept_tensors(tokenizer: bytes) -> dict[str, Tensor]:
    """Return the tensor that keeps the content of a tokenizer.json in the cache."""
    return {KEPT: torch.frombuffer(bytearray(tokenizer), dtype=torch.uint8)}


def kept_files(tensors: Mapping[str, Tensor]) -> dict[str, bytes]:
    """Return the tokenizer of ``kept_tensors`` as a file of the run folder."""
    return {KEPT_FILE: tensors[KEPT].numpy().tobytes()}
