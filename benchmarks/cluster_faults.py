"""One fault in a training on several hosts: start it, inject the fault, and check what is left.

The training waits at the place of the fault until the fault is there, so the same draw gives the
same fault on any machine. Hosts are the namespaces of tests/helpers/clusters.py.
"""

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "helpers"))
from clusters import Host, Network, network
from commands import Started, background, wait_for
from injection import (
    At,
    Call,
    Fault,
    append_byte,
    call_all,
    inject,
    pause,
    raise_error,
)
from run_folders import checkpoint_steps, record, run_dirs
from trainings import shared_outputs
from undisturbed import WrongError, assert_equal, assert_whole, rank_pids

from ddp_runner.config.launching import LaunchConfig
from ddp_runner.launch.machines import GOODBYE_S
from ddp_runner.launch.rank_processes import END_S, GONE_S
from ddp_runner.launch.reports import REPORT_S, SILENT_S
from ddp_runner.launch.supervisor import JOIN_GRACE_S
from ddp_runner.rank.stop import SERVER_GRACE_S
from ddp_runner.scratch import SAVING_FACTOR
from ddp_runner.tracking.run_dir import RunDir

NUM_STEPS, SAVE_EVERY = 30, 3
TIMEOUT_S, JOIN_S, SHUTDOWN_S = 10.0, 15.0, 3.0
# Five steps an epoch, with an evaluation after each.
TRAINING = (
    "model=toy", "dataset.num_samples=60", "batch.global_size=12", "train.epochs=6",
    f"train.max_steps={NUM_STEPS}", "optimizer=adam", "train.log_every_steps=1",
    "train.num_threads=1", f"checkpoint.every_steps={SAVE_EVERY}", "checkpoint.every_epochs=null",
    "checkpoint.keep=3", "launch.nproc_per_node=1",
)  # fmt: skip
MEETING = (
    f"backend.timeout_s={TIMEOUT_S:g}", f"launch.join_timeout_s={JOIN_S:g}",
    f"launch.shutdown_timeout_s={SHUTDOWN_S:g}", "launch.rdzv_endpoint=n1:29400",
)  # fmt: skip
SHORT_CUT_S = 2.0
EARLY_S = 2.5  # start-up takes about so long
BUSY_S = 30.0  # for what takes an instant on a quiet machine
KINDS = {  # the phases in which each kind of fault can happen
    "rank killed": ("start-up", "training", "saving", "ending"),
    "rank suspended": ("start-up", "training", "saving", "ending"),
    "rank raises": ("start-up", "training", "saving", "ending"),
    "launcher killed": ("start-up", "waiting", "training", "saving", "ending"),
    "host killed": ("start-up", "waiting", "training", "saving", "ending"),
    "link cut for 2 s": ("start-up", "waiting", "training", "saving", "ending"),
    "link cut for good": ("start-up", "waiting", "training", "saving", "ending"),
    "SIGTERM": ("start-up", "waiting", "training", "saving", "ending"),
    "SIGINT": ("start-up", "waiting", "training", "saving", "ending"),
    "host comes late": ("waiting", "training"),
    "host comes back": ("start-up", "training", "saving"),
}


@dataclass(frozen=True)
class Setting:
    """How a training is started."""

    nnodes: str
    num_hosts: int = 2
    max_restarts: int = 0
    is_shared: bool = True  # the disk

    @property
    def launch(self) -> LaunchConfig:
        """The config that the keys make."""
        return LaunchConfig(nnodes=self.nnodes, max_restarts=self.max_restarts)

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of each command."""
        return (f"launch.nnodes={self.nnodes}", f"launch.max_restarts={self.max_restarts}")

    @property
    def limit_s(self) -> float:
        """Seconds from a fault to the end of all commands, as the keys and constants say."""
        ranks = 2 * TIMEOUT_S + END_S + GONE_S + SAVING_FACTOR * SHUTDOWN_S
        launchers = SILENT_S + REPORT_S + JOIN_S + JOIN_GRACE_S + GOODBYE_S
        return (1 + self.max_restarts + self.launch.is_elastic) * (ranks + launchers)


SETTINGS = {
    "2 hosts": Setting("2"),
    "2 hosts, restarts": Setting("2", max_restarts=2),
    "2 hosts, own disks": Setting("2", is_shared=False),
    "1:2 hosts": Setting("1:2"),
    "1:2 hosts, restarts, own disks": Setting("1:2", max_restarts=1, is_shared=False),
    "3 hosts, restarts": Setting("3", num_hosts=3, max_restarts=1),
    "2:3 hosts": Setting("2:3", num_hosts=3),
}


@dataclass(frozen=True)
class Draw:
    """A fault and its place."""

    kind: str
    phase: str
    setting: str
    seed: str

    def __str__(self) -> str:
        return f"{self.kind}, {self.phase}, {self.setting} (seed {self.seed!r})"


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

    def sentence(self, wrong: str) -> None:
        """Note a wrong sentence."""
        self.wrong_sentences += 1
        self.wrong.append(wrong)


@dataclass(frozen=True)
class Command:
    """A command on a host, and its folder as this process sees it."""

    host: Host
    process: Started
    folder: Path

    def text(self, name: str) -> str:
        """Return what it has printed to stdout or stderr."""
        return (self.folder / name).read_text(errors="replace")


class Training:
    """The commands of one training on its hosts."""

    def __init__(self, base: Path, net: Network, setting: Setting, stack: ExitStack) -> None:
        self.base, self.net, self.setting, self._stack = base, net, setting, stack
        self.commands: list[Command] = []

    def start(self, place: int, *keys: str, faults: Sequence[Fault] = ()) -> Command:
        """Start a command on a host; it takes its place among the hosts from 0."""
        host, name = self.net.hosts[place], f"command-{len(self.commands)}"
        if self.setting.is_shared:
            folder = shared_outputs(self.base, name)
        else:
            folder = self.base / "disk" / name
            host.run("mkdir", "-p", str(folder))
            host.run("ln", "-s", "../outputs", str(folder / "outputs"))
            host.run("mkdir", "-p", str(self.base / "disk" / "outputs"))
        prepare = partial(call_all, host.enter, inject(*faults))
        command = background(*keys, folder=folder, prepare=prepare)
        self.commands.append(Command(host, self._stack.enter_context(command), folder))
        return self.commands[-1]

    def run_dirs(self) -> list[Path]:
        """Return the run folders on all disks."""
        if self.setting.is_shared:
            return run_dirs(self.base / "outputs")
        disks = [self.base / f"disk-{host.name}" / "outputs" for host in self.net.hosts]
        return [run for disk in disks for run in run_dirs(disk)]

    def saved(self) -> int:
        """Return the step of the newest checkpoint; 0 without one."""
        return max((step for run in self.run_dirs() for step in checkpoint_steps(run)), default=0)

    def resumed_steps(self) -> list[int]:
        """Return the steps from which the runs went on."""
        logs = [run / "logs" / "rank-0.log" for run in self.run_dirs()]
        text = "".join(log.read_text() for log in logs if log.exists())
        return [int(step) for step in re.findall(r"resumed from \S+, step (\d+)", text)]


@contextmanager
def training(base: Path, setting: Setting) -> Iterator[Training]:
    """Make the hosts of a setting, and a training on them that is not started yet."""
    base.mkdir(parents=True)
    private = None if setting.is_shared else base / "disk"
    with network(setting.num_hosts, private=private) as net, ExitStack() as stack:
        yield Training(base, net, setting, stack)


def undisturbed(base: Path, setting: Setting) -> tuple[Path, int]:
    """Run a training without a fault; return its folder and the file system calls of its saves."""
    calls = base.with_suffix(".calls")
    count = Fault(partial(append_byte, str(calls)), Call(None))
    with training(base, setting) as run:
        for place in range(setting.num_hosts):
            run.start(place, *TRAINING, *MEETING, *setting.keys, faults=[count])
        for one in run.commands:
            if one.process.wait(10 * BUSY_S) != 0:
                raise WrongError(f"the undisturbed run failed: {one.text('stderr')}")
        (folder,) = run.run_dirs()
    return folder, calls.stat().st_size


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
        fault = _Injection(run, draw, chance, num_calls=num_calls)
        seen.was_reached = fault.inject()
        begun_at = time.monotonic()
        wait_for_ends(run, seen)
        seen.seconds = time.monotonic() - begun_at
        for host in run.net.hosts:
            host.mend()
        nothing_left(run, seen)
        fault.check(seen)
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


class _Injection:
    """A fault: how it comes about, and what the commands must then have printed."""

    def __init__(self, run: Training, draw: Draw, chance: random.Random, *, num_calls: int) -> None:
        self.run, self.kind, self.phase, self._chance = run, draw.kind, draw.phase, chance
        self.is_elastic = run.setting.launch.is_elastic
        self.victim = chance.randrange(run.setting.num_hosts)
        self._begin = (*TRAINING, *MEETING, *run.setting.keys)
        if self.kind == "host comes back":
            self._begin += ("resume=auto",)  # as after a boot, when nobody knows what was there
        self._num_calls = num_calls
        self.saved = 0  # the newest checkpoint's step at the fault
        self.killed: list[Command] = []

    def inject(self) -> bool:
        """Start the commands and do it; return whether the place was reached."""
        num_hosts = self.run.setting.num_hosts
        order = self._chance.sample(range(num_hosts), num_hosts)
        if self.phase == "waiting":
            return self._while_waiting(order)
        if self.kind == "host comes late":
            self.victim = num_hosts - 1  # without the first host, nothing trains
        late = [self.victim] if self.kind == "host comes late" else []
        own, where = self._place(late), self.run.base / "pause"
        where.mkdir()
        raises = self.kind == "rank raises"
        what = raise_error if raises else partial(pause, str(where))
        faults = [Fault(what, own)] if own else []
        for place in order:
            if place not in late:
                self.run.start(place, *self._begin, faults=faults)
        if own is None:
            time.sleep(self._chance.uniform(0.0, EARLY_S))
        elif raises:
            return True
        else:
            ends = [one.process for one in self.run.commands]
            wait_for(
                lambda: (where / "reached").exists() or all(one.poll() is not None for one in ends)
            )
            if not (where / "reached").exists():
                return False
        self.saved = self.run.saved()
        self._strike()
        (where / "go").touch()
        if self.kind == "link cut for 2 s":
            time.sleep(SHORT_CUT_S)
            self.run.net.hosts[self.victim].mend()
        return True

    def _place(self, late: Sequence[int]) -> At | Call | None:
        """Return where a rank waits for the fault; None: at any instant of the start."""
        chance, num_ranks = self._chance, self.run.setting.num_hosts - len(late)
        rank = self.victim if self.kind == "rank raises" else chance.randrange(num_ranks)
        if self.phase == "start-up":
            return At(rank, 1, of="evaluation") if self.kind == "rank raises" else None
        if self.phase == "training":
            return At(rank, chance.randint(2, NUM_STEPS - SAVE_EVERY))
        if self.phase == "saving":
            if self.kind == "rank raises":
                self.victim = 0
            return Call(chance.randint(1, self._num_calls), half=chance.random() < 0.5)
        return At(rank, 1, of="end")

    def _while_waiting(self, order: Sequence[int]) -> bool:
        run, others = self.run, [place for place in order if place != self.victim]
        first = run.start(self.victim, *self._begin)
        wait_for(lambda: "waiting for" in first.text("stdout") or first.process.poll() is not None)
        if "waiting for" not in first.text("stdout"):
            return False
        if self.kind != "host comes late":
            self._strike()
        if self.kind == "link cut for 2 s":
            time.sleep(SHORT_CUT_S)
            run.net.hosts[self.victim].mend()
        for place in others:
            run.start(place, *self._begin)
        return True

    def _strike(self) -> None:
        """Do it to the victim."""
        host = self.run.net.hosts[self.victim]
        found = [one for one in self.run.commands if one.host == host]
        if self.kind in ("rank killed", "rank suspended"):
            self._signal_rank(found[0])
        elif self.kind == "launcher killed":
            found[0].process.send_signal(signal.SIGKILL)
            self.killed = found
        elif self.kind in ("host killed", "host comes back"):
            host.kill()
            self.killed = found
            if self.kind == "host comes back":
                self.run.start(self.victim, *self._begin)
        elif self.kind.startswith("link cut"):
            host.cut()
        elif self.kind in ("SIGTERM", "SIGINT"):
            found[0].process.send_signal(signal.Signals[self.kind])
            time.sleep(0.1)
        else:  # a host comes late
            command = self.run.start(self.victim, *self._begin)
            wait_for(lambda: command.text("stdout") or command.process.poll() is not None)
            time.sleep(SHORT_CUT_S)

    def _signal_rank(self, command: Command) -> None:
        process = command.process

        def pids() -> list[int]:
            return list(rank_pids(process.pid))

        wait_for(lambda: pids() or process.poll() is not None)
        signum = signal.SIGKILL if self.kind == "rank killed" else signal.SIGSTOP
        for pid in pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signum)

    def check(self, seen: Seen) -> None:
        """Check exit codes, what was printed, and run.json."""
        codes = [one.process.poll() for one in self.run.commands]
        for one, code in zip(self.run.commands, codes, strict=True):
            if one in self.killed or seen.hangs:
                continue
            if wrong := self._wrong_output(one, code):
                seen.sentence(f"{one.host.name} ended with {code}: {wrong}")
        if self._must_complete and any(codes):
            stderr = [one.text("stderr").strip() for one in self.run.commands]
            seen.wrong.append(f"the run should have completed: {codes}, {stderr}")
        runs = self.run.run_dirs()
        if len(runs) > 1:
            seen.doubled_folders += len(runs) - 1
            seen.wrong.append(f"{len(runs)} run folders: {[str(one) for one in runs]}")
        for folder in runs:
            self._check_record(folder, codes, seen)

    @property
    def _must_complete(self) -> bool:
        """Whether nobody may notice the fault but in the logs."""
        restarts = self.run.setting.max_restarts > 0 and self.phase in ("training", "saving")
        is_late = self.kind == "host comes late" and self.phase == "waiting"
        is_elsewhere = self.kind in ("rank killed", "rank suspended", "rank raises")
        return self.kind == "link cut for 2 s" or is_late or (restarts and is_elsewhere)

    def _check_record(self, folder: Path, codes: Sequence[int | None], seen: Seen) -> None:
        status = record(folder)["status"]
        is_complete = any(code == 0 for code in codes)
        writers = [one for one in self.run.commands if one not in self.killed]
        if not self.run.setting.is_shared:  # only the host with the folder can write
            keeper = folder.relative_to(self.run.base).parts[0]
            writers = [one for one in writers if keeper == f"disk-{one.host.name}"]
        if status == "running" and writers:
            seen.wrong.append(f"run.json says running after {codes}")
        if is_complete != (status == "completed"):
            errors = [one.text("stderr").strip() for one in self.run.commands]
            seen.wrong.append(f"run.json says {status}, and the commands {codes}: {errors}")

    def _wrong_output(self, command: Command, code: int | None) -> str:
        """Return what is wrong with what a command has printed; nothing if all is well."""
        stdout, stderr = command.text("stdout"), command.text("stderr")
        # A warm command has imported torch before it can silence torch's warnings.
        lines = [line for line in stderr.splitlines() if line.strip() and line[:2] != "[W"]
        errors = [line for line in lines if line.startswith("error: ")]
        if "frame #" in stderr + stdout and self.kind != "rank raises":
            return f"C++ frames: {lines[:3]}"
        if "Traceback" in stderr and self.kind != "rank raises":
            return f"a traceback: {lines[:1]} … {lines[-1:]}"
        if code in (0, 128 + signal.SIGTERM, 128 + signal.SIGINT):
            return f"stderr after a success: {lines[:3]}" if lines else ""
        if code not in (1, 2) or len(errors) != 1:
            return f"{len(errors)} error lines: {lines[:3]}"
        expected = self._sentence(command)
        if expected and not re.search(expected, errors[0]):
            return f"{errors[0]!r} does not match {expected!r}"
        return ""

    def _sentence(self, command: Command) -> str:
        """Return the pattern of a command's error; empty if several are true."""
        if self.phase not in ("training", "saving") or command.process.poll() == 2:
            return ""
        rank = self.victim
        lost = f"n{rank + 1} \\(rank {rank}\\) was lost: " if rank else "n1:29400, .* is lost: "
        own = "n1:29400, .* is lost: " if rank else "was lost: "
        is_own = command.host == self.run.net.hosts[rank]
        return {
            "rank killed": f"rank {rank} on n{rank + 1} was killed by SIGKILL",
            "rank suspended": f"rank {rank} .*did not reach",
            "rank raises": f"rank {rank} on n{rank + 1} raised ZeroDivisionError",
            "launcher killed": lost,
            "host killed": lost,
            "host comes back": lost,
            "link cut for good": own if is_own else lost,
        }.get(self.kind, "")


def finish(run: Training, fault: _Injection, expected: Path, seen: Seen) -> None:
    """Resume the run on all hosts unless it has completed; compare it with the undisturbed one."""
    before = run.run_dirs()
    for folder in before:
        assert_whole(folder)
    if before and record(before[0])["status"] != "completed":
        _resume(run, before[0], seen)
    elif not before:
        _run_all(run, fault._begin)
    after = run.run_dirs()
    if len(after) != 1:
        seen.doubled_folders += 1
        raise WrongError(f"{len(after)} run folders after the resume")
    went_on = [step for step in run.resumed_steps() if step < fault.saved]
    if went_on:
        seen.lost_steps += fault.saved - min(went_on)
        raise WrongError(f"the run went on from step {went_on}, though {fault.saved} was saved")
    assert_whole(after[0])
    assert_equal(after[0], expected, num_steps=NUM_STEPS, same_saves=False, rounds=fault.is_elastic)


def _resume(run: Training, folder: Path, seen: Seen) -> None:
    if not RunDir(folder).is_frozen:
        # It was claimed, and never begun: nothing can be resumed.
        subprocess.run(["rm", "-r", str(folder)], check=True)
        _run_all(run, (*TRAINING, *MEETING, *run.setting.keys))
        return
    saved = run.saved()
    path = "/".join(folder.parts[folder.parts.index("outputs") :])
    _run_all(run, (f"resume={path}", *MEETING, f"launch.nnodes={run.setting.nnodes}"))
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
