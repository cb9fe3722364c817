"""The command that a stopped run prints is enough to go on with it, as it was."""

import shlex
import signal
from pathlib import Path

import own_trackers
import pytest
from commands import background, wait_for, wait_for_end
from own_trackers import calls
from run_folders import last_step

pytestmark = pytest.mark.full

HERE = {"PYTHONPATH": str(Path(own_trackers.__file__).parent)}


def test_the_printed_command_sends_to_a_tracker_of_the_users_own(tmp_path: Path) -> None:
    """Its option is in a folder of the user's, which the command names."""
    sent, option = tmp_path / "sent", tmp_path / "my conf" / "trackers" / "file.yaml"
    option.parent.mkdir(parents=True)
    option.write_text(f"mine:\n  _target_: own_trackers.Recorder\n  path: {sent}\n")
    command = ("--config-dir=my conf", "trackers=file", "allowed_targets=[own_trackers]")
    run = ("model=toy", "world_size=1", "train.epochs=100000", "hydra.run.dir=run")
    with background(*command, *run, folder=tmp_path, environ=HERE) as process:
        wait_for(lambda: last_step(tmp_path) > 0 and sent.exists())
        process.send_signal(signal.SIGTERM)
        stopped = wait_for_end(process, tmp_path)
    (line,) = [one for one in stopped.stdout.splitlines() if one.startswith("resume with: ")]
    go_on = line.removeprefix("resume with: python -m ddp_runner ")
    with background(*shlex.split(go_on), folder=tmp_path, environ=HERE) as process:
        wait_for(lambda: process.poll() is not None or sent.read_text().count('"begin"') == 2)
        process.send_signal(signal.SIGTERM)
        again = wait_for_end(process, tmp_path)
    assert again.exit_code == 128 + signal.SIGTERM, again.stderr
    assert line in again.stdout
    assert [one["end"] for one in calls(sent) if "end" in one] == ["preempted", "preempted"]
