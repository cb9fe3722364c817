"""A moving average of the trained weights, in torch's ``AveragedModel``.

Source: https://docs.pytorch.org/docs/stable/optim.html#weight-averaging-swa-and-ema
"""

from collections import defaultdict
from collections.abc import Callable
from itertools import chain

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from ddp_runner.parallelism.shards import is_shard

STATISTICS = ("running_mean", "running_var")  # the buffers of BatchNorm that are averaged


class Ema:
    """A second model with averaged weights: ema = decay * ema + (1 - decay) * weights.

    BatchNorm's statistics are averaged like the weights, so that they fit them. All other buffers
    are copied: the average of integers is rounded down, and the average of two -inf is NaN.

    Attributes:
        averaged: the module that a checkpoint holds, with the number of averaged steps.
    """

    def __init__(self, module: nn.Module, *, decay: float, build: Callable[[], nn.Module]) -> None:
        """Copy a bare model, on its devices. Collective if the model is split over ranks.

        `build` makes the copy: not every model can be copied, and no model under FSDP2.
        """
        self._decay = decay
        self.averaged = AveragedModel(nn.Identity())
        self.averaged.module = build()
        self.averaged.module.load_state_dict(module.state_dict())

    @property
    def module(self) -> nn.Module:
        """The model with the averaged weights."""
        return self.averaged.module

    @torch.no_grad()
    def update(self, module: nn.Module) -> None:
        """Add the weights after an optimizer step to the average; copy those of the first step.

        AveragedModel's own update copies its counter to the device, which makes a GPU wait.
        """
        by_kind = defaultdict[object, list[tuple[Tensor, Tensor]]](list)
        is_first = bool(self.averaged.n_averaged == 0)  # it stays on the CPU
        averages = chain(self.module.named_parameters(), self.module.named_buffers())
        values = chain(module.parameters(), module.buffers())
        for index, ((name, average), value) in enumerate(zip(averages, values, strict=True)):
            is_averaged = isinstance(average, nn.Parameter) or name.split(".")[-1] in STATISTICS
            is_number = average.is_floating_point() or average.is_complex()
            if is_first or not is_averaged or not is_number:
                average.copy_(value)
            else:  # torch._foreach_lerp_ takes one split tensor at a time
                kind = index if is_shard(average) else (average.device, average.dtype)
                by_kind[kind].append((average, value))
        for pairs in by_kind.values():
            targets, sources = map(list, zip(*pairs, strict=True))
            torch._foreach_lerp_(targets, sources, 1 - self._decay)
        self.averaged.n_averaged += 1
