"""Write small pictures of noise, one folder per class or in shards, for tests of large datasets."""

import io
import tarfile
from pathlib import Path

import torch
from PIL import Image

CLASSES = ("cat", "dog", "emu")


def noise(seed: int, *, size: int = 10) -> Image.Image:
    """Return a picture of noise."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(256, (size, size, 3), generator=generator, dtype=torch.uint8)
    return Image.fromarray(pixels.numpy())


def write_folders(root: Path, *, num_train: int, num_eval: int) -> None:
    """Write root/train/CLASS/NUMBER.png and root/val/CLASS/NUMBER.png, three classes in turns."""
    for split, count in (("train", num_train), ("val", num_eval)):
        for number in range(count):
            path = root / split / CLASSES[number % 3] / f"{number:03d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            noise(number if split == "train" else -1 - number).save(path)


def write_shards(root: Path, *, num_train: int, num_eval: int, per_shard: int = 10) -> None:
    """Write the same pictures as root/train-NUMBER.tar and root/val-NUMBER.tar."""
    root.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", num_train), ("val", num_eval)):
        for first in range(0, count, per_shard):
            with tarfile.open(root / f"{split}-{first:06d}.tar", "w") as shard:
                for number in range(first, min(first + per_shard, count)):
                    picture = io.BytesIO()
                    noise(number if split == "train" else -1 - number).save(picture, "png")
                    _add(shard, f"{number:06d}.png", picture.getvalue())
                    _add(shard, f"{number:06d}.cls", str(number % 3).encode())


def _add(shard: tarfile.TarFile, name: str, content: bytes) -> None:
    """Add a file to a tar."""
    member = tarfile.TarInfo(name)
    member.size = len(content)
    shard.addfile(member, io.BytesIO(content))
