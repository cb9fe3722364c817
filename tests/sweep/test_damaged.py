"""Damage in a sweep's folder costs only its own job, and is reported in one sentence."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier

import pytest
from configs import resolved
from sweeps import batch_of, planned

from ddp_runner.errors import UserError
from ddp_runner.job import COMPLETED, Job, Outcome
from ddp_runner.sweep import __main__ as sweep
from ddp_runner.sweep.jobs import freeze_unheld, run_jobs
from ddp_runner.sweep.sweep_dir import PLAN, read_plan
from ddp_runner.sweep.sweep_table import sweep_table
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.tracking.run_record import read_run_record


@pytest.fixture
def jobs(tmp_path: Path) -> dict[str, Job]:
    """Return three jobs with their folders."""
    job = Job(config=resolved("model=toy")[0], started_at=0.0, provenance={})
    jobs = {name: replace(job, run_dir=tmp_path / name) for name in ("a", "b", "c")}
    for name in jobs:
        (tmp_path / name).mkdir()
    return jobs


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (None, "is not valid JSON"),
        (OSError(28, "No space left on device"), "No space left on device; free some"),
        (UserError("the folder is in the way"), "the folder is in the way"),
    ],
)
def test_a_job_that_cannot_begin_costs_itself_alone(
    jobs: dict[str, Job], tmp_path: Path, error: Exception | None, reason: str
) -> None:
    """Its sentence is in the plan and the table; the jobs after it run."""
    planned(tmp_path, *jobs)

    def execute(job: Job) -> Outcome:
        assert job.run_dir is not None
        if job.run_dir.name == "b":
            if error is not None:
                raise error
            (job.run_dir / "run.json").write_text("{")
            read_run_record(job.run_dir)
        return COMPLETED

    outcomes = run_jobs(batch_of(tmp_path, *jobs), execute=execute).values()
    assert [one.status for one in outcomes] == ["completed", "failed", "completed"]
    assert [one.exit_code for one in outcomes] == [0, 2, 0]
    current = read_plan(tmp_path).jobs["b"].standing(tmp_path)
    assert (current.status, current.kind) == ("damaged" if error is None else "failed", "user")
    assert reason in str(current.sentence)
    assert reason in sweep_table(tmp_path)


def test_a_folder_that_leads_elsewhere_costs_its_own_job_alone(
    jobs: dict[str, Job], tmp_path: Path
) -> None:
    """It is rejected; if another launcher seemed to have it, the sweep would wait."""
    (tmp_path / "mine").write_text("{}")
    (tmp_path / "b" / "run.json").symlink_to(tmp_path / "mine")
    planned(tmp_path, *jobs)

    def execute(job: Job) -> Outcome:
        return COMPLETED

    outcomes = run_jobs(batch_of(tmp_path, *jobs), execute=execute)
    assert [one.exit_code for one in outcomes.values()] == [0, 2, 0]
    assert "is a link to" in str(read_plan(tmp_path).jobs["b"].fault)


def test_launchers_that_plan_one_job_at_once_do_not_meet(
    jobs: dict[str, Job], tmp_path: Path
) -> None:
    """One freezes its config, the other leaves it alone: they would write one temporary file."""
    job, run_dir = jobs["a"], tmp_path / "a"
    together = Barrier(2)

    def plan(_: int) -> None:
        for _ in range(50):
            together.wait(60)
            freeze_unheld(job)

    with ThreadPoolExecutor(2) as launchers:
        list(launchers.map(plan, range(2)))
    assert {path.name for path in (run_dir / ".hydra").iterdir()} == {
        *("choices.yaml", "config.yaml", "overrides.yaml")
    }
    with RunDir(run_dir).locked():
        (run_dir / ".hydra" / "config.yaml").unlink()
        freeze_unheld(job)
        assert not (run_dir / ".hydra" / "config.yaml").exists()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((), "write python -m ddp_runner.sweep FOLDER"),
        (("--help",), "write python -m ddp_runner.sweep FOLDER"),
        (("nowhere",), "sweep.json is missing"),
        (("cut",), "is damaged or of another version"),
        (("binary",), "is damaged or of another version"),
        (("other",), "is damaged or of another version"),
    ],
)
def test_the_table_of_a_damaged_sweep_is_one_sentence(
    arguments: tuple[str, ...],
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The exit code is 2, whatever stands in the place of a plan."""
    for name, content in {"cut": b'{"format', "binary": b"\xff\x00", "other": b"[1]"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / PLAN).write_bytes(content)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["sweep", *arguments])
    with pytest.raises(SystemExit) as end:
        sweep.main()
    assert end.value.code == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    assert sentence.startswith("error: ")
    assert reason in sentence


def test_odd_fields_of_a_record_are_left_out_of_the_table(tmp_path: Path) -> None:
    """A run.json that somebody has changed by hand is no reason to show nothing."""
    planned(tmp_path, "a")
    huge = f'{{"wall_s": {"9" * 400}, "metrics": {{"train/loss": {"9" * 400}}}}}'
    odd = '{"wall_s": "soon", "metrics": {"train/loss": "low"}}'
    for text in (odd, '{"metrics": 3}', "{", huge, "[" * 100_000):
        (tmp_path / "a" / "run.json").write_text(text)
        assert "damaged" in sweep_table(tmp_path)
