"""Two hosts: machines that are lost, cut off or late; under torchrun, one that comes back."""

import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import pytest
from clusters import Host, Network, needs, network
from commands import CommandResult, Started, background, rank_processes, wait_for, wait_for_end
from run_folders import checkpoint_steps, last_step, metrics, rank_log, record, run_dirs
from trainings import EQUAL, assert_continued, shared_outputs

pytestmark = needs()
MEETING = ("launch.nproc_per_node=1", "launch.rdzv_endpoint=n1:29400")
TWO = ("launch.nnodes=2", *MEETING)
ENDLESS = "train.max_steps=1000000"


@contextmanager
def started(
    folder: Path, hosts: Sequence[Host], *keys: str
) -> Iterator[list[tuple[Started, Path]]]:
    """Start one command on hosts that share their outputs; give each with its own folder."""
    with ExitStack() as stack:
        commands = []
        for host in hosts:
            own = shared_outputs(folder, f"{host.name}-{len(list(folder.iterdir()))}")
            command = background(*EQUAL, *keys, folder=own, prepare=host.enter)
            commands.append((stack.enter_context(command), own))
        yield commands


def ends(commands: Sequence[tuple[Started, Path]]) -> list[CommandResult]:
    """Wait until all commands have ended."""
    return [wait_for_end(process, folder) for process, folder in commands]


def has_saved(folder: Path) -> bool:
    """Return whether the only run has a checkpoint."""
    return any(checkpoint_steps(run) for run in run_dirs(folder / "outputs"))


@pytest.fixture(name="net", scope="module")
def two_hosts() -> Iterator[Network]:
    """Give two hosts; a test may kill all their processes."""
    with network() as net:
        yield net


def test_a_rank_that_is_killed_is_named_on_every_machine_and_the_run_restarts(
    net: Network, tmp_path: Path
) -> None:
    """In the same folder, from its last checkpoint, and without a step lost or done twice."""
    with started(tmp_path, net.hosts, *TWO, "launch.max_restarts=1") as commands:
        wait_for(lambda: has_saved(tmp_path))
        rank_processes(commands[1][0].pid)[1].kill()
        assert [end.exit_code for end in ends(commands)] == [0, 0]
    (run,) = run_dirs(tmp_path / "outputs")
    assert_continued(run)
    assert "restart 1 of 1: rank 1 on n2 was killed by SIGKILL" in rank_log(run)
    assert (record(run)["host"], record(run)["num_nodes"]) == ("n1", 2)

    with started(tmp_path, net.hosts, *TWO, "name=fatal", ENDLESS) as commands:
        wait_for(lambda: any("fatal" in str(one) for one in run_dirs(tmp_path / "outputs")))
        (run,) = (tmp_path / "outputs" / "fatal").iterdir()
        wait_for(lambda: checkpoint_steps(run))
        rank_processes(commands[1][0].pid)[1].kill()
        for end in ends(commands):
            assert end.exit_code == 1
            assert "error: rank 1 on n2 was killed by SIGKILL" in end.stderr
            assert "Traceback" not in end.stderr
    assert record(run)["error"]["rank"] == 1


def test_a_lost_machine_is_named_and_so_is_the_one_where_they_meet(
    net: Network, tmp_path: Path
) -> None:
    """Each in one sentence; the run can go on from its last checkpoint."""
    sentences = ["n2 (rank 1) was lost: ", "n1:29400, where the machines meet, is lost: "]
    for lost, sentence in zip(reversed(net.hosts), sentences, strict=True):
        folder = tmp_path / lost.name
        folder.mkdir()
        with started(folder, net.hosts, *TWO, ENDLESS) as commands:
            wait_for(lambda folder=folder: has_saved(folder))
            lost.kill()
            (end,) = [one for one in ends(commands) if one.exit_code != -signal.SIGKILL]
        assert end.exit_code == 1
        assert f"error: {sentence}" in end.stderr
        (run,) = run_dirs(folder / "outputs")
        assert (record(run)["status"], record(run)["error"]["kind"]) == ("failed", "machine")


@pytest.mark.slow
def test_a_short_cut_costs_nothing_and_a_long_one_ends_both_sides(
    net: Network, tmp_path: Path
) -> None:
    """Each side says which part it has lost; neither waits longer than the timeouts."""
    keys = (*TWO, "backend.timeout_s=10", ENDLESS)
    with started(tmp_path, net.hosts, *keys) as commands:
        wait_for(lambda: has_saved(tmp_path))
        (run,) = run_dirs(tmp_path / "outputs")
        net.hosts[1].cut()
        before = last_step(run)
        time.sleep(4.0)  # TCP tries again after 0.2, 0.6, 1.4, 3, 6.2 and only then 12.6 s
        net.hosts[1].mend()
        wait_for(lambda: last_step(run) > before + 10)
        net.hosts[1].cut()
        first, second = ends(commands)
        net.hosts[1].mend()
    assert (first.exit_code, second.exit_code) == (1, 1)
    assert "error: n2 (rank 1) was lost: " in first.stderr
    assert "error: n1:29400, where the machines meet, is lost: " in second.stderr
    steps = [line["step"] for line in metrics(run) if "train/loss" in line]
    assert steps == list(range(10, steps[-1] + 1, 10))


@pytest.mark.parametrize(
    ("place", "sentence"),
    [
        (0, "waiting for 1 of 2 machines at n1:29400, up to 600 s; start the same command on each"),
        (1, "waiting for n1:29400, where the 2 machines of the run meet (Connection refused), up"),
    ],
)
def test_a_machine_says_what_it_waits_for_and_answers_ctrl_c(
    net: Network, tmp_path: Path, place: int, sentence: str
) -> None:
    """At once: there is nothing to save."""
    with started(tmp_path, [net.hosts[place]], *TWO) as commands:
        ((process, folder),) = commands
        wait_for(lambda: sentence in (folder / "stdout").read_text())
        process.send_signal(signal.SIGINT)
        (end,) = ends(commands)
    assert (end.exit_code, "rror" in end.stderr, "frame #" in end.stderr) == (130, False, False)
    assert run_dirs(tmp_path / "outputs") == []


def test_machines_that_are_late_are_reported_as_missing(net: Network, tmp_path: Path) -> None:
    """Each side prints one line."""
    expected = ["1 of 2 machines at n1:29400", "n1:29400, where the 2 machines of the run meet"]
    for host, awaited in zip(net.hosts, expected, strict=True):
        with started(tmp_path, [host], *TWO, "launch.join_timeout_s=1") as commands:
            (end,) = ends(commands)
        assert end.exit_code == 2
        sentence = f"error: waited 1 s (launch.join_timeout_s) for {awaited}"
        assert sentence in end.stderr


@pytest.mark.slow
def test_an_elastic_run_of_torchrun_continues_when_a_machine_is_lost_and_comes_back(
    net: Network, tmp_path: Path
) -> None:
    """In its folder, with its global batch; what was not saved is done again."""
    torchrun = (
        *(str(Path(sys.executable).with_name("torchrun")), "--nnodes=1:2", "--nproc-per-node=1"),
        *("--rdzv-backend=c10d", "--rdzv-endpoint=n1:29400", "--max-restarts=3"),
        *("--rdzv-conf=last_call_timeout=5", "-m", "ddp_runner"),
    )

    def start(host: Host, name: str) -> AbstractContextManager[Started]:
        return background(
            *(*EQUAL, "batch.global_size=40", ENDLESS),
            folder=shared_outputs(tmp_path, name),
            program=(*host.program, *torchrun),
            environ={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        )

    def world_size() -> int:
        runs = run_dirs(tmp_path / "outputs")
        return record(runs[0])["world_size"] if runs else 0

    first, second = net.hosts
    with start(first, "first") as command, start(second, "second"):
        wait_for(lambda: has_saved(tmp_path))
        (run,) = run_dirs(tmp_path / "outputs")
        assert world_size() == 2
        second.kill()
        wait_for(lambda: world_size() == 1)
        with start(second, "again"):
            wait_for(lambda: world_size() == 2)
            saved = max(checkpoint_steps(run))
            wait_for(lambda: max(checkpoint_steps(run)) > saved)
            command.send_signal(signal.SIGTERM)
            wait_for_end(command, tmp_path / "first")
    assert run_dirs(tmp_path / "outputs") == [run]
    log = (tmp_path / "first" / "stdout").read_text()
    assert log.count("batch        40 a step = ") == 3
    steps = [line["step"] for line in metrics(run) if "train/loss" in line]
    assert steps == list(range(10, steps[-1] + 1, 10))


def test_without_a_shared_disk_a_run_trains_and_resumes_on_both_machines(tmp_path: Path) -> None:
    """The first keeps the run; the second needs no folder, and no key but where they meet.

    Rank 0 follows the folder to the other machine. Each machine's own name is an address of
    loopback, as Debian sets it.
    """
    disk = tmp_path / "disk"
    with network(private=disk) as net, ExitStack() as stack:
        for host in net.hosts:
            others = [f"{one.address} {one.name}\n" for one in net.hosts if one is not host]
            names = tmp_path / f"hosts-{host.name}"
            names.write_text(f"127.0.0.1 localhost\n127.0.1.1 {host.name}\n{''.join(others)}")
            host.run("mount", "--bind", str(names), "/etc/hosts")

        def run(*keys: str) -> list[CommandResult]:
            folders = [disk / host.name for host in net.hosts]
            for host, folder in zip(net.hosts, folders, strict=True):
                host.run("mkdir", "-p", str(folder))
            commands = [
                stack.enter_context(background(*keys, folder=folder, prepare=host.enter))
                for host, folder in zip(net.hosts, folders, strict=True)
            ]
            return ends(list(zip(commands, folders, strict=True)))

        begun = run(*EQUAL, *TWO, "train.max_steps=60", "name=apart", "hydra.run.dir=run")
        assert [end.exit_code for end in begun] == [0, 0], begun[1].stderr
        assert "n1 keeps the run: n2 does not see its folder, and keeps only the logs" in (
            begun[0].stdout
        )
        resumed = run("resume=run", "train.max_steps=120", "launch.nnodes=2", MEETING[1])
        assert [end.exit_code for end in resumed] == [0, 0], resumed[1].stderr
        folder = Path(f"{disk}-n2") / "n2" / "run"
        shutil.rmtree(folder, ignore_errors=True)
        (Path(f"{disk}-n1") / "n1" / "run").rename(folder)
        moved = run("resume=run", "train.max_steps=140", "launch.nnodes=2", MEETING[1])
        assert [end.exit_code for end in moved] == [0, 0], moved[1].stderr
        nowhere = run("resume=nowhere", "launch.nnodes=2", MEETING[1])
    assert (record(folder)["status"], record(folder)["host"]) == ("completed", "n2")
    assert_continued(folder, num_steps=140)
    for end in nowhere:
        assert end.exit_code == 2
        assert "error: resume=nowhere is not a run folder on any of the 2 machines" in (end.stderr)
