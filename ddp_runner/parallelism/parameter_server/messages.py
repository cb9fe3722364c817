"""What server and trainers of ``ps`` send each other: numbers, and tensors as one vector."""

import torch
from torch import Tensor, nn

from ddp_runner.job import Status

# What a trainer is sent in place of a batch, once the run has ended.
STATUS_OF = {-1: Status.COMPLETED, -2: Status.PREEMPTED}
ALIVE = -3  # what a trainer is sent while there is no batch for it, this often within a timeout:
ALIVE_PER_TIMEOUT = 4


EXACT_IN_FLOAT32 = {
    *(torch.float32, torch.bfloat16, torch.float16),
    *(torch.int16, torch.int8, torch.uint8, torch.bool),
}


def message_dtype(module: nn.Module) -> torch.dtype:
    """Return the type of a message: float32, or float64 where that would round what is sent."""
    sent = (*module.named_parameters(), *module.named_buffers())
    wide = any(
        one.dtype not in EXACT_IN_FLOAT32
        # BatchNorm's count of batches is exact up to 2**24 of them.
        and not name.endswith("num_batches_tracked")
        for name, one in sent
    )
    return torch.float64 if wide else torch.float32


@torch.no_grad()
def packed(module: nn.Module, *, gradients: bool = False, facts: Tensor | None = None) -> Tensor:
    """Return the parameters as one vector on the CPU; or gradients, buffers and facts.

    After the gradients comes a number for each parameter: 1 if it has a gradient, else 0.
    """
    tensors: list[Tensor] = list(module.parameters())
    if gradients:
        present = torch.tensor([float(one.grad is not None) for one in tensors])
        tensors = [torch.zeros_like(one) if one.grad is None else one.grad for one in tensors]
        tensors += [present, *module.buffers()]
    if facts is not None:
        tensors.append(facts)
    dtype = message_dtype(module)
    return torch.cat([one.detach().to("cpu", dtype).reshape(-1) for one in tensors])


@torch.no_grad()
def copy_parts(values: Tensor, tensors: list[Tensor]) -> None:
    """Copy a vector's parts into tensors, which keep their memory format."""
    parts = values.split([one.numel() for one in tensors]) if tensors else ()
    for one, part in zip(tensors, parts, strict=True):
        one.copy_(part.view(one.shape))
