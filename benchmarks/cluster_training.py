"""A small training on several hosts, which are the namespaces of tests/helpers/clusters.py."""

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "helpers"))
from clusters import Host, Network, network
from commands import Started, background
from injection import Call, Fault, append_byte, call_all, inject
from run_folders import checkpoint_steps, run_dirs
from trainings import shared_outputs
from undisturbed import WrongError

from ddp_runner.host.network import SILENT_S
from ddp_runner.host.processes import KILL_S
from ddp_runner.launch.hub import ENDING_S
from ddp_runner.launch.machines import LEAVE_S
from ddp_runner.launch.ranks import ANSWER_S, SAVING_FACTOR

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
BUSY_S = 30.0  # for what takes an instant on a quiet machine


@dataclass(frozen=True)
class Setting:
    """How a training is started."""

    num_hosts: int = 2
    max_restarts: int = 0
    is_shared: bool = True  # the disk

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of each command."""
        return (f"launch.nnodes={self.num_hosts}", f"launch.max_restarts={self.max_restarts}")

    @property
    def limit_s(self) -> float:
        """Seconds from a fault to the end of all commands, as the keys and constants say."""
        ranks = 3 * TIMEOUT_S + ANSWER_S + KILL_S + SAVING_FACTOR * SHUTDOWN_S
        launchers = 2 * SILENT_S + ENDING_S + JOIN_S + LEAVE_S
        return (1 + self.max_restarts) * (ranks + launchers)


SETTINGS = {
    "2 hosts": Setting(),
    "2 hosts, restarts": Setting(max_restarts=2),
    "2 hosts, own disks": Setting(is_shared=False),
    "2 hosts, restarts, own disks": Setting(max_restarts=1, is_shared=False),
    "3 hosts, restarts": Setting(num_hosts=3, max_restarts=1),
}


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
