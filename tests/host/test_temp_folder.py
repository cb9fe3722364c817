"""What launchers leave in the temp folder: cleared by the next one, never under a living one."""

import fcntl
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ddp_runner.host.temp_folder import (
    OWNER,
    UNLOCKED,
    _made,
    clear_abandoned,
    temp_folder,
)

LAUNCHER = """
import sys, tempfile, time
from ddp_runner.host.temp_folder import temp_folder
folder = temp_folder()
open(tempfile.mkdtemp(prefix="pymp-", dir=folder) + "/listener", "w").close()
print(folder, flush=True)
sys.stdin.read()
"""


@contextmanager
def launcher(base: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Start a process that has a folder of its own under `base`; end it with the block."""
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER],
        env={**os.environ, "TMPDIR": str(base)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield process, Path(process.stdout.readline().strip())
        process.communicate("")
    finally:
        process.kill()
        process.communicate()


def test_the_next_start_clears_what_a_killed_launcher_left(short_temp: Path) -> None:
    """With all that lies in it; a living launcher's folder stays, and goes at its own end."""
    with launcher(short_temp) as (living, held):
        with launcher(short_temp) as (killed, abandoned):
            killed.kill()
        assert len(list(abandoned.glob("pymp-*/listener"))) == 1
        with launcher(short_temp) as (other, others):
            assert set(short_temp.iterdir()) == {held, others}
    assert [living.returncode, other.returncode] == [0, 0]
    assert not list(short_temp.iterdir())


def test_a_long_path_leaves_no_room_for_a_socket(tmp_path: Path) -> None:
    """The folder is then in /tmp, where multiprocessing can put its sockets."""
    long = tmp_path / ("x" * 60)
    long.mkdir()
    with launcher(long) as (process, held):
        assert held.parent == Path("/tmp")
    assert process.returncode == 0
    assert not held.exists()


def test_a_started_process_has_the_folder_of_its_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As every further call has that of the first one."""
    folder = tmp_path / "ddp_runner-launcher"
    folder.mkdir()
    (folder / OWNER).write_text(f"{socket.gethostname()}\nprocess 1\n")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    assert temp_folder() == folder


def test_nobody_sees_a_folder_that_is_not_locked_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another launcher that starts just then would take it for abandoned."""
    seen, flock = [], fcntl.flock

    def noted(descriptor: int, operation: int) -> None:
        seen.extend(one.name for one in tmp_path.iterdir())
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", noted)
    made = _made(tmp_path)
    assert seen == [f"{UNLOCKED}{made.name}"]
    assert list(tmp_path.iterdir()) == [made]


def test_what_is_not_surely_abandoned_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No owner yet, another host's or user's, a file, a link, another program's."""
    (tmp_path / "new-ddp_runner-young").mkdir()
    (tmp_path / "ddp_runner-bare").mkdir()
    (tmp_path / "ddp_runner-file").touch()
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / OWNER).write_text(f"{socket.gethostname()}\nprocess 1\n")
    (tmp_path / "ddp_runner-link").symlink_to(tmp_path / "precious")
    elsewhere = tmp_path / "ddp_runner-elsewhere"
    elsewhere.mkdir()
    (elsewhere / OWNER).write_text("another-host\nprocess 1\n")
    before = set(tmp_path.rglob("*"))
    clear_abandoned(tmp_path)
    assert set(tmp_path.rglob("*")) == before
    (elsewhere / OWNER).write_text(f"{socket.gethostname()}\nprocess 1\n")
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda: -1)
        clear_abandoned(tmp_path)
        assert set(tmp_path.rglob("*")) == before
    clear_abandoned(tmp_path)
    assert not elsewhere.exists()
