"""The hosts that the other tests here use: names, addresses, cables and disks of their own."""

import subprocess
import sys
from pathlib import Path

from clusters import Host, needs, network
from commands import background, wait_for, wait_for_end

pytestmark = needs()
# A server on the next host answers with that host's name.
SERVE = """
import socket
server = socket.create_server(("", 7000))
print("ready", flush=True)
while True:
    link, _ = server.accept()
    link.sendall(socket.gethostname().encode())
    link.close()
"""
ASK = """
import socket, sys
print(socket.create_connection((sys.argv[1], 7000), timeout=1).recv(100).decode())
"""


def ask(host: Host, other: str) -> str | None:
    """Return what the server on the other host answers; None if it cannot be reached."""
    command = [*host.program, sys.executable, "-S", "-c", ASK, other]
    asked = subprocess.run(command, capture_output=True, text=True, check=False)
    return asked.stdout.strip() if asked.returncode == 0 else None


def test_hosts_reach_each_other_until_the_cable_is_cut_or_all_their_processes_are_killed(
    tmp_path: Path,
) -> None:
    """By name and by address; this machine is none of them."""
    with network() as net:
        first, second = net.hosts
        program = (*second.program, sys.executable, "-S")
        with background("-c", SERVE, folder=tmp_path, program=program) as server:
            wait_for(lambda: "ready" in (tmp_path / "stdout").read_text())
            assert [ask(host, second.name) for host in (first, net.login)] == ["n2", "n2"]
            assert ask(first, second.address) == "n2"
            assert ask(first, "n3") is None
            second.cut()
            assert ask(first, second.name) is None
            second.mend()
            assert wait_for(lambda: ask(first, second.name)) == "n2"
            assert server.pid in second.pids()
            second.kill()
            assert server.wait() == -9
            assert ask(first, second.name) is None


def test_a_warm_command_runs_on_a_host_with_a_disk_of_its_own(tmp_path: Path) -> None:
    """What it writes below the private folder is not seen by the other host."""
    disk = tmp_path / "disk"
    with network(private=disk) as net:
        first, second = net.hosts
        overrides = ("model=toy", "train.max_steps=1", "world_size=1")
        with background(*overrides, folder=disk, prepare=first.enter) as process:
            assert wait_for_end(process, disk).exit_code == 0
        assert first.run("ls", cwd=disk).split() == ["outputs"]
        assert second.run("ls", cwd=disk) == ""
    assert (tmp_path / "disk-n1" / "outputs").is_dir()
    (record,) = (tmp_path / "disk-n1").rglob("run.json")
    assert '"host": "n1"' in record.read_text()
