"""A user's own pictures are found, decoded, scaled and split; every fault is reported."""

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import rights
import torch
from pictures import write_folders
from PIL import Image
from torch import Tensor

from ddp_runner.config.instantiate import make
from ddp_runner.data.cache import load_dataset
from ddp_runner.data.dataset import Dataset
from ddp_runner.data.loader import LoaderSplit
from ddp_runner.data.sources import image_folder
from ddp_runner.data.sources.image_folder import ImageFolder
from ddp_runner.data.splits import Piece, Split
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
        ({"height": 10**7, "width": 10**6, "prepared": True}, r"or use a smaller dataset\.height"),
        ({"prepared": True, "eval_transform": str}, "leaves no place for dataset.eval_tr"),
        ({"train_transform": {"size": 3}}, r"dataset\.train_transform \(\{'size': 3\}\) cannot be"),
        ({"prepared": False, "num_workers": -1}, r"dataset\.num_workers \(-1\) must be 0 or great"),
        ({"prepared": False, "prefetch_factor": 0}, r"dataset\.prefetch_factor \(0\) must be|1 or"),
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


@pytest.mark.parametrize("place", ["", "train", "train/cat"])
def test_a_folder_that_cannot_be_read_is_named(place: str, root: Path, tmp_path: Path) -> None:
    """It does not count as empty."""
    with rights.unreadable(root / place), pytest.raises(UserError, match=r"cannot be read \(Perm"):
        load_dataset(SOURCE, data_root=tmp_path, log=print)


def test_a_link_to_nowhere_is_named(root: Path, tmp_path: Path) -> None:
    """The pictures it points to may have moved."""
    link = root / "train" / "cat" / "9.png"
    link.symlink_to(tmp_path / "gone.png")
    with pytest.raises(UserError, match=r"cat/9\.png cannot be read \(No such file"):
        load_dataset(SOURCE, data_root=tmp_path, log=print)


FILES = replace(SOURCE, prepared=False, num_workers=0)


def samples(split: Split, *, epoch: int = 0, size: int = 4) -> tuple[Tensor, Tensor]:
    """Return all inputs and targets of a split, loaded in batches."""
    pieces = [
        Piece(range(start, min(start + size, len(split))), epoch)
        for start in range(0, len(split), size)
    ]
    inputs, targets = zip(*split.load(pieces, seed=5), strict=True)
    return torch.cat(inputs), torch.cat(targets)


def opened(source: ImageFolder, folder: Path) -> Dataset:
    """Return the dataset of pictures that stay in their files."""
    dataset = source.open(folder)
    assert dataset is not None
    return dataset


@pytest.mark.parametrize("num_workers", [0, 2])
def test_pictures_in_their_files_are_the_prepared_ones(
    num_workers: int, root: Path, tmp_path: Path
) -> None:
    """The same samples in the same order, classes included."""
    prepared = load_dataset(SOURCE, data_root=tmp_path, log=print)
    files = load_dataset(replace(FILES, num_workers=num_workers), data_root=tmp_path, log=print)
    for of_prepared, of_files in ((prepared.train, files.train), (prepared.eval, files.eval)):
        inputs, targets = samples(of_files)
        assert inputs.is_contiguous()
        assert torch.equal(inputs, of_prepared.inputs)
        assert torch.equal(targets, of_prepared.targets)


def test_the_size_of_the_pictures_decides(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to half of the memory they are prepared; the run says which way it takes and why."""
    needed = 7 * 3 * 8 * 6
    for memory, is_prepared in ((2 * needed, True), (2 * needed - 1, False)):
        monkeypatch.setattr(image_folder, "memory_bytes", lambda memory=memory: memory)
        dataset = load_dataset(SOURCE, data_root=tmp_path, log=print)
        assert isinstance(dataset.train, LoaderSplit) != is_prepared
        (note,) = dataset.notes
        assert ("are in the cache, since they fit" in note) == is_prepared
        assert ("decoded to 8x6 pixels they take 0.0 GiB" in note) != is_prepared
    assert opened(replace(FILES, num_workers=3), tmp_path).notes == (
        "dataset pets: 5 + 2 pictures are decoded while the model trains, by 3 workers of each "
        "rank, since dataset.prepared=false",
    )


def test_workers_default_to_the_threads_of_the_rank(root: Path, tmp_path: Path) -> None:
    """The ranks of a machine have shared its cores among them."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        train = opened(replace(FILES, num_workers=None), tmp_path).train
    finally:
        torch.set_num_threads(before)
    assert isinstance(train, LoaderSplit)
    assert train.num_workers == 3


def test_a_damaged_picture_is_named_when_its_turn_comes(root: Path, tmp_path: Path) -> None:
    """Not before; with workers and without, in one line with its path."""
    unreadable(root)
    for num_workers in (0, 1):
        train = opened(replace(FILES, num_workers=num_workers), tmp_path).train
        batches = train.load([Piece(range(1)), Piece(range(3))], seed=0)
        next(batches)
        with pytest.raises(UserError, match=r"^/.*train/cat/1\.png cannot be read as a pict.*it$"):
            next(batches)


def test_the_digest_follows_the_pictures_and_not_their_place(root: Path, tmp_path: Path) -> None:
    """A copy on another machine has other times and is the same; another size is another set."""
    seen = [opened(FILES, tmp_path).digest]
    os.utime(root / "val" / "cat" / "0.png", (1, 1))
    shutil.copytree(root, tmp_path / "elsewhere" / "pets")
    seen.append(opened(FILES, tmp_path / "elsewhere").digest)
    assert seen[0] == seen[1]
    assert str(seen[0]).startswith("files:")
    save(root / "val" / "cat" / "0.png", RED, size=(50, 50))
    assert opened(FILES, tmp_path).digest != seen[0]
    unreadable(root)
    assert len({seen[0], opened(FILES, tmp_path).digest}) == 2


def test_transforms_see_the_whole_picture(tmp_path: Path) -> None:
    """Each epoch draws anew, alike with any number of workers; the eval split has its own."""
    from torchvision import transforms

    write_folders(tmp_path / "pets", num_train=8, num_eval=3)
    seen, sizes = [], set[tuple[int, int]]()

    def noted(picture: Image.Image) -> Image.Image:
        sizes.add(picture.size)
        return picture

    for num_workers in (0, 2):
        source = replace(
            FILES,
            num_classes=3,
            num_workers=num_workers,
            train_transform=transforms.RandomResizedCrop(size=4),
            eval_transform=noted,
        )
        dataset = opened(replace(source, prepared=None), tmp_path)
        assert "since dataset.train_transform changes them" in dataset.notes[0]
        seen.append([samples(dataset.train, epoch=epoch)[0] for epoch in (0, 1)])
    samples(opened(replace(source, num_workers=0), tmp_path).eval)
    assert sizes == {(10, 10)}
    assert seen[0][0].shape == (8, 3, 4, 4)
    assert seen[0][0].dtype == torch.uint8
    assert not torch.equal(seen[0][0], seen[0][1])
    assert all(torch.equal(one, other) for one, other in zip(*seen, strict=True))


def test_a_config_names_transforms(tmp_path: Path) -> None:
    """Those of torchvision's transforms need no permission; its datasets do."""
    write_folders(tmp_path / "pets", num_train=3, num_eval=3)
    v2 = "torchvision.transforms.v2"
    transforms = [
        {"_target_": f"{v2}.RandomResizedCrop", "size": 5},
        {"_target_": f"{v2}.RandomHorizontalFlip", "p": 1.0},
    ]
    settings = {
        "_target_": "ddp_runner.data.sources.image_folder.ImageFolder",
        **{"name": "pets", "folder": "pets", "height": 8, "width": 8, "mean": 0.5, "std": 0.5},
        **{"num_classes": 3, "num_workers": 0},
        "train_transform": {"_target_": f"{v2}.Compose", "transforms": transforms},
    }
    inputs, _ = samples(opened(make("dataset", settings), tmp_path).train)
    assert inputs.shape == (3, 3, 5, 5)
    settings["train_transform"] = {"_target_": "torchvision.datasets.MNIST", "root": "x"}
    with pytest.raises(UserError, match="not a part that a config may name"):
        make("dataset", settings)
