"""Sharded checkpoints: resumed at any place, read by other tools, whole after any kill."""

import errno
import json
import os
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import forked, kill_at_call, latest_checkpoint, wait_status
from ranks import run_ranks
from safetensors import safe_open
from tiers import named, selected
from train_states import build, compose_config, equal, save_state, take_steps

from ddp_runner.checkpoint import shard_notes
from ddp_runner.checkpoint.between_ranks import agreed_checkpoint
from ddp_runner.checkpoint.manifest import STATE, read_manifest
from ddp_runner.checkpoint.shard_notes import Shards
from ddp_runner.checkpoint.state_parts import split_off
from ddp_runner.checkpoint.store import begin_checkpoint, load_checkpoint, load_plain_data
from ddp_runner.checkpoint.weights import read_model
from ddp_runner.checkpoint.writer import CheckpointWriter
from ddp_runner.config.schema import Config
from ddp_runner.config.training import CheckpointConfig
from ddp_runner.dist_env import DistEnv
from ddp_runner.errors import UserError
from ddp_runner.parallelism.shards import whole
from ddp_runner.train.snapshot import restore, snapshot

# Sizes that ranks cannot split evenly, and shards without rows.
GPT = (
    *("model=gpt", "model.num_layers=2", "model.width=24", "model.num_heads=2"),
    *("model.feedforward=66", "model.min_vocab_size=259", "dataset.sequence_length=8"),
    *("batch.global_size=8", "ema.decay=0.9", "train.max_steps=9", "scheduler=cosine"),
    "train.grad_accum_steps=2",
)
PLACES = {
    "single": ("single", 1),
    "ddp": ("ddp", 2),
    "fsdp": ("fsdp", 2),
    "fsdp 4": ("fsdp", 4),
    "hsdp": ("hsdp", 4),
    "tp": ("tp", 2),
    "fsdp_tp": ("fsdp_tp", 4),
    "pp": ("pp", 2),
    "ddp_pp": ("ddp_pp", 4),
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
    kinds = [(source, ("checkpoint.format=sharded",), source) for source in sources]
    kinds += [(source, (), f"{source}, file") for source in sources if source in ("tp", "pp")]
    for source, keys, name in kinds:
        mode, ranks = PLACES[source]
        config = config_of(mode, ranks, *keys)
        run_ranks(saved_in, ranks, config, config_of(mode, ranks), folder / name)
    return {name: folder / name for _, _, name in kinds}


@pytest.mark.parametrize("target", named(PLACES, quick=["single"]))
def test_any_place_resumes_any_other(saved: dict[str, Path], target: str) -> None:
    """Model, optimizer and averaged weights are equal bit for bit."""
    mode, ranks = PLACES[target]
    (results, *_) = run_ranks(restored_from, ranks, config_of(mode, ranks), [*saved.values()])
    assert dict(zip(saved, results, strict=True)) == dict.fromkeys(saved, True)


@pytest.mark.full
def test_momentum_of_which_each_rank_has_a_summand_is_saved(tmp_path: Path) -> None:
    """Norms of sequence parallelism have such gradients, and SGD keeps them as they are."""
    own = ("parallelism.sequence_parallel=true", "optimizer=momentum")
    config = config_of("tp", 2, *own)
    sharded = config_of("tp", 2, *own, "checkpoint.format=sharded")
    run_ranks(saved_in, 2, sharded, config, tmp_path)
    assert run_ranks(restored_from, 2, config, [tmp_path])[0] == [True]


def test_a_stage_does_not_lose_what_its_file_cannot_hold() -> None:
    """Every rank rejects it: rank 0 would save a tensor without values."""
    state = {"model": {"table": torch.empty(3, dtype=torch.complex128, device="meta")}}
    assert split_off(state, {}, rank=0)[1] == {}
    message = "model.table is torch.complex128, torch.strided, which a rank of a pipeline cannot"
    with pytest.raises(UserError, match=message):
        split_off(state, {"model.table": 1}, rank=0)


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


def content_of(rank: int, step: int) -> dict[str, Any]:
    """Return the content of a checkpoint of two ranks, each with half of the rows."""
    rows = torch.full((2, 3), float(10 * step + rank))
    objects = {"model": {"weight": torch.empty(4, 3, device="meta")}}
    return {"step": step, "objects": objects, "parts": {"model.weight": ((2 * rank, 0), rows)}}


def write_part(folder: Path, rank: int, step: int, other: int | None = None) -> None:
    """Write a rank's part of a checkpoint; the loop fails once the `other` process has ended."""
    shard_notes.IDLE_S = 0.0
    shards = Shards(rank, 2)
    writer = CheckpointWriter(folder, CheckpointConfig(), wire=None, log=print, shards=shards)
    with suppress(KeyboardInterrupt), writer:
        writer.save(content_of(rank, step), step=step, metrics={})
        while other is not None and Path(f"/proc/{other}").exists():
            time.sleep(0.005)
        raise KeyboardInterrupt


def test_a_stop_ends_the_wait_for_a_rank_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its launcher asks the others to stop; rank 0 may be waiting for the last checkpoint."""
    monkeypatch.setattr(shard_notes, "IDLE_S", 0.05)
    shards = Shards(0, 2, wire=cast(Any, SimpleNamespace(stop=False, has_signal=True)))
    with pytest.raises(UserError, match="is incomplete: rank 1 did not write its part"):
        shards.write(tmp_path, parts=content_of(0, 1)["parts"])


def save_both(folder: Path, step: int, traps: dict[int, Callable[[], None]] | None = None) -> bool:
    """Save with two processes; return whether a trap killed one of them."""
    begin_checkpoint(folder, step, log=pytest.fail)
    traps = {0: lambda: None, 1: lambda: None} | (traps or {})
    second = forked(traps[1], partial(write_part, folder, 1, step))
    first = forked(traps[0], partial(write_part, folder, 0, step, second))
    statuses = [wait_status(second), wait_status(first)]
    return any(map(os.WIFSIGNALED, statuses))


def newest_step(folder: Path) -> int:
    """Return the step of the newest checkpoint, after a look at all its numbers."""
    path = latest_checkpoint(folder, log=pytest.fail)
    assert path is not None
    content = load_checkpoint(path)
    step = int(content["step"])
    rows = [[10.0 * step + rank] * 3 for rank in (0, 0, 1, 1)]
    assert whole(content["objects"]["model"]["weight"]).tolist() == rows
    return step


@pytest.mark.parametrize("rank", [0, 1])
def test_killed_between_any_two_calls_a_whole_checkpoint_is_left(tmp_path: Path, rank: int) -> None:
    """Rank 0 or another: the latest is the old or the new one; the next save removes the rest."""
    for number in range(100):
        folder = tmp_path / str(number)
        save_both(folder, 5)
        killed = save_both(folder, 6, {rank: partial(kill_at_call, number)})
        assert newest_step(folder) in (5, 6)
        if not killed:
            assert number > (8 if rank == 0 else 2)
            assert newest_step(folder) == 6
            break
        save_both(folder, 7)
        assert newest_step(folder) == 7
        assert all(path.name.startswith("step-") for path in folder.iterdir())
    else:
        pytest.fail("the save never ran to its end")


def test_a_rank_that_cannot_write_is_named_by_rank_zero(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A full disk of one machine: the checkpoint before is intact."""
    save_both(tmp_path, 5)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    save_both(tmp_path, 6, {1: lambda: setattr(shard_notes, "write_parts", full)})
    assert "(rank 1: No space left on device); free space" in capfd.readouterr().out
    assert newest_step(tmp_path) == 5


def cut(path: Path) -> str:
    """Remove the last byte; return the message."""
    path.write_bytes(path.read_bytes()[:-1])
    return rf"expected {path.name} of (\d+) bytes.*found (\d+) bytes"


def flip(path: Path) -> str:
    """Flip a bit; return the message."""
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    return rf"expected {path.name} of.*SHA-256"


def remove(path: Path) -> str:
    """Remove the file; return the message."""
    path.unlink()
    return rf"{path.name} \(No such file"


@pytest.mark.parametrize("damage", [flip, cut, remove])
def test_a_damaged_part_sends_a_resume_to_the_checkpoint_before(
    tmp_path: Path, damage: Callable[[Path], str]
) -> None:
    """The ranks share the files, and all hear what one of them finds."""
    save_both(tmp_path, 5)
    save_both(tmp_path, 6)
    message = damage(tmp_path / "step-00000006" / "shard-00002-of-00002.safetensors")
    (logged, path), other = run_ranks(found_in, 2, tmp_path)
    assert path == tmp_path / "step-00000005"
    assert other == ([], path)
    assert re.search(message, logged[0])
    assert logged[1] == f"{path} is used in its place"


def found_in(env: DistEnv, folder: Path) -> tuple[list[str], Path | None]:
    """Return what is logged, and the checkpoint that is found."""
    logged = list[str]()
    return logged, agreed_checkpoint(folder, log=logged.append)
