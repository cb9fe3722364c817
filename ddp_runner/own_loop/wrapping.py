"""Modules under the run's mode of parallelism, in a loop that the runner does not know."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel


def bare(module: Any) -> Any:
    """Return the module that a mode has wrapped; anything else as it is."""
    if isinstance(module, DistributedDataParallel | DataParallel):
        return module.module
    return module


def fix_bucket_order(model: nn.Module) -> None:
    """Run a backward whose gradients are dropped, so that DDP rebuilds its buckets now.

    DDP rebuilds its buckets after its first backward. A gradient's place in its bucket decides in
    which order three or more ranks are added, and so how the sum is rounded. A resumed run would
    take its first step with the initial buckets, and an undisturbed one with the rebuilt ones. So
    both get them here: in the reverse order of the module's parameters. Collective.

    It calls no forward of the user's: nobody knows its arguments yet.
    """
    if not isinstance(model, DistributedDataParallel):
        return
    # These never rebuild their buckets, or by what the first backward used.
    if model.static_graph or model.find_unused_parameters:
        return
    parameters = [one for one in model.module.parameters() if one.requires_grad]

    def total(_: Tensor) -> Tensor:
        sums = torch.zeros((), device=parameters[-1].device)
        for parameter in parameters:  # backward visits the last one first
            sums = sums + parameter.sum().to(sums)
        return sums

    model.module.forward = total  # an attribute of this object: it hides the class's method
    try:
        with torch.enable_grad():
            model(torch.zeros(1)).backward()
    finally:
        del model.module.forward
    model.zero_grad(set_to_none=True)
