"""Sweeps on Slurm without a Slurm: shapes, submissions, and what the queue and run.json tell.

tests/cluster has whole sweeps on a real one.
"""

import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands import run_command
from configs import compose_raw, resolved
from omegaconf import OmegaConf
from sweeps import statuses, table_row

from ddp_runner.cli.compose import register
from ddp_runner.config.load import to_config
from ddp_runner.config.schema import CONFIG_DIR, SweepConfig
from ddp_runner.errors import UserError
from ddp_runner.host.hardware import Hardware
from ddp_runner.job import Job
from ddp_runner.sweep import slurm, slurm_jobs, slurm_settings, slurm_watch
from ddp_runner.sweep.jobs import Batch
from ddp_runner.sweep.ledger import Ledger, sweep_command
from ddp_runner.sweep.slurm import Slurm
from ddp_runner.sweep.slurm_jobs import RECORD, standing, submit, submitted_number
from ddp_runner.sweep.slurm_settings import (
    OURS,
    SlurmSettings,
    job_shape,
    node_hardware,
    sbatch_options,
)
from ddp_runner.sweep.slurm_settings import slurm_settings as read_settings
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.tracking.run_record import write_run_record

GPU_NODE, CPU_NODE = Hardware(num_gpus=8, num_cores=96), Hardware(num_gpus=0, num_cores=16)
SETTINGS = SlurmSettings(gpus_per_node=0, cpus_per_node=4)


@pytest.mark.parametrize(
    ("node", "overrides", "cpus_per_task", "nodes", "ranks_per_node"),
    [
        (GPU_NODE, ("world_size=2",), None, 1, 2),
        (GPU_NODE, ("world_size=12",), None, 2, 6),
        (GPU_NODE, ("world_size=8", "launch.nproc_per_node=4"), None, 2, 4),
        (GPU_NODE, ("world_size=4", "model=toy_mp", "parallelism=ddp_mp"), None, 1, 4),
        (GPU_NODE, ("world_size=8", "model=toy_mp", "parallelism=ddp_mp"), None, 2, 4),
        (GPU_NODE, ("world_size=96", "backend.device=cpu"), None, 1, 96),
        (CPU_NODE, ("world_size=8",), 4, 2, 4),
    ],
)
def test_a_job_takes_as_few_nodes_as_hold_it(
    node: Hardware,
    overrides: tuple[str, ...],
    cpus_per_task: int | None,
    nodes: int,
    ranks_per_node: int,
) -> None:
    """By the GPUs of a node, else by its cores."""
    register()
    config = to_config(compose_raw(*overrides))
    shape = job_shape(config, node, replace(SETTINGS, cpus_per_task=cpus_per_task))
    assert (shape.num_nodes, shape.ranks_per_node) == (nodes, ranks_per_node)


def test_a_job_asks_for_the_gpus_and_cores_that_its_ranks_use() -> None:
    """Not for whole nodes; options of the user's own win."""
    config, _ = resolved("world_size=4", "model=toy", hardware=GPU_NODE)
    settings = SlurmSettings(
        partition="gpu", mem_gb=1.5, additional_parameters={"exclusive": True, "signal": "TERM@9"}
    )
    shape = job_shape(config, GPU_NODE, settings)
    assert sbatch_options(config, shape, GPU_NODE, settings) == {
        **{"partition": "gpu", "time": 60, "mem": "1536M", "nodes": 1, "ntasks_per_node": 4},
        **{"cpus_per_task": 12, "gpus_per_node": 4, "requeue": True, "open_mode": "append"},
        **{"exclusive": True, "signal": "TERM@9"},
    }
    on_cpu, _ = resolved("world_size=4", "model=toy", "backend.device=cpu")
    options = sbatch_options(on_cpu, shape, GPU_NODE, settings)
    assert (options.get("gpus_per_node"), options["cpus_per_task"]) == (None, 1)


def test_ranks_that_no_nodes_hold_are_rejected() -> None:
    """With the numbers that work."""
    config, _ = resolved("world_size=9", "model=toy", hardware=Hardware(9, 9))
    with pytest.raises(UserError, match=r"write 8 or 10, or give launch\.nproc_per_node"):
        job_shape(config, GPU_NODE, SETTINGS)
    config, _ = resolved("world_size=8", "launch.nproc_per_node=8", "model=toy")
    with pytest.raises(UserError, match="8 ranks on a node take 32 cores and it has 16"):
        job_shape(config, CPU_NODE, replace(SETTINGS, cpus_per_task=4))


def test_a_node_has_what_slurm_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """The least of a partition's nodes; keys of the launcher win."""
    asked = list[tuple[str, ...]]()
    report = "cpu|64|(null)\ngpu*|96|gpu:a100:8(S:0-1),lscratch:2\ngpu*|48|gpu:2,gpu:h100:4\n"

    def sinfo(*command: str) -> str:
        asked.append(command)
        return report

    monkeypatch.setattr(slurm_settings, "run_slurm", sinfo)
    assert node_hardware(SlurmSettings()) == Hardware(num_gpus=6, num_cores=48)
    assert node_hardware(SlurmSettings(gpus_per_node=1)) == Hardware(num_gpus=1, num_cores=48)
    report = "cpu|64|(null)\n"
    assert node_hardware(SlurmSettings(partition="cpu")) == Hardware(num_gpus=0, num_cores=64)
    assert asked[-1][-2:] == ("--partition", "cpu")
    with pytest.raises(UserError, match=r"no default partition; write hydra\.launcher\.partition"):
        node_hardware(SlurmSettings())
    num_asked = len(asked)
    assert node_hardware(SETTINGS) == Hardware(num_gpus=0, num_cores=4)
    assert len(asked) == num_asked


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("timeout_min", "soon", r"timeout_min \(soon\) must be a whole number"),
        ("cpus_per_task", 0, r"cpus_per_task \(0\) must be 1 or greater"),
        ("gpus_per_node", -1, r"gpus_per_node \(-1\) must be 0 or greater"),
        ("setup", 3, r"setup \(3\) must be a list"),
        ("partitoin", "gpu", "partitoin is not a key"),
    ],
)
def test_a_wrong_key_of_the_launcher_is_answered_in_one_line(
    key: str, value: object, rule: str
) -> None:
    """As any other key."""
    with pytest.raises(UserError, match=rf"hydra\.launcher\.{rule}"):
        read_settings(OmegaConf.create({"_target_": OURS, key: value}))


def test_the_yaml_has_every_key_with_its_default() -> None:
    """Hydra accepts no key on the command line that the YAML lacks."""
    path = CONFIG_DIR / "hydra" / "launcher" / "slurm.yaml"
    assert read_settings(OmegaConf.load(path)) == SlurmSettings()
    assert set(OmegaConf.load(path)) == {"_target_", *vars(SlurmSettings())}


def test_other_launchers_have_no_settings_of_slurm() -> None:
    """Neither our own for one machine, nor somebody else's."""
    assert read_settings(OmegaConf.create({"_target_": OURS})) is None
    assert read_settings(OmegaConf.create({"_target_": "other", "partition": "gpu"})) is None


def test_a_sweep_stays_the_same_wherever_its_jobs_run() -> None:
    """So it goes on with another time limit, in another partition, or on this machine."""
    on_slurm = ("-m", "hydra/launcher=slurm", "hydra.launcher.timeout_min=9", "seed=1,2")
    assert sweep_command(on_slurm) == sweep_command(("-m", "seed=1,2", "sweep.parallel_jobs=2"))


@pytest.fixture
def batch(tmp_path: Path) -> Batch:
    """Three queued jobs with their folders, of a sweep in a folder of its own."""
    sweep = tmp_path / "sweep"
    sweep.mkdir()
    job = Job(config=resolved("model=toy", "world_size=2")[0], started_at=0.0, code={})
    Ledger(sweep).queue({name: name for name in "abc"}, invalid=())
    for name in "abc":
        (sweep / name).mkdir()
    jobs = {name: replace(job, run_dir=sweep / name, title=f"job {name}") for name in "abc"}
    return Batch(jobs, Ledger(sweep), SweepConfig())


def program(folder: Path, name: str, *lines: str) -> None:
    """Write a shell script that stands for a command of Slurm."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("\n".join(["#!/bin/bash", *lines, ""]))
    (folder / name).chmod(0o755)


def test_a_submission_is_an_array_that_resumes_frozen_runs(
    batch: Batch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of ours is pickled; a run's folder names its job; sbatch sees no job around it."""
    programs = tmp_path / "bin"
    program(programs, "srun")
    program(programs, "sbatch", f"env > {tmp_path}/seen", "echo Submitted batch job 7")
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_CONF", "/some/slurm.conf")
    monkeypatch.setenv("SLURM_MEM_PER_CPU", "1")
    sweep, settings = batch.ledger.folder, replace(SETTINGS, setup=["module load cuda"])
    numbers = submit(
        list(batch.jobs.values()),
        folder=sweep,
        options={"partition": "gpu", "requeue": True, "signal": "USR1@90"},
        settings=settings,
        at_once=2,
    )
    assert numbers == ["7_0", "7_1", "7_2"]
    assert [submitted_number(sweep / name, folder=sweep) for name in "abc"] == numbers
    script = (sweep / "slurm" / "7_submission.sh").read_text()
    for line in ("array=0-2%2", "partition=gpu", "requeue", "signal=USR1@90"):
        assert f"#SBATCH --{line}\n" in script
    assert script.index("module load cuda") < script.index("\nsrun ") < script.index('requeue "')
    assert "wckey" not in script
    seen = (tmp_path / "seen").read_text()
    assert "SLURM_CONF=/some/slurm.conf" in seen
    assert "SLURM_MEM_PER_CPU" not in seen
    pickled = pickle.loads((sweep / "slurm" / "7_1_submitted.pkl").read_bytes())
    assert pickled.function is os.execv
    assert pickled.args == (
        sys.executable,
        [sys.executable, "-m", "ddp_runner", f"resume={sweep / 'b'}"],
    )


def test_what_slurm_rejects_is_said_and_submitted_by_the_next_start(
    batch: Batch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one line, with what sbatch printed."""
    program(tmp_path / "bin", "srun")
    program(tmp_path / "bin", "sbatch", "echo 'sbatch: error: invalid partition' >&2", "exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    sweep, jobs = batch.ledger.folder, list(batch.jobs.values())
    with pytest.raises(UserError, match=r"Slurm rejects the jobs .*invalid partition"):
        submit(jobs, folder=sweep, options={}, settings=SETTINGS, at_once=1)
    monkeypatch.setattr(slurm_jobs, "jobs_named", lambda name: [])
    assert submitted_number(sweep / "a", folder=sweep) is None


def test_a_submission_that_was_cut_off_is_found_by_its_name(
    batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that lacks submitit's file would wait for it in vain: it is cancelled."""
    sweep, cancelled = batch.ledger.folder, list[str]()
    monkeypatch.setattr(slurm_jobs, "jobs_named", lambda name: {"mine": ["9"]}[name])
    monkeypatch.setattr(slurm_jobs, "cancel", cancelled.extend)
    for index, name in enumerate("ab"):
        submission = {"name": "mine", "index": index, "number": None}
        (sweep / name / RECORD).write_text(json.dumps(submission))
    (sweep / "slurm").mkdir()
    (sweep / "slurm" / "9_1_submitted.pkl").touch()
    assert submitted_number(sweep / "a", folder=sweep) is None
    assert submitted_number(sweep / "b", folder=sweep) == "9_1"
    assert submitted_number(sweep / "c", folder=sweep) is None
    assert cancelled == ["9_0"]


@pytest.mark.parametrize(
    ("state", "fields", "status", "part"),
    [
        ("PENDING", {"status": "preempted"}, "queued", None),
        ("COMPLETING", {"status": "completed"}, "running", None),
        ("COMPLETED", {"status": "completed"}, "completed", None),
        (None, {"status": "completed"}, "completed", None),
        (
            "FAILED",
            {"status": "failed", "error": {"rank": 1, "kind": "user", "sentence": "why"}},
            "failed",
            "why",
        ),
        ("CANCELLED", None, "preempted", "5_1 was cancelled; the same command goes on with it"),
        ("TIMEOUT", {"status": "running"}, "preempted", "reached its time limit"),
        (None, {"status": "running"}, "preempted", "Slurm has forgotten job 5_1"),
        ("FAILED", {"status": "running"}, "failed", "ended (FAILED) before its run did"),
        ("OUT_OF_MEMORY", {"status": "running"}, "failed", "more memory than hydra.launcher.mem"),
    ],
)
def test_how_a_job_stands_follows_from_the_queue_and_run_json(
    tmp_path: Path,
    state: str | None,
    fields: dict[str, Any] | None,
    status: str,
    part: str | None,
) -> None:
    """Without accounting: a job that Slurm has forgotten has ended, and is not waited for."""
    run_dir = tmp_path / "run"
    if fields is not None:
        write_run_record(run_dir, **fields)
    found = standing(run_dir, number="5_1", state=state, folder=tmp_path)
    assert found.status == status
    assert (part is None) == (found.sentence is None)
    assert part is None or part in str(found.sentence)


def test_a_job_that_fails_before_it_has_a_run_is_explained_by_its_log(tmp_path: Path) -> None:
    """Its last error line, and where the log is."""
    log = tmp_path / "slurm" / "5_0_log.out"
    log.parent.mkdir()
    log.write_text("error: not this\nsubmitit INFO\nerror: data_root (x) is not a folder\nmore\n")
    found = standing(tmp_path / "run", number="5", state="FAILED", folder=tmp_path)
    assert (found.status, found.kind) == ("failed", "user")
    assert found.sentence == f"data_root (x) is not a folder; see {log}"


class Queue:
    """Stands for Slurm: its jobs, by number, and those that were cancelled."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **states: str) -> None:
        self.states = {number.lstrip("_"): state for number, state in states.items()}
        self.cancelled, self.num_asked, self.is_down = list[str](), 0, False
        self.on_ask: Callable[[int], None] = lambda num_asked: None
        monkeypatch.setattr(slurm_watch, "queued_states", self._ask)
        monkeypatch.setattr(slurm, "queued_states", self._ask)
        monkeypatch.setattr(slurm_watch, "cancel", self._cancel)
        for name, value in {"POLL_S": 0.01, "SETTLE_S": 0.0, "LINE_S": 0.0}.items():
            monkeypatch.setattr(slurm_watch, name, value)

    def _ask(self) -> dict[str, str]:
        self.num_asked += 1
        self.on_ask(self.num_asked)
        if self.is_down:
            raise UserError("squeue failed: no controller")
        return dict(self.states)

    def _cancel(self, numbers: Any) -> None:
        self.cancelled += numbers
        for number in numbers:
            self.states[number] = "CANCELLED"


def watch(batch: Batch, **numbers: str) -> slurm_watch.Watch:
    """Return what watches the jobs, whose numbers begin with an underscore."""
    named = {name: number.lstrip("_") for name, number in numbers.items()}
    return slurm_watch.Watch(batch, named, slurm_watch.Signals())


def test_the_ledger_follows_the_queue_to_the_end_of_each_job(
    batch: Batch, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also of one that was cancelled, and of one that Slurm has forgotten."""
    sweep, seen = batch.ledger.folder, list[list[str]]()
    queue = Queue(monkeypatch, _1_0="PENDING", _1_1="PENDING", _1_2="PENDING")

    def ask(num_asked: int) -> None:
        seen.append(list(statuses(sweep).values()))
        match num_asked:
            case 2:
                queue.states |= {"1_0": "RUNNING", "1_1": "RUNNING"}
            case 3:
                write_run_record(sweep / "a", status="completed")
                queue.is_down = True
            case 5:
                queue.is_down, queue.states = False, {"1_1": "RUNNING", "1_2": "CANCELLED"}
            case 6:
                queue.states = {}

    queue.on_ask = ask
    outcomes = watch(batch, a="1_0", b="1_1", c="1_2").run()
    assert seen[3] == ["running", "running", "queued"]
    assert statuses(sweep) == {"a": "completed", "b": "preempted", "c": "preempted"}
    assert [(one.status, one.exit_code) for one in outcomes] == [
        ("completed", 0),
        ("preempted", 143),
        ("preempted", 143),
    ]
    out, err = capsys.readouterr()
    assert "3 queued\n2 running, 1 queued\n" in out
    assert "job a  completed" in out
    assert err.count("squeue failed: no controller; its jobs go on") == 1


def test_too_many_failures_cancel_the_rest(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is cancelled then can go on later, and does not decide the exit code."""
    sweep = batch.ledger.folder
    queue = Queue(monkeypatch, _1_0="FAILED", _1_1="RUNNING", _1_2="PENDING")
    error = {"rank": 0, "kind": "crash", "sentence": "why"}
    write_run_record(sweep / "a", status="failed", error=error)
    strict = replace(batch, settings=SweepConfig(fail_fast=True))
    outcomes = watch(strict, a="1_0", b="1_1", c="1_2").run()
    assert queue.cancelled == ["1_1", "1_2"]
    assert [one.exit_code for one in outcomes] == [1]
    assert statuses(sweep) == {"a": "failed", "b": "preempted", "c": "preempted"}


def test_the_first_ctrl_c_leaves_the_jobs_and_the_second_cancels_them(
    batch: Batch, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """SIGTERM leaves them at once."""
    queue = Queue(monkeypatch, _1_0="RUNNING", _1_1="PENDING", _1_2="PENDING")
    numbers = {"a": "1_0", "b": "1_1", "c": "1_2"}
    for signum, words in (
        (signal.SIGINT, "SIGINT: the 3 jobs go on; Ctrl-C again within 0 s cancels them (scancel)"),
        (signal.SIGTERM, "SIGTERM: the 3 jobs go on; the same command finds them"),
    ):
        monkeypatch.setattr(slurm_watch, "SECOND_CHANCE_S", 0.05)
        leaving = watch(batch, **numbers)
        leaving._signals.put(signum)
        (outcome,) = leaving.run()
        assert (outcome.status, outcome.exit_code) == ("preempted", 128 + signum)
        assert words in capsys.readouterr().out
    assert queue.cancelled == []

    monkeypatch.setattr(slurm_watch, "SECOND_CHANCE_S", 600.0)
    monkeypatch.setattr(slurm_watch, "ONE_REQUEST_S", 0.0)
    cancelling = watch(batch, **numbers)
    for _ in range(2):
        cancelling._signals.put(signal.SIGINT)
    outcomes = cancelling.run()
    assert queue.cancelled == ["1_0", "1_1", "1_2"]
    assert [one.exit_code for one in outcomes] == [130]


def test_a_start_submits_only_what_is_neither_there_nor_done(
    batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One job is in the queue, one was completed meanwhile, one was cancelled."""
    sweep, submitted = batch.ledger.folder, list[str]()
    for index, name in enumerate("abc"):
        submission = {"name": "x", "index": index, "number": f"1_{index}"}
        (sweep / name / RECORD).write_text(json.dumps(submission))
    write_run_record(sweep / "b", status="completed")
    write_run_record(sweep / "c", status="preempted")

    def fake_submit(jobs: list[Job], **_: object) -> list[str]:
        submitted.extend(job.title for job in jobs)
        return ["2"]

    monkeypatch.setattr(slurm, "submit", fake_submit)
    queue = Queue(monkeypatch, _1_0="RUNNING", _2="RUNNING")

    def ask(num_asked: int) -> None:
        if num_asked == 3:
            write_run_record(sweep / "a", status="completed")
            write_run_record(sweep / "c", status="completed")
            queue.states = {}

    queue.on_ask = ask
    executor = Slurm(sweep, SETTINGS)
    outcomes = executor.run(batch)
    executor.close()
    assert submitted == ["job c"]
    assert [one.exit_code for one in outcomes] == [0, 0, 0]
    assert set(statuses(sweep).values()) == {"completed"}


def test_a_failed_job_is_submitted_again_only_if_asked(
    batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It failed while nobody watched."""
    sweep, submitted = batch.ledger.folder, list[str]()
    one = replace(batch, jobs={"a": batch.jobs["a"]})
    (sweep / "a" / RECORD).write_text(json.dumps({"name": "x", "index": None, "number": "1"}))
    error = {"rank": 0, "kind": "crash", "sentence": "why"}
    write_run_record(sweep / "a", status="failed", error=error)

    def fake_submit(jobs: list[Job], **_: object) -> list[str]:
        submitted.extend(job.title for job in jobs)
        write_run_record(sweep / "a", status="completed")
        return ["2"]

    monkeypatch.setattr(slurm, "submit", fake_submit)
    Queue(monkeypatch)
    executor = Slurm(sweep, SETTINGS)
    assert [end.exit_code for end in executor.run(one)] == [1]
    assert (submitted, batch.ledger.read()["a"].sentence) == ([], "why")
    batch.ledger.begin(command=[], retry_failed=True)
    again = replace(one, settings=SweepConfig(retry="failed"))
    assert [end.exit_code for end in executor.run(again)] == [0]
    assert submitted == ["job a"]
    executor.close()


def test_two_commands_never_submit_the_same_sweep(
    batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does a command submit a job that runs elsewhere."""
    Queue(monkeypatch)
    first, second = (Slurm(batch.ledger.folder, SETTINGS) for _ in range(2))
    first._hold()
    with pytest.raises(UserError, match=r"another command submits the jobs of .*sweep; wait"):
        second.run(batch)
    first.close()
    with (
        RunDir(batch.ledger.folder / "b").locked(),
        pytest.raises(UserError, match="b is in use by a process outside of this sweep's queue"),
    ):
        second.run(batch)
    second.close()


def test_a_script_for_sbatch_runs_the_frozen_jobs(tmp_path: Path) -> None:
    """The table then tells how they stand, and the same command writes what is left.

    The folder has characters that bash and Hydra would change.
    """
    folder = tmp_path / "it's $HOME, a=b"
    sweep = (
        *("-m", "model=toy", "seed=1,2", "world_size=1", "train.max_steps=2"),
        *(
            "hydra/launcher=slurm",
            "hydra.launcher.gpus_per_node=0",
            "hydra.launcher.cpus_per_node=2",
        ),
        *("hydra.launcher.submit=false", "hydra.sweep.dir=sweep", "hydra.launcher.timeout_min=5"),
    )
    end = run_command(*sweep, folder=folder)
    assert (end.exit_code, end.stderr) == (0, "")
    assert "2 jobs: submit with  sbatch sweep/sweep.sbatch\n" in end.stdout
    script = folder / "sweep" / "sweep.sbatch"
    for line in ("array=0-1%1", "ntasks-per-node=1", "time=5", "signal=USR1@90", "requeue"):
        assert f"#SBATCH --{line}\n" in script.read_text()
    assert table_row(end.stdout, "seed=2")[1] == "queued"

    program(tmp_path / "bin", "srun", f'printf "%s\\0" "$@" > {tmp_path}/asked')
    environ = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "SLURM_ARRAY_TASK_ID": "1"}
    subprocess.run(["bash", str(script)], env=environ, cwd=folder, check=True)
    *started, resume, end_of_words = (tmp_path / "asked").read_text().split("\0")
    assert (started, end_of_words) == ([sys.executable, "-m", "ddp_runner"], "")
    assert run_command(resume, folder=folder).exit_code == 0
    (folder / "sweep" / "seed=1" / "run.json").write_text('{"status": "preempted"}')
    table = run_command("sweep", folder=folder, program=(sys.executable, "-m", "ddp_runner.sweep"))
    assert table_row(table.stdout, "seed=1")[1] == "preempted"
    assert table_row(table.stdout, "seed=2")[1] == "completed"
    end = run_command(*sweep, folder=folder)
    assert "1 job: submit with" in end.stdout
    assert statuses(folder / "sweep") == {"seed=1": "queued", "seed=2": "completed"}
    assert "seed=1'" in script.read_text()
    assert "seed=2'" not in script.read_text()


@pytest.mark.parametrize(
    ("code", "state", "restarts", "is_requeued"),
    [
        (138, "RUNNING", "", True),
        (143, "RUNNING", "2", True),
        (138, "RUNNING", "20", False),
        (143, "COMPLETING", "", False),
        (1, "RUNNING", "", False),
        (0, "RUNNING", "", False),
    ],
)
def test_a_job_that_its_time_limit_stops_is_queued_again(
    tmp_path: Path, code: int, state: str, restarts: str, *, is_requeued: bool
) -> None:
    """Not after scancel, a failure, or too many times; the exit code stays."""
    programs = tmp_path / "bin"
    program(programs, "squeue", f"echo {state}")
    program(programs, "scontrol", f'echo "$@" > {tmp_path}/asked')
    lines = [f"(exit {code})", *slurm_settings.after_srun(SlurmSettings())]
    environ = {"PATH": f"{programs}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    if restarts:
        environ["SLURM_RESTART_COUNT"] = restarts
    done = subprocess.run(["bash", "-c", "\n".join(lines)], env=environ, check=False)
    assert done.returncode == code
    asked = tmp_path / "asked"
    assert (asked.read_text() if asked.exists() else None) == (
        "requeue 7\n" if is_requeued else None
    )
