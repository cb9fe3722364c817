"""What torch's launcher settles for the ranks of a machine, and how its versions name it."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
from configs import resolved
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent
from torch.numa import binding as numa

from ddp_runner.job import Job
from ddp_runner.launch.elastic import numa_bound, numa_options
from ddp_runner.launch.supervisor import Supervisor
from ddp_runner.scratch import Scratch

OPTIONS = numa.NumaOptions(affinity_mode=numa.AffinityMode.NODE)


def named_as_now(work: Any, *, device_index: int, numa_options: Any) -> Any:
    """Torch's helper as 2.15 has it."""
    return lambda: (work(), device_index, numa_options)


def named_as_before(work: Any, *, gpu_index: int, numa_options: Any) -> Any:
    """Torch's helper as 2.11 has it."""
    return lambda: (work(), gpu_index, numa_options)


@pytest.mark.parametrize("helper", [named_as_now, named_as_before])
def test_ranks_are_bound_under_either_name(helper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch has renamed the keyword of its helper, which is private."""
    monkeypatch.setattr(numa, "_maybe_wrap_with_numa_binding", helper)
    assert numa_bound(lambda: "done", 1, OPTIONS)() == ("done", 1, OPTIONS)
    assert numa_bound(len, 1, None) is len


def test_the_helper_of_this_torch_is_known() -> None:
    """A wrapped function comes back, which is not called yet."""
    assert callable(numa_bound(lambda: "done", 0, OPTIONS))


def test_the_agent_of_this_torch_has_the_hooks_and_attributes_that_the_supervisor_uses(
    tmp_path: Path,
) -> None:
    """They are private by name: a torch that renames one fails here, not in a run."""
    hooks = {"_start_workers", "_monitor_workers", "_stop_workers", "_shutdown"}
    assert SimpleElasticAgent.__abstractmethods__ == hooks
    config, _ = resolved("model=toy", "launch.max_restarts=3")
    job = Job(config=config, started_at=0.0, code={}, scratch=Scratch(tmp_path))
    supervisor = Supervisor(job)
    assert supervisor._attempt == 0
    supervisor._remaining_restarts -= 1
    assert supervisor._attempt == 1


def test_torchs_launcher_makes_no_folder_for_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody would remove it: torch's own launcher leaves it to the user."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    numa_options(resolved("model=toy")[0])
    assert not list(tmp_path.iterdir())
