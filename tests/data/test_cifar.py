"""CIFAR's batches are read without running the code they name; every damage is reported."""

import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.error import URLError

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor

from ddp_runner.config.instantiate import make
from ddp_runner.config.schema import CONFIG_DIR
from ddp_runner.data.cache import load_dataset
from ddp_runner.data.sources.cifar import Cifar, read_batch
from ddp_runner.errors import UserError

BATCHES = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
PIXELS = 3 * 32 * 32


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the test its own dataset cache."""
    monkeypatch.setenv("DDP_RUNNER_CACHE", str(tmp_path / "cache"))


def source(name: str) -> Cifar:
    """Return the source of a YAML."""
    settings: Any = OmegaConf.to_container(OmegaConf.load(CONFIG_DIR / "dataset" / f"{name}.yaml"))
    built: Cifar = make("dataset", settings)
    return built


def images_of(seed: int, count: int = 4) -> Tensor:
    """Return random images (count, 3, 32, 32)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (count, 3, 32, 32), dtype=torch.uint8, generator=generator)


def batch(images: Tensor, labels: list[int], key: bytes = b"labels") -> bytes:
    """Return a pickle as current Python and numpy write it."""
    return pickle.dumps({b"data": images.flatten(1).numpy(), key: labels}, protocol=4)


def original_batch(images: Tensor, labels: list[int]) -> bytes:
    """Return a pickle as Python 2 and its numpy wrote it, with bytes for texts."""

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value

    data = images.numpy().tobytes()
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\0\x85", text(b"b"), b"\x87R",
        b"(K\1M", struct.pack("<H", len(images)), b"M", struct.pack("<H", PIXELS), b"\x86",
        b"cnumpy\ndtype\n", text(b"u1"), b"K\0K\1\x87R(K\3", text(b"|"),
        b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\0tb\x89T", struct.pack("<I", len(data)), data,
        b"tb",
    )  # fmt: skip
    numbers = b"".join(b"K" + bytes([label]) for label in labels)
    keys = (b"\x80\2}(", text(b"labels"), b"](", numbers, b"e", text(b"data"), *array)
    return b"".join((*keys, text(b"batch_label"), text(b"testing batch"), b"u."))


def cifar_folder(data_root: Path, write: Callable[[Tensor, list[int]], bytes] = batch) -> Path:
    """Write a tiny CIFAR-10: batches of 4 images, labels counting up from the batch's number."""
    folder = data_root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    for number, name in enumerate(BATCHES):
        labels = [number, number + 1, number + 2, number + 3]
        (folder / name).write_bytes(write(images_of(number), labels))
    return folder


@pytest.mark.parametrize("write", [batch, original_batch])
def test_batches_are_read_in_order_and_followed(
    write: Callable[[Tensor, list[int]], bytes], tmp_path: Path
) -> None:
    """Five batches train, one evaluates; a changed file gets a new cache."""
    folder = cifar_folder(tmp_path, write)
    data = load_dataset(source("cifar10"), data_root=tmp_path, log=print)
    assert torch.equal(data.train.inputs, torch.cat([images_of(seed) for seed in range(5)]))
    assert torch.equal(data.eval.inputs, images_of(5))
    assert (data.eval.targets.dtype, data.eval.targets.tolist()) == (torch.int64, [5, 6, 7, 8])
    assert data.train.targets.tolist()[-5:] == [6, 4, 5, 6, 7]
    (folder / "test_batch").write_bytes(write(images_of(6, 2), [9, 0]))
    os.utime(folder / "test_batch", (1, 1))
    again = load_dataset(source("cifar10"), data_root=tmp_path, log=print)
    assert again.eval.targets.tolist() == [9, 0]


def test_the_hundred_classes_are_the_fine_ones(tmp_path: Path) -> None:
    """CIFAR-100 has one file per split, and two kinds of labels."""
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    for name, label in (("train", 99), ("test", 7)):
        pixels = images_of(label, 1).flatten(1).numpy()
        labels = {b"fine_labels": [label], b"coarse_labels": [3]}
        (folder / name).write_bytes(pickle.dumps({b"data": pixels, **labels}, protocol=4))
    data = load_dataset(source("cifar100"), data_root=tmp_path, log=print)
    assert (data.train.targets.tolist(), data.eval.targets.tolist()) == ([99], [7])
    assert torch.equal(data.train.inputs, images_of(99, 1))


def test_images_are_normalised_by_channel(tmp_path: Path) -> None:
    """The result is that of torchvision's Normalize, in any memory format."""
    cifar_folder(tmp_path)
    data = load_dataset(source("cifar10"), data_root=tmp_path, log=print)
    mean, std = (torch.tensor(one).view(3, 1, 1) for one in (data.mean, data.std))
    expected = (data.train.inputs.float() / 255 - mean) / std
    torch.testing.assert_close(data.normalize(data.train.inputs), expected)
    last = data.train.inputs.contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(data.normalize(last), expected)


class Hostile:
    """Its pickle creates a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what the pickle runs."""
        return os.system, (f"touch '{self.path}'",)


@pytest.mark.parametrize("where", ["whole", "data", "labels", "unused"])
def test_a_batch_that_runs_code_is_rejected(where: str, tmp_path: Path) -> None:
    """The code does not run, wherever it is, and the message names it."""
    path, trace = cifar_folder(tmp_path) / "data_batch_3", tmp_path / "trace"
    content: Any = {b"data": images_of(0).flatten(1).numpy(), b"labels": [1, 2, 3, 4]}
    content = Hostile(trace) if where == "whole" else content | {where.encode(): Hostile(trace)}
    path.write_bytes(pickle.dumps(content, protocol=4))
    with pytest.raises(UserError, match=r"it asks for posix\.system, which is refused") as caught:
        load_dataset(source("cifar10"), data_root=tmp_path, log=print)
    assert str(caught.value).startswith(f"{path} ")
    assert not trace.exists()


@pytest.mark.parametrize(
    "name", ["numpy.load", "numpy.core.multiarray.fromfile", "builtins.eval", "numpy.os.system"]
)
def test_nothing_of_numpy_but_its_arrays_can_be_asked_for(name: str, tmp_path: Path) -> None:
    """Other functions of the allowed package stay out of reach."""
    module, _, function = name.rpartition(".")
    path = tmp_path / "batch"
    path.write_bytes(f"\x80\2c{module}\n{function}\n.".encode("latin-1"))
    with pytest.raises(UserError, match=f"asks for {name}, which is refused"):
        read_batch(path, key="labels")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (batch(images_of(0), [1, 2, 3, 4])[:5000], "truncated"),
        (b"", "EOFError"),
        (b"\x1f\x8b\x08\x08" * 9, "UnpicklingError"),
        (batch(images_of(0), [1, 2, 3]), "it has 3 labels for 4 images"),
        (batch(images_of(0), [1, 2, 3, 4], b"fine_labels"), "KeyError: 'labels'"),
        (batch(images_of(0)[:, :2], [1, 2, 3, 4]), "invalid for input of size"),
        (batch(images_of(0).float(), [1, 2, 3, 4]), "its pixels are not bytes"),
        (pickle.dumps([1, 2]), "AttributeError"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)
def test_a_damaged_batch_is_named(content: bytes, message: str, tmp_path: Path) -> None:
    """The line has the file, the fault and the fix."""
    path = cifar_folder(tmp_path) / "data_batch_2"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        load_dataset(source("cifar10"), data_root=tmp_path, log=print)
    assert str(path) in str(caught.value)
    assert message in str(caught.value)
    assert "replace the file, or delete it" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("label", [10, -2])
def test_a_label_that_is_no_class_is_an_error(label: int, tmp_path: Path) -> None:
    """The line has the split and the range."""
    (cifar_folder(tmp_path) / "test_batch").write_bytes(batch(images_of(0), [1, label, 3, 4]))
    message = f"the eval targets of dataset=cifar10 go from {min(1, label)} to {max(4, label)}; 10 "
    with pytest.raises(UserError, match=message):
        load_dataset(source("cifar10"), data_root=tmp_path, log=print)


def test_missing_files_without_network_say_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line has the folder, the missing file, ways to get it, and the bundled dataset."""

    def no_network(*args: object, **kwargs: object) -> None:
        raise URLError("Name or service not known")

    monkeypatch.setattr("torchvision.datasets.cifar.download_and_extract_archive", no_network)
    folder = cifar_folder(tmp_path)
    (folder / "test_batch").unlink()
    with pytest.raises(UserError) as caught:
        load_dataset(source("cifar10"), data_root=tmp_path, log=print)
    message = str(caught.value)
    for part in (f"test_batch not found in {folder}", "service not known", "dataset=digits"):
        assert part in message
    assert "data_batch_1" not in message
    assert "\n" not in message


def test_what_the_files_cannot_be_is_rejected() -> None:
    """Three channels and the two known folders are all that is valid."""
    with pytest.raises(UserError, match=r"dataset\.channels \(1\) must be 3"):
        Cifar("c", "cifar-10-batches-py", (0.5,), (0.5,), num_classes=10, channels=1)
    with pytest.raises(UserError, match=r"dataset\.folder \(cifar\) must be one of cifar-10"):
        Cifar("c", "cifar", (0.5,), (0.5,), num_classes=10)
