"""If another machine has the run to resume, the user can do what the error advises."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from configs import resolved
from ranks import run_ranks

from ddp_runner.dist_env import DistEnv
from ddp_runner.errors import UserError
from ddp_runner.job import Job
from ddp_runner.rank.adopt import with_config_of_rank_zero


def adopted(env: DistEnv, job: Job) -> str:
    """Return the error if only rank 1 has the run."""
    try:
        with_config_of_rank_zero(replace(job, lacks_run=env.is_rank_zero))
    except UserError as error:
        return str(error)
    return "adopted"


@pytest.mark.parametrize("wire", [None, SimpleNamespace()], ids=["torchrun", "our launcher"])
def test_only_our_launcher_can_give_rank_zero_away(wire: Any) -> None:
    """Under torchrun, launch.node_rank has no effect: the folder must go to the machine."""
    config, _ = resolved("model=toy", "world_size=2")
    job = Job(config=replace(config, resume="RUN"), started_at=0.0, provenance={}, wire=wire)
    for sentence in run_ranks(adopted, 2, job):
        assert "has rank 0; copy it to " in sentence
        assert ("launch.node_rank=0" in sentence) == (wire is not None)
