"""``python -m ddp_runner.doctor``: alone, and as the ranks of a launch on one machine."""

import json
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from commands import (
    RUNNER,
    CommandResult,
    background,
    error_line,
    free_port,
    run_command,
    wait_for_end,
)

DOCTOR = (*RUNNER[:-1], "ddp_runner.doctor")


def variables(rank: int, port: int) -> dict[str, str]:
    """Return what torchrun sets for a rank of two on one machine."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return {name: str(value) for name, value in (names | address).items()}


def test_alone_it_examines_this_machine(tmp_path: Path) -> None:
    """As lines of 80 columns, and as JSON with the same content; nothing is left."""
    end = run_command(folder=tmp_path, program=DOCTOR)
    lines = end.stdout.splitlines()
    assert end.stderr == ""
    assert lines[0] == f"machine {os.uname().nodename}"
    assert max(map(len, lines)) <= 80
    shown = run_command("--json", folder=tmp_path, program=DOCTOR)
    report = json.loads(shown.stdout)
    ((name, findings),) = report["machines"].items()
    assert name == os.uname().nodename
    names = {one["name"] for one in findings}
    assert {"software", "cores", "limits", "host name", "outputs", "lock", "torch"} <= names
    assert all((one["level"] == "ok") == (one["advice"] is None) for one in findings)
    assert {one["name"] for one in findings if f"  {one['level']:<8} {one['name']}" in end.stdout}
    assert report["between"] == []
    assert shown.exit_code == end.exit_code == (report["counts"]["problem"] > 0)
    assert {path.name for path in tmp_path.iterdir()} == {"stdout", "stderr"}


def test_two_ranks_report_once(tmp_path: Path) -> None:
    """On stdout of rank 0 alone, as one JSON object."""
    port = free_port()
    with ExitStack() as stack:
        folders = [tmp_path / str(rank) for rank in range(2)]
        processes = [
            stack.enter_context(
                background("--json", folder=folder, program=DOCTOR, environ=variables(rank, port))
            )
            for rank, folder in enumerate(folders)
        ]
        ends = [wait_for_end(*one) for one in zip(processes, folders, strict=True)]
    report: dict[str, Any] = json.loads(ends[0].stdout)
    assert len(report["machines"]) == 1
    assert [one["name"] for one in report["between"]] == ["software", "gloo"]
    assert ends[1].stdout == ""
    assert ends[0].exit_code == ends[1].exit_code == (report["counts"]["problem"] > 0)


def test_a_rank_that_waits_in_vain_reports_its_own_machine(tmp_path: Path) -> None:
    """And that the others did not come, with exit code 1. stdout has the report alone."""
    environ = variables(0, free_port()) | {"LOCAL_WORLD_SIZE": "1"}  # of another machine's rank
    end: CommandResult = run_command(
        "--json", "--timeout=4", folder=tmp_path, program=DOCTOR, environ=environ
    )
    report = json.loads(end.stdout)
    assert end.exit_code == 1
    (finding,) = report["between"]
    assert (finding["name"], finding["level"]) == ("group", "problem")
    assert finding["value"].startswith("2 ranks did not meet: ")
    assert "within 4 s" in finding["advice"]
    assert report["machines"]


@pytest.mark.parametrize(
    ("environ", "says"),
    [({"RANK": "x", "WORLD_SIZE": "2"}, "RANK (x) must be a whole number")],
)
def test_a_launcher_that_makes_no_sense_is_one_line(
    tmp_path: Path, environ: dict[str, str], says: str
) -> None:
    """With exit code 2, before anything is examined."""
    end = run_command(folder=tmp_path, program=DOCTOR, environ=environ)
    assert error_line(end).startswith(says)


def test_ranks_without_a_place_to_meet_are_told_how(tmp_path: Path) -> None:
    """As of mpirun on several machines."""
    environ = {name: value for name, value in variables(0, 1).items() if "MASTER" not in name}
    end = run_command("--json", folder=tmp_path, program=DOCTOR, environ=environ)
    (finding,) = json.loads(end.stdout)["between"]
    assert "nothing says where they meet; set MASTER_ADDR" in finding["value"]
