"""python -m ddp_runner --config-dir examples/coming_from/conf experiment=own_loop."""

from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from ddp_runner import Run
from examples.coming_from.digits import Digits, Net


def train(run: Run, *, epochs: int, lr: float) -> None:
    """Train as the script does; the keys under loop are the arguments."""
    train_set, eval_set = Digits("train"), Digits("eval")
    sampler: DistributedSampler[Any] = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=32, sampler=sampler)
    eval_sampler: DistributedSampler[Any] = DistributedSampler(eval_set, shuffle=False)
    eval_loader = DataLoader(eval_set, batch_size=32, sampler=eval_sampler)
    net = Net().to(run.device)
    model = run.wrap(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    done = run.restore(net=net, optimizer=optimizer)  # epochs, since this loop counts them
    for epoch in range(done, epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            loss = cross_entropy(model(images.to(run.device)), labels.to(run.device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        right = torch.zeros((), device=run.device)
        with torch.no_grad():
            for images, labels in eval_loader:
                right += (net(images.to(run.device)).argmax(dim=1) == labels.to(run.device)).sum()
        accuracy = run.sum({"right": right})["right"] / len(eval_set)
        run.log({"train/loss": loss, "eval/accuracy": accuracy}, step=epoch + 1)
        run.save(epoch + 1)
        if run.should_stop(epoch + 1):
            return
    run.export(net)
