"""An import that fails is one line, and the fork server's first attempt decides its text."""

import sys
from pathlib import Path

import pytest
from commands import background, error_line, run_command, wait_for_end
from run_folders import record

# The runner under ``ulimit -v`` of 1 GiB.
LIMITED = """
import resource, runpy, sys

if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))
    sys.argv[0] = "ddp_runner"
    runpy.run_module("ddp_runner", run_name="__main__", alter_sys=True)
"""


def test_a_limit_that_torch_does_not_fit_in_is_named(tmp_path: Path) -> None:
    """The message is one line, and run.json says that the run has failed."""
    command = (sys.executable, "-c", LIMITED)
    with background("model=toy", folder=tmp_path, program=command) as process:
        end = wait_for_end(process, tmp_path)
    assert end.exit_code == 2
    sentence = "torch cannot be imported: ulimit -v allows each process 1.0 GiB of addresses"
    assert end.stderr == f"error: {sentence}; raise it\n"
    fields = record(end.run_dir)
    assert (fields["status"], fields["error"]["kind"]) == ("failed", "user")


def broken_plug_in(folder: Path) -> dict[str, str]:
    """Install a plug-in of torch that cannot be loaded; return the environment that finds it."""
    info = folder / "broken-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[torch.backends]\nbroken = no_such_module:load\n")
    return {"PYTHONPATH": str(folder)}


def test_a_plug_in_that_torch_cannot_load_is_named(tmp_path: Path) -> None:
    """The fork server's first import of torch gives the reason, which a later import would not."""
    environ = broken_plug_in(tmp_path)
    end = run_command("model=toy", folder=tmp_path, environ=environ, fresh=True)
    ended, fields = error_line(end), record(end.run_dir)
    assert (fields["status"], fields["error"]["kind"]) == ("failed", "user")
    assert ended.startswith("torch cannot be imported: RuntimeError: Failed to load the backend ")
    assert "extension: broken" in ended
    assert ended.endswith("No module named 'no_such_module'; repair the installation")


@pytest.mark.full
def test_who_asks_for_gpus_learns_of_the_plug_in_as_well(tmp_path: Path) -> None:
    """The command asks torch for GPUs before it starts anything."""
    environ, asked = broken_plug_in(tmp_path), ("model=toy", "backend=nccl")
    rejected = error_line(run_command(*asked, folder=tmp_path, environ=environ, fresh=True))
    assert "torch cannot say which GPUs it sees (RuntimeError: " in rejected
    assert "extension: broken" in rejected
