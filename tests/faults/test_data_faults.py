"""Missing, damaged and wrong data: real commands, and the error lines of their ranks."""

import json
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from commands import CommandResult, background, error_line, run_command, wait_for, wait_for_end
from injection import flip_bits, truncate
from real_data import idx_images, idx_labels, write_tiny_mnist
from run_folders import rank_log, record
from texts import HEADER, TINY_BERT, write_reviews, write_rows
from tiers import first_of

from ddp_runner.data.load_dataset import FORMAT_VERSION

IMAGES = ("model=mnist_net", "train.num_threads=1", "train.max_steps=1", "batch.global_size=2")
IDX = (*IMAGES, "dataset=mnist", "data_root=data", "world_size=2")
FAKE = (*IMAGES, "dataset=fake_images", "dataset.num_samples=32", "world_size=1")
TEXT = (
    *TINY_BERT,
    "dataset.path=texts.csv",
    "batch.global_size=4",
    "train.max_steps=1",
    "train.num_threads=1",
    "data_root=data",
)
GRACE_S = 1.0  # for a run that is about to ask for its data


def command(*args: str, folder: Path, **environ: str) -> CommandResult:
    """Run a command to its end, with a dataset cache of its own."""
    own = {"DDP_RUNNER_CACHE": str(folder / "cache"), **environ}
    return run_command(*args, folder=folder, environ=own)


def data_error(end: CommandResult) -> str:
    """Return the error line of a rank, which is also in run.json and in logs/failure.txt."""
    sentence = error_line(end)
    fields = record(end.run_dir)
    assert (fields["status"], fields["error"]["kind"]) == ("failed", "user")
    assert fields["error"]["sentence"] == sentence
    assert sentence in (end.run_dir / "logs" / "failure.txt").read_text()
    assert not any((end.run_dir / "checkpoints").glob("*"))
    return sentence


# The content of a file for six train images or their labels, and a part of the error line.
DAMAGED = {
    "truncated": ("train-images-idx3-ubyte", idx_images(bytes(6 * 784))[:4000], "RuntimeError: "),
    "no_network": ("t10k-labels-idx1-ubyte", None, "Connection refused"),
    "label_out_of_range": (
        "train-labels-idx1-ubyte",
        idx_labels([0, 1, 2, 3, 10, 5]),
        "the train targets of dataset=mnist go from 0 to 10; number 10 classes from 0 to 9",
    ),
    "fewer_labels_than_images": (
        "train-labels-idx1-ubyte",
        idx_labels(range(5)),
        "the train sample 5 cannot be loaded: IndexError: ",
    ),
}


@pytest.mark.parametrize("row", first_of(DAMAGED))
def test_a_damaged_or_missing_file_is_reported(row: str, tmp_path: Path) -> None:
    """Its folder, the reason, and what to do; or the sample."""
    raw = write_tiny_mnist(tmp_path / "data")
    name, content, part = DAMAGED[row]
    (raw / name).write_bytes(content) if content else (raw / name).unlink()
    nowhere = "http://127.0.0.1:9"  # the discard port, where nothing listens
    sentence = data_error(
        command(*IDX, folder=tmp_path, https_proxy=nowhere, http_proxy=nowhere, no_proxy="")
    )
    assert part in sentence
    if row in ("truncated", "no_network"):
        assert f"can be neither read in {raw.parent} nor downloaded: " in sentence
        assert "or use dataset=digits, which is bundled" in sentence


@pytest.mark.full
def test_fewer_samples_than_ranks_are_an_error(tmp_path: Path) -> None:
    """One of two ranks would have none in each step."""
    raw = write_tiny_mnist(tmp_path / "data")
    (raw / "train-images-idx3-ubyte").write_bytes(idx_images(bytes(784)))
    (raw / "train-labels-idx1-ubyte").write_bytes(idx_labels([3]))
    sentence = data_error(command(*IDX, folder=tmp_path))
    expected = "dataset=mnist has 1 training samples and world_size is 2; use world_size=1 or less"
    assert sentence.startswith(expected)


ROWS: list[tuple[object, ...]] = [HEADER, (1, "a b"), (0, "c d"), (1, "é f"), (0, "g h")]
FAULTY_CSV: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing_column": (
        lambda path: write_rows(path, [("label", "text"), *ROWS[1:]]),
        " has the columns label, text and not review; name two in dataset.text and dataset.label",
    ),
    "bad_label": (
        lambda path: write_rows(path, [*ROWS, ("yes", "i j")]),
        ", line 6, column label: yes is not a class from 0 to 1; correct it, or "
        "increase dataset.num_classes",
    ),
    "another_encoding": (
        lambda path: write_rows(path, ROWS, encoding="latin-1"),
        ", line 4: not utf-8; save the file as utf-8, or name its encoding, as in "
        "dataset.encoding=gb18030",
    ),
    "empty_rows_alone": (
        lambda path: write_rows(path, [HEADER, (), (1, ""), ("", "a")]),
        " has no row with both review and label; add some",
    ),
}


@pytest.mark.parametrize("row", first_of(FAULTY_CSV))
def test_a_faulty_csv_is_reported_by_row_and_column(row: str, tmp_path: Path) -> None:
    """The answer names the file, the line, the column and the fix."""
    write, part = FAULTY_CSV[row]
    (tmp_path / "data").mkdir()
    write(tmp_path / "data" / "texts.csv")
    sentence = data_error(command(*TEXT, "world_size=2", folder=tmp_path))
    assert sentence == f"data/texts.csv{part}"


def test_empty_csv_rows_are_skipped_and_counted(tmp_path: Path) -> None:
    """The run completes without them."""
    (tmp_path / "data").mkdir()
    path = write_reviews(tmp_path / "data" / "texts.csv", num_rows=20)
    with path.open("a") as file:
        file.write("\n1,\n,a\n")
    end = command(*TEXT, "world_size=1", folder=tmp_path)
    assert (end.exit_code, end.stderr) == (0, "")
    warning = "texts.csv: 3 rows without review or label are left out"
    assert (end.stdout.count(warning), rank_log(end.run_dir).count(warning)) == (1, 1)


def set_old_version(folder: Path) -> None:
    """Mark a cache as written by an older version of the program."""
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"format_version": 1}))


# The damage to a cache's folder, and the reason that the log gives.
CACHES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "flipped": (lambda folder: flip_bits(folder / "tensors.pt", 5000), "sha256 is "),
    "cut": (lambda folder: truncate(folder / "tensors.pt", 1000), "sha256 is "),
    "version": (set_old_version, f"format_version is {FORMAT_VERSION}, manifest.json has 1"),
    "manifest": (
        lambda folder: truncate(folder / "manifest.json", 9),
        "manifest.json or tensors.pt cannot be read",
    ),
    "tensors_gone": (
        lambda folder: (folder / "tensors.pt").unlink(),
        "manifest.json or tensors.pt cannot be read",
    ),
}


@pytest.mark.parametrize(
    "names",
    first_of(
        [["flipped", "version"], ["cut", "manifest", "tensors_gone"]], num_quick=0, num_full=1
    ),
)
def test_a_damaged_or_old_cache_is_rebuilt_with_a_message(
    names: Sequence[str], tmp_path: Path
) -> None:
    """It is rebuilt once, with the reason; all runs have the same numbers."""
    first = command(*FAKE, "hydra.run.dir=first", folder=tmp_path)
    assert first.exit_code == 0
    assert first.stdout.count("preparing it, once") == 1
    (cache,) = [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    tensors = (cache / "tensors.pt").read_bytes()
    for name in names:
        damage, reason = CACHES[name]
        damage(cache)
        end = command(*FAKE, f"hydra.run.dir={name}", folder=tmp_path)
        assert (end.exit_code, end.stderr) == (0, "")
        (line,) = [line for line in end.stdout.splitlines() if "rebuilding" in line]
        assert line.startswith(f"dataset fake_images: rebuilding the cache in {cache} ({reason}")
        assert line in rank_log(tmp_path / name)
        assert (cache / "tensors.pt").read_bytes() == tensors
    last = command(*FAKE, "hydra.run.dir=last", folder=tmp_path)
    assert (last.exit_code, "rebuilding" in last.stdout, "once" in last.stdout) == (0, False, False)
    losses = {record(path)["metrics"]["eval/loss"] for path in last.run_dirs}
    assert len(losses) == 1


def slow_build() -> None:
    """Let the preparation of fake images last until another command asks for them, too."""
    from ddp_runner.data.sources.offline import FakeImages

    build = FakeImages.build

    def wait_and_build(self: FakeImages, data_root: Path) -> Any:
        Path("building").touch()
        # The other commands' folders are beside this folder.
        wait_for(lambda: len(list(Path().absolute().parent.glob("*/sweep/seed=1/run.json"))) == 2)
        time.sleep(GRACE_S)
        return build(self, data_root)

    FakeImages.build = wait_and_build


@pytest.mark.parametrize(
    "is_killed", first_of([True, False], num_quick=0, num_full=1), ids=["killed", "whole"]
)
def test_one_of_several_sweeps_prepares_the_data_and_the_others_wait(
    is_killed: bool, tmp_path: Path
) -> None:
    """Two sweeps share a cache; if the preparing sweep is killed, the other prepares."""
    sweep = ("-m", "seed=1,2", *FAKE, "hydra.sweep.dir=sweep")
    cache = {"DDP_RUNNER_CACHE": str(tmp_path / "cache")}
    folders = [tmp_path / "first", tmp_path / "second"]
    with ExitStack() as stack:
        start = [
            background(*sweep, folder=folder, environ=cache, prepare=slow_build)
            for folder in folders
        ]
        first = stack.enter_context(start[0])
        wait_for((folders[0] / "building").exists)
        if is_killed:
            first.kill()
        second = stack.enter_context(start[1])
        ends = [wait_for_end(*sweep) for sweep in zip((first, second), folders, strict=True)]
    whole = ends[1:] if is_killed else ends
    assert [(end.exit_code, end.stderr) for end in whole] == [(0, "")] * len(whole)
    assert all(len(end.run_dirs) == 2 for end in whole)
    assert sum(end.stdout.count("preparing it, once") for end in whole) == 1
    assert is_killed or "another rank or run is preparing it; waiting" in ends[-1].stdout
    assert not [end for end in whole if "rebuilding" in end.stdout]
    assert (folders[1] / "building").exists() == is_killed
