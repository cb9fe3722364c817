"""The page about watching runs does what it says: its own tracker runs, and resumes."""

import csv
from pathlib import Path

import pytest
from commands import run_command
from pages import blocks, commands, write_files
from run_folders import metrics

pytestmark = pytest.mark.full

PAGE = "docs/observing.md"
SHORT = ("train.max_steps=20", "train.num_threads=1", "world_size=2", "tags=[baseline]")


def test_the_tracker_of_the_page_gets_every_number_once(tmp_path: Path) -> None:
    """Also over a resume; a secret key of it is in no file."""
    files = write_files(PAGE, tmp_path)
    assert files == ["my_package/csv_tracker.py", "conf/trackers/csv.yaml"]
    assert all(one.path or one.language not in ("python", "yaml") for one in blocks(PAGE))
    environ = {"PYTHONPATH": str(tmp_path), "CSV_PATH": f"{tmp_path}/a-secret-place.csv"}
    (command,) = (one for one in commands(PAGE) if "trackers=csv" in one)
    first = run_command(
        *command,
        *SHORT,
        "trackers.csv.wait_s=120",
        "trackers.csv.path=${oc.env:CSV_PATH}",
        folder=tmp_path,
        environ=environ,
    )
    assert (first.exit_code, first.stderr) == (0, "")
    own = ("--config-dir", "conf", "allowed_targets=[my_package]", f"resume='{first.run_dir}'")
    keys = [one for one in command if one.startswith("trackers")]
    keys += ["trackers.csv.wait_s=120", "trackers.csv.path=${oc.env:CSV_PATH}"]
    second = run_command(*own, *keys, "train.max_steps=30", folder=tmp_path, environ=environ)
    assert (second.exit_code, second.stderr) == (0, "")
    rows = list(csv.reader((tmp_path / "a-secret-place.csv").open()))
    assert len({name for name, *_ in rows}) == 1
    sent = [(int(step), name, float(value)) for _, step, name, value in rows if step]
    expected = [
        (line["step"], name, line[name])
        for line in metrics(first.run_dir)
        for name in line
        if "/" in name
    ]
    assert sent == expected
    assert [row[2] for row in rows if not row[1]] == ["completed", "completed"]
    assert "warning" not in first.stdout + second.stdout
    files = [path for path in first.run_dir.rglob("*") if path.is_file()]
    assert not [path for path in files if b"a-secret-place" in path.read_bytes()]
