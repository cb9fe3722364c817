"""What server and trainers of ``ps`` send each other: numbers, and tensors as one vector."""

import torch
from torch import Tensor, nn

STATUS_OF = {-1: "completed", -2: "preempted"}  # what a trainer is sent in place of a batch
ALIVE = -3  # what a trainer is sent while there is no batch for it, this often within a timeout:
ALIVE_PER_TIMEOUT = 4


def message_dtype(module: nn.Module) -> torch.dtype:
    """Return the type of a message: float64 where a parameter has it, else float32."""
    wide = any(parameter.dtype == torch.float64 for parameter in module.parameters())
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
