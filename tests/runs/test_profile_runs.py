"""``train.profile`` through the real command: what a user types, sees and finds in the folder."""

from pathlib import Path

import pytest
from commands import error_line, run_command
from run_folders import metrics, record, reproducible_metrics
from trainings import RUN, TOY

pytestmark = pytest.mark.full


def test_a_profiled_run_keeps_its_profile(tmp_path: Path) -> None:
    """Its numbers are those of a run without one; torch writes nothing to the terminal."""
    end = run_command(*TOY, "train.profile=3", folder=tmp_path / "profiled")
    assert (end.exit_code, end.stderr) == (0, "")
    assert "traced steps 6 to 8 into " in end.stdout
    folder = tmp_path / "profiled" / RUN / "profile" / "steps-6-8"
    assert {path.name for path in folder.iterdir()} == {
        *("rank-0.json.gz", "rank-0.txt", "rank-1.json.gz", "rank-1.txt")
    }
    timed = [line["step"] for line in metrics(end.run_dir) if "perf/samples_per_s" in line]
    assert timed == [1, 2, 3, 4, *range(9, 19)]
    plain = run_command(*TOY, folder=tmp_path / "plain")
    assert reproducible_metrics(end.run_dir) == reproducible_metrics(plain.run_dir)
    hashes = [record(run.run_dir)["config_hash"] for run in (end, plain)]
    assert hashes[0] == hashes[1]


def test_a_resumed_run_can_be_profiled(tmp_path: Path) -> None:
    """By the steps of the run, which need no quotes in a shell; those that are past are left out.

    If all are, the run says so.
    """
    begin = run_command(*TOY, "train.max_steps=8", folder=tmp_path)
    assert begin.exit_code == 0
    keys = ("train.profile=5-12", "train.max_steps=14")
    end = run_command(f"resume={RUN}", *keys, folder=tmp_path)
    assert (end.exit_code, end.stderr) == (0, "")
    assert "traced steps 9 to 12 into " in end.stdout
    assert [path.name for path in (end.run_dir / "profile").iterdir()] == ["steps-9-12"]
    keys = ("train.profile=3-7", "train.max_steps=18")
    end = run_command(f"resume={RUN}", *keys, folder=tmp_path)
    assert (end.exit_code, end.stderr) == (0, "")
    (warning,) = record(end.run_dir)["warnings"]
    assert warning.startswith(
        "train.profile=3-7 traces nothing: this run continues after step 14; "
    )
    assert f"warning: {warning}" in " ".join(end.stdout.split())


def test_a_profile_after_the_end_is_an_error_before_the_start(tmp_path: Path) -> None:
    """In a line, and nothing is left behind."""
    end = run_command(*TOY, "train.profile=17-19", folder=tmp_path)
    assert error_line(end) == (
        "train.profile=17-19 traces steps up to 19, and the run has 18; train longer, or name "
        "earlier steps: train.profile=FIRST-LAST"
    )
    assert end.run_dirs == []
