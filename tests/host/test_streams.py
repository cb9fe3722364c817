"""A process continues if its stdout or stderr is closed, full or a pipe without a reader."""

import logging
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from commands import RUNNER, TIME_LIMIT_S
from terminals import terminal, without_waiting

from ddp_runner.dist_env import DistEnv
from ddp_runner.host.streams import shortened, wrap_lines
from ddp_runner.rank.rank_log import rank_log
from ddp_runner.tracking.run_dir import RunDir

CHATTY = """
import os, sys
from ddp_runner.host.streams import keep_streams
told = []
keep_streams(told.append)
with open("first", "w") as file:  # must not take the place of a closed descriptor
    assert file.fileno() > 2
    for _ in range(3):
        print("x" * 100_000, flush=True)
        print("y" * 100_000, file=sys.stderr)
        os.system("echo from a child; echo from a child >&2")
open("told", "w").write("\\n".join(told))
"""


MARKED = """
from ddp_runner.host.streams import keep_streams
for number in (1, 2):  # a slot marks the lines of one job after the other
    keep_streams(prefix=f"[{number}] ")
    print(f"first of {number}\\n\\n  second")
    print("x" * 20_000)
"""


def test_each_line_has_the_prefix_of_its_job() -> None:
    """Empty lines are left out; a line may be longer than what is written at once."""
    done = subprocess.run(
        [sys.executable, "-c", MARKED], capture_output=True, text=True, check=True
    )
    lines = done.stdout.splitlines()
    starts = [(one[:4], one[4:].startswith("x")) for one in lines]
    for number in (1, 2):
        assert f"[{number}] first of {number}" in lines
        assert f"[{number}]   second" in lines
    assert [mark for mark, _ in starts] == sorted(mark for mark, _ in starts)
    assert sum(len(one) - 4 for one in lines if one[4] == "x") == 40_000


@pytest.mark.parametrize(
    ("redirection", "lost"),
    [
        (">&- 2>&-", ["stdout was closed: what it", "stderr was closed: what it"]),
        (">/dev/full", ["stdout is lost (No space left on device)"]),
        (">/dev/full 2>&1", ["stdout is lost (No s", "stderr is lost (No s"]),
        ("2>&1 | head -c 1", ["stdout is lost (Broken pipe)", "stderr is lost (Broken pipe)"]),
    ],
    ids=["closed", "full", "both-full", "head"],
)
def test_what_cannot_be_written_is_dropped(
    tmp_path: Path, redirection: str, lost: list[str]
) -> None:
    """It exits with 0 and prints one line for each stream, never a traceback."""
    (tmp_path / "chatty.py").write_text(CHATTY)
    command = f"set -o pipefail; {sys.executable} chatty.py {redirection}"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    message = (tmp_path / "told").read_text().splitlines()
    assert [one[: len(start)] for one, start in zip(message, lost, strict=True)] == lost
    assert b"Traceback" not in done.stderr
    assert (tmp_path / "first").read_text() == ""


def test_what_a_killed_process_has_printed_is_shown(tmp_path: Path) -> None:
    """It may explain the kill; to a file or a pipe, Python would write it later."""
    (tmp_path / "killed.py").write_text(
        "import os, signal\n"
        "from ddp_runner.host.streams import keep_streams\n"
        "keep_streams()\n"
        "print('last words')\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    command = [sys.executable, "killed.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, b"last words\n")


def test_a_log_on_a_full_disk_is_reported_of_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The line replaces logging's own traceback for each line."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-0.log").symlink_to("/dev/full")
    env = DistEnv(rank=0, local_rank=0, world_size=1, local_world_size=1)
    try:
        with rank_log(RunDir(tmp_path), env) as log:
            log("one")
            log("two")
    finally:
        logging.captureWarnings(False)
    out, err = capfd.readouterr()
    assert out == "one\ntwo\n"
    assert len(err.splitlines()) == 1
    assert "rank-0.log cannot be written" in err
    assert "No space left on device" in err


@pytest.mark.full
def test_a_run_on_a_terminal(tmp_path: Path) -> None:
    """It shows the live line with the last step, the last lines, and nothing after them."""
    with terminal() as (stream, shown):
        done = subprocess.run(
            [*RUNNER, "experiment=toy_ddp"],
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            timeout=TIME_LIMIT_S,
            check=False,
        )
    lines = without_waiting("".join(shown).splitlines())
    assert done.returncode == 0, lines
    assert any("epoch 10/10" in line and "step 50/50" in line for line in lines)
    assert lines[-2].startswith("completed in ")
    assert lines[-1].startswith("tensorboard --logdir ")


@pytest.mark.parametrize(
    ("width", "text"),
    [
        (35, "1/8 optimizer.lr=0.1,data.seed=1234"),
        (29, "1/8 lr=0.1,seed=1234"),
        (19, "1/8 lr=0.1,see=1234"),
        (18, "1/8 lr=0.1,se=1234"),
        (10, "1/8 l…1234"),
        (1, "…"),
    ],
)
def test_a_shortened_name_keeps_its_values(width: int, text: str) -> None:
    """The keys of all jobs of a sweep are the same, and what differs is often at the end."""
    assert shortened("1/8 optimizer.lr=0.1,data.seed=1234", width) == text


@pytest.mark.parametrize(
    ("text", "broken"),
    [
        ("ok      each sample counts once", ["ok      each sample", "        counts once"]),
        ("  scale: of the whole loss", ["  scale: of the", "    whole loss"]),
        ("warning: too many ranks", ["warning: too many", "  ranks"]),
        ("/a/path/that/nobody/can/break", ["/a/path/that/nobody/can/break"]),
        ("short\n\nlines", ["short", "", "lines"]),
    ],
)
def test_long_lines_break_between_words(text: str, broken: list[str]) -> None:
    """The rest lines up with what follows the label; without a terminal nothing changes."""
    assert wrap_lines(text, 20).split("\n") == broken
    assert wrap_lines(text, 0) == text


def test_a_long_text_without_keys_is_shortened_at_once() -> None:
    """The regular expression reads each letter once; an earlier one took minutes."""
    assert shortened("a" * 20_000, 9) == "aaaa…aaaa"
    assert shortened("dataset.train.fold=1,seed=2", 20) == "fold=1,seed=2"
