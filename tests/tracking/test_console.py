"""The terminal of a run: a live line that fits, plain lines elsewhere, the summary at the end."""

import io
import shlex
import time
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from configs import resolved
from terminals import terminal

from ddp_runner.job import Job
from ddp_runner.metric_names import METRICS as LISTED
from ddp_runner.tracking.console import ProgressLine, end_summary, waiting_line
from ddp_runner.tracking.run_dir import RunDir

METRICS = {"train/loss": 0.12341, "perf/samples_per_s": 12345.4}
EVALUATION = {"eval/loss": 0.2, "eval/accuracy": 0.97, "eval/f1": 0.96}
TITLE = "job 12 of 60: world_size=2,parallelism=ddp,optimizer.lr=0.1"


def summary(
    status: str,
    metrics: Mapping[str, Any],
    *,
    run_dir: Path = Path("run"),
    waits: Mapping[str, Any] | None = None,
    **fields: Any,
) -> str:
    """Return how a run ended 1.23 s after its start."""
    config = resolved("model=toy")[0]
    job = Job(config, started_at=time.time() - 1.23, provenance={}, **fields)
    record = {"status": status, "metrics": metrics, **(waits or {})}
    return end_summary(job, RunDir(run_dir), record)


def frames(shown: list[str]) -> list[str]:
    """Return what a terminal's line held after each redraw."""
    return [frame.rstrip("\r\n") for frame in "".join(shown).split("\r\x1b[2K")]


def drawn(
    *, columns: int, title: str = "", metrics: Mapping[str, float] = METRICS | EVALUATION
) -> list[str]:
    """Return the frames of a run that is shown at one step and closed."""
    with terminal(columns=columns) as (stream, shown):
        line = ProgressLine(600, total_epochs=10, initial_step=100, stream=stream, title=title)
        line._drawn_at = -1.0  # the next step is shown, however soon it comes
        line.update(300, epoch=5, metrics=metrics)
        line.close()
    return frames(shown)


def test_plain_lines_where_there_is_no_terminal() -> None:
    """One line for each step that has metrics, none for the others."""
    stream = io.StringIO()
    lines = ProgressLine(600, total_epochs=10, initial_step=100, stream=stream)
    lines.update(119, epoch=2, metrics={})
    lines.update(120, epoch=2, metrics={"train/loss": 0.12341, "perf/samples_per_s": 1234.4})
    lines.update(120, epoch=2, metrics={"eval/accuracy": 0.97})
    lines.close()
    assert stream.getvalue().splitlines() == [
        "epoch 2/10  step 120/600  loss 0.1234  1234 samples/s",
        "epoch 2/10  step 120/600  eval/accuracy 0.9700",
    ]


@pytest.mark.parametrize(("columns", "has_bar"), [(80, True), (120, True), (75, False)])
def test_the_live_line_fits_its_terminal(columns: int, has_bar: bool) -> None:
    """All that matters is there at 80 columns; the bar takes what is left."""
    first, *_, last = [frame for frame in drawn(columns=columns) if frame]
    assert "step 100/600" in first, "a resumed run does not begin at 0"
    assert len(last) < columns
    assert last.startswith("epoch 5/10  ")
    assert ("━" in last) == has_bar
    assert "step 300/600  loss 0.1234  accuracy 0.9700  12345 samples/s" in last
    assert ("left" in last) == (columns == 120)


def test_a_line_too_long_for_its_terminal_is_cut_at_its_end() -> None:
    """It never wraps: the next redraw would leave its first half behind."""
    assert all(len(frame) < 40 for frame in drawn(columns=40))


@pytest.mark.parametrize(("columns", "start"), [(80, "wo=2,"), (120, "world_size=2,")])
def test_a_sweeps_job_has_its_title_in_the_line_and_leaves_none(columns: int, start: str) -> None:
    """Its result takes the place of the line."""
    *_, last, nothing = drawn(columns=columns, title=TITLE)
    assert len(last) < columns
    assert last.startswith(f"12/60 {start}")
    assert "epoch 5/10" in last
    assert "step 300/600  loss 0.1234" in last
    assert last.endswith("samples/s") or last.endswith("left")
    assert nothing == ""


@pytest.mark.parametrize(("lines", "columns", "term"), [(0, 80, ""), (24, 0, ""), (24, 80, "dumb")])
def test_a_terminal_that_cannot_draw_shows_plain_lines(
    lines: int, columns: int, term: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As mpirun gives one, or Emacs."""
    if term:
        monkeypatch.setenv("TERM", term)
    with terminal(lines=lines, columns=columns) as (stream, shown):
        line = ProgressLine(600, total_epochs=10, initial_step=0, stream=stream)
        line.update(1, epoch=1, metrics={})
        line.close()
    assert not shown


def test_the_line_is_drawn_ten_times_a_second_at_most() -> None:
    """However fast the steps are; and the cursor is never hidden: a killed rank leaves it so."""
    with terminal() as (stream, shown):
        line = ProgressLine(10**6, total_epochs=1, initial_step=0, stream=stream)
        for step in range(1000):
            line.update(step, epoch=1, metrics=METRICS)
        drawn_at = line._drawn_at
        line._drawn_at = drawn_at - 1
        line.update(1000, epoch=1, metrics=METRICS)
        line.close()
    text = "".join(shown)
    assert text.count("\x1b[2K") < 20
    assert "step 1000/1000000" in text
    assert "\x1b[?25l" not in text


def test_a_terminal_that_goes_away_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run in the background outlives its window."""

    def gone(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    with terminal() as (stream, shown):
        line = ProgressLine(10, total_epochs=1, initial_step=0, stream=stream)
        monkeypatch.setattr("os.get_terminal_size", gone)
        line._drawn_at = -1.0
        line.update(5, epoch=1, metrics=METRICS)
        line.close()
    assert "step 5/10" in "".join(shown)


def test_own_metrics_are_shown_with_the_evaluation() -> None:
    """On the lines of a file, and at the end; a training step's scalars are not."""
    metrics = {"eval/loss": 0.25, "eval/mine": 0.5, "train/part": 0.75}
    lines = io.StringIO()
    line = ProgressLine(9, total_epochs=1, initial_step=0, stream=lines)
    line.update(9, epoch=1, metrics=metrics)
    assert lines.getvalue() == "epoch 1/1  step 9/9  eval/loss 0.2500  eval/mine 0.5000\n"
    text = summary("completed", metrics)
    assert text.splitlines()[0] == "completed in 1.2 s  eval/loss 0.2500  eval/mine 0.5000"
    text = summary("completed", metrics | {"eval/mine": None})
    assert text.splitlines()[0].endswith("eval/mine nan"), "it is not left out"


@pytest.mark.parametrize(
    ("by_rank", "step_ms", "expected"),
    [
        ([1.0, 50.2, 0.0], 120.4, "rank 1 kept the others waiting 50 ms of a step of 120 ms"),
        ([3.14, 0.0], 9.0, "rank 0 kept the others waiting 3.1 ms of a step of 9.0 ms"),
        (
            [25.4, 50.2, 0.0],
            120.4,
            "ranks 0, 1 kept the others waiting 25 ms, 50 ms of a step of 120 ms",
        ),
        (
            [30.0, 31.0, 32.0, 33.0, 34.0],
            120.0,
            "ranks 1, 2, 3, 4, … kept each other waiting "
            "31 ms, 32 ms, 33 ms, 34 ms, … of a step of 120 ms",
        ),
        ([0.0, 11.0], 120.0, None),  # less than a tenth
        ([0.0, 1.5], 4.0, None),  # any machine's noise
        (None, None, None),  # a single rank
    ],
)
def test_the_end_names_the_rank_that_the_others_waited_for(
    by_rank: object, step_ms: object, expected: str | None
) -> None:
    """In one line, and only if it matters."""
    waits = {"skew_ms_by_rank": by_rank, "skew_step_ms": step_ms}
    assert waiting_line(waits) == expected
    text = summary("completed", {}, waits=waits)
    assert [one for one in text.splitlines() if "waiting" in one] == (
        [expected] if expected else []
    )


def test_the_end_names_results_and_a_command_that_shows_the_runs_name(tmp_path: Path) -> None:
    """Within 80 columns; in a shell the command can be pasted."""
    metrics = dict.fromkeys((metric.name for metric in LISTED), 0.5)
    run_dir = Path("outputs/toy-random-ddp-ws2/2026-01-01_00-00-00")
    *results, command = summary("completed", metrics, run_dir=run_dir).split("\n")
    assert results[0].startswith("completed in 1.2 s  eval/accuracy 0.5000  eval/loss 0.5000")
    assert all(len(line) <= 80 for line in results)
    assert command == "tensorboard --logdir outputs"
    elsewhere = tmp_path / "my runs" / "one"
    ours: Any = object()  # a wire to our launcher
    text = summary("preempted", {}, run_dir=elsewhere, wire=ours)
    assert text.splitlines()[0] == "preempted in 1.2 s"
    assert text.splitlines()[1].startswith("resume with: python -m ddp_runner ")
    assert text.splitlines()[2] == f"tensorboard --logdir '{tmp_path / 'my runs'}'"
    text = summary("preempted", {})
    resume = "resume, unless its launcher restarts it, with the same command and resume=run"
    assert text.splitlines()[1] == resume


def test_a_loop_of_ones_own_shows_its_own_names() -> None:
    """In each line, and at the end; those of the machine stay out, but for the speed."""
    stream = io.StringIO()
    lines = ProgressLine(None, total_epochs=0, initial_step=0, stream=stream)
    speed = {"perf/step_time_ms": 2.0, "perf/samples_per_s": 1234.4}
    lines.update(3, epoch=1, metrics={})
    lines.update(3, epoch=1, metrics={"d/loss": 0.5, **speed})
    lines.update(4, epoch=1, metrics={"perf/step_time_ms": 2.0})
    lines.close()
    assert stream.getvalue() == "step 3  d/loss 0.5000  1234 samples/s\n"
    for title in ("", TITLE):
        text = summary("completed", {"d/loss": 0.5, **speed}, title=title)
        assert "completed in 1.2 s  d/loss 0.5000" in text


def test_the_command_that_goes_on_says_again_what_the_run_was_told(tmp_path: Path) -> None:
    """A resumed run allows nothing by itself; a shell reads the words as they were."""
    words = ("allowed_targets=[mine,theirs]", "--config-dir=/my $conf", "+trackers.a.b='c d'")
    ours: Any = object()
    text = summary("preempted", {}, run_dir=tmp_path, resume_arguments=words, wire=ours)
    assert f'resume={tmp_path} "allowed_targets=[mine,theirs]"' in text
    assert shlex.split(text.splitlines()[1])[5:] == [f"resume={tmp_path}", *words]


def test_the_result_of_a_sweeps_job_is_one_line() -> None:
    """The table and the command for TensorBoard follow at the end of the sweep."""
    metrics = {**METRICS, **EVALUATION, "eval/f1": None}
    text = summary("completed", metrics, title=TITLE)
    assert text == f"{TITLE}  completed in 1.2 s  train/loss 0.1234  eval/accuracy 0.9700"
    for columns, begin, end in (
        (200, TITLE, "  train/loss 0.1234  eval"),
        (80, "12/60 ", "  eval"),
    ):
        with terminal(columns=columns) as (stream, _), redirect_stdout(stream):
            text = summary("completed", metrics, title=TITLE)
        assert len(text) < columns
        assert text.startswith(begin)
        assert text.endswith(f"  completed in 1.2 s{end}/accuracy 0.9700")
    assert "\n" not in summary("preempted", metrics, title=TITLE)  # its sweep says what goes on
