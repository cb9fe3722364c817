"""The samples: scanned digits, which scikit-learn carries, so nothing is downloaded."""

import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import Dataset

NUM_EVAL = 360  # samples of the split eval; the other 1437 are for training


class Digits(Dataset[tuple[Tensor, Tensor]]):
    """Images (1, 8, 8) in [0, 1], each with its class from 0 to 9.

    Args:
        split: train or eval.
        shift: pixels by which an image may move in each direction, anew in each epoch.
    """

    def __init__(self, *, split: str, shift: int = 0) -> None:
        images, labels = load_digits(return_X_y=True)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        part = (order[NUM_EVAL:] if split == "train" else order[:NUM_EVAL]).numpy()
        self.images = torch.tensor(images[part] / 16.0, dtype=torch.float32).view(-1, 1, 8, 8)
        self.labels = torch.tensor(labels[part])
        self.shift = shift

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return an image and its class. The runner seeds the random numbers of each sample."""
        down, right = torch.randint(2 * self.shift + 1, (2,)).tolist()
        padded = pad(self.images[index], [self.shift] * 4)
        return padded[:, down : down + 8, right : right + 8], self.labels[index]
