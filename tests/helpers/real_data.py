"""Find real datasets, and write a tiny MNIST."""

import struct
from pathlib import Path

import pytest

from ddp_runner.data.sources.mnist import IMAGES_MAGIC, LABELS_MAGIC


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
        header = struct.pack(">4I", IMAGES_MAGIC, count, 28, 28)
        (raw / f"{prefix}-images-idx3-ubyte").write_bytes(header + bytes(range(count)) * 784)
        header = struct.pack(">2I", LABELS_MAGIC, count)
        (raw / f"{prefix}-labels-idx1-ubyte").write_bytes(header + bytes(range(count)))
    return raw
