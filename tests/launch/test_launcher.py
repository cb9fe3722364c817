"""Real ranks and launchers are killed, stopped and restarted."""

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import psutil
import pytest
from commands import (
    TIME_LIMIT_S,
    CommandResult,
    Started,
    background,
    fork_server,
    rank_processes,
    session_pids,
    wait_for,
    wait_for_end,
)
from configs import resolved
from injection import call_all
from run_folders import (
    assert_same_state,
    checkpoint_steps,
    last_step,
    record,
    reproducible_metrics,
    run_dirs,
)
from trainings import LONG, is_training

from ddp_runner.dist_env import dist_env
from ddp_runner.host import processes
from ddp_runner.host.processes import STOP_SIGNALS
from ddp_runner.job import COMPLETED, Failure, Job, Outcome
from ddp_runner.launch import launcher
from ddp_runner.launch.ranks import Ranks
from ddp_runner.launch.stop_requests import ONE_REQUEST_S
from ddp_runner.tracking.run_dir import RunDir

FAULTY = '''
import os, time
from torch import nn

class Faulty(nn.Linear):
    """Works for two steps; then rank 1 raises, while rank 0 waits for it in a collective."""

    def __init__(self):
        super().__init__(10, 5)
        self.calls = 0

    def forward(self, inputs):
        self.calls += self.training
        if self.calls == 3 and os.environ["RANK"] == "1":
            raise ZeroDivisionError("the third batch is cursed")
        return super().forward(inputs)
'''


def is_gone(launcher_pid: int) -> bool:
    """Return whether all processes of a command have ended."""
    return not session_pids(launcher_pid)


def is_importing_torch(launcher_pid: int) -> bool:
    """Return whether a command imports torch, which takes longest."""
    return any(
        "libtorch" in one.path
        for pid in session_pids(launcher_pid)
        for one in psutil.Process(pid).memory_maps()
    )


def test_a_killed_launcher_leaves_no_process(tmp_path: Path) -> None:
    """No process can handle SIGKILL, and the workers and the fork server end as well."""
    with background(*LONG, folder=tmp_path) as process:
        wait_for(lambda: is_training(process, tmp_path))
        assert len(rank_processes(process.pid)) == 2
        process.kill()
        process.wait()
        wait_for(lambda: is_gone(process.pid))
    assert record(run_dirs(tmp_path)[0])["status"] == "running"  # nobody was left to change it


def test_sigterm_saves_and_says_so(tmp_path: Path) -> None:
    """SIGTERM saves the step and ends with 143; until then the ranks listen on loopback only."""
    with background(*LONG, folder=tmp_path) as process:
        wait_for(lambda: is_training(process, tmp_path))
        server = fork_server(process.pid)
        assert server.num_threads() == 1  # a thread would not survive a fork
        listening = {}
        for pid in session_pids(process.pid):
            for socket in psutil.Process(pid).net_connections("inet"):
                if socket.status == psutil.CONN_LISTEN:
                    listening[pid, socket.laddr.port] = socket.laddr.ip
        assert set(rank_processes(process.pid).values()) >= {
            psutil.Process(pid) for pid, _ in listening if pid != process.pid
        }
        assert listening
        assert {
            ip for ip in listening.values() if not ip.startswith("127.") and ip != "::1"
        } == set()
        process.terminate()
        end = wait_for_end(process, tmp_path)
        wait_for(lambda: is_gone(process.pid))
    assert (end.exit_code, end.stderr) == (143, "")
    fields = record(end.run_dir)
    assert (fields["status"], fields["error"]) == ("preempted", None)
    assert (
        checkpoint_steps(end.run_dir)[-1]
        == fields["step"]
        == reproducible_metrics(end.run_dir)[-1]["step"]
    )


def test_a_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    """The first waits for the step, which a stopped rank never ends; the second does not wait."""
    with background(*LONG, "launch.shutdown_timeout_s=3600", folder=tmp_path) as process:
        wait_for(lambda: is_training(process, tmp_path))
        rank_processes(process.pid)[1].suspend()
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: every process gets it
        wait_for(lambda: "again to end at once" in (tmp_path / "stdout").read_text())
        assert process.poll() is None
        time.sleep(2 * ONE_REQUEST_S)  # what comes at once is the same request
        process.send_signal(signal.SIGINT)
        process.wait(TIME_LIMIT_S)
        wait_for(lambda: is_gone(process.pid))
        end = wait_for_end(process, tmp_path)
    assert (end.exit_code, end.stderr) == (130, "")
    fields = record(end.run_dir)
    assert fields["status"] == "preempted"
    assert fields["error"]["sentence"] == "ended without a checkpoint"


def test_a_rank_that_raises_is_named_and_ends_the_group(tmp_path: Path) -> None:
    """It prints one sentence and one traceback, and exits with 1; the peer does not wait."""
    (tmp_path / "faulty.py").write_text(FAULTY)
    with background(
        "model=toy",
        "model._target_=faulty.Faulty",
        "allowed_targets=[faulty]",
        folder=tmp_path,
        environ={"PYTHONPATH": str(tmp_path)},
    ) as process:
        end = wait_for_end(process, tmp_path)
        wait_for(lambda: is_gone(process.pid))
    sentence = "rank 1 raised ZeroDivisionError: the third batch is cursed"
    assert end.exit_code == 1
    lines = end.stderr.strip().splitlines()
    failure = end.run_dir / "logs" / "failure.txt"
    words = f'resume={end.run_dir} "allowed_targets=[faulty]"'
    assert lines[0] == f"error: {sentence}; see {failure}, then continue with {words}"
    assert lines[1] == "Traceback (most recent call last):"
    assert lines[-1] == "ZeroDivisionError: the third batch is cursed"
    assert end.stderr.count("Traceback") == 1
    fields = record(end.run_dir)
    assert fields["status"] == "failed"
    assert fields["error"] == {"rank": 1, "kind": "crash", "sentence": sentence}
    assert "cursed" in failure.read_text()
    assert "cursed" in (end.run_dir / "logs" / "rank-1.log").read_text()


@pytest.mark.full
def test_a_killed_rank_is_named_or_its_group_restarted(tmp_path: Path) -> None:
    """With restarts left the group goes on from its checkpoint and ends where it would have.

    A sweep: the first job loses a rank and restarts, the second is left alone, and the third
    loses a rank and may not restart.
    """
    short = [one for one in LONG if not one.startswith("train.epochs")]
    with background(
        "-m",
        "launch.max_restarts=1,2,0",
        "hydra.sweep.dir=sweep",
        *short,
        "train.epochs=10",
        "checkpoint.every_epochs=null",
        "checkpoint.every_steps=10",
        folder=tmp_path,
    ) as process:
        restarted, undisturbed, lost = (
            tmp_path / "sweep" / f"launch.max_restarts={number}" for number in (1, 2, 0)
        )
        wait_for(lambda: checkpoint_steps(restarted) and last_step(restarted) >= 15)
        rank_processes(process.pid)[1].kill()
        wait_for(lambda: checkpoint_steps(lost) and last_step(lost) >= 15)
        rank_processes(process.pid)[0].kill()
        end = wait_for_end(process, tmp_path)
    assert end.exit_code == 1
    sentence = (
        "rank 0 was killed by SIGKILL, by another process or by the kernel's out-of-memory killer"
    )
    (line,) = end.stderr.strip().splitlines()
    assert line.startswith(f"error: {sentence}; see {(lost / 'logs').relative_to(tmp_path)}, then ")
    assert "continue with " in line
    assert RunDir(lost.relative_to(tmp_path)).resume_argument in line
    fields = record(lost)
    assert (fields["status"], fields["error"]["rank"], fields["error"]["sentence"]) == (
        "failed",
        0,
        sentence,
    )
    assert checkpoint_steps(lost)[-1] >= 10  # every earlier checkpoint is still there
    assert [record(run)["status"] for run in (restarted, undisturbed)] == ["completed"] * 2
    assert [record(run)["restarts"] for run in (restarted, undisturbed)] == [1, 0]
    log = (restarted / "logs" / "rank-0.log").read_text()
    assert re.search(r"restart 1 of 1: .+", log)
    assert re.search(r"resumed from .*step-000000[1-9]0", log)
    assert reproducible_metrics(restarted) == reproducible_metrics(undisturbed)
    assert_same_state(restarted, undisturbed)


Work = Callable[[Job], Any]


def do_instead(work: Work) -> None:
    """Let the ranks of a command do this instead of a training."""
    Ranks.run_task = f"{work.__module__}:{work.__name__}"


@contextmanager
def working(
    folder: Path, work: Work, *prepare: Callable[[], None], keys: Sequence[str] = ()
) -> Iterator[Started]:
    """Start two ranks that do this, and once again if they fail."""
    with background(
        *("model=toy", "world_size=2", "launch.max_restarts=1", *keys),
        folder=folder,
        spares=2,
        prepare=partial(call_all, partial(do_instead, work), *prepare),
    ) as process:
        yield process


def supervised(folder: Path, work: Work, *prepare: Callable[[], None]) -> CommandResult:
    """Let two ranks do this to their end; no process is left then."""
    with working(folder, work, *prepare) as process:
        end = wait_for_end(process, folder)
        wait_for(lambda: is_gone(process.pid))
    return end


def rank_and_attempt() -> tuple[int, int]:
    """Return this process's rank and attempt."""
    env = dist_env()
    assert env is not None
    return env.rank, env.restart_count


def leave_behind(job: Job) -> Outcome:
    """Fail twice: rank 1 first, after the end of rank 0; then rank 0, which reports it."""
    rank, attempt = rank_and_attempt()
    assert job.wire is not None
    if (rank, attempt) == (1, 0):
        wait_for(lambda: Path("rank-0").exists() and Path("rank-0").read_text())
        wait_for(lambda: not psutil.pid_exists(int(Path("rank-0").read_text())))
        os._exit(7)
    if (rank, attempt) == (0, 0):
        job.wire.send("ready")
        for message in (("saving", True), ("stack", 0, "?"), ("failure", Failure(0, "peer", "?"))):
            job.wire.send(*message)
        Path("server").write_text(str(os.getppid()))
        Path("rank-0").write_text(str(os.getpid()))
    if (rank, attempt) == (0, 1):
        is_same = Path("server").read_text() == str(os.getppid())
        Path("found").write_text(json.dumps({"earlier": job.earlier, "same server": is_same}))
        os._exit(8)
    return COMPLETED


@pytest.mark.full
def test_a_restart_knows_nothing_of_the_ranks_before_but_why_they_ended(tmp_path: Path) -> None:
    """Their results are forgotten: they would hide the loss of rank 0. The server stays."""
    end = supervised(tmp_path, leave_behind)
    assert end.exit_code == 1
    assert end.stderr.startswith("error: rank 0 ended with exit code 8, without an exception")
    facts = json.loads((tmp_path / "found").read_text())
    sentence = "rank 1 ended with exit code 7, without an exception: by os._exit, or by a library"
    assert facts["earlier"][0][1].startswith(sentence)
    assert facts["same server"]


def lose_the_server(job: Job) -> Outcome:
    """Kill the server once; then answer as rank 0 alone, if signals are ignored as they were."""
    rank, attempt = rank_and_attempt()
    ignored = {signal.getsignal(signum) for signum in STOP_SIGNALS} == {signal.SIG_IGN}
    server = os.getppid()
    if attempt == 0:
        Path(f"server-{rank}").write_text(str(server))
        wait_for(lambda: Path("server-0").exists() and Path("server-1").exists())
        if rank == 0:  # the other one's parent may be the launcher by then
            os.kill(server, signal.SIGKILL)
        wait_for(lambda: os.getppid() != server)
        os._exit(0)
    is_new = str(server) != Path("server-0").read_text()
    is_right = rank == 0 and ignored and is_new
    return COMPLETED if is_right else Outcome.stopped(signal.SIGTERM)


def test_a_restart_has_a_server_like_the_one_that_was_killed(tmp_path: Path) -> None:
    """It ignores signals, so that only the launcher answers them; rank 0 says how the run ended."""
    end = supervised(tmp_path, lose_the_server)
    assert (end.exit_code, end.stderr) == (0, "")


def lose_the_folder(job: Job) -> Outcome:
    """Remove the launcher's temporary folder, as a cleaner does, and fail once."""
    rank, attempt = rank_and_attempt()
    assert job.temp is not None
    if attempt == 0:
        if rank == 1:
            shutil.rmtree(job.temp.parent)
            os._exit(7)
        time.sleep(TIME_LIMIT_S)
    return COMPLETED


@pytest.mark.full
def test_a_restart_needs_nothing_that_a_cleaner_of_temporary_files_removes(tmp_path: Path) -> None:
    """It reads neither the folder nor the server's socket in it."""
    end = supervised(tmp_path, lose_the_folder)
    assert (end.exit_code, end.stderr) == (0, "")


def save(job: Job) -> Outcome:
    """Let rank 0 save for longer than launch.shutdown_timeout_s, and then end as asked."""
    rank, _ = rank_and_attempt()
    assert job.wire is not None
    job.wire.send("ready")
    if rank == 0:
        with job.wire.saving():
            Path("saving").touch()
            wait_for(lambda: job.wire is not None and job.wire.stop)
            time.sleep(2.0)
    wait_for(lambda: job.wire is not None and job.wire.stop)
    return Outcome.stopped(signal.SIGTERM)


@pytest.mark.full
def test_a_save_is_waited_for(tmp_path: Path) -> None:
    """It takes longer than shutdown_timeout_s, and the run has that time again afterwards."""
    with working(tmp_path, save, keys=["launch.shutdown_timeout_s=0.5"]) as process:
        wait_for((tmp_path / "saving").exists)
        process.terminate()
        end = wait_for_end(process, tmp_path)
    assert (end.exit_code, end.stderr) == (143, "")
    assert "finishing the step and saving a checkpoint" in end.stdout
    assert record(end.run_dir)["error"] is None


def hang(job: Job) -> NoReturn:
    """Ignore every request to stop."""
    Path("hangs").touch()
    time.sleep(10 * TIME_LIMIT_S)
    raise AssertionError


def hang_in_a_save(job: Job) -> NoReturn:
    """Begin a save that never ends."""
    assert job.wire is not None
    job.wire.send("saving", True)
    hang(job)


@pytest.mark.full
@pytest.mark.parametrize("work", [hang_in_a_save, hang])
def test_what_hangs_is_not_waited_for_for_ever(tmp_path: Path, work: Work) -> None:
    """The run ends after shutdown_timeout_s, or after ten times that during a save."""
    with working(tmp_path, work, keys=["launch.shutdown_timeout_s=0.2"]) as process:
        wait_for((tmp_path / "hangs").exists)
        process.terminate()
        end = wait_for_end(process, tmp_path)
        wait_for(lambda: is_gone(process.pid))
    assert end.exit_code == 143
    assert record(end.run_dir)["error"]["sentence"] == "ended without a checkpoint"


def die_in_a_save(job: Job) -> Outcome:
    """Be killed in a save once, while a forked child holds the pipe to the launcher."""
    rank, attempt = rank_and_attempt()
    assert job.wire is not None
    if attempt == 0:
        if rank == 0:
            job.wire.send("saving", True)
            if os.fork() == 0:
                time.sleep(10 * TIME_LIMIT_S)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(10 * TIME_LIMIT_S)
    return COMPLETED


@pytest.mark.full
def test_a_rank_that_was_killed_does_not_save_any_more(tmp_path: Path) -> None:
    """A child may hold its pipe, and a restart would wait for the save, by default five minutes."""
    end = supervised(tmp_path, die_in_a_save)
    assert (end.exit_code, end.stderr) == (0, "")


def without_proc() -> None:
    """Let the launcher find no /proc, as on macOS."""
    processes.PROC = Path("nowhere")


def suspend(job: Job) -> NoReturn:
    """Fail on rank 1, once rank 0 cannot answer."""
    rank, _ = rank_and_attempt()
    if rank == 0:
        Path("rank-0").write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    wait_for(lambda: Path("rank-0").exists() and Path("rank-0").read_text())
    suspended = psutil.Process(int(Path("rank-0").read_text()))
    wait_for(lambda: suspended.status() == psutil.STATUS_STOPPED)
    raise ZeroDivisionError("cursed")


@pytest.mark.full
def test_ranks_end_where_there_is_no_proc(tmp_path: Path) -> None:
    """Even a suspended rank ends, which multiprocessing would wait for at the launcher's exit."""
    keys = ["launch.max_restarts=0"]
    with working(tmp_path, suspend, without_proc, keys=keys) as process:
        end = wait_for_end(process, tmp_path)
        wait_for(lambda: is_gone(process.pid))
    assert end.exit_code == 1
    assert "rank 1 raised ZeroDivisionError: cursed" in end.stderr


def collect_slowly() -> None:
    """Let each rank end after the look for its result, before whatever follows that."""
    receive = Ranks._receive

    def receive_slowly(self: Ranks, timeout_s: float) -> None:
        receive(self, timeout_s)
        Path("collected").touch()
        for process in self._processes.values():
            process.join()

    Ranks._receive = receive_slowly


def return_once_looked_for(job: Job) -> Outcome:
    """Print without a flush, and return while the launcher looks at its ranks."""
    print("last words")
    wait_for(Path("collected").exists)
    return COMPLETED


@pytest.mark.full
def test_a_rank_that_ends_while_it_is_looked_at_is_not_lost(tmp_path: Path) -> None:
    """A rank sends its result and its output before it ends, and the launcher reads them after."""
    end = supervised(tmp_path, return_once_looked_for, collect_slowly)
    assert (end.exit_code, end.stderr) == (0, "")
    assert end.stdout.count("last words") == 2


def print_and_raise(job: Job) -> NoReturn:
    """Print without a flush, and fail with a file's name that is no UTF-8."""
    print("last words")
    raise ZeroDivisionError(os.fsdecode(b"cursed \xff"))


def test_what_a_rank_has_printed_before_it_raises_is_shown(tmp_path: Path) -> None:
    """It may explain the error; to a file or a pipe, Python would write it too late."""
    end = supervised(tmp_path, print_and_raise)
    assert end.exit_code == 1
    assert "last words" in end.stdout
    assert end.stderr.startswith("error: rank ")
    assert " raised ZeroDivisionError: cursed " in end.stderr
    assert "cursed" in (end.run_dir / "logs" / "failure.txt").read_text()
    assert record(end.run_dir)["started_at"] < record(end.run_dir)["finished_at"]


def damage_and_raise(job: Job) -> NoReturn:
    """Leave a run.json that cannot be read, and fail."""
    assert job.run_dir is not None
    (job.run_dir / "run.json").write_text("{")
    raise ZeroDivisionError("cursed")


@pytest.mark.full
def test_why_a_run_failed_comes_before_why_that_is_not_recorded(tmp_path: Path) -> None:
    """A full disk often causes both, and the user needs the first."""
    end = supervised(tmp_path, damage_and_raise)
    assert end.exit_code == 1
    sentence = (
        r"error: rank [01] raised ZeroDivisionError: cursed; recording this failed too: .*run\.json"
    )
    assert re.match(sentence, end.stderr)


def test_a_signal_before_the_launcher_answers_them_marks_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a run that a signal ended during its freeze would seem to run for ever."""

    def leave(*_: object) -> NoReturn:
        raise SystemExit(143)

    monkeypatch.setattr(launcher, "run_ranks", leave)
    config, _ = resolved("model=toy")
    with pytest.raises(SystemExit):
        launcher.launch(Job(config=config, started_at=time.time(), provenance={}, run_dir=tmp_path))
    assert record(tmp_path)["status"] == "preempted"


@pytest.mark.full
def test_a_signal_during_start_up_is_no_crash(tmp_path: Path) -> None:
    """It gives an exit code and no traceback, and no run seems to run."""
    with background(*LONG, folder=tmp_path, fresh=True) as process:
        wait_for(lambda: run_dirs(tmp_path) and is_importing_torch(process.pid))
        process.send_signal(signal.SIGINT)
        end = wait_for_end(process, tmp_path)
        wait_for(lambda: is_gone(process.pid))  # also a server that is importing still
    assert (end.exit_code, end.stderr) == (130, "")
    assert [record(run)["status"] for run in end.run_dirs] in ([], ["preempted"])


@pytest.mark.parametrize("status", ["running", "completed"])
def test_a_machine_that_is_lost_after_the_end_is_no_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], status: str
) -> None:
    """Rank 0 has written that the run is complete; before, the loss is a failure."""
    times = {"started_at": 1.0, "startup_s": None, "wall_s": None}
    (tmp_path / "run.json").write_text(json.dumps({"status": status, "sessions": [times]}))
    lost = Failure(rank=None, kind="machine", sentence="n1 was lost")
    config, _ = resolved("model=toy")
    config = replace(config, launch=replace(config.launch, nnodes=2))
    outcome = launcher.report_failure(
        Job(config=config, started_at=2.0, provenance={}), lost, [tmp_path]
    )
    is_complete = status == "completed"
    assert outcome.exit_code == (0 if is_complete else 1)
    assert record(tmp_path)["status"] == ("completed" if is_complete else "failed")
    assert ("error: n1 was lost" in capsys.readouterr().err) is not is_complete
