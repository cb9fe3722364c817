"""Parallel jobs of a sweep: each on its own cores and GPUs, stopped and resumed together."""

import os
import re
import signal
import time
from contextlib import nullcontext, suppress
from pathlib import Path

import psutil
import pytest
from commands import (
    TIME_LIMIT_S,
    CommandResult,
    background,
    rank_logs,
    run_command,
    session_pids,
    wait_for,
    wait_for_end,
    wait_until_gone,
)
from configs import compose_raw
from run_folders import checkpoint_steps, last_step, record, run_dirs
from slow_models import TOY as SLOWED_TOY
from slow_models import slow_models
from sweeps import POLL_S, both_train, needs_two_cores, only_sweep, statuses

from ddp_runner.cli.compose import register
from ddp_runner.config.load import to_config
from ddp_runner.config.sections import SweepConfig
from ddp_runner.errors import UserError
from ddp_runner.host import hardware
from ddp_runner.host.hardware import Hardware, core_shares, gpu_shares
from ddp_runner.launch.stop_requests import ONE_REQUEST_S
from ddp_runner.sweep import local
from ddp_runner.sweep.jobs import JobBatch
from ddp_runner.sweep.local import Local

TOY = ("model=toy", "world_size=1", "train.num_threads=1", "train.log_every_steps=1")
PARALLEL = ("-m", *TOY, "sweep.parallel_jobs=2")


def test_cores_and_gpus_are_dealt_out_evenly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each slot gets cores and GPUs that no other has, and both hyperthreads of a core."""
    core_of = {4: 0, 5: 1, 6: 0, 7: 1, 9: 2}
    for cpu, core in core_of.items():
        for name, value in {"physical_package_id": 0, "core_id": core}.items():
            path = tmp_path / f"cpu{cpu}" / "topology" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{value}\n")
    monkeypatch.setattr(hardware, "CPUS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(core_of))
    assert core_shares(2, num_cores=5) == [(4, 6), (5, 7)]
    assert core_shares(2, num_cores=3) == [(4,), (5,)]  # a quota of CPU time leaves cores idle
    assert core_shares(5, num_cores=5) == [(4,), (6,), (5,), (7,), (9,)]

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    variable = "CUDA_VISIBLE_DEVICES"
    assert gpu_shares(2, Hardware(5, 4)) == [{variable: "0,1"}, {variable: "2,3"}]
    assert gpu_shares(2, Hardware(1, 4)) == [{variable: ""}] * 2  # the jobs compute on cores
    assert gpu_shares(2, Hardware(0, 4)) == [{}, {}]
    assert gpu_shares(2, Hardware(2, 4, kind="xpu")) == [
        {"ZE_AFFINITY_MASK": "0"},
        {"ZE_AFFINITY_MASK": "1"},
    ]
    assert gpu_shares(2, Hardware(2, 4, kind="npu")) == [{}, {}]  # with backend.device=cpu
    monkeypatch.setenv(variable, "3,GPU-a,1")
    assert gpu_shares(2, Hardware(3, 4)) == [{variable: "3"}, {variable: "GPU-a"}]
    assert Hardware(num_gpus=5, num_cores=9).share(2) == Hardware(num_gpus=2, num_cores=4)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ("sweep.parallel_jobs=0", "(0) must be greater than 0"),
        ("sweep.parallel_jobs=5", "(5) is more than the 4 cores that this process may use; write"),
        ("sweep.parallel_jobs=3", "(3) is more than the 2 GPUs that its jobs use; write 2 or"),
        ("sweep.parallel_jobs=3 backend.device=cpu", None),
        ("sweep.parallel_jobs=2", None),
        ("sweep.parallel_jobs=2 launch.nnodes=2", "launch.nnodes (2) must be 1 in a sweep on this"),
        ("sweep.parallel_jobs=2 launch.init_method=file:///x", "launch.init_method (file:///x)"),
        ("sweep.parallel_jobs=2 sweep.calibrate=true", "sweep.calibrate measures all_reduce, and"),
    ],
)
def test_jobs_that_cannot_run_in_parallel_are_invalid(
    monkeypatch: pytest.MonkeyPatch, overrides: str, sentence: str | None
) -> None:
    """One line answers for the whole sweep."""
    register()
    monkeypatch.setattr(local, "detect", lambda: Hardware(num_gpus=2, num_cores=4))
    config = to_config(compose_raw(*overrides.split()))
    expected = pytest.raises(UserError, match=re.escape(sentence)) if sentence else nullcontext()
    with expected:
        Local().validate(config)


def test_gpus_that_cannot_be_shown_to_some_jobs_alone_are_not_shared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A plug-in's variable for that is not known here, and each job would take all of them."""
    register()
    config = to_config(compose_raw("sweep.parallel_jobs=2"))
    machine = Hardware(num_gpus=2, num_cores=4, kind="npu", backend="hccl")
    monkeypatch.setattr(local, "detect", lambda: machine)
    with pytest.raises(UserError, match="can share cuda and xpu devices, not npu; leave it"):
        Local().validate(config)


def test_slots_that_have_all_ended_are_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The later batches of a search need them."""
    started = list[int]()
    monkeypatch.setattr(Local, "_start_slots", lambda _, num_slots: started.append(num_slots))
    monkeypatch.setattr(Local, "_run_in_slots", lambda *_: {})
    machine, batch = Local(), JobBatch({}, SweepConfig(parallel_jobs=2))
    assert [machine.run(batch) for _ in range(2)] == [{}, {}]
    assert started == [2, 2]


@pytest.mark.full
@needs_two_cores
def test_jobs_run_side_by_side_each_on_its_own_cores(tmp_path: Path) -> None:
    """Two at a time; pinned as run.json says; each line names its job; failures count over all."""
    lost = "optimizer.lr=0.1,1e30", "seed=range(5)", "sweep.max_failures=2", "train.max_steps=300"
    seen: dict[Path, set[int]] = {}
    with background(*PARALLEL, *lost, folder=tmp_path, spares=2) as process:
        while process.poll() is None:
            for log, rank in rank_logs(process.pid):
                with suppress(psutil.Error):
                    seen[log.parent.parent] = set(rank.cpu_affinity())
            time.sleep(POLL_S)
        end = wait_for_end(process, tmp_path)
    assert end.exit_code == 2
    check_places(end, seen)
    check_lines(end)
    ends = list(statuses(only_sweep(tmp_path)).values())
    assert ends[:5] == ["completed"] * 5
    assert ends.count("failed") in (2, 3)  # what another slot had begun came to its end
    assert set(ends[5:]) == {"failed", "queued"}


def check_places(end: CommandResult, seen: dict[Path, set[int]]) -> None:
    """Assert that two runs, never three, went on at a time, on cores that they did not share."""
    done = [record(run_dir) for run_dir in run_dirs(end.folder)]
    assert all(one["parallel_jobs"] is True for one in done)
    assert len({tuple(one["cores"]) for one in done}) == 2
    instants = sorted(
        (one[key], change)
        for one in done
        for key, change in (("started_at", 1), ("finished_at", -1))
    )
    at_a_time = [sum(change for _, change in instants[: i + 1]) for i in range(len(instants))]
    assert max(at_a_time) == 2
    for one in done:
        others = [
            other
            for other in done
            if other["started_at"] < one["finished_at"] and one["started_at"] < other["finished_at"]
        ]
        assert all(not set(one["cores"]) & set(other["cores"]) for other in others if other != one)
        assert len(one["cores"]) == hardware.detect().num_cores // 2
    assert len(seen) >= 2
    for run_dir, cores in seen.items():
        assert cores == set(record(run_dir)["cores"])


def check_lines(end: CommandResult) -> None:
    """Assert that what a job says, and its errors, are marked with its number."""
    live, _, table = end.stdout.partition("\njob  ")
    first, *lines = live.splitlines()
    assert first.startswith("sweep  ")
    assert all(re.match(r"\[\d+\] \S", line) for line in lines)
    titles = dict(re.findall(r"^\[(\d+)\] job \1 of 10: (\S+)$", live, flags=re.MULTILINE))
    assert set(titles.values()) == {run_dir.name for run_dir in end.run_dirs}
    for number, name in titles.items():
        ended = [
            line for line in lines if line.startswith(f"[{number}] job {number} of 10: {name}  ")
        ]
        assert len(ended) == (record(end.run_dirs[0].parent / name)["status"] == "completed")
    assert "[" not in table
    failed = [line for line in end.stderr.splitlines() if "error: train/loss became" in line]
    assert {titles[line[1 : line.index("]")]] for line in failed} == {
        run_dir.name for run_dir in end.run_dirs if record(run_dir)["status"] == "failed"
    }


@pytest.mark.full
@pytest.mark.slow
@needs_two_cores
def test_a_sweep_in_slots_is_killed_stopped_and_goes_on(tmp_path: Path) -> None:
    """SIGKILL leaves no process; Ctrl-C saves every job that runs; alone the rest comes to an end.

    Ctrl-C reaches every process, as from a terminal, and counts once.
    """
    command = (
        "-m",
        *TOY,
        *SLOWED_TOY,
        "seed=0,1,2",
        "train.max_steps=800",
        "checkpoint.every_steps=20",
        "checkpoint.keep=1",
    )
    parallel = (*command, "sweep.parallel_jobs=2")
    slow = slow_models(tmp_path / "models")
    saved = {"seed=0": 20, "seed=1": 20}
    with background(*parallel, folder=tmp_path, environ=slow.environ, spares=2) as process:
        wait_for(lambda: both_train(process, tmp_path, beyond=saved), every_s=POLL_S)
        process.kill()
        process.wait()
        wait_for(lambda: not session_pids(process.pid))
    sweep = only_sweep(tmp_path)
    assert list(statuses(sweep).values()) == ["lost", "lost", "queued"]
    reached = {run_dir.name: last_step(run_dir) for run_dir in run_dirs(sweep)}

    with background(*parallel, folder=tmp_path, environ=slow.environ, spares=2) as process:
        wait_for(lambda: both_train(process, tmp_path, beyond=reached), every_s=POLL_S)
        os.killpg(process.pid, signal.SIGINT)
        end = wait_for_end(process, tmp_path)
        wait_for(lambda: not session_pids(process.pid))
    assert (end.exit_code, end.stderr) == (130, "")
    assert end.stdout.count("again to end at once") == 1
    assert list(statuses(sweep).values()) == ["preempted", "preempted", "queued"]
    for run_dir in end.run_dirs:
        assert record(run_dir)["status"] == "preempted"
        assert checkpoint_steps(run_dir)[-1] == record(run_dir)["step"] > 20

    slow.release()
    assert run_command(*command, folder=tmp_path, environ=slow.environ).exit_code == 0
    assert only_sweep(tmp_path) == sweep
    assert set(statuses(sweep).values()) == {"completed"}
    parallel = [record(run_dir).get("parallel_jobs") for run_dir in run_dirs(sweep)]
    assert parallel == [True, True, None]
    for run_dir in run_dirs(sweep)[:2]:
        assert (run_dir / "logs" / "rank-0.log").read_text().count("resumed from") == 2


@pytest.mark.full
@needs_two_cores
def test_a_second_ctrl_c_ends_all_slots_at_once(tmp_path: Path) -> None:
    """The first waits for a step, which a suspended rank never ends; the second for nothing."""
    slow = slow_models(tmp_path / "models")
    command = (*PARALLEL, *SLOWED_TOY, "seed=0,1", "launch.shutdown_timeout_s=3600")
    with background(*command, folder=tmp_path, environ=slow.environ, spares=2) as process:
        wait_for(lambda: both_train(process, tmp_path), every_s=POLL_S)
        for _, rank in rank_logs(process.pid):
            rank.suspend()
        os.killpg(process.pid, signal.SIGINT)
        wait_for(lambda: "again to end at once" in (tmp_path / "stdout").read_text())
        time.sleep(2 * ONE_REQUEST_S)  # before that it would be the same request
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        process.wait(TIME_LIMIT_S)
        wait_for(lambda: not session_pids(process.pid))
        end = wait_for_end(process, tmp_path)
    assert (end.exit_code, end.stderr) == (130, "")
    assert len(end.run_dirs) == 2
    for run_dir in end.run_dirs:
        fields = record(run_dir)
        assert fields["status"] == "preempted"
        assert fields["error"]["sentence"] == "ended without a checkpoint"


def has_slot(launcher_pid: int) -> bool:
    """Return whether a process of a slot has started."""
    with suppress(psutil.Error):  # another child has just ended
        children = psutil.Process(launcher_pid).children()
        return any("spawn_main" in " ".join(one.cmdline()) for one in children)
    return False


@needs_two_cores
@pytest.mark.full
@pytest.mark.slow
def test_a_signal_while_slots_start_ends_them(tmp_path: Path) -> None:
    """No slot has begun a job, so no slot prints anything."""
    keys = ("-m", *TOY, "train.epochs=10000", "seed=1,2", "sweep.parallel_jobs=2")
    with background(*keys, folder=tmp_path, fresh=True) as process:
        wait_for(lambda: has_slot(process.pid))
        process.terminate()
        end = wait_for_end(process, tmp_path)
        wait_until_gone(process)
    assert (end.exit_code, end.stderr) == (143, "")
