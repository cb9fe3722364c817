"""Find real datasets, and write a tiny MNIST."""

import struct
from collections.abc import Sequence
from pathlib import Path

import pytest


def require(path: Path) -> Path:
    """Return the path of real data; skip the test if it does not exist."""
    if not path.exists():
        pytest.skip(f"needs {path}, not shipped: put it there, or set DDP_RUNNER_DATA_ROOT")
    return path


def write_tiny_mnist(data_root: Path) -> Path:
    """Write 6 train and 3 eval images with labels that count up from 0; return their folder."""
    raw = data_root / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for prefix, count in (("train", 6), ("t10k", 3)):
        (raw / f"{prefix}-images-idx3-ubyte").write_bytes(idx_images(bytes(range(count)) * 784))
        (raw / f"{prefix}-labels-idx1-ubyte").write_bytes(idx_labels(range(count)))
    return raw


def idx_images(pixels: bytes) -> bytes:
    """Return an IDX file of images of 28x28: http://yann.lecun.com/exdb/mnist/."""
    return struct.pack(">4I", 0x803, len(pixels) // 784, 28, 28) + pixels


def idx_labels(labels: Sequence[int]) -> bytes:
    """Return an IDX file of labels."""
    return struct.pack(">2I", 0x801, len(labels)) + bytes(labels)
