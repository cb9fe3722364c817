"""The model: an ordinary ``nn.Module``, which knows nothing of ranks and devices."""

from torch import Tensor, nn


class SmallNet(nn.Module):
    """Two convolutions and a linear classifier.

    Args:
        width: channels of the first convolution; the second has twice as many.
    """

    def __init__(self, *, width: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, width, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.classify = nn.Linear(2 * width * 4 * 4, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (batch, 1, 8, 8) to logits (batch, 10)."""
        logits: Tensor = self.classify(self.features(images).flatten(1))
        return logits
