"""The rows about checkpoints, by whole runs: saves that are cut, fail or are waited for; damage."""

import json
import re
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
from commands import background, ended, record, run_command, steps, wait_for
from injection import (
    INPUT_OUTPUT,
    NO_SPACE,
    READ_ONLY,
    At,
    Call,
    Fault,
    cut,
    flip,
    hang,
    kill_tree,
    note,
    prepared,
    raise_error,
    send,
    send_launcher,
    slow,
    wait_until,
)
from trainings import (
    NUM_STEPS,
    RUN,
    TOY,
    assert_all_whole,
    assert_resumes,
    assert_same_run,
    error_line,
    trained,
    wait_for_nobody,
)

from ddp_runner.launch.signals import ONE_REQUEST_S
from ddp_runner.launch.supervisor import END_S

KILL = partial(send, signal.SIGKILL)
# The save of step 6, the third one: two checkpoints are there before it.
SAVED, SAVING = 4, 6
SAVE = partial(Call, within=3)


def step_folder(folder: Path, step: int) -> Path:
    """Return the place of a step's checkpoint."""
    return folder / RUN / "checkpoints" / f"step-{step:08d}"


# Its folder is made, its files are written, halves of them, and it is put in place.
@pytest.mark.parametrize(
    ("number", "what"),
    [(3, KILL), (12, KILL), (4, kill_tree), (9, kill_tree), (13, kill_tree)],
    ids=["rank-3", "rank-12", "tree-4", "tree-9", "tree-13"],
)
def test_a_run_killed_in_a_save_resumes_from_the_one_before(
    tmp_path: Path, undisturbed: Path, number: int, what: Callable[[], None]
) -> None:
    """Nothing half-written is taken for whole, and the end is that of the undisturbed run."""
    end = trained(tmp_path, Fault(what, SAVE(number, half=True)))
    if what is KILL:
        assert end.exit_code == 1
        assert error_line(end).startswith(
            "rank 0 was killed by SIGKILL, by another process or by the kernel's out-of-memory "
            "killer; see "
        )
        assert record(end.run_dir)["status"] == "failed"
    else:
        assert (end.exit_code, end.stderr) == (-signal.SIGKILL, "")
        assert record(end.run_dir)["status"] == "running"
    assert_all_whole(tmp_path)
    last = steps(end.run_dir)[-1]
    assert last in (SAVED, SAVING)  # the last calls of a save come when it has its name
    assert_resumes(tmp_path, undisturbed)
    log = (end.run_dir / "logs" / "rank-0.log").read_text()
    assert f"resumed from {step_folder(tmp_path, last)}, step {last}" in log


@pytest.mark.parametrize(
    ("number", "what", "words"),
    [
        (2, READ_ONLY, "Read-only file system"),
        (4, NO_SPACE, "No space left on device"),
        (7, INPUT_OUTPUT, "Input/output error"),
    ],
)
def test_a_save_that_fails_ends_the_run_in_one_sentence_and_it_resumes(
    tmp_path: Path, undisturbed: Path, number: int, what: Callable[[], None], words: str
) -> None:
    """What to do, and that what was saved before is intact; nothing of the failed one is left."""
    end = trained(tmp_path, Fault(what, SAVE(number, half=True)))
    assert end.exit_code == 2
    path = (end.run_dir / "checkpoints" / f"step-{SAVING:08d}").relative_to(tmp_path)
    sentence = error_line(end)
    assert re.fullmatch(
        rf"checkpoint \S*{path} could not be saved \({words}\); free space or make the folder "
        "writable, then resume: the checkpoints before it are intact",
        sentence,
    )
    error = record(end.run_dir)["error"]
    assert (error["rank"], error["kind"], error["sentence"]) == (0, "user", sentence)
    assert "Traceback" in (end.run_dir / "logs" / "failure.txt").read_text()
    left = sorted(one.name for one in (end.run_dir / "checkpoints").iterdir())
    assert left == ["step-00000002", "step-00000004"]
    assert_all_whole(tmp_path)
    assert_resumes(tmp_path, undisturbed)


def test_figures_that_cannot_be_written_end_the_run_and_it_resumes(
    tmp_path: Path, undisturbed: Path
) -> None:
    """A disk may be full for metrics.jsonl first."""
    end = trained(tmp_path, Fault(NO_SPACE, At(0, 11, of="log")))
    assert end.exit_code == 2
    assert error_line(end) == (
        f"metrics cannot be written to {end.run_dir} (No space left on device); free space or make "
        "the folder writable, then resume"
    )
    assert_all_whole(tmp_path)
    assert_resumes(tmp_path, undisturbed)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was killed in its midst, with each of its checkpoints."""
    folder = tmp_path_factory.mktemp("killed")
    trained(
        folder,
        Fault(kill_tree, At(0, 11)),
        args=("checkpoint.every_steps=1", "checkpoint.keep=100"),
    )
    assert len(steps(folder / RUN)) >= 8
    return folder


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The undisturbed run with each of its checkpoints."""
    folder = tmp_path_factory.mktemp("kept")
    trained(folder, args=("checkpoint.every_steps=1", "checkpoint.keep=100"))
    return folder / RUN


def changed_digit(path: Path) -> None:
    """Change a digit of the checksum that a manifest tells."""
    fields = json.loads(path.read_text())
    digit = fields["sha256"][5]
    fields["sha256"] = fields["sha256"].replace(digit, "0" if digit != "0" else "1")
    path.write_text(json.dumps(fields))


# What is done to files of the newest checkpoints, how many of these, and what is said.
DAMAGES: dict[str, tuple[str, Callable[[Path], object], int, str]] = {
    "cut off": ("state.pt", partial(cut, size=100), 1, r"expected state\.pt of \d+ bytes with"),
    "a flipped bit": ("state.pt", partial(flip, offset=2000), 1, r"SHA-256 \S+, found \d+ bytes"),
    "no state": ("state.pt", Path.unlink, 1, r"state\.pt: No such file or directory"),
    "another checksum": ("manifest.json", changed_digit, 1, ""),
    "half a manifest": ("manifest.json", partial(cut, size=60), 1, r"manifest\.json"),
    "a flipped bit of the manifest": ("manifest.json", partial(flip, offset=30), 1, ""),
    "no manifest": ("manifest.json", Path.unlink, 1, r"manifest\.json"),
    "the two newest": ("state.pt", partial(cut, size=100), 2, r"expected state\.pt of \d+ bytes"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(
    tmp_path: Path, killed: Path, kept: Path, name: str
) -> None:
    """On the screen and in the log; what was lost by it is trained again, to the very same end."""
    file, damage, number, words = DAMAGES[name]
    shutil.copytree(killed / RUN, tmp_path / RUN)
    damaged = steps(tmp_path / RUN)[-number:]
    whole = damaged[0] - 1
    for step in damaged:
        damage(step_folder(tmp_path, step) / file)
    end = run_command(f"resume={RUN}", folder=tmp_path)
    assert (end.exit_code, end.stderr) == (0, "")
    log = (tmp_path / RUN / "logs" / "rank-0.log").read_text()
    for text in (end.stdout, log):
        for step in damaged:
            said = rf"checkpoint \S+{step:08d} is damaged: .*{words}.*; it is skipped"
            assert len(re.findall(said, text)) == 1
        assert len(re.findall(rf"step-{whole:08d} is used in its place", text)) == 1
        assert re.search(rf"resumed from \S+step-{whole:08d}", text)
    assert_same_run(tmp_path / RUN, kept)


@pytest.fixture(scope="module")
def calls_of_the_sixth_save(tmp_path_factory: pytest.TempPathFactory) -> int:
    """How many calls the sixth save makes, which is one of those that delete the oldest."""
    folder = tmp_path_factory.mktemp("counted")
    trained(folder, Fault(partial(note, "calls"), Call(None, within=6)))
    return (folder / "calls").stat().st_size


# The last calls of a save: the oldest is renamed, its two files and its folder are deleted.
@pytest.mark.parametrize("last", [1, 4], ids=["rmdir", "rename"])
def test_a_checkpoint_that_cannot_be_deleted_is_said_and_the_run_goes_on(
    tmp_path: Path, undisturbed: Path, calls_of_the_sixth_save: int, last: int
) -> None:
    """The next save clears it."""
    number = calls_of_the_sixth_save + 1 - last
    end = trained(tmp_path, Fault(INPUT_OUTPUT, Call(number, within=6)))
    assert (end.exit_code, end.stderr) == (0, "")
    said = r"\S+ could not be deleted \(Input/output error\); the run goes on"
    assert len(re.findall(said, end.stdout)) == 1
    assert len(re.findall(said, (end.run_dir / "logs" / "rank-0.log").read_text())) == 1
    assert not list((end.run_dir / "checkpoints").glob(".*"))
    assert_same_run(end.run_dir, undisturbed)


# Something that a save is told by, and that it has begun.
MARK = "saving"
BEGUN = Fault(partial(note, MARK), SAVE(4))
LONG_S = END_S + 2.0  # longer than a rank of a failed group is let live that saves nothing


def test_a_restart_goes_on_from_the_save_that_a_peers_end_interrupted(
    tmp_path: Path, undisturbed: Path
) -> None:
    """Rank 0 is let write to the end, though its group has failed: rank 1 was killed, or raised."""
    slowed, peer = Fault(partial(slow, LONG_S), SAVE(4)), At(1, SAVING + 1)
    begun = Fault(partial(wait_until, MARK), peer)
    hits = {tmp_path / "killed": KILL, tmp_path / "raises": raise_error}
    with ExitStack() as stack:
        processes = {
            folder: stack.enter_context(
                background(
                    *TOY,
                    "launch.max_restarts=1",
                    "launch.shutdown_timeout_s=1",
                    folder=folder,
                    prepare=prepared(BEGUN, slowed, begun, Fault(what, peer)),
                )
            )
            for folder, what in hits.items()
        }
        for folder, process in processes.items():
            end = ended(process, folder)
            assert (end.exit_code, end.stderr) == (0, "")
            assert record(end.run_dir)["restarts"] == 1
            log = (end.run_dir / "logs" / "rank-0.log").read_text()
            assert "restart 1 of 1: rank 1 " in log
            assert re.search(rf"resumed from \S+step-{SAVING:08d}", log)
            assert_same_run(end.run_dir, undisturbed)


def test_sigterm_while_a_save_is_being_written_lets_it_end(
    tmp_path: Path, undisturbed: Path
) -> None:
    """Also where it takes longer than launch.shutdown_timeout_s; then a checkpoint of the stop."""
    said = partial(wait_until, "stdout", "again to end at once")
    sigterm = partial(send_launcher, signal.SIGTERM)
    slowed = Fault(partial(slow, 3.0), SAVE(4))
    faults = (Fault(sigterm, SAVE(4)), Fault(said, SAVE(4)), slowed)
    end = trained(tmp_path, *faults, args=("launch.shutdown_timeout_s=1",))
    assert (end.exit_code, end.stderr) == (143, "")
    fields = record(end.run_dir)
    assert (fields["status"], fields["error"]) == ("preempted", None)
    assert SAVING in steps(end.run_dir)
    assert steps(end.run_dir)[-1] == fields["step"] < NUM_STEPS
    assert_all_whole(tmp_path)
    assert_resumes(tmp_path, undisturbed, same_steps=False)


def test_a_second_sigterm_while_a_save_is_being_written_loses_that_one_alone(
    tmp_path: Path, undisturbed: Path
) -> None:
    """Who asks twice does not wait; the half-written one is no checkpoint."""
    faults = (BEGUN, Fault(hang, SAVE(4)))
    with background(*TOY, folder=tmp_path, prepare=prepared(*faults)) as process:
        wait_for((tmp_path / MARK).exists)
        process.terminate()
        wait_for(lambda: "again to end at once" in (tmp_path / "stdout").read_text())
        time.sleep(2 * ONE_REQUEST_S)  # what comes at once is the same request
        process.terminate()
        assert ended(process, tmp_path).exit_code == 143
        wait_for_nobody(process)
    assert steps(tmp_path / RUN)[-1] == SAVED
    assert_all_whole(tmp_path)
    assert_resumes(tmp_path, undisturbed)
