"""What a SIGKILL leaves behind: temporary files and shared memory, cleared by the next start."""

import signal
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from injection import At, Fault, kill_tree, send_launcher
from trainings import trained

SHARED_MEMORY = Path("/dev/shm")


@pytest.fixture
def temp() -> Iterator[Path]:
    """A temp folder whose path leaves room for that of a socket."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


def shared_memory() -> set[str]:
    """Return what lies in the shared memory of this machine and is this program's, or torch's."""
    if not SHARED_MEMORY.is_dir():
        return set()
    prefixes = ("torch_", "psm_", "mp-", "sem.mp-", "pymp-", "gloo", "nccl-", "ddp_runner")
    return {path.name for path in SHARED_MEMORY.iterdir() if path.name.startswith(prefixes)}


@pytest.mark.parametrize(
    "what", [kill_tree, partial(send_launcher, signal.SIGKILL)], ids=["tree", "launcher"]
)
def test_what_a_kill_leaves_is_cleared_by_the_next_start(
    tmp_path: Path, temp: Path, what: object
) -> None:
    """Of a whole run: the launcher's folder with all that is in it; shared memory has nothing."""
    before, environ = shared_memory(), {"TMPDIR": str(temp)}
    end = trained(tmp_path / "killed", Fault(what, At(0, 11)), environ=environ)
    assert end.exit_code == -signal.SIGKILL
    (left,) = temp.iterdir()
    assert left.name.startswith("ddp_runner-")
    end = trained(tmp_path / "next", args=("train.max_steps=3",), environ=environ)
    assert (end.exit_code, end.stderr) == (0, "")
    assert list(temp.iterdir()) == []
    assert shared_memory() - before == set()
