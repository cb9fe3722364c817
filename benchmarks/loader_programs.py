"""The dataset that all programs of loader.py train on, and the four programs that are not ours.

torchrun --standalone --nproc-per-node=2 benchmarks/loader_programs.py plain --data-root data

Each is the loop that its library's documentation shows first: DDP and a DataLoader by hand,
Accelerate, Lightning Fabric, and Lightning's Trainer. MNIST is decoded and transformed sample by
sample, as in the tutorials.
"""

import argparse
import json
import logging
import os
import time
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from torchvision import models, transforms
from torchvision.datasets import MNIST
from tutorial import BATCH_SIZE, ConvNet, init_process_group

LR = 1e-3


def mnist(data_root: str, num_samples: int, train: bool = True) -> Dataset[Any]:
    """Return the first samples of MNIST, transformed one by one."""
    steps = [transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))]
    whole = MNIST(data_root, train=train, transform=transforms.Compose(steps))
    return Subset(whole, range(num_samples))


def pictures(num_samples: int) -> Dataset[Any]:
    """Return random pictures of 32x32 pixels and classes, in memory."""
    images = torch.rand(num_samples, 3, 32, 32)
    return TensorDataset(images, torch.randint(0, 10, (num_samples,)))


def model_of(args: argparse.Namespace) -> nn.Module:
    """Return the model of every program."""
    return ConvNet() if args.model == "convnet" else models.resnet18(num_classes=10)


def parse_args() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description="Train the ConvNet on MNIST, sample by sample.")
    parser.add_argument("program", choices=PROGRAMS)
    parser.add_argument("--data-root", required=True)
    parser.add_argument("--model", default="convnet", help="resnet18 trains on random pictures")
    parser.add_argument("--samples", type=int, default=12000)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--num-workers", type=int, default=0)
    parser.add_argument("--num-threads", type=int, default=1, help="per rank")
    parser.add_argument("--json", type=Path, help="file for rank 0's results")
    return parser.parse_args()


def loader_of(args: argparse.Namespace, **keys: Any) -> "DataLoader[Any]":
    """Return the loader of every program; its workers live as long as the run."""
    on_mnist = args.model == "convnet"
    dataset = mnist(args.data_root, args.samples) if on_mnist else pictures(args.samples)
    return DataLoader(
        dataset,
        batch_size=BATCH_SIZE,
        num_workers=args.num_workers,
        persistent_workers=args.num_workers > 0,
        pin_memory=torch.cuda.is_available(),
        **keys,
    )


def plain(args: argparse.Namespace) -> list[float]:
    """Train as the tutorials do."""
    init_process_group()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    model = DistributedDataParallel(model_of(args).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    numbers: Any = range(args.samples)
    sampler: DistributedSampler[Any] = DistributedSampler(numbers, shuffle=True)
    loader, ends = loader_of(args, sampler=sampler), list[float]()
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for batch in loader:
            images, labels = (tensor.to(device, non_blocking=True) for tensor in batch)
            loss = cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        ends.append(ended(loss))
    dist.destroy_process_group()
    return ends


def accelerate(args: argparse.Namespace) -> list[float]:
    """Train with Accelerate."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    torch.set_num_threads(args.num_threads)  # it chooses for itself
    model: Any = model_of(args)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=LR)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader_of(args, shuffle=True))
    ends = list[float]()
    for _ in range(args.epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
        ends.append(ended(loss))
    accelerator.end_training()
    return ends


def fabric(args: argparse.Namespace) -> list[float]:
    """Train with Lightning Fabric."""
    from lightning.fabric import Fabric

    runner = Fabric(**devices())
    runner.launch()
    model: Any = model_of(args)
    model, optimizer = runner.setup(model, torch.optim.SGD(model.parameters(), lr=LR))
    loader: Any = runner.setup_dataloaders(loader_of(args, shuffle=True))
    ends = list[float]()
    for epoch in range(args.epochs):
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(images), labels)
            runner.backward(loss)
            optimizer.step()
        ends.append(ended(loss))
    return ends


def trainer(args: argparse.Namespace) -> list[float]:
    """Train with Lightning's Trainer, which evaluates, saves and shows nothing."""
    import lightning

    ends = list[float]()

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model_of(args)

        def training_step(self, batch: Any) -> torch.Tensor:
            images, labels = batch
            self.loss = cross_entropy(self.net(images), labels)
            return self.loss

        def on_train_epoch_end(self) -> None:
            ends.append(ended(self.loss))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=LR)

    lightning.Trainer(
        max_epochs=args.epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **devices(),
    ).fit(Module(), loader_of(args, shuffle=True))
    return ends


def devices() -> dict[str, Any]:
    """Return what Lightning's programs run on."""
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    return {
        "accelerator": kind,
        "devices": num_ranks,
        "strategy": "ddp" if num_ranks > 1 else "auto",
    }


def ended(loss: torch.Tensor) -> float:
    """Read the last loss of an epoch, as a log line does; return the time in seconds."""
    assert loss.isfinite()
    return time.perf_counter()


PROGRAMS: dict[str, Callable[[argparse.Namespace], list[float]]] = {
    "plain": plain,
    "accelerate": accelerate,
    "fabric": fabric,
    "trainer": trainer,
}


def main() -> None:
    """Run one rank of one program; rank 0 writes its epochs' seconds."""
    args = parse_args()
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(args.num_threads)
    torch.manual_seed(0)
    ends = PROGRAMS[args.program](args)
    seconds = [end - start for start, end in pairwise(ends)]
    if args.json is not None and os.environ.get("RANK", "0") == "0":
        args.json.write_text(json.dumps({"threads": torch.get_num_threads(), "epoch_s": seconds}))


if __name__ == "__main__":
    main()
