"""The disk of the outputs folder: its kind, its space, its locks and renames."""

import fcntl
import os
import shutil
import tempfile
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest

from ddp_runner.doctor import storage
from ddp_runner.doctor.finding import Level
from ddp_runner.doctor.machine import GIB

Usage = namedtuple("Usage", "total used free")
MOUNTS = """22 1 8:1 / / rw - ext4 /dev/sda rw
23 22 0:5 / /home/my\\040disk rw,relatime shared:1 - nfs4 server:/x rw
24 22 0:6 / /home rw - xfs /dev/sdb rw
26 22 0:8 / /home/Bücher\\0401\\134日本 rw - btrfs /dev/sdc rw
25 22 0:7 / {outputs} rw - {kind} none rw
"""


def test_the_file_system_is_that_of_the_longest_mount_point(tmp_path: Path) -> None:
    """A mount point may have spaces, and letters of any language."""
    mounts = tmp_path / "mounts"
    mounts.write_text(MOUNTS.format(outputs="/data", kind="lustre"), encoding="utf-8")
    for path, kind in {
        "/home/my disk/outputs": "nfs4",
        "/home/me": "xfs",
        "/home/Bücher 1\\日本/outputs": "btrfs",
        "/homes": "ext4",
        "/data": "lustre",
    }.items():
        assert storage.file_system(Path(path), mounts=mounts)[0] == kind
    assert storage.file_system(tmp_path, mounts=tmp_path / "none") == ("unknown", "/")


@pytest.mark.parametrize(
    ("kind", "free", "inodes", "level", "says"),
    [
        ("nfs4", 50 * GIB, 9, Level.OK, ""),
        ("btrfs", 50 * GIB, None, Level.OK, ""),  # which has no number of inodes
        ("ext4", 50 * GIB, 0, Level.PROBLEM, "delete files"),
        ("ext4", 1 * GIB, 9, Level.WARNING, "checkpoints may fill it"),
        ("ext4", 10, 9, Level.PROBLEM, "free some"),
        ("tmpfs", 50 * GIB, 9, Level.WARNING, "lost at a reboot"),
        ("overlay", 50 * GIB, 9, Level.WARNING, "mount a volume"),
    ],
)
def test_kind_and_space_of_the_disk(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    free: int,
    inodes: int | None,
    level: Level,
    says: str,
) -> None:
    """Of the nearest folder that exists."""
    mounts = tmp_path / "mounts"
    mounts.write_text(MOUNTS.format(outputs=tmp_path, kind=kind))
    counts = SimpleNamespace(f_files=0 if inodes is None else 9, f_favail=inodes or 0)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(free, 0, free))
    monkeypatch.setattr(os, "statvfs", lambda _: counts)
    (finding,) = storage.space(tmp_path / "new" / "outputs", mounts=mounts)
    assert finding.level == level
    assert finding.value.startswith(f"{tmp_path}: {kind} at {tmp_path}")
    assert says in str(finding.advice or "")


@pytest.mark.parametrize("exists", [True, False])
def test_what_is_tried_leaves_nothing(tmp_path: Path, exists: bool) -> None:
    """Neither in the outputs folder, nor that folder if there was none."""
    outputs = tmp_path / "outputs"
    if exists:
        (outputs / "run").mkdir(parents=True)
    rename, lock = storage.behaviour(outputs)
    assert (rename.level, lock.level) == (Level.OK, Level.OK)
    assert [path.name for path in tmp_path.iterdir()] == (["outputs"] if exists else [])
    assert not exists or [path.name for path in outputs.iterdir()] == ["run"]


def test_what_is_tried_is_in_the_folder_as_the_user_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other machines look for it there; Python 3.12 gives another path for a folder with `..`."""
    (tmp_path / "here").mkdir()
    make = tempfile.mkdtemp
    monkeypatch.setattr(tempfile, "mkdtemp", lambda **keys: str(Path(make(**keys)).resolve()))
    outputs = tmp_path / "here" / ".."
    with storage.trial_folder(outputs / "new") as folder:
        assert folder.parent == outputs
        assert folder.is_dir()
    assert not folder.exists()


def test_a_lock_that_keeps_nobody_out_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a disk whose locks do nothing, or that has none."""
    path = tmp_path / "file"
    path.touch()
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    assert storage.lock(path).value == "two processes hold it at once"

    def fail(*_: object) -> NoReturn:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", fail)
    assert storage.lock(path).value == "flock fails (No locks available)"
    monkeypatch.undo()
    monkeypatch.setattr(storage, "LOCK", "raise SystemExit('odd disk')")
    finding = storage.lock(path)
    assert (finding.level, finding.value) == (
        Level.PROBLEM,
        "another process fails at it: odd disk",
    )
