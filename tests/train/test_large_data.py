"""Data that stay in their files give the losses of prepared data, and resume exactly."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from pictures import write_folders, write_shards
from ranks import run_ranks
from torch import Tensor
from train_states import TOLERANCES, Trace, compose_config, run_loop

from ddp_runner.config.schema import Config
from ddp_runner.dist_env import DistEnv

NUM_STEPS, MIDDLE = 12, 6  # four steps an epoch, so that the middle is inside the second
PICTURES = (
    "model=convnet", "dataset.num_classes=3",
    "dataset.height=8", "dataset.width=8", "batch.global_size=8", "optimizer.lr=0.05",
    "dataset.augmentation.horizontal_flip=true", "dataset.augmentation.crop_padding=1",
    "train.log_every_steps=1", f"train.max_steps={NUM_STEPS}",
)  # fmt: skip
PREPARED = ("dataset.prepare=true",)
FILES = ("dataset.prepare=false", "dataset.num_workers=0")
WORKERS = ("dataset.prepare=false", "dataset.num_workers=1")


def loops(env: DistEnv, plans: list[list[tuple[Config, int]]], folders: list[Path]) -> list[Trace]:
    """Train by each plan: configs and the steps at which they end; return the last traces."""
    last = []
    for plan, folder in zip(plans, folders, strict=True):
        for config, end in plan:
            trace = run_loop(env, config, max_steps=end, folder=folder)
        last.append(trace)
        gc.collect()  # ends the workers, for which multiprocessing would wait
    return last


@pytest.mark.full
def test_both_ways_give_the_same_losses(tmp_path: Path) -> None:
    """Bit for bit, with augmentation and two ranks; a run that changes the way midway agrees."""
    write_folders(tmp_path / "pets", num_train=27, num_eval=7)
    keys = (*PICTURES, f"data_root={tmp_path}", "dataset=image_folder", "dataset.folder=pets")
    prepared, files, workers = (
        compose_config(*keys, *way, world_size=2) for way in (PREPARED, FILES, WORKERS)
    )
    plans = [
        [(prepared, NUM_STEPS)],
        [(files, NUM_STEPS)],
        [(prepared, MIDDLE), (workers, NUM_STEPS)],
        [(files, MIDDLE), (prepared, NUM_STEPS)],
    ]
    folders = [tmp_path / f"run{index}" for index in range(len(plans))]
    assert_same_runs(run_ranks(loops, 2, plans, folders)[0])


def columns(row: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the brightness of a picture's ten columns, flipped at random, and its class."""
    means = (row["png"] / 255).mean(dim=(0, 1))
    return (means.flip(0) if torch.rand(()) < 0.5 else means), row["cls"].float().expand(5)


@pytest.mark.full
def test_shards_train_alike_at_each_world_size_and_resume_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The resume bit for bit, with two ranks, workers and a stop amid an epoch."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    write_shards(tmp_path / "tars", num_train=27, num_eval=7)
    keys = (
        "model=toy", "batch.global_size=8", "optimizer.lr=0.05", "train.log_every_steps=1",
        f"data_root={tmp_path}", "dataset=hf_dataset", "dataset.path=webdataset",
        "dataset.data_files={train: tars/train-*.tar, test: tars/val-*.tar}",
        f"dataset.transform={{_target_:{__name__}.columns,_partial_:true}}",
        f"allowed_targets=[{__name__}]",
    )  # fmt: skip
    single, alone, workers = (
        compose_config(*keys, f"dataset.num_workers={number}", world_size=world_size)
        for world_size, number in ((1, 0), (2, 0), (2, 1))
    )
    plans = [[(alone, NUM_STEPS)], [(alone, MIDDLE), (workers, NUM_STEPS)]]
    traces = run_ranks(loops, 2, plans, [tmp_path / "whole", tmp_path / "parts"])[0]
    assert_same_runs(traces)
    ((other,),) = run_ranks(loops, 1, [[(single, NUM_STEPS)]], [tmp_path / "single"])
    expected, found = torch.tensor(traces[0].losses), torch.tensor(other.losses)
    torch.testing.assert_close(found, expected, **TOLERANCES[torch.float32])


def assert_same_runs(traces: list[Trace]) -> None:
    """Assert that each run ends as the first, and logged what that one did."""
    whole, *others = traces
    assert len(whole.losses) == NUM_STEPS
    expected = without_times(whole)
    for trace in others:
        lines = without_times(trace)
        assert lines[-1]["step"] == NUM_STEPS
        assert all(line in expected for line in lines), trace.error
        assert trace.weights.equal(whole.weights)


def without_times(trace: Trace) -> list[dict[str, float]]:
    """Return what a run logged, without what the machine's speed decides."""
    return [{k: v for k, v in line.items() if "perf/" not in k} for line in trace.lines]
