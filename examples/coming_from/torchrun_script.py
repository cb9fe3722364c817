"""torchrun --standalone --nproc-per-node=2 -m examples.coming_from.torchrun_script."""

import os
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from examples.coming_from.digits import Digits, Net


def main() -> None:
    """Train; rank 0 prints and saves."""
    has_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if has_gpu else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpu else torch.device("cpu")
    torch.manual_seed(0)
    train_set, eval_set = Digits("train"), Digits("eval")
    sampler: DistributedSampler[Any] = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=32, sampler=sampler)
    eval_sampler: DistributedSampler[Any] = DistributedSampler(eval_set, shuffle=False)
    eval_loader = DataLoader(eval_set, batch_size=32, sampler=eval_sampler)
    net = Net().to(device)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(5):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            loss = cross_entropy(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        right = torch.zeros((), device=device)
        with torch.no_grad():
            for images, labels in eval_loader:
                right += (net(images.to(device)).argmax(dim=1) == labels.to(device)).sum()
        dist.all_reduce(right)
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}  loss {loss:.4f}  accuracy {right / len(eval_set):.4f}")
    if dist.get_rank() == 0:
        torch.save(net.state_dict(), "net.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
