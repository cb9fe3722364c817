"""What is between machines, with two or three ranks of one machine that take each other's part."""

import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import pytest
from ranks import run_ranks

from ddp_runner.dist_env import DistEnv
from ddp_runner.doctor import between, links
from ddp_runner.doctor.finding import Finding, Level
from ddp_runner.doctor.machines import find_machines


def findings_of(
    env: DistEnv, folders: list[str], names: list[str], torch_versions: list[str], locks: bool
) -> list[Finding]:
    """Return what this rank finds, as the only one of its machine."""
    own = replace(env, local_rank=0, local_world_size=1, node_rank=env.rank)
    folder = Path(folders[env.rank])
    versions = {"python": "3.12", "torch": torch_versions[env.rank]}
    with (
        patch.object(socket, "gethostname", lambda: names[env.rank]),
        patch.object(between, "versions", lambda: versions),
        patch.object(between, "SEEN_S", 0.3),
        patch.object(between.fcntl, "flock", between.fcntl.flock if locks else lambda *_: None),
    ):
        machines = find_machines(own)
        return list(
            between.examine(
                machines, outputs=folder / "outputs", data_root=folder / "data", timeout_s=60.0
            )
        )


def examine(
    folders: list[Path],
    *,
    names: tuple[str, ...] = ("n1", "n2", "n3"),
    torch_versions: tuple[str, ...] = ("2.15",) * 3,
    locks: bool = True,
) -> dict[str, Finding]:
    """Return rank 0's findings by name; those of the others lead to the same exit code."""
    found = run_ranks(
        findings_of, len(folders), [*map(str, folders)], [*names], [*torch_versions], locks
    )
    for other in found[1:]:
        assert [(one.name, one.level) for one in other] == [
            (one.name, one.level) for one in found[0]
        ]
    return {finding.name: finding for finding in found[0]}


def test_machines_that_share_everything_are_ok(tmp_path: Path) -> None:
    """Speeds are measured and not judged here: the machine may be busy."""
    (tmp_path / "data").mkdir()
    found = examine([tmp_path] * 3)
    assert list(found) == ["software", "outputs", "lock", "data", "link", "clocks", "gloo"]
    assert found["software"].value == "equal on 3 machines"
    assert found["outputs"].value == f"all 3 machines see {tmp_path / 'outputs'}"
    assert found["lock"].value == "keeps processes of other machines out"
    assert found["data"].level == Level.OK
    assert found["link"].value.startswith("n2 to n3: ")  # the last of three pairs
    assert found["clocks"].level == Level.OK
    assert found["gloo"].value.startswith("all_reduce of 8 MiB over 3 ranks: ")
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_other_versions_are_a_problem(tmp_path: Path) -> None:
    """With each version and where it is."""
    found = examine([tmp_path] * 2, torch_versions=("2.15", "2.11"))
    assert (found["software"].level, found["software"].value) == (
        Level.PROBLEM,
        "torch is 2.15 on n1 and 2.11 on n2",
    )


def test_what_a_machine_cannot_see_is_named(tmp_path: Path) -> None:
    """A host name that two machines share gets the machine's number."""
    (tmp_path / "1" / "data").mkdir(parents=True)
    (tmp_path / "1" / "outputs").mkdir()  # the other machine has not even the folder
    (tmp_path / "2").mkdir()
    found = examine([tmp_path / "1", tmp_path / "2"], names=("same", "same"))
    outputs = tmp_path / "1" / "outputs"
    assert found["outputs"].level == Level.WARNING
    assert found["outputs"].value.startswith("same#1 cannot see ")
    assert "lock" not in found
    assert found["data"].level == Level.PROBLEM
    assert found["data"].value == f"same#1 cannot see {tmp_path / '1' / 'data'}"
    assert list(outputs.iterdir()) == []


def test_a_lock_that_other_machines_do_not_see_is_a_warning(tmp_path: Path) -> None:
    """As with NFS and its option local_lock."""
    found = examine([tmp_path] * 2, locks=False)
    assert (found["lock"].level, found["lock"].value) == (
        Level.WARNING,
        "n2 does not see the lock of n1: free",
    )


def test_an_outputs_folder_that_cannot_be_made_is_left_to_the_machines_report(
    tmp_path: Path,
) -> None:
    """The other looks go on."""
    (tmp_path / "outputs").write_text("a file")
    found = examine([tmp_path] * 2)
    assert "outputs" not in found
    assert "gloo" in found


def meet_with_an_offset(env: DistEnv, ahead_s: float) -> tuple[float, float, float]:
    """Return the link of two ranks, the second of which has another clock."""
    real = time.time
    with patch.object(time, "time", lambda: real() + ahead_s * env.rank):
        return links.measure_link(0, 1)


def test_the_offset_of_a_clock_is_measured() -> None:
    """To within a round trip."""
    first, _ = run_ranks(meet_with_an_offset, 2, 100.0)
    assert first[2] == pytest.approx(100.0, abs=30.0)
    assert first[0] > 0
    assert first[1] > 0


def test_a_look_that_fails_ends_the_looks_with_one_line() -> None:
    """Without the place in the C++ code, and without advice that is not ours."""

    def looks() -> Iterator[Any]:
        yield "a finding"
        fail()

    def fail() -> NoReturn:
        raise RuntimeError("[/a/b/pair.cc:545] Read error [10.0.0.3]:5: reset. This is odd.\nGLHF")

    first, last = between.guarded(looks)
    assert first == "a finding"
    assert (last.level, last.value) == (Level.PROBLEM, "Read error [10.0.0.3]:5: reset")
