"""Finds a user's pictures, one folder per class, and tells whether they changed."""

import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from ddp_runner.data.pictures import SUFFIXES, Samples
from ddp_runner.data.sources import shared
from ddp_runner.errors import UserError, os_errors

SPLIT_SEED = 0


def find_pictures(
    root: Path, *, num_classes: int, eval_fraction: float | None
) -> dict[str, Samples]:
    """Return the files of ``train`` and of ``eval`` with their classes, in a fixed order.

    Raises:
        UserError: a folder is missing or empty or cannot be read, or the classes of the splits
            differ or do not match num_classes.
    """
    try:
        return _find(root, num_classes, eval_fraction)
    except OSError as error:
        raise UserError(
            f"{Path(error.filename or root).absolute()} cannot be read ({error.strerror}); make it "
            "readable, or name another folder with data_root and dataset.folder"
        ) from error


def _find(root: Path, num_classes: int, eval_fraction: float | None) -> dict[str, Samples]:
    if eval_fraction is not None:
        _, samples = _classes(root, num_classes)
        parts = shared.shuffled_split(
            len(samples), eval_fraction, seed=SPLIT_SEED, noun="pictures", place=root
        )
        return {split: [samples[i] for i in part] for split, part in parts.items()}
    present = [name for name in ("val", "eval") if (root / name).is_dir()]
    if not (root / "train").is_dir() or len(present) != 1:
        raise UserError(
            f"{root.absolute()} must hold train/CLASS/ and either val/CLASS/ or eval/CLASS/ "
            "with the pictures; name it with data_root and dataset.folder, or write "
            "dataset.eval_fraction=0.1 if it holds the folders of the classes itself"
        )
    names, train = _classes(root / "train", num_classes)
    eval_names, rest = _classes(root / present[0], num_classes)
    if differing := names ^ eval_names:
        raise UserError(
            f"the classes in {root / 'train'} and {root / present[0]} differ: "
            f"{', '.join(sorted(differing))} is in only one of them; give both the same classes"
        )
    return {"train": train, "eval": rest}


def _classes(root: Path, num_classes: int) -> tuple[set[str], Samples]:
    """Return the names of the classes, and the pictures sorted by class and path."""
    folders = [path for path in root.iterdir() if path.is_dir() and path.name[0] != "."]
    # Sorted as paths are, by their parts.
    classes = {
        folder.name: sorted(_pictures(str(folder)), key=lambda path: path.replace(os.sep, "\0"))
        for folder in sorted(folders)
    }
    for name, paths in classes.items():
        if not paths:
            raise UserError(
                f"{root / name} holds no picture ({', '.join(SUFFIXES)}); add some, or remove "
                "the folder"
            )
    if len(classes) != num_classes:
        raise UserError(
            f"{root.absolute()} holds {len(classes)} folders of classes, dataset.num_classes "
            f"is {num_classes}; "
            + (f"write dataset.num_classes={len(classes)}" if classes else "add pictures")
        )
    numbered = enumerate(classes.values())
    return set(classes), [(path, label) for label, paths in numbered for path in paths]


def _pictures(folder: str) -> Iterator[str]:
    """Yield the pictures in a folder and its subfolders; links to folders are not followed.

    Of a million pictures pathlib would make a million objects, which takes a minute.
    """
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _pictures(entry.path)
            elif entry.name.lower().endswith(SUFFIXES) and entry.name.lower() not in SUFFIXES:
                yield entry.path


def digest_of_files(samples: Mapping[str, Samples], root: Path | None = None) -> str:
    """Return a digest of the files of both splits.

    With `root` the paths below it count, and the modification times do not. So a copy of the
    pictures on another machine has the same digest, and other pictures have another one, unless
    names and sizes are the same.
    """
    digest, prefix = hashlib.sha256(), f"{root}{os.sep}" if root else ""
    for of_split in samples.values():
        for path, label in of_split:
            what = f"{Path(path).absolute()} cannot be read"
            with os_errors(what, fix="replace or remove it"):  # such as a dangling link
                stat = Path(path).stat()
            time = "" if root else f"\0{stat.st_mtime_ns}"
            name = path.removeprefix(prefix)
            digest.update(os.fsencode(f"{name}\0{label}\0{stat.st_size}{time}\n"))
        digest.update(b"\n")
    return digest.hexdigest()
