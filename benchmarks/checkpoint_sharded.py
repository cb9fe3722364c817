"""How long a checkpoint of a sharded model stops the loop, in both formats and by torch's own way.

python benchmarks/checkpoint_sharded.py

Two ranks save gpt_10m under FSDP2 with AdamW's state, 124 MiB, in turns: as one file of rank 0, as
a file of each rank, and by ``torch.distributed.checkpoint.async_save`` into files of the same
format. All are flushed to the disk. The loop waits for the call; "on the disk" is the time until
the save is complete. Read the medians.
"""

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.fsdp import fully_shard

from ddp_runner.checkpoint.optimizer_state import settings_of
from ddp_runner.checkpoint.saved_objects import Saver
from ddp_runner.checkpoint.shard_notes import Shards
from ddp_runner.checkpoint.writer import CheckpointWriter
from ddp_runner.config.training import CheckpointConfig
from ddp_runner.models.gpt import GPT

RANKS = 2


def main() -> None:
    """Measure in turns, and print the medians of rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="on the disk to write to")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        mp.spawn(work, args=(Path(folder), args.turns), nprocs=RANKS)


def work(rank: int, folder: Path, turns: int) -> None:
    """Save in turns on one rank."""
    torch.set_num_threads(1)
    method = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=RANKS)
    model, optimizer = trained()
    group = dist.new_group(backend="gloo")  # async_save's thread needs its own
    ways: dict[str, Callable[[int], Callable[[], object]]] = {
        "format=file": ours(model, optimizer, rank, folder / "file", is_sharded=False),
        "format=sharded": ours(model, optimizer, rank, folder / "sharded", is_sharded=True),
        "dcp.async_save": partial(torchs, model, optimizer, group, folder),
    }
    waits, ends = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    for turn in range(turns + 1):
        for name in list(ways) if turn % 2 else reversed(ways):
            dist.barrier()
            start = time.perf_counter()
            finish = ways[name](turn)
            wait = time.perf_counter() - start
            finish()
            dist.barrier()
            if turn:  # the first allocates memory
                waits[name].append(wait)
                ends[name].append(time.perf_counter() - start)
    for name in ways if rank == 0 else ():
        wait, end = statistics.median(waits[name]), statistics.median(ends[name])
        print(
            f"{name:15} the loop waits {wait:.3f} s ({min(waits[name]):.3f} to "
            f"{max(waits[name]):.3f}), on the disk after {end:.3f} s",
            flush=True,
        )
    dist.destroy_process_group()


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return the sharded model and its optimizer after two steps."""
    model = GPT(vocab_size=256, num_layers=6, width=384, num_heads=6)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.zeros(2, 16, dtype=torch.int64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def ours(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    rank: int,
    folder: Path,
    *,
    is_sharded: bool,
) -> Callable[[int], Callable[[], object]]:
    """Return a function that starts a save as a run does, and returns what waits for its end."""
    objects: dict[str, Any] = {"model": model, "optimizer": optimizer}
    saver = Saver(
        objects, settings_of(objects), task="train", num_shares=RANKS, is_sharded=is_sharded
    )
    shards = Shards(rank, RANKS) if is_sharded else None
    writer = CheckpointWriter(folder, CheckpointConfig(), wire=None, log=print, shards=shards)

    def save(step: int) -> Callable[[], object]:
        writer.begin(step)
        copies = set[int]()
        content = saver.snapshot(step, copies=copies)
        if rank == 0 or is_sharded:
            writer.save(content, step=step, metrics={}, copies=copies)
        return writer.wait

    return save


def torchs(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, group: Any, folder: Path, step: int
) -> Callable[[], object]:
    """Start torch's own save; return what waits for its end."""
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    states = get_state_dict(model, optimizer, options=options)
    tensors = {
        f"{number}.{name}": value
        for number, state in enumerate(states)
        for name, value in state.items()
        if isinstance(value, torch.Tensor)
    }
    writer = dcp.HuggingFaceStorageWriter(str(folder / f"dcp-{step}"), save_distributed=True)
    future: Any = dcp.async_save(tensors, storage_writer=writer, process_group=group)
    result: Callable[[], object] = future.result
    return result


if __name__ == "__main__":
    main()
