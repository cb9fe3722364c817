"""A run that cannot be compared is listed with a reason, and the others are compared."""

import csv
import json
import re
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from generated_runs import lines_of, write_run
from rights import unreadable

from ddp_runner.compare import run_reader
from ddp_runner.compare.__main__ import main, run
from ddp_runner.compare.analysis import compare
from ddp_runner.compare.formats import FORMATS
from ddp_runner.compare.run_reader import read_runs
from ddp_runner.errors import UserError
from ddp_runner.tracking.alive import Standing, standing
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.tracking.run_record import write_run_record

HERE = socket.gethostname()
ERROR = {"rank": 1, "kind": "crash", "sentence": "rank 1 raised RuntimeError: no"}
HUGE = int("9" * 400)  # larger than any float


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"status": "running"}, "still starting; last sign of life less than a minute ago"),
        ({"status": "running", "host": HERE}, "lost; last sign of life less than a minute ago"),
        ({"status": "failed", "error": ERROR}, "failed: rank 1 raised RuntimeError: no"),
        ({"status": "failed", "error": "text"}, "failed: at step 20"),
        ({"status": "preempted", "step": 20}, "preempted: at step 20"),
        ({"status": ["odd"]}, r"unknown format: status is \['odd'\]"),
        ({"world_size": "two"}, "unknown format: world_size is 'two'"),
        ({"world_size": 0}, "unknown format: world_size is 0"),
        ({"metrics": None}, "unknown format: metrics is None"),
        ({"config_hash": None}, "unknown format: config_hash is None"),
        ({"task": "check"}, "task=check"),
        ({"collectives": "text"}, "unknown format: collectives is 'text'"),
        ({"collectives": [{"bytes": 8}]}, r"unknown format: collectives is \[{'bytes': 8}\]"),
        (
            {"collectives": [{"bytes": 8, "latency_us": {"median": 0}}]},
            "unknown format: collectives is ",
        ),
    ],
)
def test_an_unusable_record_has_a_reason(
    tmp_path: Path, record: dict[str, Any], reason: str
) -> None:
    """A run that is running, has failed or has an unknown format gets no row."""
    write_run(tmp_path / "good", lines=lines_of([1.0, 2.0]))
    write_run(tmp_path / "odd", lines=lines_of([1.0, 2.0]), record=record)
    comparison = compare(read_runs([tmp_path]))
    assert len(comparison.rows) == 1
    (note,) = comparison.skipped
    assert note.run.folder == tmp_path / "odd"
    assert "\n" not in note.sentence
    assert re.search(reason, note.sentence)


def test_a_metric_that_is_not_finite_is_named(tmp_path: Path) -> None:
    """Its cell is empty, which alone would look as if the run had no such metric."""
    lines = [*lines_of([1.0]), {"step": 20, "epoch": 1, "time_s": 2.0, "eval/mine": None}]
    write_run(tmp_path / "run", lines=lines)
    sentences = [note.sentence for note in compare(read_runs([tmp_path])).notes]
    assert "not finite at the end, so not compared: eval/mine" in sentences


def test_without_a_run_to_compare_only_the_reasons_are_left(tmp_path: Path) -> None:
    """No empty table, and no legend of columns that are not there."""
    (write_run(tmp_path / "run", lines=lines_of([1.0])) / "run.json").write_text("{")
    text = FORMATS["table"](compare(read_runs([tmp_path])))
    headline, empty, title, *reason = text.splitlines()
    assert (headline, empty, title) == ("0 runs compared", "", "skipped, 1 run:")
    assert "run.json is not valid JSON" in " ".join(" ".join(reason).split())


@pytest.mark.parametrize(
    ("path", "content", "reason"),
    [
        ("run.json", None, "no run.json: the run never started"),
        ("run.json", b"", "not valid JSON"),
        ("run.json", b'{"status": "comp', "not valid JSON"),
        ("run.json", b"\xff\xfe", "not valid JSON"),
        ("run.json", b"[]", "does not hold a JSON object"),
        ("run.json", b"[" * 100_000, r"not valid JSON \(RecursionError"),
        (".hydra/config.yaml", None, r"config.yaml cannot be read \(No such file"),
        (".hydra/config.yaml", b"a: [", "config.yaml cannot be read"),
        (".hydra/config.yaml", b"- list", "it is not a mapping"),
        (".hydra/config.yaml", b"a: &a {b: *a}", "config.yaml cannot be read"),
        (".hydra/config.yaml", b'a: !!int ""', r"config.yaml cannot be read \(string index"),
        (".hydra/config.yaml", b"a: !!python/object/apply:os.getcwd []", "could not determine"),
    ],
)
def test_a_damaged_file_is_named(
    tmp_path: Path, path: str, content: bytes | None, reason: str
) -> None:
    """In one line, whether the file is missing, truncated, of the wrong type or hostile."""
    run = write_run(tmp_path / "run", lines=lines_of([1.0, 2.0]))
    (run / path).unlink()
    if content is not None:
        (run / path).write_bytes(content)
    (note,) = compare(read_runs([tmp_path])).skipped
    assert "\n" not in note.sentence
    assert str(tmp_path) not in note.sentence  # the same fault in many runs takes one line
    assert re.search(reason, note.sentence)


@pytest.mark.parametrize("place", ["", ".hydra", ".hydra/config.yaml", "run.json"])
def test_a_run_that_is_somebody_elses_has_a_reason(tmp_path: Path, place: str) -> None:
    """One private folder below outputs does not keep the others from being compared."""
    write_run(tmp_path / "good", lines=lines_of([1.0, 2.0]))
    private = write_run(tmp_path / "private", lines=lines_of([1.0, 2.0]))
    with unreadable(private / place):
        run_reader = read_runs([tmp_path])
        alone = read_runs([private])
    comparison = compare(run_reader)
    assert len(comparison.rows) == 1
    (note,) = comparison.skipped
    assert re.match(r"\S*(run\.json|\.hydra/config\.yaml) cannot be read ", note.sentence)
    assert "Permission denied" in note.sentence
    assert [len(run.lines) for run in run_reader] == [2, 2 if place else 0]
    assert [run.reason for run in alone] == [note.sentence]


def test_a_folder_that_may_be_listed_and_not_entered_has_a_reason(tmp_path: Path) -> None:
    """Its files have names, and no content."""
    run = write_run(tmp_path / "run", lines=lines_of([1.0]))
    with unreadable(run):
        run.chmod(0o444)
        (found,) = read_runs([tmp_path])
    assert found.reason is not None
    assert found.reason.startswith("run.json cannot be read (Permission denied)")


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
def test_damaged_lines_are_skipped_and_counted(tmp_path: Path, damage: bytes) -> None:
    """The rest of the run is compared."""
    run = write_run(tmp_path / "run", lines=lines_of([1.0, 100.0, 100.0]))
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(damage)
    comparison = compare(read_runs([tmp_path]))
    (row,), (note,) = comparison.rows, comparison.notes
    assert note.sentence == "skipped 1 of 4 lines of metrics.jsonl: damaged"
    assert row.stats["perf/samples_per_s"].mean == 100.0


def test_numbers_that_are_not_finite_are_ignored(tmp_path: Path) -> None:
    """NaN, infinities and integers beyond any float cause neither a mean nor a crash."""
    lines = lines_of([1.0, 100.0], eval__accuracy=[0.5, HUGE], eval__f1=[0.5, float("inf")])
    write_run(tmp_path / "run", lines=lines, record={"wall_s": HUGE, "startup_s": "soon"})
    (row,) = compare(read_runs([tmp_path]), best="train/loss").rows
    assert not {"eval/accuracy", "eval/f1", "wall_s", "startup_s"} & row.stats.keys()


def test_a_single_nan_is_left_out(tmp_path: Path) -> None:
    """Also as the only odd value of a file, after a larger number: a median with it is wrong."""
    times = [9.0, float("nan"), 3.0, 5.0]
    write_run(tmp_path / "run", lines=lines_of([1.0] * 4, perf__forward_ms=times))
    (run,) = read_runs([tmp_path])
    assert run.values("perf/forward_ms") == [9.0, 3.0, 5.0]


def test_a_run_of_another_version_is_compared_with_a_note(tmp_path: Path) -> None:
    """The note names both."""
    record = {"versions": {"ddp_runner": "9.0"}, "field_of_tomorrow": 3}
    write_run(tmp_path / "new", lines=lines_of([1.0, 2.0]), record=record)
    (note,) = compare(read_runs([tmp_path])).notes
    assert note.sentence.startswith("written by ddp_runner 9.0, this is ")


def test_a_path_without_a_run_is_an_error_in_one_line(tmp_path: Path) -> None:
    """Also beside a path with runs: an empty folder, a missing path, a file."""
    write_run(tmp_path / "good" / "run")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    for name in ("empty", "missing", "file"):
        with pytest.raises(
            UserError, match=rf"{name} contains no run.*give the folder of a run"
        ) as caught:
            read_runs([tmp_path / "good", tmp_path / name])
        assert "\n" not in str(caught.value)


def test_a_run_inside_the_folder_of_another_run_is_found(tmp_path: Path) -> None:
    """hydra.run.dir=outputs causes this; the folders that belong to a run are not searched."""
    outer = write_run(tmp_path / "outputs")
    write_run(outer / "sweep" / "inner", record={"started_at": 1.0})
    write_run(outer / "checkpoints" / "copy", record={"started_at": 2.0})
    assert [run.folder.name for run in read_runs([tmp_path])] == ["outputs", "inner"]


@pytest.mark.full
def test_a_thousand_runs_are_compared_or_listed(tmp_path: Path) -> None:
    """Some are damaged, some still running; none is lost."""
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
    assert len(comparison.skipped) == 200


def test_a_setting_of_any_yaml_type_is_shown(tmp_path: Path) -> None:
    """YAML has dates, for which JSON has no type."""
    for day in (1, 2):
        run = write_run(tmp_path / str(day))
        with (run / ".hydra" / "config.yaml").open("a") as file:
            file.write(f"day: 2026-01-0{day}\n")
    for form in FORMATS.values():
        assert "2026-01-02" in form(compare(read_runs([tmp_path])))


@pytest.mark.parametrize("form", ["table", "markdown"])
def test_values_from_a_foreign_run_cannot_forge_output(tmp_path: Path, form: str) -> None:
    """They start no new line and send no control characters to the terminal."""
    names = {"good": "toy", "odd": "toy\x1b[2J\nbest of all"}
    for folder, name in names.items():
        write_run(tmp_path / folder, config={"model.name": name}, lines=lines_of([1.0, 2.0]))
    text = FORMATS[form](compare(read_runs([tmp_path])))
    assert "toy\\x1b[2J\\nbest of all" in text.replace("\\[", "[")
    assert "\x1b" not in text
    assert not any(line.startswith("best of all") for line in text.splitlines())


def test_a_table_for_other_programs_holds_texts_alone(tmp_path: Path) -> None:
    """Markdown shows no markup of a run, and a spreadsheet computes no formula of it."""
    odd = [
        "<img src=x onerror=alert(1)>|`",
        "![x](http://evil)",
        "=1+1",
        "@x",
        "\t=2",
        "-0.5",
        "-x",
    ]
    for name in odd:
        write_run(tmp_path / str(odd.index(name)), config={"model.name": name}, lines=lines_of([1]))
    comparison = compare(read_runs([tmp_path]))
    markdown = FORMATS["markdown"](comparison)
    assert r"&lt;img src=x onerror=alert(1)&gt;\|\`" in markdown
    assert "<" not in markdown
    assert r"!\[x\](http://evil)" in markdown
    table = list(csv.reader(FORMATS["csv"](comparison).splitlines(keepends=True)))
    names = [row[table[0].index("model.name")] for row in table[1:]]
    assert sorted(names) == sorted([*odd[:2], "'=1+1", "'@x", "'\t=2", "-0.5", "'-x"])


@pytest.mark.full
def test_one_odd_run_does_not_stop_a_comparison(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers whose difference no float holds, and names that no encoding has."""
    high = 1.7e308
    lines = lines_of([1.0, high, high], losses=[1.0, high, -high], eval__far=[high, -high, high])
    metrics = {"eval/\ud800": 1, "eval/far": -high, "eval/near": 0.5}
    for seed in (0, 1):
        folder = tmp_path / "outputs" / str(seed)
        write_run(folder, config={"seed": seed}, lines=lines, record={"metrics": metrics})
    config = folder / ".hydra" / "config.yaml"
    config.write_text(config.read_text().replace("name: sgd", 'name: "s\\ud800"'))
    for form in FORMATS:
        out = tmp_path / "report"
        words = ["compare", str(tmp_path / "outputs"), "--format", form, "--out", str(out)]
        monkeypatch.setattr(sys, "argv", words)
        main()
        assert b"near" in capsysbinary.readouterr().out
    assert "eval/\\ud800" in (out / "comparison.csv").read_text(encoding="utf-8")


@pytest.mark.full
def test_a_text_of_megabytes_is_cut_for_people(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the terminal and in the report; CSV and JSON are whole."""
    long = "x" * 1_000_000
    record = dict.fromkeys(("git_revision", "host", "notes"), long) | {"tags": [long]}
    config = {"optimizer.name": long}
    metrics = {f"eval/{long}": 1.0}
    outputs = tmp_path / "outputs"
    write_run(outputs / "plain", lines=lines_of([1.0, 2.0]))
    write_run(
        outputs / "a",
        config=config,
        lines=lines_of([1.0, 2.0]),
        record=record | {"metrics": metrics},
    )
    error = {"status": "failed", "error": {"sentence": long}}
    write_run(outputs / "b", record=error)
    run([str(outputs), "--out", str(tmp_path / "report")])
    assert len(capsys.readouterr().out) < 30_000
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "report").iterdir()}
    assert sizes["comparison.md"] < 30_000
    assert sizes["report.html"] < 500_000
    assert sizes["comparison.csv"] > len(long)


def test_a_run_that_ends_while_it_is_read_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its record said running a moment before."""
    folder = write_run(tmp_path / "run", lines=lines_of([1.0, 2.0]), record={"status": "running"})

    def end_then_look(run_dir: RunDir) -> Standing:
        write_run_record(run_dir, status="completed")
        return standing(run_dir)

    monkeypatch.setattr(run_reader, "standing", end_then_look)
    (run,) = read_runs([folder])
    assert run.reason is None
