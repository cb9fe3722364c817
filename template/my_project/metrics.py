"""A metric of evaluations: any object with ``update`` and ``compute``."""

import torch
from torch import Tensor


class WorstClass:
    """The accuracy of the class that the model recognises worst.

    What ``update`` adds to tensors is summed over the ranks before ``compute``.
    """

    higher_is_better = True

    def __init__(self, *, num_classes: int) -> None:
        self.right = torch.zeros(num_classes)
        self.count = torch.zeros(num_classes)

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Count logits (batch, classes) and their true classes (batch,)."""
        is_right = (outputs.argmax(dim=1) == targets).float().cpu()
        labels = targets.cpu()
        self.right.index_add_(0, labels, is_right)
        self.count.index_add_(0, labels, torch.ones(len(labels)))

    def compute(self) -> float:
        """Return the lowest accuracy among the classes that were seen."""
        seen = self.count > 0
        return float((self.right[seen] / self.count[seen]).min())
