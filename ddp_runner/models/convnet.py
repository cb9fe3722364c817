"""The ConvNet of the MNIST-under-DDP tutorials, whole or split over two devices.

Batch normalisation uses each rank's statistics, so steps depend slightly on the number of ranks.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def conv_block(in_channels: int, out_channels: int) -> nn.Sequential:
    """Return a block that maps (batch, in, height, width) to (batch, out, height/2, width/2)."""
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, kernel_size=5, padding=2),
        nn.BatchNorm2d(out_channels),
        # The tutorials apply ReLU first: the same result from four times the work for ReLU.
        nn.MaxPool2d(2),
        nn.ReLU(),
    )


class ConvNet(nn.Module):
    """Two convolution blocks (16 and 32 channels) and a linear classifier for 28x28 images.

    The parameters have the tutorials' names and order. For other image sizes the features are
    averaged to the size that 28x28 gives.
    """

    def __init__(self, *, num_classes: int = 10, in_channels: int = 1) -> None:
        super().__init__()
        self.layer1 = conv_block(in_channels, 16)
        self.layer2 = conv_block(16, 32)
        self.fc = nn.Linear(7 * 7 * 32, num_classes)

    def stage0(self, images: Tensor) -> Tensor:
        """Map images (batch, in_channels, 28, 28) to features (batch, 16, 14, 14)."""
        features: Tensor = self.layer1(images)
        return features

    def stage1(self, features: Tensor) -> Tensor:
        """Map features (batch, 16, 14, 14) to logits (batch, num_classes)."""
        features = self.layer2(features)
        if features.shape[-2:] != (7, 7):
            features = F.adaptive_avg_pool2d(features, 7)
        logits: Tensor = self.fc(features.flatten(1))
        return logits

    def forward(self, images: Tensor) -> Tensor:
        """Map images (batch, in_channels, 28, 28) to logits (batch, num_classes)."""
        return self.stage1(self.stage0(images))


class ConvNetMp(ConvNet):
    """`ConvNet` with the first block on ``dev0``, the second and the classifier on ``dev1``.

    It has the parameter names, initial weights and outputs of `ConvNet`. Targets are on ``dev1``.
    """

    def __init__(self, *, dev0: torch.device, dev1: torch.device, **options: int) -> None:
        super().__init__(**options)
        self.dev0, self.dev1 = dev0, dev1
        self.layer1.to(dev0)
        self.layer2.to(dev1)
        self.fc.to(dev1)

    def forward(self, images: Tensor) -> Tensor:
        """Map images on any device to logits (batch, num_classes) on ``dev1``."""
        return self.stage1(self.stage0(images.to(self.dev0)).to(self.dev1))
