"""Datasets that a config names: prepared once, or loaded while the model trains."""

import os
import pickle
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from configs import resolved
from real_data import idx_images, idx_labels, require, write_tiny_mnist
from torch import Tensor

from ddp_runner.cli.plan import validate_files
from ddp_runner.data.load_dataset import build_dataset, build_source, load_dataset
from ddp_runner.data.loader import LoaderSplit
from ddp_runner.data.sources import torch_dataset
from ddp_runner.data.sources.torch_dataset import TorchDataset
from ddp_runner.data.splits import MicroPlan, TensorSplit
from ddp_runner.errors import UserError

NOWHERE = "http://127.0.0.1:9"  # the discard port, where nothing listens
MNIST_FILES = [
    f"{split}-{kind}-ubyte"
    for split in ("train", "t10k")
    for kind in ("images-idx3", "labels-idx1")
]
FLIP = "{_target_:ddp_runner.data.pictures.FlipAndCrop,horizontal_flip:true,crop_padding:1}"
CODE = """import random

import torch


class Numbers:
    def __init__(self, size, first=0):
        self.size, self.first = size, first

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return torch.tensor([float(self.first + index)]), index % 3


class Draws(Numbers):
    def __getitem__(self, index):
        return torch.tensor([random.random()]), 0


class Growing(Numbers):
    def __getitem__(self, index):
        return torch.zeros(1 if index < 256 else 2), 0


class Kinds(Numbers):
    def __getitem__(self, index):
        return torch.zeros(1), 0 if index < 256 else 0.5


class Items(Numbers):
    def __getitem__(self, index):
        return {"input": torch.zeros(1)}


class Stream:
    def __iter__(self):
        yield torch.zeros(1), 0
"""


@pytest.fixture(autouse=True)
def own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the test its own dataset cache and data folder, and no network."""
    monkeypatch.setenv("DDP_RUNNER_CACHE", str(tmp_path / "cache"))
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, NOWHERE)
    monkeypatch.setattr("urllib.request._opener", None)  # it keeps the proxies of its first use
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write a module with datasets and a folder of files that they could be about."""
    (tmp_path / "numbers_of_mine.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "numbers_of_mine", raising=False)
    (tmp_path / "data" / "files").mkdir(parents=True)
    (tmp_path / "data" / "files" / "a").write_text("1")
    return "numbers_of_mine"


def built(*words: str, log: Callable[[str], None] = lambda _: None) -> Any:
    """Return the dataset of a command, whose splits are of the kind that its keys ask for."""
    config, _ = resolved("data_root=data", *words)
    validate_files(config)
    return build_dataset(config, log=log)


def own(package: str, train: str = "Numbers", **keys: object) -> list[str]:
    """Return the words of a dataset of one's own, which is to be prepared."""
    words = {
        "train": train if train[0] == "{" else f"{{_target_:{package}.{train},size:300}}",
        "eval": f"{{_target_:{package}.Numbers,size:5,first:100}}",
        **{"folder": "files", "prepare": True, "num_classes": 3},
    } | keys
    if train == "Stream":
        words["train"] = f"{{_target_:{package}.Stream}}"
    return ["model=toy", "dataset=torch_dataset", *(f"dataset.{k}={v}" for k, v in words.items())]


def test_prepared_samples_are_those_that_are_loaded(package: str) -> None:
    """In two tensors, and the second time from the cache."""
    logged: list[str] = []
    prepared, again = (built(*own(package), log=logged.append) for _ in range(2))
    loaded = built(*own(package, prepare=False))
    assert len(logged) == 1
    assert isinstance(loaded.train, LoaderSplit)
    for name in ("train", "eval"):
        split, second, other = (getattr(one, name) for one in (prepared, again, loaded))
        assert isinstance(split, TensorSplit)
        (batch,) = other.load([MicroPlan(range(len(other)))], seed=0)
        assert torch.equal(split.inputs, batch[0])
        assert torch.equal(split.targets, batch[1])
        assert torch.equal(split.inputs, second.inputs)
    assert str(loaded.digest).startswith("files:")


def test_what_the_samples_follow_from_prepares_them_anew(package: str, tmp_path: Path) -> None:
    """A key, a file, the source of the class; neither the seed of the run nor what is later."""

    def prepares(*words: str, **keys: object) -> bool:
        logged: list[str] = []
        built(*own(package, **keys), *words, log=logged.append)
        return bool(logged)

    assert prepares()
    assert not prepares("seed=3")
    assert not prepares(num_workers=1)
    assert prepares(eval=f"{{_target_:{package}.Numbers,size:6,first:100}}")
    assert not prepares()
    (tmp_path / "data" / "files" / "deeper").mkdir()
    assert not prepares()
    (tmp_path / "data" / "files" / "deeper" / "b").write_text("2")
    assert prepares()
    os.utime(tmp_path / "data" / "files" / "a", (1, 1))
    assert prepares()
    with (tmp_path / f"{package}.py").open("a") as file:
        file.write("# another\n")
    assert prepares()
    assert not prepares()


def test_all_that_makes_the_samples_is_followed(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collate_fn, another module of a package, a subclass of the source, files amid a build."""
    code = "import torch\n\n\ndef {}(samples):\n    return torch.full((len(samples),), {}), {}\n"
    zeros = "torch.zeros(len(samples)).long()"
    (tmp_path / "parts_of_mine").mkdir()
    (tmp_path / "parts_of_mine" / "__init__.py").write_text("from parts_of_mine.how import a, b\n")
    how = tmp_path / "parts_of_mine" / "how.py"
    how.write_text(code.format("a", 1.0, zeros) + code.format("b", 2.0, zeros))

    def value(*words: str, **keys: object) -> float:
        data = built(*own(package, **keys), *words)
        return float(data.train.inputs[0])

    a, b = ({"collate_fn": f"{{_target_:parts_of_mine.{one},_partial_:true}}"} for one in "ab")
    assert (value(**a), value(**b)) == (1.0, 2.0)
    how.write_text(code.format("a", 3.25, zeros) + code.format("b", 2.0, zeros))
    for name in ("parts_of_mine", "parts_of_mine.how"):
        monkeypatch.delitem(sys.modules, name)
    assert value(**a) == 3.25
    (tmp_path / "sources_of_mine.py").write_text(
        "from ddp_runner.data.sources.torch_dataset import TorchDataset\n\n\n"
        "class Mine(TorchDataset):\n    pass\n"
    )
    mine = "dataset._target_=sources_of_mine.Mine"
    firsts = [f"{{_target_:{package}.Numbers,size:9,first:{one}}}" for one in (5, 6)]
    assert [value(mine, train=one) for one in firsts] == [5.0, 6.0]

    def added(split: Any, room: float) -> Any:
        Path("data", "files", f"{len(list(Path('data/files').iterdir()))}").touch()
        return prepared(split, room)

    prepared = torch_dataset.prepared
    monkeypatch.setattr(torch_dataset, "prepared", added)
    with pytest.raises(UserError, match="change again and again"):
        value(train=f"{{_target_:{package}.Numbers,size:8}}")


def test_classes_that_others_number_are_left_to_them(package: str, tmp_path: Path) -> None:
    """A target_transform makes others; a dataset may name none; a builtin has no source."""
    target = "{_target_:builtins.bool,_partial_:true}"
    write_tiny_mnist(tmp_path / "data")
    words = (f"++dataset.{one}.target_transform={target}" for one in ("train", "eval"))
    keys = ("dataset.num_classes=2", "dataset.prepare=false", "allowed_targets=[builtins]")
    assert built("dataset=mnist", *words, *keys).num_classes == 2
    builtin = "{_target_:builtins.tuple,_args_:[[1,2,3]]}"
    data = built(*own(package, train=builtin, prepare=False), "allowed_targets=[builtins]")
    assert isinstance(data.train, LoaderSplit)
    with (tmp_path / f"{package}.py").open("a") as file:
        file.write("\n\nNumbers.class_to_idx = None\n")
    built(*own(package))


def test_a_part_of_the_training_samples_is_split_off_always_alike(package: str) -> None:
    """Each sample is in one part; another fraction or seed makes another split."""
    splits = []
    for words in ((), ("seed=5",), ("dataset.prepare=false",), ("dataset.split_seed=1",)):
        data = built(*own(package, eval="null", eval_fraction=0.1), *words)
        (batch,) = data.eval.load([MicroPlan(range(len(data.eval)))], seed=0)
        splits.append(batch[0].flatten().tolist())
        (rest,) = data.train.load([MicroPlan(range(len(data.train)))], seed=0)
        assert sorted([*splits[-1], *rest[0].flatten().tolist()]) == list(range(300))
    assert len(splits[0]) == 30
    assert splits[0] == splits[1] == splits[2] != splits[3]


@pytest.mark.parametrize(
    ("train", "keys", "message"),
    [
        ("Draws", {}, "the train samples draw random numbers, and prepared they would be the same"),
        ("Growing", {}, r"from 256 on are \(2,\) of float32, and the first \(1,\) of float32"),
        ("Kinds", {}, r"from 256 on are \(\) of float64, and the first \(\) of int64; give all"),
        ("Items", {}, r"becomes a batch of type dict, and only pairs of tensors \(input, target\)"),
        ("Stream", {}, "a stream cannot be prepared"),
        (
            "Stream",
            {"eval_fraction": 0.1, "eval": "null"},
            "dataset.train is a Stream, which dataset.eval_fr",
        ),
        ("Numbers", {"eval_fraction": 0.1}, r"dataset.eval is set; write dataset.eval=null"),
        ("Numbers", {"folder": "null"}, "needs dataset.folder to notice changed files; name the"),
        ("Numbers", {"eval_fraction": 1.5, "eval": "null"}, r"\(1.5\) must be less than 1"),
        ("Numbers", {"eval": "null"}, "dataset.eval has no _target_"),
        ("Numbers", {"num_classes": 2}, "number 2 classes from 0 to 1"),
        (
            "Draws",
            {"prepare": False, "eval": "null", "eval_fraction": 0.1},
            "the training samples draw",
        ),
        ("Numbers", {"channels": 0}, r"dataset.channels \(0\) must be greater than 0"),
        (
            "Numbers",
            {"channels": 1, "mean": "[1,2]"},
            r"dataset.mean \(\[1, 2\]\) must be one number",
        ),
        (
            "Numbers",
            {"augmentation": "flip", "mean": 0},
            r"dataset.augmentation \(flip\) must be a",
        ),
        (
            "Numbers",
            {"augmentation": FLIP.replace("true", "maybe"), "mean": 0},
            r"flip \(maybe\) must be true or",
        ),
        (
            "Numbers",
            {"augmentation": FLIP},
            "changes pictures that dataset.mean and dataset.std normalise",
        ),
    ],
)
def test_what_cannot_be_is_one_line(
    train: str, keys: dict[str, object], message: str, package: str
) -> None:
    """The line has the rule, the value and what to write."""
    with pytest.raises(UserError, match=message) as caught:
        built(*own(package, train, **keys))
    assert "\n" not in str(caught.value)


def test_samples_larger_than_memory_are_found_before_they_are_loaded(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line has both sizes and the key."""
    for num_fitting, name in (
        (299, "300 train"),
        (304, "5 eval"),
    ):  # half of the memory is for both
        memory = 2 * num_fitting * (4 + 8)
        monkeypatch.setattr(torch_dataset, "memory_bytes", lambda memory=memory: memory)
        with pytest.raises(UserError, match=rf"the {name} samples take 0\.0 GiB, and half of"):
            built(*own(package))


def test_mnist_is_torchvisions_and_followed(tmp_path: Path) -> None:
    """Images are uint8 NCHW; a changed file is prepared anew; a copy has the same digest."""
    raw = write_tiny_mnist(tmp_path / "data")
    data = built("dataset=mnist")
    assert (data.train.inputs.shape, data.train.inputs.dtype) == ((6, 1, 28, 28), torch.uint8)
    assert data.train.inputs.flatten()[:7].tolist() == [0, 1, 2, 3, 4, 5, 0]
    shutil.copytree("data", "copy")
    os.utime(Path("copy/MNIST/raw") / MNIST_FILES[3], (1, 1))
    assert built("dataset=mnist", "data_root=copy").digest == data.digest is not None
    (raw / MNIST_FILES[3]).write_bytes(idx_labels([9, 8, 7]))
    os.utime(raw / MNIST_FILES[3], (1, 1))
    changed = built("dataset=mnist")
    assert changed.eval.targets.tolist() == [9, 8, 7]
    assert changed.digest != data.digest


def test_a_mistake_in_a_transform_is_no_missing_file(tmp_path: Path) -> None:
    """It is told as such, though the dataset may be downloaded."""
    write_tiny_mnist(tmp_path / "data")
    bad = "[{_target_:torchvision.transforms.v2.Resize,size:[1,2,3]}]"
    with pytest.raises(UserError, match=r"dataset.train.transform.* cannot be built") as caught:
        built("dataset=mnist", f"dataset.train.transform.transforms={bad}")
    assert "downloaded" not in str(caught.value)


def test_the_evaluation_keeps_its_own_transform(tmp_path: Path) -> None:
    """A training transform that draws at random does not reach it."""
    write_tiny_mnist(tmp_path / "data")
    crop = "{_target_:torchvision.transforms.v2.RandomCrop,size:28,padding:9}"
    both = f"[{crop},{{_target_:torchvision.transforms.v2.PILToTensor}}]"
    words = ("dataset.prepare=false", f"dataset.train.transform.transforms={both}")
    data = built("dataset=mnist", *words)
    seen = {"train": [], "eval": []}
    for name, found in seen.items():
        for epoch in range(3):
            ((inputs, _),) = getattr(data, name).load([MicroPlan(range(3), epoch)], seed=0)
            found.append(inputs)
    assert all(torch.equal(one, seen["eval"][0]) for one in seen["eval"])
    assert not all(torch.equal(one, seen["train"][0]) for one in seen["train"])


def test_grey_pixels_are_repeated_for_a_model_with_colours() -> None:
    """With dataset.channels=3."""
    write_tiny_mnist(Path("data"))
    data = built("dataset=mnist", "dataset.channels=3")
    inputs = data.train.inputs
    assert inputs.shape == (6, 3, 28, 28)
    assert torch.equal(inputs[:, 0], inputs[:, 2])


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (0, idx_images(bytes(6 * 784))[:4000], "RuntimeError: shape "),
        (0, b"\x1f\x8b\x08\x08" * 9, "AssertionError"),
        (2, None, "Connection refused"),
    ],
)
def test_a_damaged_or_missing_file_says_where_and_what_to_do(
    file: int, content: bytes | None, message: str, tmp_path: Path
) -> None:
    """The folder, the reason, ways to get whole files, and the bundled dataset."""
    path = write_tiny_mnist(tmp_path / "data") / MNIST_FILES[file]
    path.write_bytes(content) if content else path.unlink()
    with pytest.raises(UserError) as caught:
        built("dataset=mnist")
    for part in (f"can be neither read in {path.parents[1]} nor", message, "dataset=digits"):
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def images_of(seed: int, count: int = 4) -> Tensor:
    """Return random images (count, 3, 32, 32)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (count, 3, 32, 32), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize(
    ("name", "folder", "files", "key"),
    [
        ("cifar10", "cifar-10-batches-py", [f"data_batch_{n}" for n in range(1, 6)], "labels"),
        ("cifar100", "cifar-100-python", ["train"], "fine_labels"),
    ],
)
def test_cifar_is_torchvisions(
    name: str, folder: str, files: list[str], key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batches in order, normalised by channel as torchvision does it."""
    from torchvision.datasets import CIFAR10

    monkeypatch.setattr(CIFAR10, "_check_integrity", lambda self: True)  # these are not the real
    monkeypatch.setattr(CIFAR10, "_load_meta", lambda self: None)
    root = Path("data", folder)
    root.mkdir(parents=True)
    for number, file in enumerate([*files, "test_batch" if len(files) > 1 else "test"]):
        content = {"data": images_of(number).flatten(1).numpy(), key: [number] * 4}
        (root / file).write_bytes(pickle.dumps(content))
    data = built(f"dataset={name}")
    train: Any = data.train
    assert torch.equal(train.inputs, torch.cat([images_of(n) for n in range(len(files))]))
    assert train.targets.tolist() == [n for n in range(len(files)) for _ in range(4)]
    assert isinstance(data.eval, TensorSplit)
    assert data.eval.targets.tolist() == [len(files)] * 4
    mean, std = (torch.tensor(one).view(3, 1, 1) for one in (data.mean, data.std))
    expected = (train.inputs.float() / 255 - mean) / std
    torch.testing.assert_close(data.normalize(train.inputs), expected)


def test_a_batch_of_cifar_that_is_not_the_published_one_is_not_unpickled(tmp_path: Path) -> None:
    """Its MD5 is another, so that code in it does not run."""

    class Hostile:
        def __reduce__(self) -> Any:
            return os.system, (f"touch '{tmp_path / 'trace'}'",)

    root = Path("data", "cifar-10-batches-py")
    root.mkdir(parents=True)
    for name in (*(f"data_batch_{n}" for n in range(1, 6)), "test_batch", "batches.meta"):
        (root / name).write_bytes(pickle.dumps(Hostile()))
    with pytest.raises(UserError, match="can be neither read in"):
        built("dataset=cifar10")
    assert not (tmp_path / "trace").exists()


def test_nothing_of_torchvision_is_imported_for_prepared_samples() -> None:
    """A source is built without its datasets."""
    write_tiny_mnist(Path("data"))
    source = build_source(resolved("dataset=mnist", "data_root=data")[0])
    assert isinstance(source, TorchDataset)
    broken = {"build": lambda: pytest.fail("it was built")}
    built("dataset=mnist")
    ready = replace(
        source, train=replace(source.train, **broken), eval=replace(source.eval, **broken)
    )
    cached: Any = load_dataset(ready, data_root=Path("data"), log=pytest.fail)
    assert len(cached.train) == 6


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.real_data
@pytest.mark.parametrize(
    ("name", "folder"), [("mnist", "MNIST"), ("fashion_mnist", "FashionMNIST")]
)
def test_real_images_have_the_yamls_statistics(name: str, folder: str, data_root: Path) -> None:
    """The real files load, and their mean and std are those in the YAML."""
    require(data_root / folder)
    data = built(f"dataset={name}", f"data_root={data_root}")
    assert isinstance(data.train, TensorSplit)
    assert (len(data.train), len(data.eval)) == (60000, 10000)
    pixels = data.train.inputs.float() / 255
    assert float(pixels.mean()) == pytest.approx(data.mean, abs=1e-4)
    assert float(pixels.std()) == pytest.approx(data.std, abs=1e-4)
