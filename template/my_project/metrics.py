"""A metric of evaluations: any object with ``update``, ``compute`` and ``merge``."""

import torch
from torch import Tensor

from ddp_runner import summed


class WorstClass:
    """The accuracy of the class that the model recognises worst.

    Each rank evaluates its part of the samples; ``merge`` adds what two of them have counted.
    """

    higher_is_better = True
    merge = summed("right", "count")

    def __init__(self, *, num_classes: int) -> None:
        self.right = torch.zeros(num_classes)
        self.count = torch.zeros(num_classes)

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Count logits (batch, classes) and their true classes (batch,)."""
        is_right = (outputs.argmax(dim=1) == targets).float()
        self.right.index_add_(0, targets, is_right)
        self.count.index_add_(0, targets, torch.ones_like(is_right))

    def compute(self) -> float:
        """Return the lowest accuracy among the classes that were seen."""
        seen = self.count > 0
        return float((self.right[seen] / self.count[seen]).min())
