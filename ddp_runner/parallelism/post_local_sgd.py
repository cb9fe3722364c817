"""Post-local SGD: after some steps each rank trains on its own, and the weights are averaged.

Source: https://arxiv.org/abs/1808.07217; torch has its parts in ``post_localSGD_hook`` and
``model_averaging``, whose steps these are.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as torch_hook
from torch.distributed.algorithms.model_averaging.utils import average_parameters


class PostLocalSGD:
    """The state of a rank whose model is its own between two averages."""

    settings: Mapping[str, Any] = {}  # any saved state fits
    replicas_differ = True
    lost = "all ranks go on with the averaged weights and rank 0's state of the optimizer"

    def __init__(self, module: nn.Module, *, start_step: int, period: int) -> None:
        """Begin at step 0 with the weights that all ranks have."""
        self._parameters = [one for one in module.parameters() if one.requires_grad]
        self._start_step, self._period = start_step, period
        # Not over the ranks of a machine either, which torch would do by default.
        self.hook = torch_hook.PostLocalSGDState(
            None, None, start_step, post_local_gradient_allreduce=False
        )
        self.begin_at(0)

    def begin_at(self, step: int) -> None:
        """Begin anew; torch's hook counts only the steps before start_step."""
        self._step = self.hook.iter = step

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps taken; the model and the optimizer are saved beside it."""
        return {"step": self._step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self.begin_at(state["step"])

    def step_done(self) -> None:
        """Average the weights where torch's PeriodicModelAverager does. Collective."""
        local_steps, self._step = self._step - self._start_step, self._step + 1
        if local_steps < 0 or local_steps % self._period:
            return
        own = [one.data for one in self._parameters]
        self._average()
        for parameter, data in zip(self._parameters, own, strict=True):
            parameter.data = data.copy_(parameter.data)  # in its own memory format

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Give all ranks the mean of their weights in the block. Collective: every rank."""
        own = [one.data for one in self._parameters]
        self._average()
        try:
            yield
        finally:
            for parameter, data in zip(self._parameters, own, strict=True):
                parameter.data = data

    def _average(self) -> None:
        """Give each parameter new memory with the mean over the ranks. Collective."""
        assert dist.group.WORLD is not None
        average_parameters(iter(self._parameters), dist.group.WORLD)
