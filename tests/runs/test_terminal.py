"""What commands show on a terminal of 80 columns: one line per job, and nothing twice."""

import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from commands import RUNNER, TIME_LIMIT_S, run_command
from terminals import terminal, without_waiting

pytestmark = pytest.mark.full

SWEEP = ("-m", "model=toy", "world_size=1,2", "seed=1,2", "train.epochs=2")


def on_a_terminal(*arguments: str, folder: Path, interrupt_at: str = "") -> tuple[int, str]:
    """Return a command's exit code and its output; press Ctrl-C once it shows a text."""
    with terminal() as (stream, shown):
        process = subprocess.Popen(
            [*RUNNER, *arguments],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
        )
        deadline = time.monotonic() + TIME_LIMIT_S
        while interrupt_at and interrupt_at not in "".join(shown):
            assert process.poll() is None, "".join(shown)
            assert time.monotonic() < deadline, "".join(shown)
            time.sleep(0.05)
        if interrupt_at:
            process.send_signal(signal.SIGINT)
        exit_code = process.wait(TIME_LIMIT_S)
    return exit_code, re.sub(r"\x1b\[[0-9;]*m", "", "".join(shown))


def left_on_screen(text: str) -> list[str]:
    """Return the lines as the screen shows them at the end."""
    return [line.rstrip("\r").split("\r\x1b[2K")[-1] for line in text.split("\n")]


def test_a_sweep_shows_its_header_once_and_a_line_for_each_job(tmp_path: Path) -> None:
    """A job's result replaces its live line."""
    exit_code, text = on_a_terminal(*SWEEP, folder=tmp_path)
    assert exit_code == 0, text
    lines = left_on_screen(text)
    for name in ("sweep", "model", "data", "parallelism", "batch", "steps"):
        assert len([line for line in lines if line.startswith(f"{name:<12} ")]) == 1
    results = [line for line in lines if re.match(r"(job \d of 4: |\d/4 )w", line)]
    names = [f"world_size={size},seed={seed}" for size in (1, 2) for seed in (1, 2)]
    assert [line.partition("  ")[0].split()[-1] for line in results] == names
    assert all("  completed in " in line for line in results)
    assert re.search(r"(job 4 of 4: |4/4 )world_size=2,seed=2 .*epoch \d/2  .*step \d+/10", text)
    assert "\x1b[?25l" not in text, "a killed rank would leave the cursor hidden"
    first = lines.index(results[0])
    assert lines[first : first + 4] == results
    assert lines[-2].startswith("tensorboard --logdir outputs/sweep-")


def test_long_names_of_jobs_fit_a_terminal_and_are_whole_in_a_file(tmp_path: Path) -> None:
    """Each result and each row of the table is one line, with the values in the job's name."""
    long = ("optimizer.momentum=0.1234,0.2345", "scheduler.gamma=0.1234", "seed=1,2")
    command = ("-m", "model=toy", "scheduler=step", *long, "train.max_steps=3", "world_size=1")
    exit_code, text = on_a_terminal(*command, "hydra.sweep.dir=sweep", folder=tmp_path)
    assert exit_code == 0, text
    lines = left_on_screen(text)
    assert all(len(line) < 80 for line in lines)
    names = [
        f"optimizer.momentum={one},seed={seed}" for one in ("0.1234", "0.2345") for seed in (1, 2)
    ]
    for number, name in enumerate(names, start=1):
        (result,) = [line for line in lines if line.startswith(f"{number}/4 ")]
        assert f"seed={name[-1]}  completed in " in result
    table = lines[next(i for i, line in enumerate(lines) if line.startswith("job  ")) :]
    assert table[0].split() == ["job", "status", "start", "wall", "samples/s", "metrics"]
    for row, name in zip(table[1:5], names, strict=True):
        job, status, *_ = row.split()
        assert len(job) < len(name)
        assert re.findall("=([^,]+)", job) == re.findall("=([^,]+)", name)
        assert status == "completed"
    end = run_command(*command, "hydra.sweep.dir=sweep", folder=tmp_path)
    assert all(f"\n{name}  completed  " in end.stdout for name in names)
    assert "…" not in end.stdout


@pytest.mark.parametrize("task", ["check", "collectives"])
def test_the_lines_of_a_task_fit_a_terminal(tmp_path: Path, task: str) -> None:
    """Sentences break between words; a table has no line that the terminal would break."""
    size = "collectives.max_bytes=1024"
    exit_code, text = on_a_terminal(f"task={task}", "model=toy", size, folder=tmp_path)
    assert exit_code == 0, text
    lines = left_on_screen(text)
    folder = "outputs/" if task == "check" else "no such line"  # a path is never broken
    assert [line for line in lines if len(line) >= 80 and folder not in line] == []
    assert any(
        line.startswith("ok      " if task == "check" else "all_reduce sum") for line in lines
    )


def test_a_sweep_writes_its_header_once_to_a_file(tmp_path: Path) -> None:
    """Plain lines follow, each job's under its title."""
    end = run_command(*SWEEP, folder=tmp_path)
    assert end.exit_code == 0, end.stderr
    assert end.stdout.count("\nmodel        toy") == 1
    assert len(re.findall(r"^job \d of 4: \S+$", end.stdout, flags=re.MULTILINE)) == 4
    assert len(re.findall(r"^job \d of 4: \S+  completed in ", end.stdout, re.MULTILINE)) == 4
    assert "\x1b" not in end.stdout


def test_ctrl_c_leaves_a_usable_terminal(tmp_path: Path) -> None:
    """The live line stays, the result follows, and nothing is drawn afterwards."""
    long = ("model=toy", "train.epochs=100000", "train.log_every_steps=50")
    exit_code, text = on_a_terminal(*long, folder=tmp_path, interrupt_at="samples/s")
    assert exit_code == 130, text
    *_, end, go_on, command, nothing = without_waiting(left_on_screen(text))
    assert end.startswith("preempted in ")
    assert go_on.startswith("resume with: python -m ddp_runner resume=")
    assert command == "tensorboard --logdir outputs"
    assert nothing == ""
    assert "\x1b[?25l" not in text
