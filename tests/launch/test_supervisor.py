"""What the supervisor decides while ranks run, with no rank and no other machine."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from configs import resolved

from ddp_runner.job import Job
from ddp_runner.launch import machines_launcher as launcher
from ddp_runner.launch import supervisor
from ddp_runner.launch.scratch import Scratch
from ddp_runner.launch.supervisor import Supervisor


@pytest.mark.parametrize(("nnodes", "regroups"), [("2", False), ("1:2", True)])
def test_only_an_elastic_run_makes_place_for_a_machine_that_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nnodes: str, regroups: bool
) -> None:
    """A spare machine of a fixed number waits, and the ranks know nothing of it."""
    keys = ("model=toy", "launch.rdzv_endpoint=h:1", "launch.nproc_per_node=1")
    config, _ = resolved(*keys, f"launch.nnodes={nnodes}", "batch.global_size=8")
    agent = Supervisor(Job(config, started_at=0.0, code={}), Scratch(tmp_path))
    seen = SimpleNamespace(have_come=False, is_wanted=True, ranks_have_ended=False)
    monkeypatch.setattr(Supervisor, "_reports", seen)
    ranks = SimpleNamespace(exit_codes=lambda: {0: None}, results=dict)
    monkeypatch.setattr(agent, "_ranks", ranks)
    agent._monitor_workers(agent.get_worker_group())
    assert agent._scratch.regroup.exists() == regroups


def test_an_end_at_once_marks_the_run_that_rank_0_has_claimed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On several machines the launcher learns its folder from the ranks only."""
    claimed, asked = tmp_path / "run", list[Callable[[], list[Path]]]()

    def signals(*_: object, running: Callable[[], list[Path]], **__: object) -> Any:
        asked.append(running)
        return MagicMock(received=None)

    def supervise(_: Job, scratch: Scratch) -> dict[str, Any]:
        assert asked[0]() == []
        scratch.record_run(claimed)
        assert asked[0]() == [claimed]
        return {"status": "completed", "run_dir": str(claimed)}

    monkeypatch.setattr(launcher, "StopSignals", signals)
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # it sets it, too
    monkeypatch.setattr(launcher, "start_fork_server", lambda: None)
    monkeypatch.setattr(supervisor, "supervise", supervise)
    config, _ = resolved("model=toy")
    job = Job(config, started_at=0.0, code={})
    assert launcher.run_worker_group(job).run_dir == claimed
    assert asked
