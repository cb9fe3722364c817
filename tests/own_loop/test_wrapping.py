"""Three ranks add gradients in an order that a resumed run must keep."""

import torch
from ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_runner.dist_env import DistEnv
from ddp_runner.own_loop.wrapping import bare, fix_bucket_order


class Crossed(nn.Module):
    """Layers that the forward calls in another order than they are defined in."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first, self.middle = (nn.Linear(61, 61) for _ in range(3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map (batch, 61) to (batch, 61)."""
        hidden = torch.tanh(self.middle(torch.tanh(self.first(inputs))))
        outputs: torch.Tensor = self.last(hidden)
        return outputs


def gradients(env: DistEnv, is_fixed: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the gradients of one batch, in the first step of a model and in the second one."""
    torch.manual_seed(0)
    module = Crossed()
    model = DistributedDataParallel(module, gradient_as_bucket_view=True)
    if is_fixed:
        fix_bucket_order(model)
        assert all(one.grad is None for one in module.parameters())
        assert type(module).forward is module.forward.__func__
    inputs = torch.randn(5, 61, generator=torch.Generator().manual_seed(env.rank))
    steps = []
    for _ in range(2):
        module.zero_grad(set_to_none=True)
        model(inputs).square().sum().backward()
        steps.append([one.grad.clone() for one in module.parameters() if one.grad is not None])
    assert bare(model) is module
    return steps[0], steps[1]


def test_gradients_are_added_in_one_order_from_the_first_step_on() -> None:
    """Without the fix DDP rebuilds its buckets after the first step, and the sums round anew."""
    fixed, plain = (run_ranks(gradients, 3, is_fixed)[0] for is_fixed in (True, False))
    assert all(map(torch.equal, *fixed))
    assert not all(map(torch.equal, *plain))
