"""Whose run a folder is: a restart goes on in its own, and nobody in anybody else's."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from configs import resolved
from run_folders import record

from ddp_runner.config.identity import work_hash
from ddp_runner.config.secrets import Secrets
from ddp_runner.dist_env import DistEnv
from ddp_runner.errors import UserError
from ddp_runner.job import Job
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.tracking.run_folder_claim import (
    claim_run,
    own_launch_ids,
    prepare_run_folder,
    with_run_folder,
)
from ddp_runner.tracking.run_record import write_run_record

OURS, THEIRS = ["agent here 1"], ["agent here 2"]


@pytest.fixture
def stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ExitStack]:
    """Give what rank 0 holds until its process ends; outputs/ is in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    with ExitStack() as opened:
        yield opened


def job(*overrides: str, run_dir: Path | None = None, ranks: int = 2) -> Job:
    """Return a job as torchrun's ranks plan it."""
    env = DistEnv(rank=0, local_rank=0, world_size=ranks, local_world_size=ranks)
    config, _ = resolved("model=toy", *overrides, env=env)
    return Job(config=config, started_at=0.0, provenance={}, run_dir=run_dir)


def attempt(
    planned: Job, launch_ids: list[str], *, status: str | None = None, error: object = None
) -> RunDir:
    """Claim and freeze a run as one attempt of a launch does, which then ends with a status."""
    with ExitStack() as held:
        run_dir, global_size = claim_run(planned, launch_ids=launch_ids, held=held)
        prepare_run_folder(with_run_folder(planned, run_dir, global_size))
        if status is not None:
            write_run_record(run_dir, status=status, error=error)
    return run_dir


@pytest.mark.parametrize("status", ["running", "failed", "preempted", "completed"])
def test_a_restart_goes_on_in_its_own_folder_alone(stack: ExitStack, status: str) -> None:
    """An equal run that is newer stands beside it; its launch is another one."""
    own = attempt(job(), OURS, status=status)
    other = attempt(job(), THEIRS, status=status)
    assert other != own
    again = claim_run(job(), launch_ids=[*OURS, "agent there 3"], held=stack)
    assert again == (own, 40)
    assert record(own.path)["launches"] == [*OURS, "agent there 3"]
    third, _ = claim_run(job(), launch_ids=["agent here 9"], held=stack)
    assert third not in (own, other)


def test_a_restart_on_fewer_machines_keeps_folder_and_global_batch(stack: ExitStack) -> None:
    """The number of ranks is no part of a run's identity; 2 x 20 samples become 1 x 40."""
    own = attempt(job(ranks=2), OURS)
    alone = job(ranks=1)
    again = claim_run(alone, launch_ids=OURS, held=stack)
    assert again == (own, 40)
    batch = with_run_folder(alone, *again).config.batch
    assert (batch.global_size, batch.per_rank) == (40, 40)
    with pytest.raises(UserError, match=r"batch.global_size \(40\) is not divisible"):
        with_run_folder(job(ranks=3), *again)


def test_a_restart_waits_until_the_attempt_before_has_let_go(stack: ExitStack) -> None:
    """Its ranks may be about to end still; nobody else has to be waited for."""
    own = attempt(job(), OURS)
    held, let_go = threading.Event(), threading.Event()

    def hold() -> None:
        with own.locked():
            held.set()
            let_go.wait(60)

    earlier = threading.Thread(target=hold)
    earlier.start()
    assert held.wait(60)
    timer = threading.Timer(0.2, let_go.set)
    timer.start()
    assert claim_run(job(), launch_ids=OURS, held=stack)[0] == own
    earlier.join()
    timer.join()


def test_each_command_of_a_requeued_job_takes_one_of_the_jobs_runs(stack: ExitStack) -> None:
    """The oldest that no equal command of this start has taken, even if it is held a moment."""
    first, second = (attempt(job(), ["slurm x 7 start 0"]) for _ in range(2))
    assert first != second
    other = attempt(job(), ["slurm x 8 start 0"])
    launch_ids = ["slurm x 7 start 1"]
    again = [claim_run(job(), launch_ids=launch_ids, held=stack)[0] for _ in range(3)]
    assert again[:2] == [first, second]
    assert again[2] not in (first, second, other)
    assert record(first.path)["launches"] == ["slurm x 7 start 0", "slurm x 7 start 1"]


def test_a_command_passes_over_the_run_that_an_equal_command_is_taking(stack: ExitStack) -> None:
    """The other one holds the folder, and writes its mark a moment later."""
    first, second = (attempt(job(), ["slurm x 7 start 0"]) for _ in range(2))
    with first.locked():
        again, _ = claim_run(job(), launch_ids=["slurm x 7 start 1"], held=stack)
    assert again == second


def test_a_run_is_known_by_all_of_its_launches(stack: ExitStack) -> None:
    """A scheduler starts it again under another agent, and any of them may restart it."""
    own = attempt(job(), ["slurm 7.0", *OURS])
    again = attempt(job(), ["slurm 7.0", *THEIRS])
    assert again == own
    assert record(own.path)["launches"] == [*OURS, *THEIRS, "slurm 7.0"]
    assert claim_run(job(), launch_ids=OURS, held=stack)[0] == own


def test_another_config_under_the_same_agent_is_another_run(stack: ExitStack) -> None:
    """A script may run one command after another under one torchrun."""
    own = attempt(job("name=both"), OURS)
    assert claim_run(job("name=both", "seed=1"), launch_ids=OURS, held=stack)[0] != own


@pytest.mark.usefixtures("stack")
def test_a_folder_that_holds_a_run_is_rejected_unless_it_is_resumed(tmp_path: Path) -> None:
    """As our own launcher does; a restart of the launch that made it goes on."""
    folder = tmp_path / "mine"
    attempt(job(run_dir=folder), THEIRS, status="completed")
    rule = rf"^{folder} already holds a run.*resume={folder}"
    with pytest.raises(UserError, match=rule), ExitStack() as held:
        claim_run(job(run_dir=folder), launch_ids=OURS, held=held)
    resumed = job(run_dir=folder)
    resumed = replace(resumed, config=replace(resumed.config, resume=str(folder)))
    with ExitStack() as held:  # its config has what it resumes
        assert claim_run(resumed, launch_ids=OURS, held=held) == (RunDir(folder), None)
    assert attempt(job(run_dir=folder), OURS) == RunDir(folder)


def test_resume_auto_names_the_keys_of_another_config_in_the_folder(
    tmp_path: Path, stack: ExitStack
) -> None:
    """Not resume=, which would go on with the old config; a number of ranks is no other config."""
    folder = tmp_path / "mine"
    planned = job("resume=auto", "seed=1", run_dir=folder)
    attempt(planned, THEIRS, status="preempted")
    RunDir(folder).freeze(replace(planned, secrets=Secrets({("name",): "${oc.env:X}"})))
    other = job("resume=auto", "seed=2", "optimizer.lr=0.5", run_dir=folder, ranks=4)
    with pytest.raises(UserError) as caught, ExitStack() as held:
        claim_run(other, launch_ids=OURS, held=held)
    rule = f"{folder} holds a run whose config differs (seed, optimizer.lr)"
    assert str(caught.value).startswith(rule)
    assert str(caught.value).endswith("; give another hydra.run.dir")
    (folder / ".hydra" / "config.yaml").write_text("{")
    with pytest.raises(UserError, match=r"config\.yaml is damaged"):
        claim_run(other, launch_ids=OURS, held=stack)


def test_two_launches_never_hold_one_folder(tmp_path: Path, stack: ExitStack) -> None:
    """The second learns who has it."""
    planned = job("resume=auto", run_dir=tmp_path / "mine")
    claim_run(planned, launch_ids=OURS, held=stack)
    with pytest.raises(UserError, match=r"mine is in use by process \d+"):
        claim_run(planned, launch_ids=THEIRS, held=stack)


def test_resume_auto_takes_this_configs_newest_unfinished_run(stack: ExitStack) -> None:
    """Not one of another config, one that is completed, or one that somebody is at."""
    oldest, held, done = (
        attempt(job(), [f"agent {status}"], status=status)
        for status in ("preempted", "running", "completed")
    )
    attempt(job("optimizer.lr=0.5"), THEIRS, status="preempted")
    stack.enter_context(held.locked())
    with ExitStack() as moment:
        assert claim_run(job("resume=auto"), launch_ids=OURS, held=moment) == (oldest, 40)
    write_run_record(oldest, status="completed")
    new, global_size = claim_run(job("resume=auto"), launch_ids=["agent here 4"], held=stack)
    assert new not in (oldest, held, done)
    assert global_size is None


def test_a_damaged_run_is_nobodys_to_resume(stack: ExitStack) -> None:
    """Auto passes over it, and begins a new run."""
    damaged = attempt(job(), OURS, status="preempted")
    damaged.record.write_text("{")
    new, _ = claim_run(job("resume=auto"), launch_ids=THEIRS, held=stack)
    assert new != damaged
    assert damaged.record.read_text() == "{"


def test_what_may_pass_is_restarted(stack: ExitStack) -> None:
    """A crash, or a rank that was killed, is what restarts are for."""
    error = {"rank": 0, "kind": "crash", "sentence": "rank 0 raised OSError"}
    own = attempt(job(), OURS, status="failed", error=error)
    assert claim_run(job(), launch_ids=OURS, held=stack)[0] == own


def test_a_job_that_was_queued_again_after_a_mistake_goes_on(stack: ExitStack) -> None:
    """Between two starts by the scheduler somebody may have mended it."""
    error = {"rank": 0, "kind": "user", "sentence": "the disk is full"}
    own = attempt(job(), ["slurm 7.0"], status="failed", error=error)
    assert claim_run(job(), launch_ids=["slurm 7.0"], held=stack)[0] == own


def test_only_a_launcher_that_restarts_ranks_marks_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parent of ranks that somebody starts by hand is a shell, which starts other runs too."""
    env = DistEnv(rank=0, local_rank=0, world_size=1, local_world_size=1)
    (mark,) = own_launch_ids(replace(env, launcher="torchrun"), has_agent=False)
    assert own_launch_ids(env, has_agent=True) == [mark]
    assert own_launch_ids(env, has_agent=False) == []
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    srun = replace(env, launcher="srun")
    assert own_launch_ids(srun, has_agent=False) == ["slurm - 7 start 0"]


def test_work_is_the_same_on_any_number_of_ranks() -> None:
    """All else counts: a seed, a rate, a mode."""

    def work(*overrides: str) -> str:
        return work_hash(resolved("model=toy", *overrides)[0])

    assert work() == work("world_size=3") == work("batch.per_rank=7") == work("data_root=conf")
    changes = ("seed=1", "optimizer.lr=0.5", "parallelism=single", "train.max_steps=3")
    assert len({work(), *map(work, changes)}) == 1 + len(changes)


def test_the_config_type_is_kept() -> None:
    """A claim without a global batch of its own leaves the config as it is."""
    planned, folder = job(), RunDir(Path("run"))
    assert with_run_folder(planned, folder, None).config is planned.config
    assert with_run_folder(planned, folder, 40).config is planned.config
