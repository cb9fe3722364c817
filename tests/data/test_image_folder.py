"""A user's own pictures are found, decoded, scaled and split; every fault is reported."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import rights
import torch
from configs import config_error, resolved
from pictures import write_folders
from PIL import Image
from torch import Tensor

from ddp_runner.data.dataset import Dataset
from ddp_runner.data.load_dataset import build_dataset, build_source
from ddp_runner.data.loader import LoaderSplit
from ddp_runner.data.splits import MicroPlan
from ddp_runner.errors import UserError

ODD = "a b=1,c='d' {é} 猫"
RED, BLUE = (254, 0, 0), (0, 0, 254)
PETS = (
    "model=resnet18",
    "dataset=image_folder",
    "dataset.folder=pets",
    "data_root=data",
    "dataset.height=8",
    "dataset.width=6",
    "dataset.num_classes=2",
    "dataset.mean=0.5",
    "dataset.std=[0.2,0.3,0.4]",
    "dataset.num_workers=0",
)


@pytest.fixture(autouse=True)
def own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the test its own dataset cache and data folder."""
    monkeypatch.setenv("DDP_RUNNER_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def built(*words: str) -> Dataset:
    """Return the dataset of pets with some keys more."""
    return build_dataset(resolved(*PETS, *words)[0], log=lambda _: None)


def samples(split: Any, *, epoch: int = 0, size: int = 4) -> tuple[Tensor, Tensor]:
    """Return all inputs and targets of a split, loaded in batches."""
    starts = range(0, len(split), size)
    pieces = [MicroPlan(range(start, min(start + size, len(split))), epoch) for start in starts]
    inputs, targets = zip(*split.load(pieces, seed=5), strict=True)
    return torch.cat(inputs), torch.cat(targets)


def save(path: Path, colour: tuple[int, ...], *, size: tuple[int, int] = (12, 16)) -> None:
    """Write a picture of one colour."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a folder with cats and dogs: 3 + 2 pictures to train, 1 + 1 to evaluate."""
    folder = tmp_path / "data" / "pets"
    for number in range(3):
        save(folder / "train" / "cat" / f"{number}.png", RED)
    save(folder / "train" / "dog" / "deeper" / "0.PNG", BLUE)
    save(folder / "train" / "dog" / "1.jpeg", BLUE)
    save(folder / "val" / "cat" / "0.png", RED)
    save(folder / "val" / "dog" / "0.bmp", BLUE)
    (folder / "train" / "cat" / "notes.txt").write_text("not a picture")
    return folder


def test_pictures_become_scaled_samples(root: Path) -> None:
    """Classes are numbered by name, colours stay, and both splits have the configured shape."""
    data: Any = built()
    assert data.train.inputs.shape == (5, 3, 8, 6)
    assert data.eval.inputs.shape == (2, 3, 8, 6)
    assert data.train.targets.tolist() == [0, 0, 0, 1, 1]
    assert data.eval.targets.tolist() == [0, 1]
    red = data.train.inputs[data.train.targets == 0]
    assert red.amin(dim=(0, 2, 3)).tolist() == red.amax(dim=(0, 2, 3)).tolist() == [254, 0, 0]
    expected = (data.eval.inputs[0, :, 0, 0] / 255 - 0.5) / torch.tensor([0.2, 0.3, 0.4])
    torch.testing.assert_close(data.normalize(data.eval.inputs)[0, :, 0, 0], expected)


def test_the_shorter_side_is_scaled_and_the_middle_kept(tmp_path: Path) -> None:
    """A wide picture loses its sides; a photograph is turned upright by its EXIF tag."""
    wide = Image.new("RGB", (30, 10), BLUE)
    wide.paste(RED, (10, 0, 20, 10))
    lying = Image.new("RGB", (16, 8), BLUE)  # 8 wide and 16 high, upper half red, once turned
    lying.paste(RED, (0, 0, 8, 8))
    tags = Image.Exif()
    tags[0x0112] = 6  # orientation: turn right
    for split in ("train", "val"):
        for name in ("wide", "lying"):
            (tmp_path / "data" / "pets" / split / name).mkdir(parents=True)
        wide.save(tmp_path / "data" / "pets" / split / "wide" / "0.png")
        lying.save(tmp_path / "data" / "pets" / split / "lying" / "0.png", exif=tags)
    data: Any = built("dataset.height=10", "dataset.width=10")
    turned, cut = data.eval.inputs
    assert (cut[0] == 254).all()
    assert (cut[2] == 0).all()
    assert (turned[0, :4] > 200).all()
    assert (turned[2, 6:] > 200).all()


def test_odd_names_and_grey_pictures_work(root: Path, tmp_path: Path) -> None:
    """Folders and files may have any name; one channel is the brightness."""
    odd = tmp_path / "data" / ODD
    shutil.move(root, odd)
    for split in ("train", "val"):
        (odd / split / "dog").rename(odd / split / ODD)
    (odd / "train" / "cat" / "0.png").rename(odd / "train" / "cat" / f"{ODD}.png")
    config = resolved(*PETS, "dataset.channels=1", "dataset.std=0.5")[0]
    for name, split in (("train", "train"), ("eval", "val")):
        config.dataset[name]["root"] = str(odd / split)
    data: Any = build_dataset(config, log=lambda _: None)
    assert data.train.inputs.shape == (5, 1, 8, 6)
    assert data.train.targets.tolist() == [0, 0, 1, 1, 1]  # "a b…" comes before "cat"
    assert data.train.inputs.flatten(1).float().std(dim=1).max() < 1


def test_one_tree_is_split(tmp_path: Path) -> None:
    """Each picture is in one part, and keeps its class and its name."""
    for number in range(20):
        save(
            tmp_path / "data" / "pets" / ("cat", "dog")[number % 2] / f"{number}.png",
            (number, 0, 0),
        )
    words = ("dataset.train.root=data/pets", "dataset.eval=null", "dataset.eval_fraction=0.25")
    data: Any = built(*words)
    train, rest = (split.inputs[:, 0, 0, 0].tolist() for split in (data.train, data.eval))
    assert len(rest) == 5
    assert sorted(train + rest) == list(range(20))
    assert data.eval.targets.tolist() == [number % 2 for number in rest]
    source = build_source(resolved(*PETS, *words)[0])
    expected = [f"{('cat', 'dog')[number % 2]}/{number}.png" for number in rest]
    assert source.sample_names(Path("data"))["eval"] == expected


def unreadable(root: Path) -> None:
    """Write text into a picture's file."""
    (root / "train" / "cat" / "1.png").write_text("no picture")


def truncated(root: Path) -> None:
    """Cut a picture in half."""
    path = root / "val" / "dog" / "0.bmp"
    path.write_bytes(path.read_bytes()[:300])


def deep(root: Path) -> None:
    """Write a picture with 16 bits per pixel."""
    Image.new("I;16", (8, 8)).save(root / "train" / "cat" / "1.png")


def no_classes(root: Path) -> None:
    """Leave pictures without class folders."""
    shutil.rmtree(root / "train")
    save(root / "train" / "0.png", RED)


def no_eval(root: Path) -> None:
    """Leave only training pictures."""
    shutil.rmtree(root / "val")


def other_classes(root: Path) -> None:
    """Rename a class in one split."""
    (root / "val" / "dog").rename(root / "val" / "hound")


def empty_class(root: Path) -> None:
    """Leave a class without pictures."""
    for path in (root / "val" / "dog").iterdir():
        path.rename(path.with_suffix(".txt"))


def third_class(root: Path) -> None:
    """Add one class more than num_classes."""
    for split in ("train", "val"):
        save(root / split / "emu" / "0.png", RED)


def dangling(root: Path) -> None:
    """Leave a link to a picture that has moved."""
    (root / "train" / "cat" / "9.png").symlink_to(root / "gone.png")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (unreadable, "train/cat/1.png cannot be read as a picture (UnidentifiedImageError"),
        (truncated, "val/dog/0.bmp cannot be read as a picture (OSError"),
        (deep, "train/cat/1.png cannot be read as a picture (ValueError: mode I;16: more than 8"),
        (no_classes, "dataset.train (torchvision.datasets.ImageFolder) cannot be built: Couldn't"),
        (no_eval, "cannot be built: [Errno 2] No such file or directory: 'data/pets/val'"),
        (other_classes, "dataset.train and dataset.eval differ: dog, hound is in only one of them"),
        (empty_class, "Found no valid file for the classes dog"),
        (
            third_class,
            "dataset=image_folder has 3 classes, and dataset.num_classes is 2; write dat",
        ),
        (dangling, "data/pets cannot be read (No such file or directory)"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_each_fault_is_named(damage: Callable[[Path], None], message: str, root: Path) -> None:
    """The line has the file or folder, the fault and the fix."""
    damage(root)
    with pytest.raises(UserError) as caught:
        built()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_that_is_not_there_is_named_before_anything_starts() -> None:
    """With its whole path."""
    assert "dataset.folder (pets): there is no folder " in config_error(*PETS)


@pytest.mark.parametrize("place", ["", "train", "train/cat"])
def test_a_folder_that_cannot_be_read_is_named(place: str, root: Path) -> None:
    """It does not count as empty."""
    with rights.unreadable(root / place), pytest.raises(UserError, match=r"be read \(Permission"):
        built()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_pictures_in_their_files_are_the_prepared_ones(num_workers: int, root: Path) -> None:
    """The same samples in the same order, classes included."""
    prepared: Any = built()
    files = built("dataset.prepare=false", f"dataset.num_workers={num_workers}")
    for of_prepared, of_files in ((prepared.train, files.train), (prepared.eval, files.eval)):
        inputs, targets = samples(of_files)
        assert inputs.is_contiguous()
        assert torch.equal(inputs, of_prepared.inputs)
        assert torch.equal(targets, of_prepared.targets)


def test_pictures_behind_a_link_and_outside_the_folder_are_followed(
    root: Path, tmp_path: Path
) -> None:
    """The training pictures are on another disk, those of the evaluation in another folder."""
    (root / "train").rename(tmp_path / "disk")
    (root / "train").symlink_to(tmp_path / "disk")
    (root / "val").rename(tmp_path / "test")
    words = (f"dataset.eval.root={tmp_path / 'test'}",)

    def sizes() -> tuple[int, int, object]:
        data: Any = built(*words)
        return len(data.train), len(data.eval), built(*words, "dataset.prepare=false").digest

    before = sizes()
    assert before[:2] == (5, 2)
    save(tmp_path / "disk" / "cat" / ".hidden.png", RED)
    save(tmp_path / "test" / "cat" / "9.png", RED)
    after = sizes()
    assert after[:2] == (6, 3)
    assert after[2] != before[2]


def test_two_channels_are_a_mistake_of_the_key_and_not_of_the_picture(root: Path) -> None:
    """The line does not ask to remove it."""
    with pytest.raises(UserError, match=r"dataset.channels \(2\) must be 1 \(grey\) or 3"):
        built("dataset.channels=2", "dataset.std=0.5")


def test_workers_default_to_the_threads_of_the_rank(root: Path) -> None:
    """The ranks of a machine have shared its cores among them."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        train = built("dataset.prepare=false", "dataset.num_workers=null").train
    finally:
        torch.set_num_threads(before)
    assert isinstance(train, LoaderSplit)
    assert train.num_workers == 3


def test_a_damaged_picture_is_named_when_its_turn_comes(root: Path) -> None:
    """Not before; with workers and without, in one line with its path."""
    unreadable(root)
    for num_workers in (0, 1):
        train: Any = built("dataset.prepare=false", f"dataset.num_workers={num_workers}").train
        batches = train.load([MicroPlan(range(1)), MicroPlan(range(3))], seed=0)
        next(batches)
        with pytest.raises(UserError, match=r"^data.*train/cat/1\.png cannot be read as a pic.*it"):
            next(batches)


def test_the_digest_follows_the_pictures_and_not_their_place(root: Path) -> None:
    """A copy on another machine has other times and is the same; another size is another set."""
    first = built("dataset.prepare=false").digest
    shutil.copytree("data", "elsewhere", copy_function=shutil.copyfile)
    assert built("dataset.prepare=false", "data_root=elsewhere").digest == first
    assert str(first).startswith("files:")
    save(root / "val" / "cat" / "0.png", RED, size=(50, 50))
    assert built("dataset.prepare=false").digest != first


def test_transforms_see_the_whole_picture(tmp_path: Path) -> None:
    """Each epoch draws anew, alike with any number of workers; prepared they are rejected."""
    write_folders(tmp_path / "data" / "pets", num_train=8, num_eval=3)
    v2 = "torchvision.transforms.v2"
    transforms = [
        {"_target_": f"{v2}.RandomResizedCrop", "size": 4},
        {"_target_": f"{v2}.PILToTensor"},
    ]

    def with_crops(*words: str) -> Dataset:
        config = resolved(*PETS, "dataset.num_classes=3", *words)[0]
        config.dataset["train"]["transform"]["transforms"] = transforms
        return build_dataset(config, log=lambda _: None)

    seen = []
    for num_workers in (0, 2):
        train = with_crops("dataset.prepare=false", f"dataset.num_workers={num_workers}").train
        seen.append([samples(train, epoch=epoch)[0] for epoch in (0, 1)])
    assert seen[0][0].shape == (8, 3, 4, 4)
    assert seen[0][0].dtype == torch.uint8
    assert not torch.equal(seen[0][0], seen[0][1])
    assert all(torch.equal(one, other) for one, other in zip(*seen, strict=True))
    with pytest.raises(UserError, match="the train samples draw random numbers"):
        with_crops()
