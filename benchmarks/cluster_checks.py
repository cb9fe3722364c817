"""What must be so after a fault on several hosts, and at the end of the run that goes on."""

import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from cluster_faults import Draw, Injection
from cluster_training import (
    BUSY_S,
    MEETING,
    NUM_STEPS,
    SETTINGS,
    TRAINING,
    Command,
    Training,
    training,
)

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "helpers"))
from commands import wait_for
from run_folders import record
from undisturbed import WrongError, assert_equal, assert_whole

from ddp_runner.host.wire import SERVER_GRACE_S
from ddp_runner.tracking.run_dir import RunDir

TORCH_WARNING = re.compile(r"^\[W.*\n(Exception raised .*\n((frame #|<).*\n)*)?", re.MULTILINE)


@dataclass
class Seen:
    """What a fault led to."""

    wrong: list[str] = field(default_factory=list)  # guarantees that were broken
    hangs: int = 0
    lost_steps: int = 0
    doubled_folders: int = 0
    wrong_sentences: int = 0
    seconds: float = 0.0  # from the fault to the end of the last command
    was_reached: bool = True  # else the run was over before the fault


def disturbed(base: Path, draw: Draw, expected: Path, *, num_calls: int) -> Seen:
    """Run a training with a fault, resume it if it did not complete, and check it.

    Args:
        base: a folder that does not exist; its path is short, because sockets lie below it.
        draw: the fault.
        expected: the folder of the undisturbed run on as many hosts.
        num_calls: the file system calls of all saves of a run.
    """
    seen, chance, setting = Seen(), random.Random(draw.seed), SETTINGS[draw.setting]
    with training(base, setting) as run:
        fault = Injection(run, draw, chance, num_calls=num_calls)
        seen.was_reached = fault.inject()
        begun_at = time.monotonic()
        wait_for_ends(run, seen)
        seen.seconds = time.monotonic() - begun_at
        for host in run.net.hosts:
            host.mend()
        nothing_left(run, seen)
        check_ends(run, fault, seen)
        if not seen.wrong:
            try:
                finish(run, fault, expected, seen)
            except (WrongError, AssertionError) as wrong:
                seen.wrong.append(str(wrong))
    return seen


def wait_for_ends(run: Training, seen: Seen) -> None:
    """Wait until all commands have ended, up to their limit."""
    deadline = time.monotonic() + run.setting.limit_s
    for one in run.commands:
        try:
            one.process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            seen.hangs += 1
            seen.wrong.append(
                f"the command on {one.host.name} has not ended after {run.setting.limit_s:g} s: "
                + " | ".join(one.text("stdout").splitlines()[-3:])
            )
            one.host.kill()


def nothing_left(run: Training, seen: Seen) -> None:
    """Check that no host has a process left."""
    for host in run.net.hosts:
        with suppress(AssertionError):
            wait_for(lambda host=host: not host.pids(), timeout_s=SERVER_GRACE_S + BUSY_S)
        if pids := host.pids():
            seen.wrong.append(f"{len(pids)} processes are left on {host.name}")
            host.kill()


def check_ends(run: Training, fault: Injection, seen: Seen) -> None:
    """Check exit codes, what was printed, and run.json."""
    codes = [one.process.poll() for one in run.commands]
    for one, code in zip(run.commands, codes, strict=True):
        if one in fault.killed or seen.hangs:
            continue
        if wrong := _wrong_output(one, fault):
            seen.wrong_sentences += 1
            seen.wrong.append(f"{one.host.name} ended with {code}: {wrong}")
    if _must_complete(fault) and any(codes):
        stderr = [one.text("stderr").strip() for one in run.commands]
        seen.wrong.append(f"the run should have completed: {codes}, {stderr}")
    runs = run.run_dirs()
    if len(runs) > 1:
        seen.doubled_folders += len(runs) - 1
        seen.wrong.append(f"{len(runs)} run folders: {[str(one) for one in runs]}")
    for folder in runs:
        _check_record(run, fault, folder, seen)


def _must_complete(fault: Injection) -> bool:
    """Return whether nobody may notice the fault but in the logs."""
    restarts = fault.run.setting.max_restarts > 0 and fault.phase in ("training", "saving")
    is_late = fault.kind == "host comes late" and fault.phase == "waiting"
    is_elsewhere = fault.kind in ("rank killed", "rank suspended", "rank raises")
    return fault.kind == "link cut for 2 s" or is_late or (restarts and is_elsewhere)


def _check_record(run: Training, fault: Injection, folder: Path, seen: Seen) -> None:
    codes = [one.process.poll() for one in run.commands]
    status = record(folder)["status"]
    is_complete = any(code == 0 for code in codes)
    # A command that ends with 2 has never begun, so it leaves the record of a killed one alone.
    writers = [one for one in run.commands if one not in fault.killed and one.process.poll() != 2]
    if not run.setting.is_shared:  # only the host with the folder can write
        keeper = folder.relative_to(run.base).parts[0]
        writers = [one for one in writers if keeper == f"disk-{one.host.name}"]
    if status == "running" and writers:
        seen.wrong.append(f"run.json says running after {codes}")
    if is_complete != (status == "completed"):
        errors = [one.text("stderr").strip() for one in run.commands]
        seen.wrong.append(f"run.json says {status}, and the commands {codes}: {errors}")


def _wrong_output(command: Command, fault: Injection) -> str:
    """Return what is wrong with what a command has printed; nothing if all is well."""
    code = command.process.poll()
    # A command silences torch's warnings before it imports torch, and a warm one comes too late.
    stdout, stderr = (TORCH_WARNING.sub("", command.text(name)) for name in ("stdout", "stderr"))
    lines = [line for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]
    if "frame #" in stderr + stdout and fault.kind != "rank raises":
        return f"C++ frames: {lines[:3]}"
    if "Traceback" in stderr and fault.kind != "rank raises":
        return f"a traceback: {lines[:1]} … {lines[-1:]}"
    if code in (0, 128 + signal.SIGTERM, 128 + signal.SIGINT):
        return f"stderr after a success: {lines[:3]}" if lines else ""
    if code in (-signal.SIGTERM, -signal.SIGINT) and not stdout + stderr:
        return ""  # the signal came before the program's first line
    if code not in (1, 2) or len(errors) != 1:
        return f"{len(errors)} error lines: {lines[:3]}"
    expected = _sentence(command, fault)
    if expected and not re.search(expected, errors[0]):
        return f"{errors[0]!r} does not match {expected!r}"
    return ""


def _sentence(command: Command, fault: Injection) -> str:
    """Return the pattern of a command's error; empty if several are true."""
    if fault.phase not in ("training", "saving") or command.process.poll() == 2:
        return ""
    rank = fault.victim
    # Without numbers the ranks of the other machines follow the order in which those came.
    lost = f"n{rank + 1} \\(rank \\d\\) was lost: " if rank else "n1:29400, .* is lost: "
    own = "n1:29400, .* is lost: " if rank else "was lost: "
    is_own = command.host == fault.run.net.hosts[rank]
    return {
        "rank killed": f"rank {rank} on n{rank + 1} was killed by SIGKILL",
        "rank suspended": f"rank {rank} .*did not reach",
        "rank raises": f"rank {rank} on n{rank + 1} raised ZeroDivisionError",
        "launcher killed": lost,
        "host killed": lost,
        "host comes back": lost,
        "link cut for good": own if is_own else lost,
    }.get(fault.kind, "")


def finish(run: Training, fault: Injection, expected: Path, seen: Seen) -> None:
    """Resume the run on all hosts unless it has completed; compare it with the undisturbed one."""
    before = run.run_dirs()
    for folder in before:
        assert_whole(folder)
    if before and record(before[0])["status"] != "completed":
        _resume(run, before[0], seen)
    elif not before:
        _run_all(run, fault.keys)
    after = run.run_dirs()
    if len(after) != 1:
        seen.doubled_folders += 1
        raise WrongError(f"{len(after)} run folders after the resume")
    went_on = [step for step in run.resumed_steps() if step < fault.saved]
    if went_on:
        seen.lost_steps += fault.saved - min(went_on)
        raise WrongError(f"the run went on from step {went_on}, though {fault.saved} was saved")
    assert_whole(after[0])
    assert_equal(after[0], expected, num_steps=NUM_STEPS, same_saves=False)


def _resume(run: Training, folder: Path, seen: Seen) -> None:
    if not RunDir(folder).is_frozen:
        # It was claimed, and never begun: nothing can be resumed.
        subprocess.run(["rm", "-r", str(folder)], check=True)
        _run_all(run, (*TRAINING, *MEETING, *run.setting.keys))
        return
    saved = run.saved()
    path = "/".join(folder.parts[folder.parts.index("outputs") :])
    _run_all(run, (f"resume={path}", *MEETING, f"launch.nnodes={run.setting.num_hosts}"))
    if saved and run.resumed_steps()[-1:] != [saved]:
        seen.lost_steps += saved - (run.resumed_steps() or [0])[-1]
        raise WrongError(f"{saved} was saved, and resumed were {run.resumed_steps()}")


def _run_all(run: Training, keys: Sequence[str]) -> None:
    """Run commands on all hosts, to the end of the training."""
    commands = [run.start(place, *keys) for place in range(run.setting.num_hosts)]
    for one in commands:
        with suppress(subprocess.TimeoutExpired):
            one.process.wait(run.setting.limit_s + BUSY_S)
    codes = [one.process.poll() for one in commands]
    if any(code != 0 for code in codes):
        errors = [" ".join(one.text("stderr").split())[:300] for one in commands]
        raise WrongError(f"the resume ended with {codes}: {errors}")
