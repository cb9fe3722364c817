"""Hosts on one machine: network namespaces, each with a name, an address and processes of its own.

They need root on Linux, and leave nothing behind: a host exists as long as the shell that holds its
namespaces, and that shell ends with its stdin, so even a killed pytest leaves no host.
"""

import ctypes
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from commands import wait_for

ENTER = ("--net", "--uts", "--mount")
CLONE_FLAGS = 0x40000000 | 0x04000000 | 0x00020000  # linux/sched.h: NEWNET, NEWUTS, NEWNS
NETWORK = "10.77.0"
LOGIN = "login"  # holds the switch; a controller or a command that submits jobs runs there
# Arguments: the host's name, its hosts file, then each private folder after what lies under it.
# A host cannot ask a name server, so a name that is not in the file is unknown at once.
HOLD = """
hostname "$1"
mount --bind "$2" /etc/hosts
mount --bind /dev/null /etc/resolv.conf
shift 2
while [ $# -gt 0 ]; do mount --bind "$1" "$2"; shift 2; done
ip link set lo up
echo ready
read -r _ || true
"""


@dataclass(frozen=True)
class Host:
    """A machine with its own network, host name and mounts; it shares disk and process ids."""

    name: str
    address: str
    pid: int  # of the shell that holds its namespaces
    switch: int  # the shell of the host with the switch

    @property
    def program(self) -> tuple[str, ...]:
        """What starts a command here, in the current folder: put it before the command."""
        enter = f'exec nsenter --target {self.pid} {" ".join(ENTER)} --wdns="$PWD" -- "$@"'
        return ("sh", "-c", enter, self.name)

    def enter(self) -> None:
        """Move this process here; as `prepare` of a warm command it starts the command here."""
        folder, target = Path.cwd(), os.pidfd_open(self.pid)
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(target, CLONE_FLAGS):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(target)
        os.chdir(folder)  # the new mounts begin at their root

    def run(self, *command: str, **options: Any) -> str:
        """Run a short command here, and return its stdout; options are of subprocess.run."""
        done = subprocess.run(
            [*self.program, *command], capture_output=True, text=True, check=False, **options
        )
        assert done.returncode == 0, f"{command} on {self.name}: {done.stderr}{done.stdout}"
        return done.stdout

    def cut(self) -> None:
        """Pull its cable behind the switch: what it sends and what is sent to it disappears."""
        _ip(self.switch, f"link set {self.name} nomaster")

    def mend(self) -> None:
        """Plug the cable in again."""
        _ip(self.switch, f"link set {self.name} master switch")

    def pids(self) -> list[int]:
        """Return the living processes here."""
        network = Path(f"/proc/{self.pid}/ns/net").stat()
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended meanwhile
                if os.path.samestat((path / "ns/net").stat(), network):
                    found.append(int(path.name))
        return [pid for pid in found if pid != self.pid]

    def process_with(self, file: Path) -> int:
        """Return the only process here that has a file open, such as a rank its log."""
        opened = {pid: Path(f"/proc/{pid}/fd").glob("*") for pid in self.pids()}
        (only,) = [pid for pid, paths in opened.items() if any(map(file.samefile, paths))]
        return only

    def kill(self) -> None:
        """Kill every process here. Its kernel still closes their connections; see ``cut``."""

        def are_gone() -> bool:
            for pid in (pids := self.pids()):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return not pids

        wait_for(are_gone)


@dataclass(frozen=True)
class Network:
    """Hosts that reach each other, by name and by address."""

    hosts: tuple[Host, ...]
    login: Host


@contextmanager
def network(num_hosts: int = 2, *, private: Path | None = None) -> Iterator[Network]:
    """Start hosts n1, n2, …; at the end kill all processes on them, and remove them.

    Args:
        num_hosts: without the login host.
        private: a folder that is no shared disk. On host n1 it is the folder beside it with `-n1`
            at the end of its name, and so on.
    """
    names = [LOGIN, *(f"n{number}" for number in range(1, num_hosts + 1))]
    addresses = {name: f"{NETWORK}.{number}" for number, name in enumerate(names, start=1)}
    lines = "".join(f"{address} {name}\n" for name, address in addresses.items())
    with ExitStack() as stack:
        file = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "hosts"
        file.write_text(f"127.0.0.1 localhost\n{lines}")
        pids = {
            name: stack.enter_context(_holder(name, file, private=private)).pid for name in names
        }
        hosts = [Host(name, addresses[name], pids[name], pids[LOGIN]) for name in names]
        for host in hosts:
            stack.callback(host.kill)
        _connect(hosts)
        yield Network(tuple(hosts[1:]), hosts[0])


@contextmanager
def _holder(name: str, file: Path, *, private: Path | None) -> Iterator[subprocess.Popen[str]]:
    binds = list[str]()
    if private is not None and name != LOGIN:
        own = private.with_name(f"{private.name}-{name}")
        for folder in (private, own):
            folder.mkdir(parents=True, exist_ok=True)
        binds = [str(own), str(private)]
    shell = ["unshare", *ENTER, "sh", "-ec", HOLD, "sh", name, str(file), *binds]
    with subprocess.Popen(
        shell, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:  # its end closes stdin and waits
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", f"host {name} did not start"
        yield process


def _connect(hosts: list[Host]) -> None:
    """Join the hosts by a switch on the first of them."""
    login, *others = hosts
    _ip(login.pid, "link add switch type bridge", "link set switch up")
    _ip(login.pid, f"addr add {login.address}/24 dev switch")
    for host in others:
        _ip(
            login.pid,
            f"link add {host.name} type veth peer name eth0 netns {host.pid}",
            f"link set {host.name} master switch up",
        )
        _ip(host.pid, f"addr add {host.address}/24 dev eth0", "link set eth0 up")


def _ip(pid: int, *commands: str) -> None:
    """Run commands of `ip` in the network of a process."""
    enter = ["nsenter", "--target", str(pid), "--net", "ip", "-batch", "-"]
    subprocess.run(enter, input="\n".join(commands), check=True, text=True)


def needs(*programs: str) -> list[pytest.MarkDecorator]:
    """Return the marks of tests on hosts, for `pytestmark`; skip them where they cannot run.

    Args:
        programs: what else they start, for example mpirun.
    """
    reason = _missing(*programs)
    is_missing = pytest.mark.skipif(reason is not None, reason=reason or "")
    return [pytest.mark.full, pytest.mark.cluster, is_missing]


@cache
def _missing(*programs: str) -> str | None:
    """Return what this machine lacks, or None."""
    absent = [one for one in ("ip", "nsenter", "unshare", *programs) if shutil.which(one) is None]
    if absent:
        return f"needs {', '.join(absent)}, which are not installed"
    tried = subprocess.run(["unshare", *ENTER, "true"], capture_output=True, check=False)
    return "needs root with the right to make namespaces" if tried.returncode else None
