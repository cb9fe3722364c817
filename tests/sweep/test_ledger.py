"""Sweeps that are stopped, edited, shared and started again: what the ledger is for."""

import json
import os
import re
import signal
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
from commands import background, run_command, wait_for, wait_for_end
from configs import resolved, write_experiment
from run_folders import last_step, metrics, record, run_dirs
from sweeps import only_sweep, statuses, table_row
from tiers import first_of

from ddp_runner.compare.analysis import compare
from ddp_runner.compare.runs import read_runs
from ddp_runner.config.sections import SweepConfig
from ddp_runner.job import Job, Outcome
from ddp_runner.sweep.jobs import Batch, recorded, run_jobs
from ddp_runner.sweep.ledger import INVALID, JOURNAL, LEDGER, Entry, Ledger
from ddp_runner.sweep.results import sweep_table
from ddp_runner.sweep.sweep_dir import unfinished_sweep
from ddp_runner.tracking.run_dir import RunDir

TOY = ("model=toy", "train.log_every_steps=1", "train.num_threads=1")


def test_each_job_has_a_folder_of_its_own(tmp_path: Path) -> None:
    """Also where several configs would have the same name; a job keeps the one that it has."""
    ledger = Ledger(tmp_path)
    ledger.queue({"one": "a"}, invalid=())
    found = ledger.queue({"two": "a", "three": "a", "one": "b"}, invalid=())
    assert {job_id: entry.folder for job_id, entry in found.items()} == {
        **{"two": "a-2", "three": "a-3", "one": "a"}
    }


def test_jobs_that_all_want_one_folder_are_numbered_in_one_go(tmp_path: Path) -> None:
    """As with hydra.sweep.subdir=mine: ten thousand must not try each other's names."""
    tried = Counter[str]()

    class Name(str):
        def __format__(self, _: str) -> str:
            tried["names"] += 1
            return str(self)

    ledger = Ledger(tmp_path)
    found = ledger.queue({str(number): Name("mine") for number in range(100)}, invalid=())
    assert [one.folder for one in found.values()][-2:] == ["mine-99", "mine-100"]
    assert tried["names"] == 99


def test_a_start_asks_the_rules_anew_and_leaves_failures_unless_asked(tmp_path: Path) -> None:
    """What had been refused may fit by now; a job that is queued again has no failure."""
    ledger, command = Ledger(tmp_path), ["seed=1,2"]
    broken = Entry("broken", "broken", "failed", INVALID, "a rule")
    ledger.queue({"done": "done", "lost": "lost"}, invalid=[broken])
    ledger.note("done", status="completed")
    ledger.note("lost", status="failed", kind="crash", sentence="why")
    assert ledger.begin(command=command, retry_failed=False) == ["lost"]
    assert ledger.read().keys() == {"done", "lost"}
    assert ledger.begin(command=command, retry_failed=True) == []
    assert ledger.read()["lost"] == Entry("lost", "lost")
    ledger.note("lost", status="failed", kind="crash", sentence="why")
    ledger.note("lost", status="running")
    assert ledger.read()["lost"] == Entry("lost", "lost", "running")


def test_the_newest_unfinished_sweep_of_the_command_goes_on(tmp_path: Path) -> None:
    """Not one that is done, nor another command's; one with failures where they are retried."""
    statuses = {"older": "queued", "newer": "preempted", "lost": "failed", "done": "completed"}
    for age, (name, status) in enumerate([*statuses.items(), ("other", "queued")]):
        (tmp_path / name).mkdir()
        ledger = Ledger(tmp_path / name)
        ledger.begin(command=["other" if name == "other" else "mine"], retry_failed=False)
        ledger.queue({"a": "a"}, invalid=())
        ledger.note("a", status=status)
        if age % 2:  # its launcher ended well
            ledger.fold()
        else:
            os.utime(tmp_path / name / JOURNAL, (age, age))
        os.utime(tmp_path / name / LEDGER, (age, age))
    for retry_failed, expected in ((False, "newer"), (True, "lost")):
        found = unfinished_sweep(tmp_path, command=["mine"], retry_failed=retry_failed)
        assert found == tmp_path / expected
    assert unfinished_sweep(tmp_path, command=["new"], retry_failed=True) is None


def test_a_sweep_that_is_folded_meanwhile_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either of its files may be gone between two looks at it."""
    small_ledger(tmp_path / "sweep").fold()
    monkeypatch.setattr(Path, "exists", lambda path: True)  # it was, a moment ago
    sweep = unfinished_sweep(tmp_path, command=["mine"], retry_failed=False)
    assert sweep == tmp_path / "sweep"


def test_a_ledger_is_changed_by_one_launcher_at_a_time(tmp_path: Path) -> None:
    """Else one would write down again what it had read before the other's change."""
    ledger = Ledger(tmp_path)
    ledger.queue({"a": "a"}, invalid=())
    other = threading.Thread(target=ledger.note, args=("a",), kwargs={"status": "completed"})
    with ledger._locked():
        other.start()
        other.join(0.5)
        assert ledger.read()["a"].status == "queued"
    other.join()
    assert ledger.read()["a"].status == "completed"


def small_ledger(folder: Path) -> Ledger:
    """Return the ledger of a sweep with two jobs, while its launcher works."""
    folder.mkdir(exist_ok=True)
    ledger = Ledger(folder)
    ledger.begin(command=["mine"], retry_failed=False)
    ledger.queue({"a": "a", "b": "b"}, invalid=())
    return ledger


def test_a_ledger_at_rest_is_one_file_to_read(tmp_path: Path) -> None:
    """The jobs are in sweep.json then; a ledger that others still use goes on from there."""
    mine, theirs = small_ledger(tmp_path), Ledger(tmp_path)
    theirs.note("a", status="failed", kind="crash", sentence="why\nnot")
    mine.fold()
    assert not (tmp_path / JOURNAL).exists()
    fields = json.loads((tmp_path / LEDGER).read_text())
    assert (fields["format_version"], fields["command"]) == (1, ["mine"])
    assert fields["jobs"][0] == asdict(Entry("a", "a", "failed", "crash", "why\nnot"))
    theirs.note("b", status="running")
    assert mine.read() == theirs.read()
    assert [one.status for one in mine.read().values()] == ["failed", "running"]
    assert mine.failed() == {"a"}
    assert mine.command() == ["mine"]
    mine.fold()
    assert theirs.entry("b").status == "running"


def test_a_launcher_that_is_killed_while_it_writes_leaves_a_ledger(tmp_path: Path) -> None:
    """Whatever byte was its last: what was noted before is there, and the next change is kept."""
    journal = tmp_path / JOURNAL
    ledger = small_ledger(tmp_path)
    before = journal.read_bytes()
    ledger.note("a", status="failed", kind="crash", sentence="wé")
    after = journal.read_bytes()
    assert after.startswith(before)
    for num_bytes in range(len(before), len(after) + 1):
        journal.write_bytes(before)
        reader = Ledger(tmp_path)
        reader.read()
        journal.write_bytes(after[:num_bytes])
        status = "failed" if num_bytes == len(after) else "queued"
        for one in (reader, Ledger(tmp_path)):
            assert [entry.status for entry in one.read().values()] == [status, "queued"]
        Ledger(tmp_path).note("b", status="running")
        for one in (reader, Ledger(tmp_path)):
            assert [entry.status for entry in one.read().values()] == [status, "running"]


@pytest.mark.parametrize("name", ["begin", "fold"])
def test_a_launcher_that_is_killed_between_the_two_files_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """sweep.json is written and sweep.jsonl is still there, so sweep.jsonl counts."""
    ledger = small_ledger(tmp_path)
    ledger.note("a", status="failed")
    before = ledger.read()
    change = {
        "begin": partial(ledger.begin, command=["other"], retry_failed=True),
        "fold": ledger.fold,
    }
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            change[name]()
    assert "failed" not in (tmp_path / LEDGER).read_text() or name == "fold"
    for one in (ledger, Ledger(tmp_path)):
        assert (one.read(), one.command()) == (before, ["mine"])


def test_threads_and_readers_see_every_change_of_many_launchers(tmp_path: Path) -> None:
    """Four launchers note each of their jobs, and fold now and then; nothing is lost or damaged."""
    ids = {f"{number}": f"{number}" for number in range(40)}
    Ledger(tmp_path).begin(command=["mine"], retry_failed=False)
    Ledger(tmp_path).queue(ids, invalid=())
    is_over = threading.Event()

    def launch(first: int) -> None:
        ledger = Ledger(tmp_path)
        for number in range(first, len(ids), 4):
            ledger.note(f"{number}", status="running")
            if number % 10 == 0:
                ledger.fold()
            ledger.note(f"{number}", status="completed")

    def watch() -> None:
        ledger, num_completed = Ledger(tmp_path), 0
        while not is_over.is_set():
            found = [one.status for one in ledger.read().values()].count("completed")
            assert found >= num_completed
            num_completed = found

    with ThreadPoolExecutor(5) as threads:
        watching = threads.submit(watch)
        launching = [threads.submit(launch, first) for first in range(4)]
        try:
            for one in launching:
                one.result()
        finally:
            is_over.set()
        watching.result()
    assert set(statuses(tmp_path).values()) == {"completed"}


@pytest.fixture
def jobs(tmp_path: Path) -> dict[str, Job]:
    """Three queued jobs with their folders."""
    job = Job(config=resolved("model=toy")[0], started_at=0.0, code={})
    Ledger(tmp_path).queue({name: name for name in "abc"}, invalid=())
    for name in "abc":
        (tmp_path / name).mkdir()
    return {name: replace(job, run_dir=tmp_path / name) for name in "abc"}


def test_a_job_that_is_interrupted_is_the_last_one(tmp_path: Path, jobs: dict[str, Job]) -> None:
    """The sweep was asked to stop; each job has begun when it was its turn."""
    began = []

    def execute(job: Job) -> Outcome:
        began.append(job.started_at)
        status = "preempted" if len(began) == 2 else "completed"
        return Outcome(status, 0, job.run_dir)

    ledger = Ledger(tmp_path)
    outcomes = run_jobs(Batch(jobs, ledger, SweepConfig()), execute=execute)
    assert [one.status for one in outcomes] == ["completed", "preempted"]
    assert statuses(tmp_path) == {"a": "completed", "b": "preempted", "c": "queued"}
    assert 0.0 < began[0] <= began[1]


def test_a_job_that_another_launcher_took_meanwhile_is_left_to_it(
    tmp_path: Path, jobs: dict[str, Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be done between the look into the ledger and the lock of its folder."""
    ledger = Ledger(tmp_path)

    @contextmanager
    def locked_late(run_dir: RunDir) -> Iterator[None]:
        ledger.note(run_dir.path.name, status="completed")
        yield

    monkeypatch.setattr(RunDir, "locked", locked_late)
    outcomes = run_jobs(Batch(jobs, ledger, SweepConfig()), execute=pytest.fail)
    assert [one.status for one in outcomes] == ["completed"] * 3


def test_a_folder_that_cannot_be_locked_changes_nothing_that_another_launcher_has_noted(
    tmp_path: Path, jobs: dict[str, Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who does not hold the folder knows less about the job than who does."""
    ledger = Ledger(tmp_path)

    def locked(run_dir: RunDir) -> None:
        ledger.note(run_dir.path.name, status="completed")
        raise OSError(2, "No such file or directory")

    monkeypatch.setattr(RunDir, "locked", locked)
    outcomes = run_jobs(Batch(jobs, ledger, SweepConfig()), execute=pytest.fail)
    assert [one.status for one in outcomes] == ["completed"] * 3
    assert set(statuses(tmp_path).values()) == {"completed"}


def test_what_had_failed_before_stops_no_sweep(tmp_path: Path, jobs: dict[str, Job]) -> None:
    """Under fail_fast the first failure since the start does; a mistake has its exit code."""
    ledger = Ledger(tmp_path)
    ledger.note("a", status="failed", kind=INVALID, sentence="a rule")

    def execute(job: Job) -> Outcome:
        assert job.run_dir is not None
        return Outcome.invalid(job.run_dir, "broken")

    batch = Batch(jobs, ledger, SweepConfig(fail_fast=True), known_failures=["a"])
    outcomes = run_jobs(batch, execute=execute)
    assert [one.run_dir for one in outcomes] == [tmp_path / "a", tmp_path / "b"]
    assert statuses(tmp_path) == {"a": "failed", "b": "failed", "c": "queued"}
    kinds = (INVALID, "user", "crash", "signal")
    found = [recorded(Entry("a", "a", "failed", kind, ""), jobs["a"]) for kind in kinds]
    assert [one.exit_code for one in found if one is not None] == [2, 2, 1, 1]


def test_a_job_whose_launcher_is_gone_is_interrupted_in_the_table(
    tmp_path: Path, jobs: dict[str, Job]
) -> None:
    """It runs as long as somebody holds its folder."""
    Ledger(tmp_path).note("a", status="running")
    with RunDir(tmp_path / "a").locked():
        assert table_row(sweep_table(tmp_path), "a")[1] == "running"
    assert table_row(sweep_table(tmp_path), "a")[1] == "preempted"


@pytest.mark.full
def test_a_killed_sweep_goes_on_where_it_stood(tmp_path: Path) -> None:
    """SIGKILL in the second of three jobs: the first is skipped, the second resumes."""
    command = ("-m", "seed=0,1,2", *TOY, "train.max_steps=100", "checkpoint.every_steps=15")
    with background(*command, folder=tmp_path) as process:
        second = "outputs/*/seed=1/checkpoints/step-*"
        wait_for(lambda: list(tmp_path.glob(second)))
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    sweep = only_sweep(tmp_path)
    assert list(statuses(sweep).values()) == ["completed", "running", "queued"]
    done = {path: (path / "run.json").stat().st_mtime_ns for path in run_dirs(sweep)[:1]}

    program = (sys.executable, "-m", "ddp_runner.sweep")
    message = run_command(str(sweep), folder=tmp_path / "elsewhere", program=program)
    assert table_row(message.stdout, "seed=1")[1] == "preempted"

    end = run_command(*command, folder=tmp_path)
    assert (end.exit_code, end.stderr) == (0, "")
    assert only_sweep(tmp_path) == sweep
    assert set(statuses(sweep).values()) == {"completed"}
    assert [path.name for path in run_dirs(sweep)] == [f"seed={seed}" for seed in range(3)]
    assert {path: (path / "run.json").stat().st_mtime_ns for path in done} == done
    assert "resumed from" in (sweep / "seed=1" / "logs" / "rank-0.log").read_text()
    for run_dir in run_dirs(sweep):
        assert [line["step"] for line in metrics(run_dir) if "train/loss" in line] == [
            *range(1, 101)
        ]
    rows = compare(read_runs([sweep]), each=True).rows
    assert [row.setting["seed"] for row in rows] == [0, 1, 2]


@pytest.mark.full
def test_failed_jobs_are_left_alone_until_asked_for(tmp_path: Path) -> None:
    """Started again, a failed job is reported; with sweep.retry=failed it runs again."""
    rows = ("-m", "optimizer.lr=0.1,1e30", *TOY, "train.max_steps=9", "hydra.sweep.dir=sweep")
    first = run_command(*rows, folder=tmp_path)
    sweep = tmp_path / "sweep"
    assert first.exit_code == 2
    assert statuses(sweep) == {"optimizer.lr=0.1": "completed", "optimizer.lr=1e+30": "failed"}
    began = {path.name: record(path)["started_at"] for path in run_dirs(sweep)}

    again = run_command(*rows, folder=tmp_path)
    assert again.exit_code == 2
    assert {path.name: record(path)["started_at"] for path in run_dirs(sweep)} == began
    assert "smaller optimizer.lr" in again.stdout

    retried = run_command(*rows, "sweep.retry=failed", folder=tmp_path)
    assert retried.exit_code == 2
    now = {path.name: record(path)["started_at"] for path in run_dirs(sweep)}
    assert now["optimizer.lr=0.1"] == began["optimizer.lr=0.1"]
    assert now["optimizer.lr=1e+30"] > began["optimizer.lr=1e+30"]


@pytest.mark.parametrize(
    ("setting", "number"), first_of([("sweep.max_failures=2", 2), ("sweep.fail_fast=true", 1)])
)
def test_fail_fast_and_max_failures_stop_a_sweep(setting: str, number: int, tmp_path: Path) -> None:
    """At the first failure, or the second: what waits stays queued, the exit code is not 0."""
    rows = ("-m", "optimizer.lr=1e30,1e31,0.1", *TOY, "train.max_steps=9")
    end = run_command(*rows, setting, folder=tmp_path)
    assert end.exit_code == 2
    found = list(statuses(only_sweep(tmp_path)).values())
    assert found == ["failed"] * number + ["queued"] * (3 - number)


@pytest.mark.full
def test_an_edited_yaml_changes_no_job_that_waits(tmp_path: Path) -> None:
    """Every job is composed and frozen before the first one starts."""
    write_experiment(tmp_path / "conf", "mine", *TOY, "train.max_steps=300")
    command = ("-m", "--config-dir", "conf", "experiment=mine", "seed=1,2,3")
    with background(*command, folder=tmp_path) as process:
        wait_for(lambda: last_step(tmp_path) >= 1)
        write_experiment(tmp_path / "conf", "mine", *TOY, "train.max_steps=5")
        end = wait_for_end(process, tmp_path)
    assert (end.exit_code, end.stderr) == (0, "")
    assert [record(path)["step"] for path in end.run_dirs] == [300, 300, 300]


@pytest.mark.full
def test_two_launchers_share_a_sweep(tmp_path: Path) -> None:
    """Started at once on one folder: each job is run once, both end well and list all of them."""
    command = ("-m", "seed=1,2,3,4,5,6", *TOY, "train.max_steps=100", "hydra.sweep.dir=../sweep")
    folders = [tmp_path / "a", tmp_path / "b"]
    with ExitStack() as stack:
        both = [stack.enter_context(background(*command, folder=one)) for one in folders]
        ends = [wait_for_end(process, one) for process, one in zip(both, folders, strict=True)]
    assert [end.exit_code for end in ends] == [0, 0]
    started = [
        line.split(": ")[1]
        for end in ends
        for line in end.stdout.splitlines()
        if re.fullmatch(r"job \d of 6: \S+", line)
    ]
    assert sorted(started) == [f"seed={seed}" for seed in range(1, 7)]
    assert all(
        table_row(end.stdout, f"seed={seed}")[1] == "completed" for end in ends for seed in (1, 6)
    )
