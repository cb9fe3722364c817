"""Faults of checkpoints in whole runs: saves that are killed, fail or take long; damaged files."""

import json
import re
import shutil
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from commands import background, error_line, run_command, wait_for, wait_for_end, wait_until_gone
from injection import (
    INPUT_OUTPUT,
    NO_SPACE,
    READ_ONLY,
    At,
    Call,
    Fault,
    append_byte,
    flip_bits,
    hang,
    inject,
    kill_tree,
    raise_error,
    send_launcher,
    send_signal,
    truncate,
    wait_until,
)
from run_folders import checkpoint_dir, checkpoint_steps, rank_log, record
from tiers import first_of, only
from trainings import (
    NUM_STEPS,
    RUN,
    TOY,
    assert_checkpoints_whole,
    assert_resumes,
    assert_same_run,
    run_training,
)

from ddp_runner.launch.ranks import ANSWER_S
from ddp_runner.launch.stop_requests import ONE_REQUEST_S

KILL = partial(send_signal, signal.SIGKILL)
# Faults hit the save of step 6, the third one; two checkpoints exist before it.
SAVED, SAVING = 4, 6
SAVE = partial(Call, within=3)


# The folder is created, the files are written, by halves, and the folder is renamed.
@pytest.mark.parametrize(
    ("number", "what"),
    first_of(
        [(9, kill_tree), (12, KILL), (4, kill_tree), (3, KILL), (13, kill_tree)],
        num_quick=0,
        num_full=2,
    ),
    ids=["tree-9", "rank-12", "tree-4", "rank-3", "tree-13"],
)
def test_a_run_killed_during_a_save_resumes_from_a_whole_checkpoint(
    tmp_path: Path, uninterrupted: Path, number: int, what: Callable[[], None]
) -> None:
    """A half-written checkpoint is not used, and the end equals the uninterrupted run."""
    end = run_training(tmp_path, Fault(what, SAVE(number, half=True)))
    if what is KILL:
        assert error_line(end, exit_code=1).startswith(
            "rank 0 was killed by SIGKILL, by another process or by the kernel's out-of-memory "
            "killer; see "
        )
        assert record(end.run_dir)["status"] == "failed"
    else:
        assert (end.exit_code, end.stderr) == (-signal.SIGKILL, "")
        assert record(end.run_dir)["status"] == "running"
    assert_checkpoints_whole(tmp_path)
    last = checkpoint_steps(end.run_dir)[-1]
    assert last in (SAVED, SAVING)  # a save's last calls come after its rename
    assert_resumes(tmp_path, uninterrupted)
    assert f"resumed from {checkpoint_dir(end.run_dir, last)}, step {last}" in rank_log(end.run_dir)


@pytest.mark.parametrize(
    ("number", "what", "words"),
    first_of(
        [
            (4, NO_SPACE, "No space left on device"),
            (2, READ_ONLY, "Read-only file system"),
            (7, INPUT_OUTPUT, "Input/output error"),
        ],
        num_full=1,
    ),
)
def test_a_failed_save_ends_the_run_with_one_line_and_it_resumes(
    tmp_path: Path, uninterrupted: Path, number: int, what: Callable[[], None], words: str
) -> None:
    """The line says what to do; earlier checkpoints are intact, and the failed one is gone."""
    end = run_training(tmp_path, Fault(what, SAVE(number, half=True)))
    path = checkpoint_dir(end.run_dir, SAVING).relative_to(tmp_path)
    sentence = error_line(end)
    assert re.fullmatch(
        rf"checkpoint \S*{path} could not be saved \({words}\); free space or make the folder "
        "writable, then resume: the checkpoints before it are intact",
        sentence,
    )
    error = record(end.run_dir)["error"]
    assert (error["rank"], error["kind"], error["sentence"]) == (0, "user", sentence)
    assert "Traceback" in (end.run_dir / "logs" / "failure.txt").read_text()
    left = sorted(path.name for path in (end.run_dir / "checkpoints").iterdir())
    assert left == ["step-00000002", "step-00000004"]
    assert_checkpoints_whole(tmp_path)
    assert_resumes(tmp_path, uninterrupted)


@pytest.mark.full
def test_a_full_disk_for_metrics_ends_the_run_and_it_resumes(
    tmp_path: Path, uninterrupted: Path
) -> None:
    """A disk may fill up while metrics.jsonl is written."""
    end = run_training(tmp_path, Fault(NO_SPACE, At(0, 11, of="log")))
    assert error_line(end) == (
        f"metrics cannot be written to {end.run_dir} (No space left on device); free space or make "
        "the folder writable, then resume"
    )
    assert_checkpoints_whole(tmp_path)
    assert_resumes(tmp_path, uninterrupted)


@pytest.mark.full
def test_a_resume_that_cannot_read_the_checkpoints_changes_nothing(
    tmp_path: Path, uninterrupted: Path
) -> None:
    """It must not begin at step 0, over the lines of metrics.jsonl."""
    run = Path(shutil.copytree(uninterrupted, tmp_path / RUN))
    kept = (run / "checkpoints").rename(tmp_path / "kept")
    (run / "checkpoints").touch()
    before = (run / "metrics.jsonl").read_bytes()
    end = run_command(f"resume={RUN}", "train.epochs=9", folder=tmp_path)
    assert "checkpoints cannot be read (Not a directory); make it a folder" in error_line(end)
    assert (run / "metrics.jsonl").read_bytes() == before
    (run / "checkpoints").unlink()
    kept.rename(run / "checkpoints")
    assert run_command(f"resume={RUN}", folder=tmp_path).exit_code == 0


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run that was killed in mid-training, with all of its checkpoints."""
    folder = tmp_path_factory.mktemp("killed")
    run_training(
        folder,
        Fault(kill_tree, At(0, 11)),
        args=("checkpoint.every_steps=1", "checkpoint.keep=100"),
    )
    assert len(checkpoint_steps(folder / RUN)) >= 8
    return folder


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the uninterrupted run, with all of its checkpoints."""
    folder = tmp_path_factory.mktemp("kept")
    run_training(folder, args=("checkpoint.every_steps=1", "checkpoint.keep=100"))
    return folder / RUN


def changed_digit(path: Path) -> None:
    """Change a digit of the checksum in a manifest."""
    fields = json.loads(path.read_text())
    digit = fields["sha256"][5]
    fields["sha256"] = fields["sha256"].replace(digit, "0" if digit != "0" else "1")
    path.write_text(json.dumps(fields))


# The file, the damage, how many of the newest checkpoints get it, and what the log says.
DAMAGES: dict[str, tuple[str, Callable[[Path], object], int, str]] = {
    "truncated": (
        "state.pt",
        partial(truncate, size=100),
        1,
        r"expected state\.pt of \d+ bytes with",
    ),
    "no state": ("state.pt", Path.unlink, 1, r"state\.pt \(No such file or directory"),
    "half a manifest": ("manifest.json", partial(truncate, size=60), 1, r"manifest\.json"),
    "the two newest": (
        "state.pt",
        partial(truncate, size=100),
        2,
        r"expected state\.pt of \d+ bytes",
    ),
    # test_store.py has these, too, without a run.
    "a flipped bit": (
        "state.pt",
        partial(flip_bits, offset=2000),
        1,
        r"SHA-256 \S+, found \d+ bytes",
    ),
    "another checksum": ("manifest.json", changed_digit, 1, ""),
    "a flipped bit of the manifest": ("manifest.json", partial(flip_bits, offset=30), 1, ""),
    "no manifest": ("manifest.json", Path.unlink, 1, r"manifest\.json"),
}


@pytest.mark.parametrize("name", first_of(DAMAGES, num_quick=0, num_full=3))
def test_a_damaged_checkpoint_is_named_and_the_previous_one_is_used(
    tmp_path: Path, killed: Path, kept: Path, name: str
) -> None:
    """On stdout and in the log; the lost steps are trained again, to the same end."""
    file, damage, number, words = DAMAGES[name]
    shutil.copytree(killed / RUN, tmp_path / RUN)
    damaged = checkpoint_steps(tmp_path / RUN)[-number:]
    whole = damaged[0] - 1
    for step in damaged:
        damage(checkpoint_dir(tmp_path / RUN, step) / file)
    end = run_command(f"resume={RUN}", folder=tmp_path)
    assert (end.exit_code, end.stderr) == (0, "")
    for text in (end.stdout, rank_log(tmp_path / RUN)):
        for step in damaged:
            warning = rf"checkpoint \S+{step:08d} is damaged: .*{words}.*; it is skipped"
            assert len(re.findall(warning, text)) == 1
        assert len(re.findall(rf"step-{whole:08d} is used in its place", text)) == 1
        assert re.search(rf"resumed from \S+step-{whole:08d}", text)
    assert_same_run(tmp_path / RUN, kept)


@pytest.fixture(scope="module")
def calls_of_the_sixth_save(tmp_path_factory: pytest.TempPathFactory) -> int:
    """Return the number of calls in the sixth save, which also deletes the oldest checkpoint."""
    folder = tmp_path_factory.mktemp("calls")
    run_training(folder, Fault(partial(append_byte, "calls"), Call(None, within=6)))
    return (folder / "calls").stat().st_size


# A save ends with these calls: rename the oldest checkpoint, delete its two files and its folder.
@pytest.mark.full
@pytest.mark.parametrize("last", [1, 4], ids=["rmdir", "rename"])
def test_a_checkpoint_that_cannot_be_deleted_is_reported_and_the_run_continues(
    tmp_path: Path, uninterrupted: Path, calls_of_the_sixth_save: int, last: int
) -> None:
    """The next save deletes it."""
    number = calls_of_the_sixth_save + 1 - last
    end = run_training(tmp_path, Fault(INPUT_OUTPUT, Call(number, within=6)))
    assert (end.exit_code, end.stderr) == (0, "")
    warning = r"\S+ could not be deleted \(Input/output error\); the run continues"
    assert len(re.findall(warning, end.stdout)) == 1
    assert len(re.findall(warning, rank_log(end.run_dir))) == 1
    assert not list((end.run_dir / "checkpoints").glob(".*"))
    assert_same_run(end.run_dir, uninterrupted)


# A file that exists once the save has begun.
MARK = "saving"
MARK_SAVE = Fault(partial(append_byte, MARK), SAVE(4))
LONG_S = ANSWER_S + 3.0  # longer than a rank of a failed group may live if it saves nothing


@pytest.mark.parametrize("what", only("killed", {"killed": KILL, "raises": raise_error}))
def test_a_restart_continues_from_the_save_during_which_a_rank_failed(
    what: Callable[[], object], tmp_path: Path, uninterrupted: Path
) -> None:
    """Rank 0 may finish its save although rank 1 was killed, or raised."""
    slow_save, next_step = Fault(partial(time.sleep, LONG_S), SAVE(4)), At(1, SAVING + 1)
    wait_for_save = Fault(partial(wait_until, MARK), next_step)
    faults = inject(MARK_SAVE, slow_save, wait_for_save, Fault(what, next_step))
    keys = (*TOY, "launch.max_restarts=1", "launch.shutdown_timeout_s=1")
    with background(*keys, folder=tmp_path, prepare=faults) as process:
        end = wait_for_end(process, tmp_path)
    assert (end.exit_code, end.stderr) == (0, "")
    assert record(end.run_dir)["restarts"] == 1
    log = rank_log(end.run_dir)
    assert "restart 1 of 1: rank 1 " in log
    assert re.search(rf"resumed from \S+step-{SAVING:08d}", log)
    assert_same_run(end.run_dir, uninterrupted)


def test_sigterm_during_a_save_lets_it_finish(tmp_path: Path, uninterrupted: Path) -> None:
    """Even if it takes longer than launch.shutdown_timeout_s; the stop then saves its step, too."""
    actions = (
        partial(send_launcher, signal.SIGTERM),
        partial(wait_until, "stdout", "again to end at once"),
        partial(time.sleep, 3.0),
    )
    faults = [Fault(action, SAVE(4)) for action in actions]
    end = run_training(
        tmp_path, *faults, args=("launch.shutdown_timeout_s=1", "checkpoint.keep=20")
    )
    assert (end.exit_code, end.stderr) == (143, "")
    fields = record(end.run_dir)
    assert (fields["status"], fields["error"]) == ("preempted", None)
    assert SAVING in checkpoint_steps(end.run_dir)
    assert checkpoint_steps(end.run_dir)[-1] == fields["step"] < NUM_STEPS
    assert_checkpoints_whole(tmp_path)
    assert_resumes(tmp_path, uninterrupted, same_steps=False)


@pytest.mark.full
def test_a_second_sigterm_during_a_save_loses_only_that_checkpoint(
    tmp_path: Path, uninterrupted: Path
) -> None:
    """The run does not wait for the save, and the half-written checkpoint is not used."""
    faults = (MARK_SAVE, Fault(hang, SAVE(4)))
    with background(*TOY, folder=tmp_path, prepare=inject(*faults)) as process:
        wait_for((tmp_path / MARK).exists)
        process.terminate()
        wait_for(lambda: "again to end at once" in (tmp_path / "stdout").read_text())
        time.sleep(2 * ONE_REQUEST_S)  # an earlier signal would be the same request
        process.terminate()
        assert wait_for_end(process, tmp_path).exit_code == 143
        wait_until_gone(process)
    assert checkpoint_steps(tmp_path / RUN)[-1] == SAVED
    assert_checkpoints_whole(tmp_path)
    assert_resumes(tmp_path, uninterrupted)
