"""What a SIGKILL leaves behind, and that the next start removes it."""

import signal
from functools import partial
from pathlib import Path

import pytest
from injection import At, Fault, kill_tree, send_launcher
from tiers import first_of
from trainings import run_training

SHARED_MEMORY = Path("/dev/shm")


def shared_memory() -> set[str]:
    """Return the names in this machine's shared memory that torch or this program may have made."""
    if not SHARED_MEMORY.is_dir():
        return set()
    prefixes = ("torch_", "psm_", "mp-", "sem.mp-", "pymp-", "gloo", "nccl-", "ddp_runner")
    return {path.name for path in SHARED_MEMORY.iterdir() if path.name.startswith(prefixes)}


@pytest.mark.parametrize(
    "what", first_of([kill_tree, partial(send_launcher, signal.SIGKILL)]), ids=["tree", "launcher"]
)
def test_the_next_start_removes_what_a_kill_left(
    tmp_path: Path, short_temp: Path, what: object
) -> None:
    """The launcher's folder and all that is in it; no shared memory is left."""
    before, environ = shared_memory(), {"TMPDIR": str(short_temp)}
    end = run_training(tmp_path / "killed", Fault(what, At(0, 11)), environ=environ)
    assert end.exit_code == -signal.SIGKILL
    (left,) = short_temp.iterdir()
    assert left.name.startswith("ddp_runner-")
    end = run_training(tmp_path / "next", args=("train.max_steps=3",), environ=environ)
    assert (end.exit_code, end.stderr) == (0, "")
    assert list(short_temp.iterdir()) == []
    assert shared_memory() - before == set()
