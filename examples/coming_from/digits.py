"""The model and the data of every program: scanned digits, which scikit-learn carries."""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import Dataset


class Digits(Dataset[tuple[Tensor, Tensor]]):
    """Images (1, 8, 8) in [0, 1] and their classes; 1437 for training, 360 for evaluation."""

    def __init__(self, split: str) -> None:
        images, labels = load_digits(return_X_y=True)
        part = slice(0, 1437) if split == "train" else slice(1437, None)
        self.images = torch.tensor(images[part] / 16, dtype=torch.float32).view(-1, 1, 8, 8)
        self.labels = torch.tensor(labels[part])

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return an image and its class."""
        return self.images[index], self.labels[index]


class Net(nn.Sequential):
    """Map images (batch, 1, 8, 8) to logits (batch, 10)."""

    def __init__(self, width: int = 128) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))
