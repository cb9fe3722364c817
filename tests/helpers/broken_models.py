"""Models, losses and train states that each break a guarantee of data parallelism.

They are in no test file because configs name them by their import path.
"""

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from train_states import with_work

from ddp_runner.dist_env import DistEnv
from ddp_runner.models.toy import ToyModel
from ddp_runner.train.state import TrainState


class Scaled(ToyModel):
    """Has a constant of its own on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0 + dist.get_rank()

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (batch, 10) to (batch, 5)."""
        return super().forward(inputs * self.scale)


class Wandering(ToyModel):
    """Sets a parameter from the rank's own random numbers."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (batch, 10) to (batch, 5)."""
        if self.training:
            with torch.no_grad():
                self.net1.bias.normal_()
        return super().forward(inputs)


class Late(ToyModel):
    """Creates a parameter in its first forward, after DDP has listed what it reduces."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (batch, 10) to (batch, 5)."""
        if not hasattr(self, "late"):
            self.late = nn.Parameter(torch.ones(5))
        return super().forward(inputs) * self.late


class Averaging(ToyModel):
    """Keeps a running mean of its inputs in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(10)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (batch, 10) to (batch, 5)."""
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * inputs.mean(dim=0)
        return super().forward(inputs - self.mean)


class Counting(ToyModel):
    """Changes a buffer in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.zeros(5))
        self.shift: Tensor

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (batch, 10) to (batch, 5)."""
        outputs = super().forward(inputs)
        if not self.training:
            self.shift += outputs.mean(dim=0)
        return outputs + self.shift


class Dropping(ToyModel):
    """Drops features in evaluation as well."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (batch, 10) to (batch, 5)."""
        return super().forward(F.dropout(inputs, 0.5, training=True))


class Idle(ToyModel):
    """Has a layer that no output depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Linear(2, 2)


class SparseBag(nn.Module):
    """Looks up embeddings, whose gradients have values for the rows of the batch alone."""

    def __init__(self, *, sparse: bool = True) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(20, 8, sparse=sparse, mode="sum")
        self.classify = nn.Linear(8, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (batch, 10) to (batch, 5)."""
        outputs: Tensor = self.classify(self.bag(inputs.abs().mul(5).long().clamp(max=19)))
        return outputs


class Synchronised(nn.Module):
    """A layer that adds over ranks in its forward, on GPUs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(10, 5), nn.SyncBatchNorm(5)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (batch, 10) to (batch, 5)."""
        outputs: Tensor = self.norm(self.linear(inputs))
        return outputs


class Checkpointing(nn.Module):
    """A model that repeats its layers in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(10, 10), nn.GELU(), nn.Linear(10, 5))

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (batch, 10) to (batch, 5)."""
        outputs: Tensor = checkpoint(self.layers, inputs, use_reentrant=False)
        return outputs


class Shared(nn.Module):
    """A model that calls one module in several places."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(10, 10), act := nn.ReLU(inplace=True))
        self.second = nn.Sequential(nn.Linear(10, 5), act)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (batch, 10) to (batch, 5)."""
        outputs: Tensor = self.second(self.first(inputs))
        return outputs


class Sized(nn.Module):
    """A model whose width depends on the number of ranks."""

    def __init__(self) -> None:
        super().__init__()
        width = 10 // dist.get_world_size()
        self.net, self.out = nn.Linear(10, width), nn.Linear(width, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (batch, 10) to (batch, 5)."""
        outputs: Tensor = self.out(self.net(inputs))
        return outputs


class Tied(nn.Module):
    """Has blocks, of which the first and the last share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(10, 10) for _ in range(3))
        self.head = nn.Linear(10, 5)
        self.blocks[2].weight = self.blocks[0].weight

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (batch, 10) to (batch, 5)."""
        for block in self.blocks:
            inputs = block(inputs).relu()
        outputs: Tensor = self.head(inputs)
        return outputs


class Choosing(ToyModel):
    """Leaves a layer out, by the numbers of a batch or in training at random."""

    def __init__(self, *, at_random: bool) -> None:
        super().__init__()
        self.extra, self.at_random = nn.Linear(5, 5), at_random

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (batch, 10) to (batch, 5)."""
        outputs = super().forward(inputs)
        if self.at_random:
            return outputs if self.training and torch.rand(()) < 0.5 else self.extra(outputs)
        return outputs if inputs[0].sum() < 0 else self.extra(outputs)


class Detached(ToyModel):
    """Cuts its outputs off its parameters."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (batch, 10) to (batch, 5)."""
        return super().forward(inputs).detach()


class Cursed(ToyModel):
    """Raises in its forward."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Raise."""
        raise KeyError("no such layer")


class Bereft(ToyModel):
    """Fails as a forward that waits for another rank, which has ended."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Raise what gloo raises."""
        raise RuntimeError("[gloo/transport/tcp/pair.cc:561] Connection closed by peer")


class DictOutputs(ToyModel):
    """Returns more than its outputs, as Hugging Face's models do."""

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        """Map (batch, 10) to logits (batch, 5)."""
        return {"logits": super().forward(inputs)}


class ManyOutputs(nn.Module):
    """A linear classifier of images, whatever its arguments."""

    num_outputs = 10

    def __init__(self, **settings: object) -> None:
        super().__init__()
        self.linear = nn.Linear(28 * 28, self.num_outputs)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (batch, 1, 28, 28) to (batch, num_outputs)."""
        outputs: Tensor = self.linear(inputs.flatten(1))
        return outputs


class SevenOutputs(ManyOutputs):
    """Has too few outputs for ten classes."""

    num_outputs = 7


class ZeroLogits(ManyOutputs):
    """Starts with zeros as weights, as the heads of many models do."""

    def __init__(self, **settings: object) -> None:
        super().__init__()
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)


def each_square(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return a loss for each sample."""
    return (outputs - targets).square().mean(dim=1)


def mean_of_squares(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean over samples."""
    return each_square(outputs, targets).mean()


def worst_square(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of the worst sample."""
    return each_square(outputs, targets).max()


def of_pairs(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return a sum over the pairs of samples."""
    return torch.cdist(outputs, outputs).sum()


def zero(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return a loss whose gradient is zero."""
    return 0 * outputs.sum()


def blind(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return a loss that is not zero, with a gradient that is."""
    return zero(outputs, targets) + targets.square().sum()


def constant(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return a number that depends on nothing."""
    return torch.tensor(3.0)


def a_float(outputs: Tensor, targets: Tensor) -> float:
    """Return a number without a gradient."""
    return 3.0


def same_share(state: TrainState, env: DistEnv) -> TrainState:
    """Let all ranks train on the first rank's part."""
    return replace(state, batches=replace(state.batches, share=0))


def same_eval_share(state: TrainState, env: DistEnv) -> TrainState:
    """Let all ranks evaluate the first rank's part."""
    layout = replace(state.work.layout, env=replace(env, rank=0))
    return with_work(state, layout=layout)


def other_data(state: TrainState, env: DistEnv) -> TrainState:
    """Give the last rank other targets."""
    split = state.work.dataset.eval
    if env.rank == 2:
        split = replace(split, targets=split.targets + 0.25)
    return with_work(state, dataset=replace(state.work.dataset, eval=split))


def other_start(state: TrainState, env: DistEnv) -> TrainState:
    """Give the last rank another initial parameter."""
    if env.rank == 2:
        with torch.no_grad():
            next(state.module.parameters())[0, 0] += 0.5
    return state


def no_sync(state: TrainState, env: DistEnv) -> TrainState:
    """Train the bare model."""
    return replace(state, model=state.module)


def summed(state: TrainState, env: DistEnv) -> TrainState:
    """Add gradients without dividing them."""

    def add(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        assert work is not None
        return work.get_future().then(lambda future: future.value()[0])

    assert isinstance(state.model, DistributedDataParallel)
    state.model.register_comm_hook(None, add)
    return state


def untouched(state: TrainState, env: DistEnv) -> TrainState:
    """Return the state unchanged: its model is broken."""
    return state
