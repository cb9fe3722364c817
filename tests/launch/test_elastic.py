"""What the supervisor needs of torch's agent."""

from pathlib import Path

from configs import resolved
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent

from ddp_runner.job import Job
from ddp_runner.launch.scratch import Scratch
from ddp_runner.launch.supervisor import Supervisor


def test_the_agent_of_this_torch_has_the_hooks_and_attributes_that_the_supervisor_uses(
    tmp_path: Path,
) -> None:
    """They are private by name: a torch that renames one fails here, not in a run."""
    hooks = {"_start_workers", "_monitor_workers", "_stop_workers", "_shutdown"}
    assert SimpleElasticAgent.__abstractmethods__ == hooks
    config, _ = resolved("model=toy", "launch.max_restarts=3")
    supervisor = Supervisor(Job(config=config, started_at=0.0, code={}), Scratch(tmp_path))
    assert supervisor._attempt == 0
    supervisor._remaining_restarts -= 1
    assert supervisor._attempt == 1
