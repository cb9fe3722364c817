"""Tar shards are indexed once and read at random places; every fault names shard and sample."""

import json
import shutil
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pictures import add, write_folders, write_shards
from rights import unreadable
from torch import Tensor

from ddp_runner.data.cache import load_dataset
from ddp_runner.data.shards import index_shards
from ddp_runner.data.sources.image_folder import ImageFolder
from ddp_runner.data.sources.shards import Shards
from ddp_runner.data.splits import Piece, Split
from ddp_runner.errors import UserError

SOURCE = Shards(
    "tars", folder="tars", num_classes=3, height=8, width=8, mean=0.5, std=0.5, num_workers=0
)
NUM_TRAIN, NUM_EVAL = 23, 4


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the test its own dataset cache."""
    monkeypatch.setenv("DDP_RUNNER_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a folder with three training shards, the last of them short, and one more."""
    write_shards(tmp_path / "tars", num_train=NUM_TRAIN, num_eval=NUM_EVAL)
    return tmp_path / "tars"


def loaded(split: Split, indices: list[int]) -> Any:
    """Return the batch of these samples."""
    (batch,) = split.load([Piece(torch.tensor(indices))], seed=0)
    return batch


@pytest.mark.parametrize("num_workers", [0, 2])
def test_samples_are_read_wherever_they_lie(num_workers: int, root: Path, tmp_path: Path) -> None:
    """The same pixels as those of the pictures in folders, and in any order."""
    write_folders(tmp_path / "pets", num_train=NUM_TRAIN, num_eval=NUM_EVAL)
    folder = ImageFolder("pets", "pets", height=8, width=8, mean=0.5, std=0.5, num_classes=3)
    expected = load_dataset(folder, data_root=tmp_path, log=print)
    source = replace(SOURCE, num_workers=num_workers)
    data = load_dataset(source, data_root=tmp_path, log=print)
    for split, other in ((data.train, expected.train), (data.eval, expected.eval)):
        assert len(split) == len(other)
        # In a folder all of the first class come first, then all of the second.
        order = sorted(range(len(split)), key=lambda number: (number % 3, number))
        inputs, targets = loaded(split, order)
        assert torch.equal(inputs, other.inputs)
        assert torch.equal(targets, other.targets)
    assert data.digest is not None


def test_the_digest_follows_the_samples_and_not_their_place(root: Path, tmp_path: Path) -> None:
    """A copy is the same; a sample whose time or size changed is another."""
    seen = [load_dataset(SOURCE, data_root=tmp_path, log=print).digest]
    shutil.copytree(root, tmp_path / "copy" / "tars")
    seen.append(load_dataset(SOURCE, data_root=tmp_path / "copy", log=print).digest)
    assert seen[0] == seen[1]
    path = root / "val-000000.tar"
    content = bytearray(path.read_bytes())
    with tarfile.open(path) as shard:
        member = shard.getmembers()[0]
    member.mtime = 1
    content[member.offset : member.offset + 512] = member.tobuf(tarfile.USTAR_FORMAT)
    path.write_bytes(content)
    assert load_dataset(SOURCE, data_root=tmp_path, log=print).digest != seen[0]


def test_the_writer_of_webdataset_is_read(tmp_path: Path) -> None:
    """Its shards, with samples of several kinds of files, and a user's own decode."""
    import webdataset

    (tmp_path / "tars").mkdir()
    for split, count in (("train", 5), ("val", 2)):
        pattern = str(tmp_path / "tars" / f"{split}-%06d.tar")
        with webdataset.ShardWriter(pattern, maxcount=3, verbose=0) as shards:
            for number in range(count):
                sample = {"__key__": f"a/{number}.5", "json": {"value": number}, "seg.txt": "x"}
                shards.write(sample | ({"txt": "odd"} if number % 2 else {}))
    assert len(list((tmp_path / "tars").glob("train-*.tar"))) == 2

    def decode(files: Mapping[str, bytes]) -> dict[str, Tensor]:
        (ending,) = (one for one in files if one.endswith("json"))
        value = json.loads(files[ending])["value"]
        return {"value": torch.tensor(value), "files": torch.tensor(len(files))}

    source = replace(SOURCE, decode=decode, num_classes=None)
    data = load_dataset(source, data_root=tmp_path, log=print)
    assert data.mean is None
    batch = loaded(data.train, [4, 1, 0])
    assert batch["value"].tolist() == [4, 1, 0]
    assert batch["files"].tolist() == [2, 3, 2]


def test_names_group_files_to_samples(tmp_path: Path) -> None:
    """By folder and name up to the first dot; what is no sample's file is left out."""
    path = tmp_path / "0.tar"
    with tarfile.open(path, "w") as shard:
        for name in ("a/1.jpg", "a/1.seg.PNG", "b/1.jpg", ".hidden", "README", "b/2.cls"):
            add(shard, name, name.encode())
        folder = tarfile.TarInfo("c.d")
        folder.type = tarfile.DIRTYPE
        shard.addfile(folder)
    index = index_shards([path, path])
    assert index.endings == ["cls", "jpg", "seg.png"]
    assert index.places.shape == (6, 7)
    assert index.places[:, 0].tolist() == [0, 0, 0, 1, 1, 1]
    assert index.places[:3, 2::2].tolist() == [[-1, 7, 11], [-1, 7, -1], [7, -1, -1]]


def truncated(root: Path) -> None:
    """Cut a shard amid a file."""
    path = root / "train-000010.tar"
    path.write_bytes(path.read_bytes()[:3000])


def compressed(root: Path) -> None:
    """Compress a shard under its old name."""
    path = root / "val-000000.tar"
    with tarfile.open(path, "w:gz") as shard:
        add(shard, "1.cls", b"1")


def empty(root: Path) -> None:
    """Leave a shard without samples."""
    tarfile.open(root / "val-000000.tar", "w").close()


def doubled(root: Path) -> None:
    """Write one file of a sample twice."""
    with tarfile.open(root / "val-000000.tar", "w") as shard:
        add(shard, "1.cls", b"1")
        add(shard, "1.cls", b"2")


def no_eval(root: Path) -> None:
    """Remove the shards of the eval split."""
    (root / "val-000000.tar").unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncated, r"/tars/train-000010\.tar cannot be read as an uncompressed tar file \(unexp"),
        (compressed, r"/tars/val-000000\.tar cannot be read as an uncompressed tar file"),
        (empty, r"/tars/val-000000\.tar holds no files such as 000017\.jpg"),
        (doubled, r"/tars/val-000000\.tar holds 1\.cls twice"),
        (no_eval, r"/tars holds no shards named val-\*\.tar; name the folder"),
    ],
)
def test_each_fault_of_a_shard_is_named(
    damage: Callable[[Path], None], message: str, root: Path, tmp_path: Path
) -> None:
    """When the index is made, in one line."""
    damage(root)
    with pytest.raises(UserError, match=f"^/.*{message}") as caught:
        load_dataset(SOURCE, data_root=tmp_path, log=print)
    assert "\n" not in str(caught.value)


def test_shards_that_cannot_be_looked_for_are_not_left_out(root: Path, tmp_path: Path) -> None:
    """The training would have fewer samples."""
    (root / "private").mkdir()
    for path in sorted(root.glob("train-*"))[:1]:
        path.rename(root / "private" / path.name)
    for place, keys in ((root, {}), (root / "private", {"train": "*/train-*.tar"})):
        with unreadable(place), pytest.raises(UserError, match=f"{place} cannot be read"):
            load_dataset(replace(SOURCE, **keys), data_root=tmp_path, log=print)


def _zeros(content: bytes, header: int) -> bytes:
    return content[:header] + bytes(512) + content[header + 512 :]


def _noise(content: bytes, header: int) -> bytes:
    return content[:header] + b"\x7f" * 512 + content[header + 512 :]


def _cut_in_header(content: bytes, header: int) -> bytes:
    return content[: header + 200]


def _cut_before_header(content: bytes, header: int) -> bytes:
    return content[:header]


@pytest.mark.parametrize("damage", [_zeros, _noise, _cut_in_header, _cut_before_header])
@pytest.mark.parametrize("member", [1, -1])
def test_a_shard_does_not_end_before_its_end_mark(
    damage: Callable[[bytes, int], bytes], member: int, root: Path, tmp_path: Path
) -> None:
    """The library that reads tar files takes a damaged header for the end."""
    path = root / "train-000000.tar"
    with tarfile.open(path) as shard:
        header = shard.getmembers()[member].offset
    path.write_bytes(damage(path.read_bytes(), header))
    message = rf"^{path} is damaged: at byte {header:,} there is neither a file nor"
    with pytest.raises(UserError, match=message):
        load_dataset(SOURCE, data_root=tmp_path, log=print)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"png": b"no picture", "cls": b"1"}, "its png cannot be read as a picture"),
        ({"png": b""}, "it has png, and must have one picture and one cls"),
        ({"png": b"", "cls": b"3"}, r"its class \(3\) must be from 0 to 2"),
        ({"png": b"", "cls": b"cat"}, r"its class \(cat\) must be from 0 to 2"),
    ],
)
def test_each_fault_of_a_sample_is_named(
    files: dict[str, bytes], message: str, root: Path, tmp_path: Path
) -> None:
    """When its turn comes, with its shard and key, in one line."""
    with tarfile.open(root / "val-000001.tar", "w") as shard:
        for ending, content in files.items():
            add(shard, f"odd/one.{ending}", content)
    data = load_dataset(SOURCE, data_root=tmp_path, log=print)
    loaded(data.eval, [0, 3])
    place = r"^/.*/tars/val-000001\.tar: sample odd/one: "
    with pytest.raises(UserError, match=place + message) as caught:
        loaded(data.eval, [0, NUM_EVAL])
    assert "\n" not in str(caught.value)


def test_a_shard_that_shrinks_meanwhile_is_named(root: Path, tmp_path: Path) -> None:
    """Another program may overwrite it while the run goes on."""
    data = load_dataset(SOURCE, data_root=tmp_path, log=print)
    with (root / "train-000000.tar").open("r+b") as file:
        file.truncate(2000)
    with pytest.raises(UserError, match=r"train-000000\.tar ends before byte .* put it back as"):
        loaded(data.train, [9])


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"num_classes": None}, r"dataset\.num_classes is missing; write dataset\.num_classes=N"),
        ({"decode": {"size": 3}}, r"dataset\.decode \(\{'size': 3\}\) cannot be called; write"),
        ({"channels": 2}, r"dataset\.channels \(2\) must be 1 \(grey\) or 3"),
        ({"folder": "elsewhere"}, r"elsewhere holds no shards named train-\*\.tar"),
    ],
)
def test_keys_that_cannot_be_are_rejected(
    keys: dict[str, object], message: str, root: Path, tmp_path: Path
) -> None:
    """The line has key, value and fix."""
    with pytest.raises(UserError, match=message):
        load_dataset(replace(SOURCE, **keys), data_root=tmp_path, log=print)
