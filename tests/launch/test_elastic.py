"""What torch's launcher settles for the ranks of a machine, and how its versions name it."""

import socket
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from commands import background, wait_for
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


def test_a_launcher_counts_the_nodes_that_it_waits_for(tmp_path: Path) -> None:
    """Two of three are there: the rendezvous knows, once each has joined it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    command = ("model=toy", "launch.nnodes=3", f"launch.rdzv_endpoint={endpoint}", "world_size=3")
    with ExitStack() as stack:
        for number, folder in enumerate((tmp_path / "first", tmp_path / "second"), start=1):
            stack.enter_context(background(*command, folder=folder))
            text = f"waiting for the other nodes, {3 - number} of 3 missing, at {endpoint}; start"
            wait_for(lambda path=folder / "stdout", text=text: text in path.read_text())
