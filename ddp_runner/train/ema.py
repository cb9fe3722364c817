"""A moving average of the weights beside those that are trained, by torch's ``AveragedModel``.

Source: https://docs.pytorch.org/docs/stable/optim.html#weight-averaging-swa-and-ema
"""

from collections import defaultdict
from collections.abc import Callable
from itertools import chain

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from ddp_runner.errors import UserError, typed
from ddp_runner.parallelism.shards import has_shards, is_shard

STATISTICS = ("running_mean", "running_var")  # the buffers of BatchNorm that are averaged


class Ema:
    """A copy of a model whose weights follow those that are trained: ema = d * ema + (1 - d) * w.

    BatchNorm's statistics are averaged like the weights, so that they fit them. All other buffers
    are copied: the average of whole numbers is rounded down, and that of two masks of -inf is NaN.
    """

    def __init__(self, module: nn.Module, *, decay: float, build: Callable[[], nn.Module]) -> None:
        """Copy a bare model, on its devices.

        ``averaged`` is the module that a checkpoint holds: torch's, with the number of its steps.

        Args:
            module: it may be split over ranks.
            decay: of the average.
            build: builds the model again. FSDP2 refuses to copy one that is split. Collective if
                the model is split.

        Raises:
            UserError: the model cannot be copied.
        """
        self._decay = decay
        if has_shards(module):
            self.averaged = AveragedModel(nn.Identity())
            self.averaged.module = build()
            self.averaged.module.load_state_dict(module.state_dict())
            return
        try:
            self.averaged = AveragedModel(module)
        except Exception as error:  # deepcopy raises anything
            raise UserError(
                f"ema.decay needs a copy of the model, which cannot be copied ({typed(error)}); "
                "write ema.decay=null, or give the model a __deepcopy__"
            ) from error

    @property
    def module(self) -> nn.Module:
        """The model with the averaged weights."""
        return self.averaged.module

    @torch.no_grad()
    def update(self, module: nn.Module) -> None:
        """Take an optimizer step into the average; the first one is copied.

        AveragedModel's own update copies its counter to the device, which makes a GPU wait.
        """
        lerped = defaultdict[object, list[tuple[Tensor, Tensor]]](list)
        is_first = bool(self.averaged.n_averaged == 0)  # it stays on the CPU
        own = chain(self.module.named_parameters(), self.module.named_buffers())
        others = chain(module.parameters(), module.buffers())
        for index, ((name, average), value) in enumerate(zip(own, others, strict=True)):
            is_averaged = isinstance(average, nn.Parameter) or name.split(".")[-1] in STATISTICS
            is_number = average.is_floating_point() or average.is_complex()
            if is_first or not is_averaged or not is_number:
                average.copy_(value)
            else:  # one call for many tensors takes none that are split over ranks
                kind = index if is_shard(average) else (average.device, average.dtype)
                lerped[kind].append((average, value))
        for pairs in lerped.values():
            averages, values = map(list, zip(*pairs, strict=True))
            torch._foreach_lerp_(averages, values, 1 - self._decay)
        self.averaged.n_averaged += 1
