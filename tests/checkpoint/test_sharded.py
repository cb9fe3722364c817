"""Sharded checkpoints: resumed at any place, read by other tools, whole after any kill."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ranks import run_ranks
from safetensors import safe_open
from tiers import named, selected
from train_states import build, compose_config, equal, save_state, take_steps

from ddp_runner.checkpoint.manifest import STATE, read_manifest
from ddp_runner.checkpoint.store import load_plain_data
from ddp_runner.checkpoint.weights import read_model
from ddp_runner.config.schema import Config
from ddp_runner.dist_env import DistEnv
from ddp_runner.parallelism.shards import whole
from ddp_runner.train.snapshot import restore, snapshot

# Sizes that ranks cannot split evenly, and shards without rows.
GPT = (
    *("model=gpt", "model.num_layers=2", "model.width=24", "model.num_heads=2"),
    *("model.feedforward=66", "model.min_vocab_size=259", "dataset.sequence_length=8"),
    *("batch.global_size=8", "ema.decay=0.9", "train.max_steps=9", "scheduler=cosine"),
)
PLACES = {
    "single": ("single", 1),
    "ddp": ("ddp", 2),
    "fsdp": ("fsdp", 2),
    "fsdp 4": ("fsdp", 4),
    "hsdp": ("hsdp", 4),
    "tp": ("tp", 2),
    "fsdp_tp": ("fsdp_tp", 4),
}
STEPS = 3


def config_of(mode: str, ranks: int, *more: str) -> Config:
    """Return a config of the small GPT."""
    return compose_config(*GPT, f"parallelism={mode}", *more, world_size=ranks)


def saved_in(env: DistEnv, config: Config, whole_config: Config, folder: Path) -> None:
    """Train, save a checkpoint, and keep the whole state beside it."""
    state = build(env, config)
    take_steps(env, config, STEPS, state=state)
    state.progress.step = STEPS
    save_state(state, folder)
    state.work = replace_config(state, whole_config)
    content = snapshot(state)
    if env.is_rank_zero:
        torch.save(content, folder / "whole.pt")


def replace_config(state: Any, config: Config) -> Any:
    """Return a state's work with another config."""
    return replace(state.work, config=config)


def trained_part(content: Any) -> Any:
    """Return the part of a checkpoint's content that no mode sets."""
    objects = content["objects"]
    names = ("model", "scheduler", "ema", "batches")
    return {name: objects[name] for name in names} | {"state": objects["optimizer"]["state"]}


def restored_from(env: DistEnv, config: Config, folders: Sequence[Path]) -> list[bool]:
    """Resume each checkpoint; return whether the whole state equals the saved one."""
    results = []
    for folder in folders:
        state = build(env, config)
        assert restore(state, folder, log=lambda _: None) == STEPS
        content = snapshot(state)
        if env.is_rank_zero:
            expected = load_plain_data(folder / "whole.pt", named="it", fix="")
            results.append(equal(*map(trained_part, (content, expected))))
    return results


@pytest.fixture(scope="module")
def saved(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Return a folder with a sharded checkpoint of each place."""
    folder = tmp_path_factory.mktemp("sharded")
    sources = tuple(PLACES) if len(selected(request, "target")) > 1 else ("fsdp", "ddp")
    for source in sources:
        mode, ranks = PLACES[source]
        sharded = config_of(mode, ranks, "checkpoint.format=sharded")
        run_ranks(saved_in, ranks, sharded, config_of(mode, ranks), folder / source)
    return {source: folder / source for source in sources}


@pytest.mark.parametrize("target", named(PLACES, quick=["single"]))
def test_any_place_resumes_any_other(saved: dict[str, Path], target: str) -> None:
    """Model, optimizer and averaged weights are equal bit for bit."""
    mode, ranks = PLACES[target]
    (results, *_) = run_ranks(restored_from, ranks, config_of(mode, ranks), [*saved.values()])
    assert dict(zip(saved, results, strict=True)) == dict.fromkeys(saved, True)


def test_other_tools_read_the_folder(saved: dict[str, Path]) -> None:
    """Every file but the state is safetensors, which torch's own reader puts together."""
    folder = saved["fsdp"] / "step-00000003"
    files = sorted(path.name for path in folder.iterdir())
    shards = [f"shard-0000{rank}-of-00002.safetensors" for rank in (1, 2)]
    assert files == ["manifest.json", *shards, STATE]
    assert [*read_manifest(folder).files] == [STATE, *shards]
    model = read_model(folder, is_average=False, fix="")
    tensors = {f"model.{name}": torch.empty(value.shape) for name, value in model.items()}
    reader = dcp.HuggingFaceStorageReader(str(folder))
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    for name, value in model.items():
        assert torch.equal(tensors[f"model.{name}"], whole(value))
    with safe_open(folder / shards[1], framework="pt") as file:
        offsets = json.loads(file.metadata()["DCP_SHARDING_INFO"])
        part = file.get_slice("model.tokens.weight").get_shape()
    assert (offsets["model.tokens.weight"]["saved_offsets"], part) == ([130, 0], [129, 24])
