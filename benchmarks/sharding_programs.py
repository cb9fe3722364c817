"""The programs that sharding.py compares the runner with: DDP and FSDP2, each written three ways.

They are started by it, under torchrun: a loop by hand, Accelerate, and Lightning Fabric. Model,
batches, loss, optimizer and clipping are those of the runner; the text is its default one. Each
step waits for its program's turn.
"""

import argparse
import logging
import os
import warnings
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from sharding_step import take_turn
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from ddp_runner.models.gpt import GPT, Block

LR, CLIP_NORM, VOCABULARY = 1e-3, 1.0, 256


def main() -> None:
    """Run one rank of one program until it is ended."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program", choices=PROGRAMS)
    parser.add_argument("mode", choices=["ddp", "fsdp"])
    for key in ("layers", "width", "heads", "length", "batch"):
        parser.add_argument(f"--{key}", type=int, required=True)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    PROGRAMS[args.program](args)


def model_of(args: argparse.Namespace) -> GPT:
    """Return the model."""
    return GPT(
        vocab_size=VOCABULARY, num_layers=args.layers, width=args.width, num_heads=args.heads
    )


def dataset_of(args: argparse.Namespace) -> TensorDataset:
    """Return windows of Python's language reference and the same moved by one, as dataset=text."""
    from pydoc_data.topics import topics

    tokens = torch.frombuffer(bytearray("".join(topics.values()), "utf-8"), dtype=torch.uint8)
    count = (len(tokens) - 1) // args.length
    inputs, targets = (
        tokens[first : first + count * args.length].long().view(count, args.length)
        for first in (0, 1)
    )
    return TensorDataset(inputs, targets)


def check_sharding(model: nn.Module, args: argparse.Namespace) -> None:
    """Reject a program that does not shard what it should: a wrong comparison looks fast."""
    found = sum(isinstance(one, FSDPModule) for one in model.modules())
    assert found > args.layers if args.mode == "fsdp" else found == 0, found


def loss_of(model: Any, batch: Any) -> torch.Tensor:
    """Return the mean loss of a token."""
    inputs, targets = batch
    return cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def by_hand(args: argparse.Namespace) -> None:
    """Train as torch's tutorials do."""
    dist.init_process_group("gloo")
    model: nn.Module = model_of(args)
    if args.mode == "fsdp":
        for block in cast(Any, model).blocks:
            fully_shard(block)
        fully_shard(model)
    else:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    dataset = dataset_of(args)
    sampler: DistributedSampler[Any] = DistributedSampler(dataset)
    loader: DataLoader[Any] = DataLoader(dataset, batch_size=args.batch, sampler=sampler)
    for epoch in range(1000):
        sampler.set_epoch(epoch)
        for batch in loader:
            take_turn()
            loss = loss_of(model, batch)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
            optimizer.step()


def accelerate(args: argparse.Namespace) -> None:
    """Train with Accelerate."""
    from accelerate import Accelerator, PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    plugin = None
    if args.mode == "fsdp":
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=[Block.__name__],
            reshard_after_forward=True,
        )
        # On the CPU it leaves out the plugin without a word and trains with DDP.
        PartialState(cpu=True)
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    torch.set_num_threads(1)  # it chooses for itself
    model: Any = model_of(args)
    model._no_split_modules = [Block.__name__]
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=LR)
    loader: Any = DataLoader(dataset_of(args), batch_size=args.batch, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    check_sharding(model, args)
    for _ in range(1000):
        for batch in loader:
            take_turn()
            loss = loss_of(model, batch)
            optimizer.zero_grad()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), CLIP_NORM)
            optimizer.step()


def fabric(args: argparse.Namespace) -> None:
    """Train with Lightning Fabric."""
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import ModelParallelStrategy

    def split(model: nn.Module, mesh: Any) -> nn.Module:
        for block in cast(Any, model).blocks:
            fully_shard(block, mesh=mesh["data_parallel"])
        return fully_shard(model, mesh=mesh["data_parallel"])

    num_ranks = int(os.environ["WORLD_SIZE"])
    strategy: Any = "ddp"
    if args.mode == "fsdp":
        strategy = ModelParallelStrategy(
            split, data_parallel_size=num_ranks, tensor_parallel_size=1
        )
    runner = Fabric(accelerator="cpu", devices=num_ranks, strategy=strategy)
    runner.launch()
    if args.mode == "fsdp":
        model: Any = runner.setup_module(model_of(args))
        optimizer: Any = runner.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=LR))
    else:
        bare = model_of(args)
        model, optimizer = runner.setup(bare, torch.optim.AdamW(bare.parameters(), lr=LR))
    check_sharding(getattr(model, "module", model), args)
    dataset = DataLoader(dataset_of(args), batch_size=args.batch, shuffle=True)
    loader: Any = runner.setup_dataloaders(dataset)
    for _ in range(1000):
        for batch in loader:
            take_turn()
            loss = loss_of(model, batch)
            optimizer.zero_grad()
            runner.backward(loss)
            if args.mode == "fsdp":  # Fabric's own clipping knows no FSDP2
                nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
            else:
                runner.clip_gradients(model, optimizer, max_norm=CLIP_NORM)
            optimizer.step()


PROGRAMS: dict[str, Callable[[argparse.Namespace], None]] = {
    "by_hand": by_hand,
    "accelerate": accelerate,
    "fabric": fabric,
}

if __name__ == "__main__":
    main()
