"""What a reader sees of a comparison in 80 columns, and what the other formats keep."""

import csv
import io
from pathlib import Path

import pytest
from generated_runs import lines_of, write_run

from ddp_runner.compare.__main__ import run
from ddp_runner.compare.analysis import compare
from ddp_runner.compare.formats import as_csv, as_markdown, as_text
from ddp_runner.compare.report import html
from ddp_runner.compare.run_reader import read_runs

RATE = 0.013898129
DEEP = "a-folder-of-experiments-with-a-name-that-alone-fills-a-line-of-a-terminal"


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Return the terminal of a newcomer."""
    monkeypatch.setenv("COLUMNS", "80")


def blocks_of(text: str) -> list[list[str]]:
    """Return the lines of each block of the table."""
    _, *blocks = text.partition("\n\ncolumns:")[0].split("\n\n")
    return [block.splitlines() for block in blocks]


def test_long_values_are_rounded_as_in_the_names_of_jobs(tmp_path: Path) -> None:
    """CSV has every digit, and so have the report's settings."""
    for rate in (RATE, 0.1):
        write_run(tmp_path / str(rate), config={"optimizer.lr": rate}, lines=lines_of([1.0, 2.0]))
    comparison = compare(read_runs([tmp_path]))
    assert [row.label for row in comparison.rows] == ["optimizer.lr 0.0139", "optimizer.lr 0.1"]
    for text in (as_text(comparison), as_markdown(comparison)):
        assert "0.0139" in text
        assert str(RATE) not in text
        assert "optimizer.lr: rounded; CSV and JSON have all digits" in text
    rows = csv.DictReader(io.StringIO(as_csv(comparison)))
    assert [row["optimizer.lr"] for row in rows] == [str(RATE), "0.1"]
    assert f">{RATE}</td>" in html(comparison, {}, paths=[tmp_path])


def test_rows_never_look_the_same(tmp_path: Path) -> None:
    """Neither rates that differ in their last digits, nor long names in what differs."""
    last = {
        "end": f"{'x' * 300}1",
        "other end": f"{'x' * 300}2",
        "middle": f"{'x' * 150}1{'x' * 150}",
    }
    for number, (name, value) in enumerate(last.items()):
        config = {"optimizer.lr": RATE + number * 1e-8, "model.path": value}
        write_run(tmp_path / DEEP / f"{name},seed=0", config=config, lines=lines_of([1.0, 2.0]))
    comparison = compare(read_runs([tmp_path]), each=True)
    for label in ("model.path", "optimizer.lr", "run"):
        (block,) = [one for one in blocks_of(as_text(comparison)) if label in one[0].split()]
        start = block[0].index(label) if label != "optimizer.lr" else 0
        cells = {line[start:] for line in block[1:]}
        assert len(cells) == 3, label
    assert "…middle,seed=0" in as_text(comparison)


def test_what_the_headline_says_is_no_column(tmp_path: Path) -> None:
    """Nor a part of a label; CSV has it. A single setting is still called something."""
    for seed in (0, 1):
        for rate in (0.1, 0.2):
            config = {"optimizer.lr": rate, "seed": seed}
            write_run(tmp_path / f"{rate},{seed}", config=config, lines=lines_of([1.0, 2.0]))
    comparison = compare(read_runs([tmp_path]), best="train/loss")
    text = as_text(comparison)
    assert "parallelism ddp" in " ".join(text.partition("\n\n")[0].split())
    assert {block[0].split()[0] for block in blocks_of(text)[:-1]} == {"optimizer.lr"}
    assert not [line for block in blocks_of(text) for line in block if "world_size" in line]
    assert as_markdown(comparison).splitlines()[2].startswith("| optimizer.lr | runs |")
    assert as_csv(comparison).startswith("parallelism.name,world_size,optimizer.lr,")
    (only,) = compare(read_runs([tmp_path / "0.1,0"])).rows
    assert only.label == "ddp, 1 rank"


def test_settings_that_do_not_tell_rows_apart_are_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row of a run that was stopped has the settings of one that was completed."""
    monkeypatch.setenv("COLUMNS", "60")
    for rate in (0.1, 0.2):
        config = {"optimizer.lr": rate}
        write_run(tmp_path / str(rate), config=config, lines=lines_of([1.0, 2.0]))
    record = {"status": "preempted"}
    write_run(tmp_path / "stopped", config={"optimizer.lr": 0.1, "seed": 1}, record=record)
    table = blocks_of(as_text(compare(read_runs([tmp_path]))))[:-1]
    assert [[line.split()[0] for line in block] for block in table] == [["#", "1", "2", "3"]] * 2


def test_no_line_is_wider_than_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither warnings nor skipped runs, also of CSV, which lists them beside the table."""
    for number in (1, 2):
        sentence = f"rank {number} raised ValueError: " + "why it has failed in many words " * 5
        record = {"status": "failed", "error": {"sentence": sentence.strip()}}
        write_run(tmp_path / f"failed-{number}", record=record)
        config = {"optimizer.lr": number / 10}
        record = {"host": f"a-host-with-a-rather-long-name-{number}"}
        lines = lines_of([1.0, 2.0])
        write_run(tmp_path / f"run-{number}", config=config, lines=lines, record=record)
    run([str(tmp_path)])
    table = capsys.readouterr().out
    run([str(tmp_path), "--format", "csv"])
    beside = capsys.readouterr().err
    for text in (table, beside):
        words = " ".join(text.split())
        assert "the runs used 2 hosts (a-host-with-a-rather-long-name-1, " in words
        assert "has failed in many words why" in words
        lines_of_words = [line for line in text.splitlines() if str(tmp_path) not in line]
        assert max(map(len, lines_of_words)) <= 80


@pytest.mark.parametrize("seeds", [(0, 0), (0, 1)])
def test_repeats_of_one_seed_have_no_spread_of_results(
    tmp_path: Path, seeds: tuple[int, int]
) -> None:
    """They say nothing about other seeds; of a speed they do."""
    for number, seed in enumerate(seeds):
        record = {"sessions": [{"started_at": float(number)}]}
        lines = lines_of([1.0, 100.0 + number], eval__accuracy=[0.5, 0.6])
        write_run(tmp_path / str(number), config={"seed": seed}, lines=lines, record=record)
    comparison = compare(read_runs([tmp_path]))
    (row,) = comparison.rows
    has_spread = seeds == (0, 1)
    assert row.stats["eval/accuracy"].sd == (0.0 if has_spread else None)
    assert row.stats["perf/samples_per_s"].sd == pytest.approx(0.5**0.5)
    text = " ".join(as_text(comparison).split())
    assert "±: standard deviation over the runs of a row, which differ at most in seed" in text
    assert ("results of a single seed have no ±" in text) != has_spread
