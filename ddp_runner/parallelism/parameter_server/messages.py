"""Messages between server and trainers of ``ps``: numbers, and tensors as one flat vector."""

import torch
from torch import Tensor, nn

from ddp_runner.job import Status

# The server sends one of these numbers in place of a batch's: the run has ended ...
STATUS_OF = {-1: Status.COMPLETED, -2: Status.PREEMPTED}
ALIVE = -3  # ... or there is no batch yet, but the server is alive
ALIVE_PER_TIMEOUT = 4  # how often it sends ALIVE within a timeout

EXACT_IN_FLOAT32 = {
    torch.float32, torch.bfloat16, torch.float16,
    torch.int16, torch.int8, torch.uint8, torch.bool,
}  # fmt: skip


def flatten_state(module: nn.Module) -> Tensor:
    """Return the parameters and the buffers as one vector on the CPU."""
    return _flatten([*module.parameters(), *module.buffers()], module)


def flatten_gradients(module: nn.Module, numbers: Tensor) -> Tensor:
    """Return what a trainer pushes, as one vector on the CPU.

    Args:
        module: with the gradients of a batch.
        numbers: a vector to append.

    Returns:
        The gradients; for each parameter 1 if it has a gradient, else 0; the buffers; the numbers.
    """
    parameters = list(module.parameters())
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    has_gradient = torch.tensor([float(p.grad is not None) for p in parameters])
    return _flatten([*gradients, has_gradient, *module.buffers(), numbers], module)


@torch.no_grad()
def copy_parts(values: Tensor, tensors: list[Tensor]) -> None:
    """Copy the parts of a vector into tensors, which keep their memory format."""
    parts = values.split([tensor.numel() for tensor in tensors]) if tensors else ()
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.view(tensor.shape))


@torch.no_grad()
def _flatten(tensors: list[Tensor], module: nn.Module) -> Tensor:
    """Return a vector of float32, or of float64 if float32 would round a value of the model."""
    sent = (*module.named_parameters(), *module.named_buffers())
    is_wide = any(
        tensor.dtype not in EXACT_IN_FLOAT32
        # BatchNorm's count of batches is exact up to 2**24.
        and not name.endswith("num_batches_tracked")
        for name, tensor in sent
    )
    dtype = torch.float64 if is_wide else torch.float32
    return torch.cat([tensor.detach().to("cpu", dtype).reshape(-1) for tensor in tensors])
