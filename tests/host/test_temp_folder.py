"""The next launcher clears what a killed launcher left, and spares those that are alive."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LAUNCHER = """
import sys, tempfile, time
from ddp_runner.host.temp_folder import temp_folder
folder = temp_folder()
open(tempfile.mkdtemp(prefix="pymp-", dir=folder) + "/listener", "w").close()
print(folder, flush=True)
sys.stdin.read()
"""


@contextmanager
def launcher(base: Path, program: str = LAUNCHER) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Start a process that has a folder of its own under `base`; end it with the block."""
    process = subprocess.Popen(
        [sys.executable, "-c", program],
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
    """It removes the folder with its content; a launcher that is alive keeps its folder."""
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


def test_what_is_not_surely_abandoned_stays(short_temp: Path) -> None:
    """A folder may be unlocked yet, another user's or work; there may be a file or a link."""
    for name in ("new-ddp_runner-young", "precious", "ddp_runner-others", "ddp_runner-results"):
        (short_temp / name).mkdir()
        (short_temp / name / "launcher").touch()
    (short_temp / "ddp_runner-results" / "launcher").unlink()
    (short_temp / "ddp_runner-file").touch()
    (short_temp / "ddp_runner-link").symlink_to(short_temp / "precious")
    if os.getuid() == 0:
        os.chown(short_temp / "ddp_runner-others", 4242, -1)
    else:
        shutil.rmtree(short_temp / "ddp_runner-others")
    before = set(short_temp.iterdir())
    with launcher(short_temp) as (process, held):
        assert set(short_temp.iterdir()) == before | {held}
    assert process.returncode == 0
    assert set(short_temp.iterdir()) == before
