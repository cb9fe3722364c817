"""Runs on a user's own dataset: killed and resumed, and on one to four ranks."""

import signal
from functools import partial
from pathlib import Path

import pytest
import torch
from commands import background, run_command, wait_for_end, wait_until_gone
from injection import At, Fault, inject, send_signal
from own_data import end_workers
from own_pictures import HELPERS, PICTURES
from ranks import run_ranks
from run_folders import checkpoint_steps, metrics, record
from train_states import TOLERANCES, Trace, build, compose_config, take_steps
from trainings import RUN, assert_resumes

from ddp_runner.config.schema import Config
from ddp_runner.data.loader import LoaderSplit
from ddp_runner.dist_env import DistEnv

pytestmark = pytest.mark.full

RUN_KEYS = (
    *PICTURES,
    "world_size=2",
    "train.epochs=3",
    "checkpoint.every_steps=5",
    "checkpoint.every_epochs=null",
    "backend.timeout_s=120",
    f"hydra.run.dir={RUN}",
)


def test_a_run_killed_amid_an_epoch_goes_on_as_if_undisturbed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks with two workers each; metrics and weights are equal bit for bit."""
    monkeypatch.setenv("PYTHONPATH", HELPERS)
    whole = run_command(*RUN_KEYS, folder=tmp_path / "whole")
    assert (whole.exit_code, whole.stderr) == (0, "")
    assert metrics(whole.run_dir)[-1]["eval/accuracy"] > 0.9
    fault = Fault(partial(send_signal, signal.SIGKILL), At(rank=1, step=13))
    folder = tmp_path / "killed"
    with background(*RUN_KEYS, folder=folder, prepare=inject(fault)) as run:
        assert wait_for_end(run, folder).exit_code != 0
        wait_until_gone(run)  # the workers, too
    assert record(folder / RUN)["status"] == "failed"
    assert checkpoint_steps(folder / RUN)[-1] == 10  # the third step of the second epoch
    assert_resumes(folder, whole.run_dir, PICTURES[-1])


def steps(env: DistEnv, config: Config) -> Trace:
    """Take ten steps, and end the workers: torch would wait some seconds for each of them."""
    state = build(env, config)
    trace = take_steps(env, config, 10, state=state)
    split = state.batches.split
    assert isinstance(split, LoaderSplit)
    end_workers(split)
    return trace


def test_one_to_four_ranks_take_the_same_steps() -> None:
    """Through a whole epoch and into the next; random changes of samples included."""
    (expected,) = run_ranks(steps, 1, compose_config(*PICTURES))
    assert len(set(expected.losses)) == 10
    for world_size in (2, 3, 4):
        config = compose_config(*PICTURES, world_size=world_size)
        for found in run_ranks(steps, world_size, config):
            torch.testing.assert_close(found.losses, expected.losses, **TOLERANCES[torch.float32])
            torch.testing.assert_close(found.weights, expected.weights, **TOLERANCES[torch.float32])
