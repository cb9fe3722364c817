"""The network of PyTorch's MNIST example, whole or split over two devices.

Source: https://github.com/pytorch/examples/blob/main/mnist/main.py; the split is from
https://pytorch.org/tutorials/intermediate/rpc_param_server_tutorial.html
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Net(nn.Module):
    """Two 3x3 convolutions and two linear layers with dropout, for 28x28 images.

    For other image sizes the features are averaged to the size that 28x28 gives.
    """

    def __init__(
        self,
        *,
        num_classes: int = 10,
        in_channels: int = 1,
        dropout1: float = 0.25,  # probability of dropping a feature after the convolutions
        dropout2: float = 0.5,  # the same, between the linear layers
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, 32, kernel_size=3)
        self.conv2 = nn.Conv2d(32, 64, kernel_size=3)
        self.dropout1 = nn.Dropout(dropout1)
        self.dropout2 = nn.Dropout(dropout2)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, num_classes)

    def stage0(self, images: Tensor) -> Tensor:
        """Map images (batch, in_channels, 28, 28) to features (batch, 64, 12, 12)."""
        hidden = F.relu(self.conv1(images))
        # Max-pool before ReLU gives the example's result with a quarter of the work for ReLU.
        hidden = F.relu(F.max_pool2d(self.conv2(hidden), 2))
        if hidden.shape[-2:] != (12, 12):
            hidden = F.adaptive_avg_pool2d(hidden, 12)
        features: Tensor = self.dropout1(hidden)
        return features

    def stage1(self, features: Tensor) -> Tensor:
        """Map features (batch, 64, 12, 12) to log-probabilities (batch, num_classes)."""
        hidden = self.dropout2(F.relu(self.fc1(features.flatten(1))))
        return F.log_softmax(self.fc2(hidden), dim=1)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (batch, in_channels, 28, 28) to log-probabilities (batch, num_classes)."""
        return self.stage1(self.stage0(images))


class MpNet(Net):
    """`Net` with the convolutions on ``dev0`` and the linear layers on ``dev1``.

    It has the parameter names, initial weights and outputs of `Net`. Targets are on ``dev1``.
    """

    def __init__(self, *, dev0: torch.device, dev1: torch.device, **options: Any) -> None:
        super().__init__(**options)
        self.dev0, self.dev1 = dev0, dev1
        self.conv1.to(dev0)
        self.conv2.to(dev0)
        self.fc1.to(dev1)
        self.fc2.to(dev1)

    def forward(self, images: Tensor) -> Tensor:
        """Map images on any device to log-probabilities (batch, num_classes) on ``dev1``."""
        return self.stage1(self.stage0(images.to(self.dev0)).to(self.dev1))
