"""Runs that cannot be compared: each is listed with its reason, and none stops the others."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from generated_runs import lines_of, write_run

from ddp_runner.compare.analysis import compare
from ddp_runner.compare.render.tables import FORMATS
from ddp_runner.compare.runs import read_runs
from ddp_runner.errors import UserError

ERROR = {"rank": 1, "kind": "crash", "sentence": "rank 1 raised RuntimeError: no"}
HUGE = int("9" * 400)  # larger than any float


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"status": "running"}, "still running, or killed.*in the last minute"),
        ({"status": "failed", "error": ERROR}, "failed: rank 1 raised RuntimeError: no"),
        ({"status": "failed", "error": "text"}, "failed: at step 20"),
        ({"status": "preempted", "step": 20}, "preempted: at step 20"),
        ({"status": ["odd"]}, r"another format: status is \['odd'\]"),
        ({"world_size": "two"}, "another format: world_size is 'two', expected int"),
        ({"world_size": 0}, "another format: world_size is 0"),
        ({"metrics": None}, "another format: metrics is None"),
        ({"config_hash": None}, "another format: config_hash is None"),
        ({"checks": []}, "task=check"),
    ],
)
def test_a_record_that_cannot_be_used_says_why(
    tmp_path: Path, record: dict[str, Any], reason: str
) -> None:
    """One that runs, failed or was written in another form is no row."""
    write_run(tmp_path / "good", lines=lines_of([1.0, 2.0]))
    write_run(tmp_path / "odd", lines=lines_of([1.0, 2.0]), record=record)
    comparison = compare(read_runs([tmp_path]))
    assert len(comparison.rows) == 1
    (remark,) = comparison.left_out
    assert remark.folder == tmp_path / "odd"
    assert "\n" not in remark.sentence
    assert re.search(reason, remark.sentence)


@pytest.mark.parametrize(
    ("path", "content", "reason"),
    [
        ("run.json", None, "there is no run.json"),
        ("run.json", b"", "not valid JSON"),
        ("run.json", b'{"status": "comp', "not valid JSON"),
        ("run.json", b"\xff\xfe", "not valid JSON"),
        ("run.json", b"[]", "does not hold a JSON object"),
        ("run.json", b"[" * 100_000, r"not valid JSON \(maximum recursion"),
        (".hydra/config.yaml", None, r"config.yaml cannot be read \(No such file"),
        (".hydra/config.yaml", b"a: [", "config.yaml cannot be read"),
        (".hydra/config.yaml", b"- list", "it holds no mapping"),
        (".hydra/config.yaml", b"a: &a {b: *a}", "config.yaml cannot be read"),
        (".hydra/config.yaml", b'a: !!int ""', r"config.yaml cannot be read \(string index"),
        (".hydra/config.yaml", b"a: !!python/object/apply:os.getcwd []", "could not determine"),
    ],
)
def test_a_damaged_file_is_named(
    tmp_path: Path, path: str, content: bytes | None, reason: str
) -> None:
    """Missing, cut off, of another kind, or hostile: none of it is more than a line."""
    run = write_run(tmp_path / "run", lines=lines_of([1.0, 2.0]))
    (run / path).unlink()
    if content is not None:
        (run / path).write_bytes(content)
    (remark,) = compare(read_runs([tmp_path])).left_out
    assert "\n" not in remark.sentence
    assert str(tmp_path) not in remark.sentence  # so that equal faults are one line
    assert re.search(reason, remark.sentence)


@pytest.mark.parametrize(
    "damage",
    [
        b'{"step": 30, "ti',
        b"\x00\x00\x00",
        b"[1]",
        b"3",
        b'{"time_s": 1}',
        b'{"step": null, "time_s": 1}',
        b'{"step": 1, "time_s": 1, "train/loss": "low"}',
        b"\xff",
        b"[" * 100_000,
    ],
)
def test_damaged_lines_are_left_out_and_counted(tmp_path: Path, damage: bytes) -> None:
    """The rest of the run is whole, and compared."""
    run = write_run(tmp_path / "run", lines=lines_of([1.0, 100.0, 100.0]))
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(damage)
    comparison = compare(read_runs([tmp_path]))
    (row,), (note,) = comparison.rows, comparison.notes
    assert note.sentence == "1 of 4 lines of metrics.jsonl are damaged, left out"
    assert row.samples_per_s is not None
    assert row.samples_per_s.mean == 100.0


def test_numbers_that_are_none_are_no_values(tmp_path: Path) -> None:
    """NaN, infinities, whole numbers beyond any float: neither a mean nor a crash comes of them."""
    lines = lines_of([1.0, 100.0], eval__accuracy=[0.5, HUGE], eval__f1=[0.5, float("inf")])
    write_run(tmp_path / "run", lines=lines, record={"wall_s": HUGE, "startup_s": "soon"})
    (row,) = compare(read_runs([tmp_path]), best="train/loss").rows
    assert not {"eval/accuracy", "eval/f1"} & row.metrics.keys()
    assert (row.wall_s, row.startup_s) == (None, None)


def test_a_run_of_another_version_is_compared_and_said_to_be_one(tmp_path: Path) -> None:
    """With the fields that are unknown here."""
    record = {"versions": {"ddp_runner": "9.0"}, "carbon_g": 3}
    write_run(tmp_path / "new", lines=lines_of([1.0, 2.0]), record=record)
    (note,) = compare(read_runs([tmp_path])).notes
    assert note.sentence.startswith("written by ddp_runner 9.0, this is ")
    assert note.sentence.endswith("unknown here: carbon_g")


def test_a_path_without_a_run_is_refused_in_one_line(tmp_path: Path) -> None:
    """An empty folder, one that is not there, and a file, even beside a good path."""
    write_run(tmp_path / "good" / "run")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    for name in ("empty", "missing", "file"):
        with pytest.raises(UserError, match=rf"{name} holds no run.*name a run's folder") as caught:
            read_runs([tmp_path / "good", tmp_path / name])
        assert "\n" not in str(caught.value)


def test_a_run_inside_another_runs_folder_is_found(tmp_path: Path) -> None:
    """As after hydra.run.dir=outputs; what a run keeps in its own folders is not searched."""
    outer = write_run(tmp_path / "outputs")
    write_run(outer / "sweep" / "inner", record={"started_at": 1.0})
    write_run(outer / "checkpoints" / "copy", record={"started_at": 2.0})
    assert [run.folder.name for run in read_runs([tmp_path])] == ["outputs", "inner"]


def test_a_thousand_runs_with_damaged_ones_among_them(tmp_path: Path) -> None:
    """Every run is a row's or listed; none is lost."""
    for index in range(1000):
        run = write_run(
            tmp_path / f"{index:04}",
            config={"seed": index % 5, "optimizer.lr": 0.1 * (index // 5)},
            lines=lines_of([1.0, 2.0, 3.0]),
        )
        if index % 10 == 0:
            (run / "run.json").write_text((run / "run.json").read_text()[: index // 2])
        elif index % 10 == 1:
            fields = json.loads((run / "run.json").read_text())
            (run / "run.json").write_text(json.dumps(fields | {"status": "running"}))
    comparison = compare(read_runs([tmp_path]))
    assert len(comparison.rows) == 200
    assert sum(len(row.runs) for row in comparison.rows) == 800
    assert len(comparison.left_out) == 200


@pytest.mark.parametrize("form", ["table", "markdown"])
def test_what_a_foreign_run_holds_stays_on_its_line(tmp_path: Path, form: str) -> None:
    """Neither a line of its own nor anything that steers the terminal."""
    names = {"good": "toy", "odd": "toy\x1b[2J\nbest of all"}
    for folder, name in names.items():
        write_run(tmp_path / folder, config={"model.name": name}, lines=lines_of([1.0, 2.0]))
    text = FORMATS[form](compare(read_runs([tmp_path])))
    assert "toy\\x1b[2J\\nbest of all" in text
    assert "\x1b" not in text
    assert not any(line.startswith("best of all") for line in text.splitlines())
