"""The batches of a sweep, with stand-ins for what composes, plans and runs its jobs."""

from collections.abc import Callable
from pathlib import Path

import pytest
from configs import resolved

from ddp_runner.cli.command_line import parse
from ddp_runner.cli.compose import compose
from ddp_runner.errors import UserError
from ddp_runner.job import Job, Outcome
from ddp_runner.sweep.jobs import Batch
from ddp_runner.sweep.ledger import Ledger
from ddp_runner.sweep.local import Local
from ddp_runner.sweep.multirun import Sweep

OBJECTIVE = "sweep.objective=eval/loss"


class Jobs(Local):
    """Stands for this machine: a batch is a call, and no job of it ends."""

    def __init__(self, run: Callable[[Batch], object] = lambda batch: None) -> None:
        super().__init__()
        self._run = run

    def run(self, batch: Batch) -> list[Outcome]:
        """Call what the test has given."""
        self._run(batch)
        return []


def search(folder: Path, executor: Jobs) -> Sweep:
    """Return a search; its jobs with an even seed are invalid."""

    def plan(composed: object, place: object) -> Job:
        if composed.seed % 2 == 0:
            raise UserError(f"seed ({composed.seed}) is even")
        return Job(config=resolved("model=toy")[0], started_at=0.0, code={})

    return Sweep(
        folder,
        ["-m"],
        executor=executor,
        is_search=True,
        plan=plan,
        name_of=lambda composed: f"seed={composed.seed}",
    )


def batch_of(*seeds: int) -> list[object]:
    """Return the composed configs of a batch."""
    common = ("model=toy", OBJECTIVE, "+hydra.job.num=0")
    return [compose(parse([*common, f"seed={seed}"])) for seed in seeds]


def test_what_ends_a_search_is_not_taken_for_a_lack_of_jobs(tmp_path: Path) -> None:
    """Only the sweeper's own complaint is; what Slurm rejects is said as it was."""

    def reject(batch: Batch) -> None:
        raise UserError("Slurm rejects the jobs")

    with pytest.raises(UserError, match="Slurm rejects the jobs"):
        search(tmp_path, Jobs(reject)).run(lambda sweep: sweep.run_batch(batch_of(1)))

    def best(sweep: Sweep) -> None:
        sweep.run_batch(batch_of(2))
        raise ValueError("No trials are completed yet.")

    with pytest.raises(UserError, match="the search has no best job"):
        search(tmp_path, Jobs()).run(best)


def test_another_launcher_may_forget_this_one_s_invalid_jobs(tmp_path: Path) -> None:
    """As it does when it starts, since their configs may be valid by now."""

    def begin(batch: Batch) -> None:
        Ledger(tmp_path).begin(command=["-m"], retry_failed=False)
        assert len(Ledger(tmp_path).read()) == 1

    objectives = search(tmp_path, Jobs(begin)).run_batch(batch_of(1, 2))
    assert objectives == ["seed=1 is queued", "seed (2) is even"]
