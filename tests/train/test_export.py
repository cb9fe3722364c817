"""A completed run exports the best model that loads, even if checkpoints are damaged."""

import os
from pathlib import Path
from typing import Any

import torch
from ranks import run_ranks
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from train_states import TOY, Trace, at, build, compose_config, flat_weights, kept_in

from ddp_runner.checkpoint.manifest import STATE
from ddp_runner.checkpoint.store import save_checkpoint
from ddp_runner.config.schema import Config
from ddp_runner.config.training import CheckpointConfig
from ddp_runner.dist_env import DistEnv
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.train.best_model import export_best
from ddp_runner.train.snapshot import snapshot

LOSSES = {1: 0.2, 2: 0.1, 3: 0.3, 4: 0.4}  # of each checkpoint: step 2 is the best, 4 the last


def fill(module: torch.nn.Module, value: float) -> None:
    """Set every element of every parameter to a value."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(value)


def export_from(
    env: DistEnv, config: Config, run_dir: Path, damaged: tuple[int, ...], foreign: int = 0
) -> tuple[Tensor, list[str]]:
    """Save four checkpoints, damage some, export; return this rank's weights and its log.

    That of the step `foreign` is whole, and of a smaller model.
    """
    state, trace = build(env, config), Trace()
    for step, loss in LOSSES.items():
        fill(state.module, step)
        content: dict[str, Any] = snapshot(at(state, step=step))
        if step == foreign:
            model = content["objects"]["model"]
            content["objects"]["model"] = {name: one[:1].clone() for name, one in model.items()}
        if env.is_rank_zero:
            save_checkpoint(
                run_dir / "checkpoints",
                content,
                step=step,
                metrics={"eval/loss": loss},
                config=CheckpointConfig(keep=9, monitor="eval/loss", mode="min"),
                log=print,
            )
    if env.is_rank_zero:
        for step in damaged:
            path = run_dir / "checkpoints" / f"step-{step:08d}" / STATE
            os.truncate(path, path.stat().st_size - 1)
    state = at(state, epoch=1, step=4)
    state.progress.metrics["eval/loss"] = LOSSES[4]
    export_best(state, RunDir(run_dir), kept_in(run_dir, trace), log=trace.logged.append)
    return flat_weights(state.module), trace.logged


def run(folder: Path, *damaged: int, load_best: bool = True) -> tuple[list[Tensor], list[str]]:
    """Return the weights of two ranks after the export, and what the first one logged."""
    config = compose_config(
        *TOY,
        "checkpoint.monitor=eval/loss",
        "checkpoint.mode=min",
        f"checkpoint.load_best={str(load_best).lower()}",
        world_size=2,
    )
    results = run_ranks(export_from, 2, config, folder, damaged)
    return [weights for weights, _ in results], results[0][1]


def exported(folder: Path) -> tuple[float, str]:
    """Return the one value of the exported weights, and the step that they claim."""
    (value,) = (
        torch.cat([one.flatten() for one in load_file(folder / "model.safetensors").values()])
        .unique()
        .tolist()
    )
    with safe_open(folder / "model.safetensors", "pt") as file:
        return value, file.metadata()["step"]


def test_a_damaged_best_checkpoint_gives_way_to_the_next_best(tmp_path: Path) -> None:
    """It is logged; every rank gets the model from the first, which alone reads it."""
    weights, logged_lines = run(tmp_path, 2)
    assert exported(tmp_path) == (1.0, "1")
    assert all((one == 1.0).all() for one in weights)
    assert f"step-{2:08d} is damaged" in logged_lines[0]
    assert logged_lines[-1] == "best by eval/loss: 0.2000 at step 1, in model.safetensors"


def test_a_checkpoint_of_another_model_gives_way_to_the_next_best(tmp_path: Path) -> None:
    """Its checksum is right, and no rank waits for weights that do not fit."""
    keys = ("checkpoint.monitor=eval/loss", "checkpoint.mode=min", "checkpoint.load_best=true")
    config = compose_config(*TOY, *keys, world_size=2)
    (weights, logged_lines), _ = run_ranks(export_from, 2, config, tmp_path, (), 2)
    assert exported(tmp_path) == (1.0, "1")
    assert (weights == 1.0).all()
    assert "does not fit the model: " in logged_lines[0]
    assert logged_lines[0].endswith("; trying the next best checkpoint")


def test_where_no_better_one_is_whole_the_last_model_is_exported(tmp_path: Path) -> None:
    """From memory: its own checkpoint may be damaged as well."""
    _, logged_lines = run(tmp_path, 1, 2, 3, 4, load_best=False)
    assert exported(tmp_path) == (4.0, "4")
    assert len(logged_lines) == 4
    assert "0.4000 at step 4" in logged_lines[-1]


def test_a_finished_training_never_fails_for_a_manifest(tmp_path: Path) -> None:
    """Without any manifest the last model is the best that is known."""
    folder = tmp_path / "checkpoints"
    config = compose_config(*TOY, "checkpoint.monitor=eval/loss", "checkpoint.mode=min")
    (logged_lines,) = run_ranks(without_manifests, 1, config, tmp_path)
    assert not list(folder.glob("*/manifest.json"))
    assert exported(tmp_path) == (3.0, "4")
    assert logged_lines[0].startswith("no valid checkpoint has a finite eval/loss")


def without_manifests(env: DistEnv, config: Config, run_dir: Path) -> list[str]:
    """Deliver from a folder whose checkpoint has lost its manifest."""
    state, trace = build(env, config), Trace()
    fill(state.module, 3.0)
    (run_dir / "checkpoints" / "step-00000004").mkdir(parents=True)
    state = at(state, epoch=1, step=4)
    export_best(state, RunDir(run_dir), kept_in(run_dir, trace), log=trace.logged.append)
    return trace.logged
