"""Datasets of Hugging Face's library, from files and saved folders; the network is never asked."""

import importlib.util
import json
import socket
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
import torch
from configs import config_error, resolved
from pictures import write_shards
from tiers import first_of
from torch import Tensor
from torch.utils.data import default_collate

from ddp_runner.cli.plan import validate_files
from ddp_runner.data.dataset import Dataset
from ddp_runner.data.load_dataset import build_source, load_dataset
from ddp_runner.data.loader import LoaderSplit
from ddp_runner.data.sources.torch_dataset import TorchDataset
from ddp_runner.data.splits import EpochShare, MicroPlan, TensorSplit
from ddp_runner.data.stream import StreamSplit
from ddp_runner.errors import UserError

if TYPE_CHECKING:
    import datasets

SIZE, EVAL_SIZE = 17, 5


@pytest.fixture(scope="module")
def data_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the same samples as CSV, Parquet, JSON and saved datasets."""
    import datasets

    root = tmp_path_factory.mktemp("data")
    whole = rows(SIZE)
    parts = {"a": whole.select(range(6)), "b": whole.select(range(6, SIZE))}
    for name, part in {**parts, "test": rows(EVAL_SIZE)}.items():
        part.to_csv(root / f"{name}.csv")
        part.to_parquet(root / f"{name}.parquet")
        part.to_json(root / f"{name}.json")
    splits = datasets.DatasetDict(train=whole, test=rows(EVAL_SIZE))
    splits.save_to_disk(root / "saved")
    whole.save_to_disk(root / "one")
    (root / "folder").mkdir()
    whole.to_parquet(root / "folder" / "train.parquet")
    rows(EVAL_SIZE).to_parquet(root / "folder" / "test.parquet")
    return root


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fail if anything asks the network, and return the library's cache."""
    import datasets

    def no_network(*arguments: Any, **keys: Any) -> NoReturn:
        raise AssertionError(f"the network was asked: {arguments}")

    cache = tmp_path_factory.mktemp("cache")
    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(cache))
    return cache


def rows(size: int) -> "datasets.Dataset":
    """Return a dataset of numbered rows."""
    import datasets

    columns = {
        "x": [index / 2 for index in range(size)],
        "label": [index % 3 for index in range(size)],
        "number": list(range(size)),
        "text": [f"row {index}" for index in range(size)],
    }
    return datasets.Dataset.from_dict(columns)


def opened(data_root: Path, kind: str, **keys: Any) -> Dataset:
    """Return the dataset as a run loads it: saved, one, folder, or a format of files."""
    if kind in ("csv", "parquet", "json"):
        files = {"train": [f"a.{kind}", f"b.{kind}"], "test": f"test.{kind}"}
        keys = {"data_files": files} | keys
    functions = {key: keys.pop(key) for key in [*keys] if callable(keys[key])}
    words = [f"dataset.{key}={json.dumps(value)}".replace('"', "") for key, value in keys.items()]
    config, _ = resolved(
        "dataset=hf_dataset", f"data_root={data_root}", f"dataset.path={kind}", *words
    )
    validate_files(config)
    source = build_source(config)
    assert isinstance(source, TorchDataset)
    return load_dataset(replace(source, **functions), data_root=data_root, log=print)


def pair(row: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of a row."""
    return row["x"].float().reshape(1), row["number"]


KINDS = ("csv", "parquet", "json", "saved", "folder")


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_numbered_samples(kind: str, data_root: Path, offline: Path) -> None:
    """Of several files in their order; what the library writes is in its cache."""
    before = sorted(data_root.rglob("*"))
    dataset = opened(data_root, kind)
    assert isinstance(dataset.train, LoaderSplit)
    assert (len(dataset.train), len(dataset.eval)) == (SIZE, EVAL_SIZE)
    (batch,) = dataset.train.load([MicroPlan(torch.tensor([16, 2, 7]))], seed=0)
    assert batch["number"].tolist() == [16, 2, 7]
    assert batch["x"].tolist() == [8.0, 1.0, 3.5]
    assert batch["text"] == ["row 16", "row 2", "row 7"]
    assert sorted(data_root.rglob("*")) == before
    assert kind == "saved" or any(offline.iterdir())


def test_a_transform_and_columns_make_the_samples(data_root: Path) -> None:
    """The transform gets a row of the columns."""
    train = opened(data_root, "saved", transform=pair, columns=["x", "number"]).train
    assert isinstance(train, LoaderSplit)
    ((inputs, targets),) = train.load([MicroPlan(range(2, 4))], seed=0)
    assert (inputs.tolist(), targets.tolist()) == ([[1.0], [1.5]], [2, 3])


def test_rows_can_be_prepared(
    data_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, into tensors, as any other dataset; another column is prepared anew."""
    monkeypatch.setenv("DDP_RUNNER_CACHE", str(tmp_path))
    for columns in (["x", "number"], ["x", "number", "label"]):
        keys = {"prepare": True, "folder": "saved", "columns": columns, "transform": pair}
        train = opened(data_root, "saved", **keys).train
        assert isinstance(train, TensorSplit)
        assert train.targets.tolist() == list(range(SIZE))
    assert len([*tmp_path.glob("hf_dataset-*")]) == 2


def test_python_objects_without_a_format(data_root: Path) -> None:
    """As a tokenizer or a picture library wants them."""
    train = opened(data_root, "saved", format=None, collate_fn=list).train
    assert isinstance(train, LoaderSplit)
    ((row,),) = train.load([MicroPlan(range(1))], seed=0)
    assert row == {"x": 0.0, "label": 0, "number": 0, "text": "row 0"}


def test_a_part_of_the_training_split_is_evaluated(data_root: Path) -> None:
    """The same part each time, and no sample is in both."""
    for _ in range(2):
        dataset = opened(data_root, "one", eval_split=None, eval_fraction=0.25)
        numbers = [
            [int(row["number"]) for row in split.dataset] for split in (dataset.train, dataset.eval)
        ]
        assert (len(numbers[0]), len(numbers[1])) == (13, 4)
        assert sorted(numbers[0] + numbers[1]) == list(range(SIZE))
    assert numbers[1] != list(range(13, SIZE))


@pytest.mark.parametrize("num_workers", first_of([2, 0]))
@pytest.mark.parametrize("kind", first_of(KINDS, num_quick=2))
def test_rows_are_a_stream(kind: str, num_workers: int, data_root: Path) -> None:
    """Each row once over two ranks, with shards enough or too few; a transform for each row."""
    split = opened(data_root, kind, streaming=True, transform=pair, num_workers=num_workers).train
    assert isinstance(split, StreamSplit)
    found = [
        int(number)
        for rank in range(2)
        for batch in split.open(EpochShare(3, share=rank, num_shares=2, seed=0))
        for number in batch.data[1]
    ]
    assert sorted(found) == list(range(SIZE))


@pytest.mark.parametrize("num_ranks", first_of([2, 1, 4]))
@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_of_rows_goes_on_from_each_state(
    kind: str, num_ranks: int, data_root: Path
) -> None:
    """By the library's own state of its files, also where it reads many rows at once."""
    split = opened(data_root, kind, streaming=True, columns=["number", "x"], shuffle_buffer=4).train
    assert isinstance(split, StreamSplit)
    assert_goes_on(split, EpochShare(2, share=num_ranks - 1, num_shares=num_ranks, seed=0, epoch=1))


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_a_stream_of_tar_shards_goes_on_from_each_state(
    num_ranks: int, tmp_path: Path, offline: Path
) -> None:
    """With three shards, enough for the ranks or too few; nothing is copied."""
    write_shards(tmp_path, num_train=23, num_eval=4)
    files = {"train": "train-*.tar", "test": "val-*.tar"}
    split = opened(tmp_path, "webdataset", data_files=files, columns=["__key__"], streaming=True)
    assert isinstance(split.train, StreamSplit)
    found = [
        key
        for rank in range(num_ranks)
        for batch in assert_goes_on(
            split.train, EpochShare(2, share=rank, num_shares=num_ranks, seed=0)
        )
        for key in batch
    ]
    assert sorted(found) == [f"{number:06d}" for number in range(23)]
    assert not any(offline.rglob("*.arrow"))


def assert_goes_on(split: StreamSplit, part: EpochShare) -> list[list[Any]]:
    """Assert that a rank's stream goes on from each place; return its batches' first column."""
    whole = [first_column(batch.data) for batch in split.open(part)]
    for taken in range(len(whole) + 1):
        stream = split.open(part)
        before = [first_column(next(stream).data) for _ in range(taken)]
        after = [first_column(batch.data) for batch in split.open(part, state=stream.state())]
        assert before + after == whole
    return whole


def first_column(batch: Mapping[str, Any]) -> list[Any]:
    """Return the values of a batch's first column."""
    return list(next(iter(batch.values())))


WRONG = {
    "no such path": (("nowhere", {}), r"dataset\.path \(nowhere\) is neither a folder under /"),
    "not on the hub": (("me/nowhere", {}), r"dataset\.path=me/nowhere: .* there is no /.*/nowhere"),
    "pickles": (("pandas", {"data_files": "a.pkl"}), r"dataset\.path \(pandas\) is neither "),
    "no such file": (("csv", {"data_files": "no.csv"}), r"cannot be loaded \(FileNotFoundError"),
    "no such split": (("folder", {"eval_split": "val"}), r"the split val .* one of \['train'"),
    "no such saved split": (("saved", {"eval_split": "val"}), "has no split val, only train, test"),
    "one saved split": (("one", {}), r"holds one split; write dataset\.eval_split=null"),
    "no such column": (("saved", {"columns": ["z"]}), "no column z, only x, label, number, text"),
    "no such stream": (("folder", {"streaming": True, "eval_split": "val"}), "Bad split: val"),
    "no length": (("saved", {"streaming": True, "eval_split": None}), "name a split in dataset"),
    "no fraction": (("saved", {"eval_split": None, "eval_fraction": 1.5}), "must be less than 1"),
    "too small": (("saved", {"eval_split": None, "eval_fraction": 0.999}), "leaves a split empty"),
    "not callable": (("saved", {"transform": "pair"}), r"dataset\.transform \(pair\) cannot be"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_is_one_line(name: str, data_root: Path) -> None:
    """With what there is, and the key to write."""
    (kind, keys), message = WRONG[name]
    with pytest.raises(UserError, match=message) as raised:
        opened(data_root, kind, **keys)
    assert len(str(raised.value).splitlines()) == 1


def test_a_damaged_file_is_named_with_its_cause(data_root: Path, tmp_path: Path) -> None:
    """The library only says that an error occurred."""
    content = (data_root / "a.parquet").read_bytes()
    middle = len(content) // 4
    damaged = tmp_path / "a.parquet"
    damaged.write_bytes(content[:middle] + b"\x55" * 60 + content[middle + 60 :])
    with pytest.raises(UserError, match=r"the split train cannot be loaded \((?!DatasetGen)\w+: "):
        opened(data_root, "parquet", data_files={"train": str(damaged), "test": "test.parquet"})


def test_what_is_missing_is_told_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path, and the packages of the extras."""
    assert "dataset.path has no value; write dataset.path=" in config_error("dataset=hf_dataset")
    keys = ("dataset=hf_dataset", "dataset.path=csv")
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "torchdata" else find_spec(name)
    )
    assert "pip install 'ddp-runner[streams]'" in config_error(*keys, "dataset.streaming=true")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert config_error(*keys) == (
        "dataset=hf_dataset needs datasets, which is not installed; pip install 'ddp-runner[hf]'"
    )


def test_a_version_that_runs_code_is_rejected(
    data_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the dataset is."""
    import datasets

    monkeypatch.setattr(datasets, "__version__", "5.1.0")
    with pytest.raises(UserError, match=r"needs datasets 5\.2 or later, not 5\.1\.0; "):
        opened(data_root, "saved")


def test_a_batch_of_rows_is_what_torch_makes_of_them(data_root: Path) -> None:
    """The same with `__getitems__`, which the library offers, as row by row."""
    train = opened(data_root, "parquet", columns=["x", "number"]).train
    assert isinstance(train, LoaderSplit)
    (many,) = train.load([MicroPlan(range(3))], seed=0)
    single = default_collate([train.dataset[index] for index in range(3)])
    assert all(torch.equal(many[key], single[key]) for key in ("x", "number"))
