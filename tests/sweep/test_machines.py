"""What the machines of a sweep tell each other: which job is next, who joins it, how it ended."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch.distributed as dist
from configs import resolved

from ddp_runner.config.launching import LaunchConfig
from ddp_runner.errors import UserError
from ddp_runner.job import Job, Outcome, Status
from ddp_runner.launch import meeting
from ddp_runner.launch.meeting import Meeting
from ddp_runner.sweep import machines
from ddp_runner.sweep.machines import ENDED, FOLLOWERS, Leader, SweepMeeting, follow, lead, meet

STORES: Any = dist


@pytest.fixture(name="met")
def one_that_leads() -> SweepMeeting:
    """A meeting in this process."""
    return SweepMeeting(Meeting(STORES.HashStore(), "n1", is_served_here=True))


def followed(met: SweepMeeting, launch: Callable[[Job], Outcome]) -> tuple[int, list[str]]:
    """Follow with ranks that a function stands for; return the exit code and the jobs joined."""
    config, _ = resolved("model=toy", "launch.nnodes=2", "launch.rdzv_endpoint=n1:1")
    joined = list[str]()

    def run(job: Job, **_: object) -> Outcome:
        joined.append(job.config.launch.rdzv_id)
        return launch(job)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machines, "launch", run)
        exit_code = follow(met, Job(config, started_at=0.0, code={}))
    return exit_code, joined


def test_a_machine_that_comes_late_begins_with_the_job_that_is_now(
    met: SweepMeeting, capsys: pytest.CaptureFixture[str]
) -> None:
    """A job that fails to meet is not the last one; the exit code is the leader's."""
    met.tell({"job": 3, "nnodes": 2, "title": "job 4 of 5"})

    def launch(_: Job) -> Outcome:
        if "job 5 of 5" not in capsys.readouterr().out:
            met.tell({"job": 4, "nnodes": 2, "title": "job 5 of 5"})
            raise UserError("waited 1 s for 1 of 2 machines")
        met.tell({"end": 2})
        return Outcome(Status.COMPLETED, 0, Path())

    assert followed(met, launch) == (2, ["ddp_runner-3", "ddp_runner-4"])


def test_the_leader_waits_for_no_machine_that_was_asked_to_stop(
    met: SweepMeeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has left, as one has that saw the end."""
    monkeypatch.setattr(machines, "GOODBYE_S", 600.0)
    met.meeting.store.add(FOLLOWERS, 1)
    met.tell({"job": 0, "nnodes": 2, "title": "job 1 of 1"})
    exit_code, _ = followed(met, lambda _: Outcome(Status.PREEMPTED, 143, None))
    assert exit_code == 143
    assert met.meeting.store.add(ENDED, 0) == 1
    met.dismiss(143)


def test_a_job_for_fewer_machines_takes_those_that_ask_first(met: SweepMeeting) -> None:
    """All machines join one for all, so a machine that was started again is not left over."""
    every, number = LaunchConfig(nnodes=3), LaunchConfig(nnodes=3, node_rank=2)
    two = {"job": 0, "nnodes": 2}
    assert [met.takes_part(two, every) for _ in range(3)] == [True, False, False]
    assert [met.takes_part({"job": 1, "nnodes": 3}, every) for _ in range(5)] == [True] * 5
    assert [met.takes_part({"job": 2, "nnodes": num}, number) for num in (2, 3)] == [False, True]


def test_while_the_leader_runs_a_job_alone_there_is_none_to_join(
    met: SweepMeeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that comes then would find the last one closed."""
    monkeypatch.setattr(machines, "launch", lambda *_, **__: Outcome(Status.COMPLETED, 0, None))
    leader, told = Leader(met), []
    for nnodes in (2, 1):
        config, _ = resolved("model=toy", f"launch.nnodes={nnodes}", "launch.rdzv_endpoint=n1:1")
        leader._launch(Job(config, started_at=0.0, code={}, title="job"))
        told.append(met.told())
    assert told == [{"job": 0, "nnodes": 2, "title": "job"}, None]


def test_the_other_machines_learn_how_the_sweep_ended(met: SweepMeeting) -> None:
    """Also if it was invalid, and no job has run."""

    def fail() -> NoReturn:
        raise UserError("the sweep has no job")

    assert lead(met, 1, lambda: 1) == 1
    assert met.told() == {"end": 1}
    with pytest.raises(UserError, match="no job"):
        lead(met, 2, fail)
    assert met.told() == {"end": 2}


def test_a_machine_that_comes_after_the_last_job_is_waited_for(
    met: SweepMeeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweep with nothing left to do ends at once; but nobody is waited for after Ctrl-C."""
    monkeypatch.setattr(machines, "ARRIVAL_S", 600.0)
    pauses = list[float]()

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        met.meeting.store.add(FOLLOWERS if len(pauses) == 1 else ENDED, 1)

    monkeypatch.setattr(machines.time, "sleep", pause)
    assert lead(met, 2, lambda: 130) == 130
    assert pauses == []
    assert lead(met, 2, lambda: 0) == 0
    assert len(pauses) == 2


def test_an_error_of_the_store_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """With parentheses only where there is a reason."""

    def lose(*_: object, **__: object) -> NoReturn:
        raise dist.DistNetworkError("Ping failed")

    monkeypatch.setattr(meeting, "open_meeting", lose)
    with pytest.raises(UserError, match=r"the first machine of the sweep at n1:1; start the same"):
        meet(LaunchConfig(nnodes=2, rdzv_endpoint="n1:1"))
