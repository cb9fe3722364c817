"""The command that sends a run by hand: an old one, or one whose server was away."""

import json
import socket
import sys
from dataclasses import replace
from pathlib import Path

import own_trackers
import pytest
from commands import run_command
from configs import freeze, resolved
from own_trackers import calls, points
from run_folders import scalars

from ddp_runner.errors import UserError
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.tracking.run_record import write_run_record
from ddp_runner.tracking.track import run
from ddp_runner.tracking.trackers.follower import Follower

LINE = {"step": 1, "epoch": 1, "time_s": 0.5, "train/loss": 0.25}


@pytest.fixture
def ended(tmp_path: Path) -> RunDir:
    """Return a run that has completed, and named no tracker."""
    run_dir = RunDir(tmp_path / "toy" / "run")
    run_dir.path.mkdir(parents=True)
    freeze(run_dir.path, resolved("model=toy")[0])
    run_dir.metrics.write_text(json.dumps(LINE) + "\n")
    loaded = {"started_at": 5.0, "resume_step": None, "clock": 0.0}
    write_run_record(run_dir, status="completed", started_at=5.0, loaded=loaded)
    return run_dir


def words(run_dir: RunDir, **keys: str) -> list[str]:
    """Return a command that sends a run to a recorder beside its folder."""
    keys = {"_target_": "own_trackers.Recorder", "path": f"{run_dir.path.parent}/calls", **keys}
    return [str(run_dir), "mine", *(f"{key}={one}" for key, one in keys.items())]


def test_an_old_run_is_sent_whole_and_once(
    ended: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also one that no tracker has followed before."""
    sent = ended.path.parent / "calls"
    assert run(words(ended)) == 0
    assert run(words(ended)) == 0
    assert points(sent) == [(1, "train/loss", 0.25)]
    assert [one["end"] for one in calls(sent) if "end" in one] == ["completed", "completed"]
    assert capsys.readouterr().out == 2 * f"trackers.mine has all of {ended}\n"


def test_a_server_that_is_away_is_named_and_gets_the_run_later(
    ended: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    """One attempt: whoever types the command sees it."""
    broken = ended.path.parent / "broken"
    broken.touch()
    assert run(words(ended, broken=str(broken))) == 1
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == (
        "",
        "error: trackers.mine failed (ConnectionError: no answer)\n",
    )
    broken.unlink()
    assert run(words(ended, broken=str(broken))) == 0
    assert points(ended.path.parent / "calls") == [(1, "train/loss", 0.25)]


def test_a_run_whose_process_is_gone_has_failed(ended: RunDir) -> None:
    """run.json says that it still runs, and nobody holds its lock."""
    write_run_record(ended, status="running", host=socket.gethostname())
    assert run(words(ended)) == 0
    assert calls(ended.path.parent / "calls")[-1]["end"] == "failed"


def test_keys_that_came_with_a_run_are_named_again(
    ended: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else's run must not choose a server for what this environment holds."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    config, _ = resolved("model=toy", "trackers=[mlflow]")
    uri = "http://${oc.env:SECRET}.example"
    keys = config.trackers["mlflow"] | {"tracking_uri": uri, "wait_s": 3.0}
    freeze(ended.path, replace(config, trackers={"mlflow": keys}))
    with pytest.raises(UserError, match=r"was sent to trackers\.mlflow with keys that") as raised:
        run([str(ended), "mlflow"])
    assert f"; add 'tracking_uri={uri}'" in str(raised.value)
    freeze(ended.path, config)
    with pytest.raises(UserError, match="must name a server"):
        run([str(ended), "mlflow"])


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (["mine"], "mine is not a known tracker; add _target_=PACKAGE.MODULE.CLASS"),
        (
            ["mine", "path=${oc.env:NONE_OF_THESE}"],
            "Environment variable 'NONE_OF_THESE' not found",
        ),
    ],
)
def test_a_mistake_in_the_command_is_one_line(
    ended: RunDir, given: list[str], sentence: str
) -> None:
    """Before anything is sent."""
    with pytest.raises(UserError) as raised:
        run([str(ended), *given])
    assert sentence in str(raised.value)


def test_a_run_that_never_began_has_nothing_to_send(tmp_path: Path) -> None:
    """A mistake has ended it before its first line."""
    write_run_record(tmp_path, status="failed")
    with pytest.raises(UserError, match="has no metrics to send: it never began"):
        run([str(tmp_path), "mlflow"])


def test_a_run_is_sent_by_one_process_at_a_time(ended: RunDir) -> None:
    """Two would send each line twice."""
    with (
        Follower(ended, "mine", settings={}, allowed=[]).locked(),
        pytest.raises(UserError, match=r"mine\.lock is locked\); wait for the process that sends"),
    ):
        run(words(ended))


@pytest.mark.full
def test_the_command_sends_what_a_run_could_not(tmp_path: Path) -> None:
    """Each number once, also those that had arrived, and the model."""
    sent, broken = tmp_path / "sent", tmp_path / "broken"
    broken.touch()
    keys = {"_target_": "own_trackers.Recorder", "path": str(sent), "broken": str(broken)}
    environ = {"PYTHONPATH": str(Path(own_trackers.__file__).parent)}
    first = run_command(
        *("model=toy", "world_size=1", "train.max_steps=6", "train.log_every_steps=2"),
        *("hydra.run.dir=run", "allowed_targets=[own_trackers]"),
        *(f"+trackers.mine.{key}={one}" for key, one in keys.items()),
        folder=tmp_path,
        environ=environ,
    )
    assert (first.exit_code, first.stdout.count("warning: trackers.mine failed")) == (0, 1)
    broken.unlink()
    again = run_command(
        *("run", "mine", *(f"{key}={one}" for key, one in keys.items())),
        program=(sys.executable, "-m", "ddp_runner.tracking.track"),
        folder=tmp_path,
        environ=environ,
    )
    assert (again.exit_code, again.stderr) == (0, "")
    assert {(step, name): one for step, name, one in points(sent)} == scalars(first.run_dir)
    assert calls(sent)[-1]["files"] == ["run.json", "config.yaml", "model.safetensors"]
