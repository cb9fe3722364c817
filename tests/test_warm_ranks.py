"""Ranks that stay alive between tests look new to each of them."""

import os

import numpy as np
import pytest
import torch
from ranks import RankFailedError, rank_pids, run_ranks

import ddp_runner.distributed
from ddp_runner.dist_env import DistEnv
from ddp_runner.distributed import sum_over_ranks


def facts(env: DistEnv) -> dict[str, object]:
    """Return what a call could find of the one before it."""
    return {
        "draws": (torch.rand(3).tolist(), float(np.random.rand())),
        "dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "variable": os.environ.get("LEFT_BEHIND"),
        "function": ddp_runner.distributed.sum_over_ranks is sum_over_ranks,
        "sum": sum_over_ranks([1.0]),
    }


def disturb(env: DistEnv, how: str) -> None:
    """Change what a process keeps."""
    torch.manual_seed(env.rank)
    np.random.seed(env.rank)
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(2)
    os.environ["LEFT_BEHIND"] = "yes"
    if how == "patched":
        vars(ddp_runner.distributed)["sum_over_ranks"] = print
    if how == "raises" and env.rank == 1:
        raise LookupError


@pytest.mark.parametrize("how", ["settings", "patched", "raises"])
def test_a_call_finds_nothing_of_the_one_before(how: str) -> None:
    """Settings are put back; what else was changed, or failed, ends the processes."""
    expected = run_ranks(facts, 2)
    assert [one["sum"] for one in expected] == [[2.0]] * 2
    before = rank_pids()[:2]
    if how == "raises":
        with pytest.raises(RankFailedError, match="LookupError"):
            run_ranks(disturb, 2, how)
    else:
        run_ranks(disturb, 2, how)
    assert run_ranks(facts, 2) == expected
    assert (rank_pids()[:2] == before) == (how == "settings")
