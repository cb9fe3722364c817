"""A user's own pictures are found, decoded, scaled and split; every fault is reported."""

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from ddp_runner.data.cache import load_dataset
from ddp_runner.data.sources.image_folder import ImageFolder
from ddp_runner.errors import UserError

ODD = "a b=1,c='d' {é} 猫"
SOURCE = ImageFolder(
    "pets", folder="pets", height=8, width=6, mean=0.5, std=[0.2, 0.3, 0.4], num_classes=2
)
RED, BLUE = (254, 0, 0), (0, 0, 254)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the test its own dataset cache."""
    monkeypatch.setenv("DDP_RUNNER_CACHE", str(tmp_path / "cache"))


def save(path: Path, colour: tuple[int, ...], *, size: tuple[int, int] = (12, 16)) -> None:
    """Write a picture of one colour."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a folder with cats and dogs: 3 + 2 pictures to train, 1 + 1 to evaluate."""
    folder = tmp_path / "pets"
    for number in range(3):
        save(folder / "train" / "cat" / f"{number}.png", RED)
    save(folder / "train" / "dog" / "deeper" / "0.PNG", BLUE)
    save(folder / "train" / "dog" / "1.jpeg", BLUE)
    save(folder / "val" / "cat" / "0.png", RED)
    save(folder / "val" / "dog" / "0.bmp", BLUE)
    (folder / "train" / "cat" / "notes.txt").write_text("not a picture")
    save(folder / "train" / ".thumbnails" / "0.png", RED)
    return folder


def test_pictures_become_scaled_samples(root: Path, tmp_path: Path) -> None:
    """Classes are numbered by name, colours stay, and both splits have the configured shape."""
    data = load_dataset(SOURCE, data_root=tmp_path, log=print)
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
    for split in ("train", "eval"):
        for name in ("wide", "lying"):
            (tmp_path / "pets" / split / name).mkdir(parents=True)
        wide.save(tmp_path / "pets" / split / "wide" / "0.png")
        lying.save(tmp_path / "pets" / split / "lying" / "0.png", exif=tags)
    source = replace(SOURCE, height=10, width=10)
    turned, cut = load_dataset(source, data_root=tmp_path, log=print).eval.inputs
    assert (cut[0] == 254).all()
    assert (cut[2] == 0).all()
    assert (turned[0, :4] > 200).all()
    assert (turned[2, 6:] > 200).all()


def test_odd_names_and_grey_pictures_work(root: Path, tmp_path: Path) -> None:
    """Folders and files may have any name; one channel is the brightness."""
    odd = tmp_path / ODD
    shutil.move(root, odd)
    for split in ("train", "val"):
        (odd / split / "dog").rename(odd / split / ODD)
    (odd / "train" / "cat" / "0.png").rename(odd / "train" / "cat" / f"{ODD}.png")
    source = replace(SOURCE, folder=ODD, channels=1, std=0.5)
    data = load_dataset(source, data_root=tmp_path, log=print)
    assert data.train.inputs.shape == (5, 1, 8, 6)
    assert data.train.targets.tolist() == [0, 0, 1, 1, 1]  # "a b…" comes before "cat"
    assert data.train.inputs.flatten(1).float().std(dim=1).max() < 1


def test_one_tree_is_split_always_alike(tmp_path: Path) -> None:
    """The split is fixed, each picture is in one part, and another fraction has another cache."""
    for number in range(20):
        save(tmp_path / "pets" / ("cat", "dog")[number % 2] / f"{number}.png", (number, 0, 0))
    source = replace(SOURCE, eval_fraction=0.25)
    first, second = (source.build(tmp_path) for _ in range(2))
    assert all(torch.equal(first[key], second[key]) for key in first)
    train, rest = (first[f"{split}_inputs"][:, 0, 0, 0].tolist() for split in ("train", "eval"))
    assert len(rest) == 5
    assert sorted(train + rest) == list(range(20))
    assert first["eval_targets"].tolist() == [number % 2 for number in rest]
    half = replace(source, eval_fraction=0.5)
    assert half.fingerprint(tmp_path) != source.fingerprint(tmp_path)


def test_changed_files_are_prepared_anew(root: Path, tmp_path: Path) -> None:
    """Another picture or modification time is another dataset; augmentation is not."""
    seen = [SOURCE.fingerprint(tmp_path)]
    save(root / "train" / "cat" / "9.png", RED)
    seen.append(SOURCE.fingerprint(tmp_path))
    os.utime(root / "val" / "cat" / "0.png", (1, 1))
    seen.append(SOURCE.fingerprint(tmp_path))
    assert len({str(one) for one in seen}) == 3
    assert SOURCE.fingerprint(tmp_path) == seen[-1]


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


def both_evals(root: Path) -> None:
    """Leave both possible folders."""
    (root / "eval").mkdir()


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


@pytest.mark.parametrize(
    ("damage", "place", "message"),
    [
        (unreadable, "train/cat/1.png", "cannot be read as a picture (UnidentifiedImageError"),
        (truncated, "val/dog/0.bmp", "cannot be read as a picture (OSError"),
        (deep, "train/cat/1.png", "mode I;16: more than 8 bits a channel"),
        (no_classes, "train", "holds 0 folders of classes, dataset.num_classes is 2; add pictures"),
        (no_eval, "", "must hold train/CLASS/ and either val/CLASS/ or eval/CLASS/"),
        (both_evals, "", "must hold train/CLASS/ and either val/CLASS/ or eval/CLASS/"),
        (other_classes, "val", "differ: dog, hound is in only one of them"),
        (empty_class, "val/dog", "holds no picture"),
        (third_class, "train", "holds 3 folders of classes, dataset.num_classes is 2; write dat"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_each_fault_is_named(
    damage: Callable[[Path], None], place: str, message: str, root: Path, tmp_path: Path
) -> None:
    """The line has the file or folder, the fault and the fix."""
    damage(root)
    with pytest.raises(UserError) as caught:
        load_dataset(SOURCE, data_root=tmp_path, log=print)
    assert str(root / place) in str(caught.value)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"channels": 2}, r"dataset\.channels \(2\) must be 1 \(grey\) or 3"),
        ({"channels": 1}, r"dataset\.std \(\[0\.2, 0\.3, 0\.4\]\) must be one number, or one for"),
        ({"height": 0}, r"dataset\.height \(0\) must be at least 1"),
        ({"eval_fraction": 1.5}, r"dataset\.eval_fraction \(1\.5\) must be between 0 and 1"),
        ({"height": 10**7, "width": 10**6}, r"use a smaller dataset\.height and dataset\.width"),
        ({"folder": "pets/train", "eval_fraction": 0.01}, "leaves a split empty"),
        ({"folder": "birds"}, r"birds must hold train/CLASS/"),
    ],
)
def test_keys_that_cannot_be_are_rejected(
    keys: dict[str, object], message: str, root: Path, tmp_path: Path
) -> None:
    """The line has key, value and rule; a dataset larger than memory is found before decoding."""
    with pytest.raises(UserError, match=message):
        load_dataset(replace(SOURCE, **keys), data_root=tmp_path, log=print)


def test_a_link_to_nowhere_is_named(root: Path, tmp_path: Path) -> None:
    """The pictures it points to may have moved."""
    link = root / "train" / "cat" / "9.png"
    link.symlink_to(tmp_path / "gone.png")
    with pytest.raises(UserError, match=r"cat/9\.png cannot be read \(No such file"):
        load_dataset(SOURCE, data_root=tmp_path, log=print)
