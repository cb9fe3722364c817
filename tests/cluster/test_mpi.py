"""Real Open MPI starts the ranks, on one host and on two."""

import os
import shlex
import signal
from pathlib import Path

import pytest
from clusters import Network, needs, network
from commands import RUNNER, background, wait_for, wait_for_end
from pages import blocks
from run_folders import last_step, record, run_dirs
from trainings import LONG

pytestmark = needs("mpirun")
SHORT = ("model=toy", "train.max_steps=2")


def remote_shell(net: Network, folder: Path) -> str:
    """Write what mpirun starts its daemons with, in place of ssh; return its path."""
    ways = [f'{host.name}) exec {shlex.join(host.program)} sh -c "$*" ;;' for host in net.hosts]
    path = folder / "remote_shell"
    path.write_text("\n".join(["#!/bin/sh", "host=$1; shift", "case $host in", *ways, "esac\n"]))
    path.chmod(0o755)
    return str(path)


def mpirun(line: str, *overrides: str) -> list[str]:
    """Return a command of the documentation with other keys."""
    before, runner, _ = line.partition("python -m ddp_runner ")
    assert runner
    words = shlex.split(before)
    return [words[0], "--allow-run-as-root", *words[1:], *RUNNER, *overrides]


def documented(*, num_hosts: int) -> str:
    """Return the command of docs/clusters.md for one host or several."""
    lines = "".join(block.text for block in blocks("docs/clusters.md")).splitlines()
    starts = [line for line in lines if line.startswith("mpirun")]
    (line,) = [line for line in starts if ("--host" in line) == (num_hosts > 1)]
    return line


def test_a_killed_rank_ends_the_job(tmp_path: Path) -> None:
    """On one host the ranks meet without a variable, and none outlives the other."""
    command = mpirun(documented(num_hosts=1), *LONG)
    with network() as net:
        host = net.hosts[0]
        # Else two busy test processes would share one core.
        options = ("--bind-to", "none", *command[1:])
        program = (*host.program, command[0])
        with background(*options, folder=tmp_path, program=program) as process:
            wait_for(lambda: last_step(tmp_path) >= 3)
            (run_dir,) = run_dirs(tmp_path)
            facts = record(run_dir)
            assert (facts["host"], facts["num_nodes"], facts["world_size"]) == ("n1", 1, 2)
            os.kill(host.process_with(run_dir / "logs" / "rank-1.log"), signal.SIGKILL)
            assert wait_for_end(process, tmp_path).exit_code != 0
            wait_for(lambda: not host.pids())


@pytest.mark.slow
def test_ranks_on_two_hosts_meet_where_the_command_says(tmp_path: Path) -> None:
    """Without an address, each host's first rank prints what to add."""
    line = documented(num_hosts=2)
    with network() as net:
        host = net.hosts[0]
        agent = ("-mca", "plm_rsh_agent", remote_shell(net, tmp_path))

        def run(line: str) -> tuple[int, str, str]:
            command = mpirun(line, *SHORT)
            program = (*host.program, command[0], *agent)
            with background(*command[1:], folder=tmp_path, program=program) as process:
                end = wait_for_end(process, tmp_path)
            return end.exit_code, end.stdout, end.stderr

        exit_code, _, stderr = run(line.replace("-x MASTER_ADDR=n1 -x MASTER_PORT=29500 ", ""))
        assert exit_code == 2
        assert "error: mpirun started 2 ranks and nothing says where they meet; set" in stderr
        assert "Traceback" not in stderr
        assert not run_dirs(tmp_path)

        exit_code, stdout, stderr = run(line)
        assert exit_code == 0, stderr
        assert "2 ranks on 2 nodes" in stdout
        (run_dir,) = run_dirs(tmp_path)
        facts = record(run_dir)
        assert (facts["status"], facts["host"], facts["num_nodes"]) == ("completed", "n1", 2)
