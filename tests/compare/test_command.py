"""``python -m ddp_runner.compare``: its output, its files, its exit codes and its imports."""

import csv
import importlib
import io
import json
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from commands import RUNNER, run_command
from generated_runs import SINGLE, lines_of, write_run
from PIL import Image

from ddp_runner.compare.__main__ import main, run
from ddp_runner.compare.analysis import compare
from ddp_runner.compare.columns import results_table
from ddp_runner.compare.plots import figures
from ddp_runner.compare.run_reader import read_runs, tagged
from ddp_runner.errors import UserError
from ddp_runner.tracking.run_record import write_run_record

ROOT = Path(__file__).parents[2]
COMPARE = (*RUNNER[:-1], "ddp_runner.compare")
PARTS = {"perf__forward_ms": [1.0, 4.0], "perf__backward_ms": [1.0, 8.0]}
SHARE = {"perf__comm_share": [0.9, 0.25]}
RANKS = {"perf__skew_ms": [9.0, 6.0], "perf__mfu": [0.9, 0.5]}
RANKS |= {"perf__skew_rank": [0.0, 1.0]}


@pytest.fixture
def outputs(tmp_path: Path) -> Path:
    """Write two seeds with one process and two with two ranks, and a run that failed."""
    folder = tmp_path / "outputs"
    two = {"world_size": 2, "batch.per_rank": 32}
    for seed in (0, 1):
        runs: Mapping[str, tuple[dict[str, Any], float]] = {
            "single": (SINGLE, 200.0),
            "ddp": (two, 300.0),
        }
        for name, (keys, speed) in runs.items():
            lines = lines_of([1.0, speed + seed], eval__accuracy=[0.5, 0.9 + seed / 100])
            write_run(folder / f"{name}-{seed}", config={**keys, "seed": seed}, lines=lines)
    write_run(folder / "lost", record={"status": "failed", "error": {"sentence": "it fell | over"}})
    return folder


def texts_of(plot: Any) -> list[Any]:
    """Return every text of a plot."""
    from matplotlib.text import Text

    found: list[Any] = plot.findobj(Text)
    return found


def printed(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """Run the command in this process and return its output."""
    run([str(argument) for argument in arguments])
    return capsys.readouterr().out


def test_tags_choose_the_runs(outputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those that have all of them; they do not divide the runs of one setting."""
    for number, path in enumerate(sorted(outputs.iterdir())):
        tags = ["all", "even" if number % 2 == 0 else "odd"]  # ddp-0 ddp-1 lost single-0 single-1
        write_run_record(path, tags=tags)
    for tags, folders in ((["all"], 5), (["all", "even"], 3), (["odd"], 2), ([], 5)):
        runs = tagged(read_runs([outputs]), tags)
        assert (len(runs), {set(tags) <= set(one.tags) for one in runs}) == (folders, {True})
    rows = json.loads(printed(capsys, outputs, "--format", "json", "--tag", "all"))["rows"]
    assert sorted(row["setting"]["world_size"] for row in rows) == [1, 2]
    with pytest.raises(UserError, match=r"--tag \(even, odd\): no run has all of these tags; the"):
        run([str(outputs), "--tag", "even", "--tag", "odd"])


def test_the_table_has_a_row_for_each_setting(
    outputs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lists below it have the best run, the skipped runs and the meaning of the columns."""
    monkeypatch.setenv("COLUMNS", "1000")
    text = printed(capsys, outputs, "--target", "eval/accuracy=0.9", "--best", "eval/accuracy")
    header, ddp, single, *_ = [line.split("  ") for line in text.splitlines()[2:]]
    cells = [[cell.strip() for cell in line if cell.strip()] for line in (header, ddp, single)]
    rows = [dict(zip(cells[0], line, strict=True)) for line in cells[1:]]
    assert [row["parallelism"] for row in rows] == ["ddp", "single"]
    assert rows[0]["strong speedup"] == "1.50x"
    assert rows[0]["samples/s"] == "300.5 ± 0.7"
    assert rows[0]["eval/accuracy"] == "0.9050 ± 0.0071"
    assert rows[1]["s to eval/accuracy=0.9"] == "2.000 ± 0.000"
    assert [row["parity"] for row in rows] == ["ok", "reference"]
    assert "communication" not in rows[0]  # not measured
    assert f"{outputs / 'lost'}: failed: it fell | over" in text
    assert "best eval/accuracy (max):\n  0.9050 ± 0.007071 over 2 runs (ddp, " in text
    assert "  its models: none was exported\n" in text
    assert "without its first line, the warm-up" in text


@pytest.mark.parametrize("width", [80, 120])
def test_a_wide_table_is_split_into_blocks_that_repeat_the_settings(
    outputs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    """No line is wider than the terminal, and each column is in one block."""
    monkeypatch.setenv("COLUMNS", str(width))
    table = printed(capsys, outputs).partition("\n\ncolumns:")[0]
    blocks = [block.splitlines() for block in table.split("\n\n")[1:-1]]
    assert len(blocks) > 1
    titles = [block[0].split("  ") for block in blocks]
    for block in blocks:
        assert max(map(len, block)) <= width
        assert [line.split()[0] for line in block] == ["parallelism", "ddp", "single"]
    shown = [title.strip() for block in titles for title in block if title.strip()]
    assert shown.count("samples/s") == shown.count("parity") == 1


@pytest.mark.full
def test_a_run_that_ran_out_of_memory_or_time_is_a_row(
    outputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says so and has no results, and what tells it apart has a column; a crash has no row."""
    full = {"sentence": "rank 1 raised OutOfMemoryError: CUDA out of memory"}
    ends: dict[str, dict[str, Any]] = {
        "full": {"status": "failed", "error": full, "metrics": None},
        "stopped": {"status": "preempted", "step": 20},
        "no-sizes": {"status": "preempted", "num_devices": None},
        "check": {"status": "preempted", "task": "check"},
    }
    for name, end in ends.items():
        for seed in (0, 1) if name == "full" else (0,):
            config = {"batch.global_size": 4096, "batch.per_rank": 4096, "seed": seed}
            folder = outputs / f"{name}-{seed}"
            write_run(folder, config=config, lines=lines_of([1.0, 9e9]), record=end)
    options = ("--best", "perf/samples_per_s", "--out", str(tmp_path / "report"))
    rows = [*csv.DictReader(io.StringIO(printed(capsys, outputs, *options, "--format", "csv")))]
    words = [(row["batch.global_size"], row["status"], row["runs"]) for row in rows]
    assert words == [
        *[("64", "completed", "2")] * 2,
        ("4096", "out of memory", "2"),
        ("4096", "preempted", "1"),
    ]
    assert [row["samples_per_s"] for row in rows] == ["300.5", "200.5", "", ""]
    comparison = json.loads((tmp_path / "report" / "comparison.json").read_text())
    assert len(comparison["rows"]) == len(comparison["ran_out"]) == 2
    assert comparison["best"]["value"]["mean"] == 300.5
    text = (tmp_path / "report" / "comparison.txt").read_text()
    assert text.startswith("4 runs compared")
    folders = ", ".join(str(outputs / f"full-{seed}") for seed in (0, 1))
    assert f" 2 runs ({folders}): failed: {full['sentence']} " in " ".join(text.split())
    assert "  batch.global_size  status " in text
    page = (tmp_path / "report" / "report.html").read_text()
    assert ">out of memory</td>" in page


@pytest.mark.parametrize(
    "sentence",
    [
        "rank 1 was killed by SIGKILL: likely out of memory, as the kernel reports",
        "rank 1 was killed by SIGKILL, by another process or by the kernel's out-of-memory killer",
        "Slurm's job 7 took more memory than hydra.launcher.mem_gb; see log",
        "rank 0 raised RuntimeError: DefaultCPUAllocator: can't allocate memory",
        "rank 0 raised MemoryError",
    ],
)
def test_every_way_to_run_out_of_memory_is_known(tmp_path: Path, sentence: str) -> None:
    """The memory is that of a GPU, the machine, a job on Slurm, or Python."""
    write_run(tmp_path / "a", record={"status": "failed", "error": {"sentence": sentence}})
    write_run(tmp_path / "b", record={"status": "failed", "error": {"sentence": "rank 0: no"}})
    unsure = "perhaps " if "by another process or" in sentence else ""
    assert [run.ran_out for run in read_runs([tmp_path])] == [f"{unsure}out of memory", None]


def test_csv_and_json_parse_back(outputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both have every number with its standard deviation; in JSON a run is its folder."""
    ddp, single = csv.DictReader(io.StringIO(printed(capsys, outputs, "--format", "csv")))
    assert float(ddp["samples_per_s"]) == 300.5
    assert float(single["samples_per_s_sd"]) == pytest.approx(0.5**0.5)
    assert (ddp["strong_against"], ddp["world_size"]) == ("single, 1 rank", "2")
    comparison = json.loads(printed(capsys, outputs, "--format", "json"))
    row = comparison["rows"][0]
    assert row["stats"]["perf/samples_per_s"] == {"mean": 300.5, "sd": 0.5**0.5, "count": 2}
    assert row["runs"] == [str(outputs / "ddp-0"), str(outputs / "ddp-1")]
    assert comparison["skipped"] == [
        {"run": str(outputs / "lost"), "sentence": "failed: it fell | over"}
    ]


def test_markdown_is_one_table_and_lists(outputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every line of the table has the same number of cells."""
    write_run(outputs / "bar", config={"optimizer.name": "a|b"})
    text = printed(capsys, outputs, "--format", "markdown")
    table = [line.replace("\\|", "") for line in text.splitlines() if line.startswith("|")]
    assert len(table) == 5
    assert len({line.count("|") for line in table}) == 1
    assert "**skipped, 1 run**" in text


def test_each_makes_a_row_for_each_run(outputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The row has the seed and the folder of the run."""
    rows = list(csv.DictReader(io.StringIO(printed(capsys, outputs, "--each", "--format", "csv"))))
    assert [(row["seed"], Path(row["run"]).name) for row in rows] == [
        ("0", "ddp-0"),
        ("1", "ddp-1"),
        ("0", "single-0"),
        ("1", "single-1"),
    ]


@pytest.mark.full
def test_everything_is_written_into_a_folder(
    outputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All formats, and each plot as PNG and SVG; a plot without data has a reason instead."""
    run([str(outputs), "--out", str(tmp_path / "report")])
    assert "no plot step_parts: no run has measured" in capsys.readouterr().err
    plots = ("scaling", "loss_by_step", "loss_by_time")
    wanted = {f"comparison.{suffix}" for suffix in ("txt", "md", "csv", "json")}
    wanted |= {f"{plot}.{suffix}" for plot in plots for suffix in ("png", "svg")}
    wanted |= {"report.html"}
    assert {path.name for path in (tmp_path / "report").iterdir()} == wanted
    for plot in plots:
        with Image.open(tmp_path / "report" / f"{plot}.png") as image:
            colours = image.convert("RGB").getcolors(maxcolors=2**24) or []
            assert len(colours) > 20
        assert ElementTree.parse(tmp_path / "report" / f"{plot}.svg").getroot().tag.endswith("svg")


@pytest.mark.full
def test_plots_hold_the_numbers_of_the_table(outputs: Path) -> None:
    """Speedups beside the ideal ones, and the parts of a step with the rest of its time."""
    lines = lines_of([1.0, 4000.0], **PARTS, **SHARE, **RANKS)
    write_run(outputs / "parts", config={"optimizer.lr": 0.5}, lines=lines)
    comparison = compare(read_runs([outputs]))
    plots = figures(comparison)
    scaling, parts = plots["scaling"], plots["step_parts"]
    assert not isinstance(scaling, str)
    assert not isinstance(parts, str)
    ideal, ddp, *_ = scaling.axes[0].get_lines()
    assert (ideal.get_label(), list(ideal.get_ydata())) == ("ideal", [1, 2])
    assert " ".join(str(ddp.get_label()).split()) == "ddp: 1.50x (75%)"
    assert list(ddp.get_xdata()) == [1, 2]
    assert list(ddp.get_ydata()) == pytest.approx([1, 300.5 / 200.5])
    containers = scaling.axes[0].containers
    (error,) = [bars for bars in containers if type(bars).__name__ == "ErrorbarContainer"]
    (bar_lines,) = error.lines[2]
    ((_, low), (_, high)) = bar_lines.get_segments()[-1]
    assert (high - low) / 2 == pytest.approx(0.5**0.5 / 200.5)  # of two seeds
    bars = {bar.get_label(): bar.patches[0].get_width() for bar in parts.axes[0].containers}
    assert bars == {"forward": 4.0, "backward": 8.0, "rest": 4.0}  # of 16 ms
    stats = {name: one.mean for row in comparison.rows for name, one in row.stats.items()}
    wanted = {"perf/comm_share": 0.25, "perf/skew_ms": 6.0, "perf/mfu": 0.5}
    assert {name: stats.get(name) for name in wanted} == wanted
    assert "perf/skew_rank" not in stats  # ranks have no mean
    shown = {column.key: column.title for column in results_table(comparison).columns}
    assert (shown["skew_ms"], shown["mfu"]) == ("skew ms", "MFU")


def test_a_setting_has_one_colour_in_all_plots(tmp_path: Path) -> None:
    """Whichever has the lowest loss, and whichever is the fastest."""
    for rate, loss, time_s in ((0.1, 3.0, 1.0), (0.2, 1.0, 3.0), (0.3, 2.0, 2.0)):
        lines = [
            {
                "step": step,
                "epoch": 1,
                "time_s": step * time_s,
                "train/loss": loss,
                "train/lr": rate,
            }
            for step in (1, 2)
        ]
        write_run(tmp_path / str(rate), config={"optimizer.lr": rate}, lines=lines)
    plots = figures(compare(read_runs([tmp_path])))
    colours = []
    for name in ("loss_by_step", "loss_by_time"):
        plot = plots[name]
        assert not isinstance(plot, str)
        drawn = plot.axes[0].get_lines()
        colours.append({str(one.get_label()).split("\n")[0]: one.get_color() for one in drawn})
    assert colours[0] == colours[1]
    assert len(set(colours[0].values())) == 3


@pytest.mark.filterwarnings("error:constrained_layout")
def test_settings_of_many_keys_have_short_names_in_plots(tmp_path: Path) -> None:
    """Names of all keys would leave no room, and be cut before the one that differs."""
    keys = {f"train.a_rather_long_key_{number}": number for number in range(12)}
    last = {"first": {"train.z": 1}, "second": {"train.z": 2}, "third": dict.fromkeys(keys, 99)}
    for name, differing in last.items():
        lines = lines_of([1.0, 100.0], **PARTS)
        write_run(tmp_path / name, config={**keys, "train.z": 1, **differing}, lines=lines)
    for name, plot in figures(compare(read_runs([tmp_path]))).items():
        if isinstance(plot, str):
            continue
        plot.savefig(tmp_path / "plot.svg")  # here the layout is computed, and warns
        texts = {" ".join(one.get_text().split()) for one in texts_of(plot)}
        assert all(any(f"train.z {z}" in one for one in texts) for z in (1, 2)), name
        assert not any("…" in one for one in texts), name


@pytest.mark.full
def test_a_doubtful_speed_is_marked_wherever_it_is_shown(
    outputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is superlinear, or the machine was busy with more than parallel jobs of the sweep."""
    two = {"world_size": 2, "batch.per_rank": 32, "optimizer.lr": 0.5}
    quiet = {"load": {"end": {"busy_share_others": 0.04, "steal_share": 0.02}}}
    busy = {"load": {"end": {"busy_share_others": 0.25, "steal_share": 0.1}}}
    single = SINGLE | {"optimizer.lr": 0.5}
    write_run(outputs / "a", config=single, lines=lines_of([1.0, 100.0]), record=busy)
    write_run(outputs / "b", config=two, lines=lines_of([1.0, 495.0]), record=quiet)
    parallel = busy | {"parallel_jobs": True}
    write_run(outputs / "c", config={**two, "optimizer.lr": 0.7}, record=parallel)
    text = printed(capsys, outputs, "--out", tmp_path / "report", "--format", "markdown")
    (warning,) = [line for line in text.splitlines() if line.startswith("- 2 doubtful speeds (")]
    assert "ddp, 2 ranks, optimizer.lr 0.5: superlinear" in warning
    assert "single, 1 rank, optimizer.lr 0.5: busy machine" in warning
    assert "- remark: superlinear: an efficiency above 110%" in text
    rows = csv.DictReader((tmp_path / "report" / "comparison.csv").open())
    remarks = {(row["parallelism.name"], row["optimizer.lr"]): row["remark"] for row in rows}
    assert remarks["ddp", "0.5"] == "superlinear"
    assert remarks["single", "0.5"] == "busy machine"
    assert set(remarks.values()) == {"", "superlinear", "busy machine"}
    assert len(json.loads((tmp_path / "report" / "comparison.json").read_text())["warnings"]) == 1
    plot = figures(compare(read_runs([outputs])))["scaling"]
    assert not isinstance(plot, str)
    labels = " ".join(" ".join(text.get_text() for text in texts_of(plot)).split())
    assert "ddp, optimizer.lr 0.5: 4.95x (248%), superlinear" in labels
    hollow = [line for line in plot.axes[0].get_lines() if line.get_markerfacecolor() == "white"]
    assert [list(line.get_xdata()) for line in hollow] == [[2]]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nowhere"], "nowhere contains no run"),
        ([".", "--target", "eval/accuracy"], "is not METRIC=VALUE"),
        (
            [".", "--best", "eval/beauty"],
            "--best (eval/beauty): no run has this metric; use one of",
        ),
        ([".", "--best", "accuracy"], "; did you mean eval/accuracy? The metrics are eval/acc"),
        ([".", "--best", "eval/acc"], "; did you mean eval/accuracy? The metrics are eval/acc"),
        ([".", "--out", "lost/run.json"], "--out (lost/run.json) cannot be written"),
    ],
)
def test_a_wrong_argument_is_an_error_in_one_line(
    outputs: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    sentence: str,
) -> None:
    """The exit code is 2."""
    with monkeypatch.context() as patch:
        patch.chdir(outputs)
        patch.setattr(sys, "argv", ["compare", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert sentence in line


def test_nothing_slow_is_imported_for_a_table(outputs: Path) -> None:
    """No torch, torchvision, Hydra or matplotlib; with plots, still no torch and no pyplot."""
    program = (
        "import sys; from ddp_runner.compare.__main__ import run; run(sys.argv[1:]); "
        "print(*sorted(sys.modules), file=sys.stderr)"
    )
    slow = {"torch", "torchvision", "hydra", "omegaconf", "sklearn", "tensorboard"}
    for more, unwanted in (
        ([], {*slow, "matplotlib"}),
        (["--out", outputs.parent / "out"], slow - {"tensorboard"} | {"matplotlib.pyplot"}),
    ):
        command = [sys.executable, "-c", program, outputs, *more]
        end = subprocess.run(command, capture_output=True, text=True, check=True)
        modules = set(end.stderr.split())
        assert "ddp_runner.compare.analysis" in modules
        assert not modules & unwanted


def test_a_sweep_and_its_comparison_by_the_real_commands(tmp_path: Path) -> None:
    """Two world sizes and two seeds: two rows with loss parity, nothing skipped."""
    overrides = "model=toy world_size=1,2 seed=0,1 batch.global_size=20 train.max_steps=3"
    sweep = run_command("-m", *overrides.split(), "train.log_every_steps=1", folder=tmp_path)
    assert sweep.exit_code == 0, sweep.stderr
    end = run_command("outputs", "--format", "json", folder=tmp_path, program=COMPARE)
    assert (end.exit_code, end.stderr) == (0, "")
    comparison = json.loads(end.stdout)
    one, two = comparison["rows"]
    assert [row["stats"]["perf/samples_per_s"]["count"] for row in (one, two)] == [2, 2]
    speeds = [row["stats"]["perf/samples_per_s"]["mean"] for row in (one, two)]
    expected = speeds[1] / speeds[0]
    assert two["scalings"]["strong"]["speedup"] == pytest.approx(expected)
    assert [len(row["parity"]) for row in (one, two)] == [0, 2]
    assert [parity["first_break"] for parity in two["parity"]] == [None, None]
    assert comparison["skipped"] == comparison["notes"] == []
    # Only this machine may cause warnings, if it is busy.
    assert not [sentence for sentence in comparison["warnings"] if "lack keys" in sentence]
    assert not [
        sentence for sentence in comparison["warnings"] if sentence.startswith("the runs used")
    ]


def test_the_scripts_of_the_package_exist() -> None:
    """An installed ``ddp-runner-compare`` starts the same function as ``python -m``."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    for target in scripts.values():
        module, _, function = target.partition(":")
        assert callable(getattr(importlib.import_module(module), function))
