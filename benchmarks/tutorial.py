"""The MNIST-under-DDP loop as the tutorials write it: what the runner is measured against.

torchrun --standalone --nproc-per-node=2 benchmarks/tutorial.py --data-root data --num-threads 1
python benchmarks/tutorial.py --data-root data            # one rank

A per-sample dataset, DistributedSampler, DataLoader, ConvNet, DDP and SGD in one plain script. It
shares no code with the package, so speed and loss of the two can be compared.
"""

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision import transforms
from torchvision.datasets import MNIST

BATCH_SIZE = 100  # samples per rank
LOG_EVERY_STEPS = 100
WARMUP_STEPS = 50  # of each epoch; samples_per_s excludes them


class ConvNet(nn.Module):
    """Two blocks of convolution, batch norm, ReLU and max-pool, and a linear classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.layer1 = nn.Sequential(
            nn.Conv2d(1, 16, kernel_size=5, stride=1, padding=2),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(kernel_size=2, stride=2),
        )
        self.layer2 = nn.Sequential(
            nn.Conv2d(16, 32, kernel_size=5, stride=1, padding=2),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.MaxPool2d(kernel_size=2, stride=2),
        )
        self.fc = nn.Linear(7 * 7 * 32, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (batch, 1, 28, 28) to logits (batch, 10)."""
        out = self.layer1(x)
        out = self.layer2(out)
        out = out.reshape(out.size(0), -1)
        logits: Tensor = self.fc(out)
        return logits


def parse_args() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description="The tutorials' MNIST loop under DDP.")
    parser.add_argument("--data-root", required=True, help="folder that holds MNIST/raw")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument(
        "--num-threads", type=int, default=0, help="per rank; 0: torch's default, torchrun's is 1"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the weights")
    parser.add_argument("--order-seed", type=int, default=0, help="of the sample order")
    parser.add_argument("--json", type=Path, help="file for rank 0's results")
    return parser.parse_args()


def init_process_group() -> None:
    """Join torchrun's process group, or create a group of this process alone."""
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, init_method="tcp://localhost:0", rank=0, world_size=1)


def mean_over_ranks(loss: Tensor) -> float:
    """Return the loss averaged over ranks. Collective: every rank must call."""
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def now(device: torch.device) -> float:
    """Wait for the device's queued work; return the time in seconds."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def train(args: argparse.Namespace, *, device: torch.device) -> dict[str, list[float]]:
    """Train and return the results. Collective: every rank must call.

    Returns:
        ``losses``: the mean over ranks of each logged step; ``samples_per_s``: over all ranks,
        without the first steps, of each epoch; ``epoch_s``: seconds of each epoch.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    model = DistributedDataParallel(
        ConvNet().to(device), device_ids=[device.index] if device.type == "cuda" else None
    )
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)

    dataset = MNIST(
        args.data_root,
        train=True,
        transform=transforms.Compose(
            [transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))]
        ),
    )
    sampler: DistributedSampler[tuple[Tensor, int]] = DistributedSampler(
        dataset, num_replicas=world_size, rank=rank, shuffle=True, seed=args.order_seed
    )
    loader = DataLoader(
        dataset,
        batch_size=BATCH_SIZE,
        sampler=sampler,
        num_workers=0,
        pin_memory=device.type == "cuda",
    )

    results: dict[str, list[float]] = {"losses": [], "samples_per_s": [], "epoch_s": []}
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        epoch_start = steady_start = now(device)
        steady_samples = 0
        for step, batch in enumerate(loader, start=1):
            images, labels = (tensor.to(device, non_blocking=True) for tensor in batch)
            loss = criterion(model(images), labels)

            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

            if step > WARMUP_STEPS:
                steady_samples += len(images) * world_size
            elif step == WARMUP_STEPS:
                steady_start = now(device)
            if step % LOG_EVERY_STEPS == 0:
                results["losses"].append(mean_over_ranks(loss))
                if rank == 0:
                    print(
                        f"epoch [{epoch + 1}/{args.epochs}], step [{step}/{len(loader)}], "
                        f"loss {results['losses'][-1]:.4f}",
                        flush=True,
                    )
        epoch_end = now(device)
        results["samples_per_s"].append(steady_samples / (epoch_end - steady_start))
        results["epoch_s"].append(epoch_end - epoch_start)
    return results


def main() -> None:
    """Run one rank; rank 0 prints the total time and writes the results."""
    start = time.perf_counter()
    args = parse_args()
    if args.num_threads:
        torch.set_num_threads(args.num_threads)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    init_process_group()
    results = train(args, device=device)
    wall_s = time.perf_counter() - start
    if dist.get_rank() == 0:
        print(f"training complete in {wall_s:.1f} s")
        if args.json:
            facts = {
                "world_size": dist.get_world_size(),
                "num_threads": torch.get_num_threads(),
                "seed": args.seed,
                "order_seed": args.order_seed,
                "lr": args.lr,
                "wall_s": wall_s,  # of main(), without the imports
            }
            args.json.write_text(json.dumps(facts | results, indent=2) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
