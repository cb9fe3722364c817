"""A moving average of the weights beside those that are trained, by torch's ``AveragedModel``.

Source: https://docs.pytorch.org/docs/stable/optim.html#weight-averaging-swa-and-ema
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ddp_runner.errors import UserError, typed
from ddp_runner.parallelism.shards import has_shards

STATISTICS = ("running_mean", "running_var")  # the buffers of BatchNorm that are averaged
PREFIX = "module."  # of the model's names in the state of an AveragedModel


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
            self.averaged = AveragedModel(nn.Identity(), multi_avg_fn=_lerp(decay))
            self.averaged.module = build()
            self.averaged.module.load_state_dict(module.state_dict())
            return
        try:
            average = get_ema_multi_avg_fn(decay)
            self.averaged = AveragedModel(module, multi_avg_fn=average)
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
        """Take an optimizer step into the average; the first one is copied."""
        statistics = [
            buffer
            for name, buffer in self.module.named_buffers()
            if name.rpartition(".")[2] in STATISTICS
        ]
        before = [buffer.clone() for buffer in statistics]
        is_first = bool(self.averaged.n_averaged == 0)
        self.averaged.update_parameters(module)  # copies all buffers
        if not is_first:
            for buffer, old in zip(statistics, before, strict=True):
                buffer.copy_(old.lerp(buffer, 1 - self._decay))


def _lerp(decay: float) -> Callable[..., None]:
    """Return an average like torch's, tensor by tensor: those of several meshes do not mix."""

    @torch.no_grad()
    def update(averages: Sequence[Tensor], values: Sequence[Tensor], _: Tensor) -> None:
        for average, value in zip(averages, values, strict=True):
            average.lerp_(value, 1 - decay)

    return update


def averaged_weights(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the model's state_dict that is in the state of an ``Ema``."""
    return {
        name.removeprefix(PREFIX): value for name, value in state.items() if name.startswith(PREFIX)
    }
