"""What the supervisor needs of torch's agent, and what an end at once marks."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from configs import resolved
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent

from ddp_runner.job import Job
from ddp_runner.launch import machines_launcher as launcher
from ddp_runner.launch import supervisor
from ddp_runner.launch.stop_requests import StopRequests
from ddp_runner.launch.supervisor import Supervisor


def test_the_agent_of_this_torch_has_the_hooks_and_attributes_that_the_supervisor_uses() -> None:
    """They are private by name: a torch that renames one fails here, not in a run."""
    hooks = {"_start_workers", "_monitor_workers", "_stop_workers", "_shutdown"}
    assert SimpleElasticAgent.__abstractmethods__ == hooks
    config, _ = resolved("model=toy", "launch.max_restarts=3")
    agent = Supervisor(Job(config, 0.0, {}), StopRequests(running=list), lambda _: None)
    assert agent._attempt == 0
    agent._remaining_restarts -= 1
    assert agent._attempt == 1


def test_an_end_at_once_marks_the_run_that_rank_0_has_claimed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On several machines the launcher learns its folder from the ranks only."""
    claimed, asked = tmp_path / "run", list[Callable[[], list[Path]]]()

    def requests(*, running: Callable[[], list[Path]]) -> StopRequests:
        asked.append(running)
        return StopRequests(running=running)

    def supervise(
        _: Job, __: StopRequests, note_run: Callable[[Path, bool], list[int]]
    ) -> dict[str, Any]:
        assert asked[0]() == []
        assert note_run(claimed, True) == []  # no tracker
        assert asked[0]() == [claimed]
        return {"status": "completed", "run_dir": str(claimed)}

    monkeypatch.setattr(launcher, "StopRequests", requests)
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # it sets it, too
    monkeypatch.setattr(launcher, "start_fork_server", lambda: None)
    monkeypatch.setattr(supervisor, "supervise", supervise)
    config, _ = resolved("model=toy")
    job = Job(config, started_at=0.0, code={})
    with ExitStack() as trackers:
        assert launcher.run_worker_group(job, trackers).run_dir == claimed
    assert asked
