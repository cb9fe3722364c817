"""The toy of the DDP tutorial as one plain script: what a sweep's jobs are measured against.

torchrun --standalone --nproc-per-node=2 benchmarks/toy_tutorial.py --lr 0.05

Two linear layers, random data, SGD, twenty steps. It shares no code with the package and prints
only its last loss. https://pytorch.org/tutorials/intermediate/ddp_tutorial.html
"""

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


class ToyModel(nn.Module):
    """Two linear layers with a ReLU between them."""

    def __init__(self) -> None:
        super().__init__()
        self.net1 = nn.Linear(10, 10)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, 10) to (batch, 5)."""
        outputs: Tensor = self.net2(self.relu(self.net1(x)))
        return outputs


def main() -> None:
    """Run one rank; rank 0 prints the last loss."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lr", type=float, default=0.001)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=20)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(ToyModel())
    loss_fn = nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    for _ in range(args.steps):
        optimizer.zero_grad()
        loss = loss_fn(model(torch.randn(args.batch_size, 10)), torch.randn(args.batch_size, 5))
        loss.backward()
        optimizer.step()
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
