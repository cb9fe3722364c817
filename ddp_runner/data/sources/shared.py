"""What sources share: checks of their fields, the split, their workers, and downloads."""

import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, redirect_stdout, suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any, Protocol

import torch
from filelock import FileLock
from torch import Tensor

from ddp_runner.data.dataset import Augmentation, Dataset, TensorSource, splits
from ddp_runner.data.loader import LoaderSplit, MapDataset
from ddp_runner.data.loading import Loading, require_function
from ddp_runner.data.tokenizer import SETTINGS_FILE, TOKENIZER_FILE, VOCABULARY_FILE
from ddp_runner.errors import UserError, one_line

REMEDY = "replace the file, or delete it to have it downloaded"
KEPT_FILE = f"tokenizer/{TOKENIZER_FILE}"  # in the run's folder
KEPT = f"file:{KEPT_FILE}"  # the key of the tensor with its bytes
DOWNLOADS = ("MNIST", "FashionMNIST", "KMNIST", "CIFAR10", "CIFAR100")  # torchvision's classes
DOWNLOAD_TIMEOUT_S = 10  # without an answer; torchvision would wait for ever
DOWNLOAD_LOCK = ".download.lock"  # beside the files: machines may share them, but not the cache


class _ImageSource(TensorSource, Protocol):
    """A source of images with classes: its facts are those of the ``Dataset``."""

    @property
    def num_classes(self) -> int: ...
    @property
    def mean(self) -> float | Sequence[float]: ...
    @property
    def std(self) -> float | Sequence[float]: ...
    @property
    def augmentation(self) -> Augmentation | None: ...


def image_dataset(source: _ImageSource, tensors: Mapping[str, Tensor]) -> Dataset:
    """Return the dataset of a source of images; its inputs are to be normalised."""
    return Dataset(
        source.name,
        *splits(tensors),
        num_classes=source.num_classes,
        mean=source.mean,
        std=source.std,
        augmentation=source.augmentation,
    )


def loader_split(source: object, name: str, samples: MapDataset) -> LoaderSplit:
    """Return a split that loads as the source's fields say; see ``Loading.of``.

    Raises:
        UserError: a key is out of range.
    """
    split = Loading.of(source).split(name, samples)
    assert isinstance(split, LoaderSplit)
    return split


def validate_pictures(source: Any) -> None:
    """Reject fields that no source of pictures can use.

    Raises:
        UserError: a size, the number of channels, mean, std or a transform is unusable.
    """
    require_at_least(source, height=1, width=1)
    for key in ("train_transform", "eval_transform"):
        fix = f"dataset.{key}._target_=torchvision.transforms.v2.NAME and its keywords"
        require_function(key, getattr(source, key), fix=fix)
    if source.channels not in (1, 3):
        raise UserError(f"dataset.channels ({source.channels}) must be 1 (grey) or 3 (colours)")
    for key in ("mean", "std"):
        value = getattr(source, key)
        if not isinstance(value, float | int) and len(value) != source.channels:
            raise UserError(
                f"dataset.{key} ({list(value)}) must be one number, or one for each of "
                f"dataset.channels ({source.channels})"
            )


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


def require_eval_fraction(fraction: float, *, fix: str = "use 0.1") -> None:
    """Reject a fraction that would leave a split empty, however large the dataset is.

    Raises:
        UserError: it is not between 0 and 1.
    """
    if not 0 < fraction < 1:
        raise UserError(f"dataset.eval_fraction ({fraction}) must be between 0 and 1; {fix}")


def shuffled_split(
    num_samples: int, eval_fraction: float, *, seed: int, noun: str, place: Path
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


def fetch_missing(
    paths: Sequence[Path], *, name: str, torchvision_class: str, data_root: Path
) -> None:
    """Download a dataset with torchvision, unless all its files are there, in one folder.

    If several machines share the folder, one downloads and the others wait.

    Raises:
        UserError: a file is missing and cannot be downloaded.
    """
    folder = paths[0].parent
    if all(path.exists() for path in paths) and not (folder / DOWNLOAD_LOCK).exists():
        return
    lock = FileLock(folder / DOWNLOAD_LOCK)
    # A folder that cannot be written or locked is not locked: the download fails with the reason.
    with suppress(OSError, RuntimeError):
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    try:
        if all(path.exists() for path in paths):
            return
        reason = _download(torchvision_class, data_root)
    finally:
        lock.release()
    if missing := [path.name for path in paths if not path.exists()]:
        raise UserError(
            f"dataset {name}: {', '.join(missing)} not found in {folder.absolute()}, and the "
            f"download failed ({reason}); copy the files into that folder, point data_root at the "
            f"folder that holds {folder.relative_to(data_root)}, connect to the network once, or "
            "use dataset=digits, which is bundled and needs no network"
        )


def _download(torchvision_class: str, data_root: Path) -> str:
    """Download what torchvision offers; return why a file may still be missing."""
    from torchvision import datasets  # slow to import, and needed only here

    if torchvision_class not in DOWNLOADS:  # the name of a folder that a config gives
        return f"only {', '.join(DOWNLOADS)} can be downloaded"
    with ExitStack() as stack:
        stack.callback(socket.setdefaulttimeout, socket.getdefaulttimeout())
        socket.setdefaulttimeout(DOWNLOAD_TIMEOUT_S)
        stack.enter_context(redirect_stdout(sys.stderr))
        try:
            getattr(datasets, torchvision_class)(data_root, download=True)
        # torchvision also reads the files; our own reader reports damaged ones better.
        except (RuntimeError, OSError, HTTPException, ValueError, AssertionError) as error:
            return one_line(error)
    return "the download left them out"
