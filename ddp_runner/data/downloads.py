"""What sources of files share: stamps of the files, their download, the range of their labels."""

import contextlib
import socket
import sys
from collections.abc import Iterator, Sequence
from http.client import HTTPException
from pathlib import Path

from filelock import FileLock
from torch import Tensor

from ddp_runner.errors import UserError

REMEDY = "replace the file, or delete it to have it downloaded"
DOWNLOADS = ("MNIST", "FashionMNIST", "KMNIST", "CIFAR10", "CIFAR100")  # torchvision's classes
DOWNLOAD_TIMEOUT_S = 10  # without an answer; torchvision would wait for ever
DOWNLOAD_LOCK = ".download.lock"  # beside the files: machines may share them, but not the cache


def stamps(paths: Sequence[Path]) -> dict[str, object]:
    """Return size (bytes) and modification time (ns) of each file by name; None: missing."""
    found: dict[str, object] = {}
    for path in paths:
        try:
            stat = path.stat()
        except OSError:  # the build reports it
            found[path.name] = None
        else:
            found[path.name] = [stat.st_size, stat.st_mtime_ns]
    return found


def fetch_missing(
    paths: Sequence[Path], *, name: str, torchvision_class: str, data_root: Path
) -> None:
    """Download a dataset with torchvision, unless all its files are there.

    If several machines share the folder, one downloads and the others wait.

    Args:
        paths: the files, all in one folder under ``data_root``.
        name: of the dataset, for messages.
        torchvision_class: in ``torchvision.datasets``; it has the addresses of the files.
        data_root: folder of the datasets.

    Raises:
        UserError: a file is missing and cannot be downloaded.
    """
    folder = paths[0].parent
    if all(path.exists() for path in paths) and not (folder / DOWNLOAD_LOCK).exists():
        return
    with _download_lock(folder):
        if all(path.exists() for path in paths):
            return
        reason = _download(torchvision_class, data_root)
    missing = [path.name for path in paths if not path.exists()]
    if missing:
        raise UserError(
            f"dataset {name}: {', '.join(missing)} not found in {folder.absolute()}, and the "
            f"download failed ({reason}); copy the files into that folder, point data_root at the "
            f"folder that holds {folder.relative_to(data_root)}, connect to the network once, or "
            "use dataset=digits, which is bundled and needs no network"
        )


def _download(torchvision_class: str, data_root: Path) -> str:
    """Download what torchvision offers; return why a file may still be missing."""
    from torchvision import datasets  # slow to import, and needed only here

    try:
        if torchvision_class not in DOWNLOADS:  # the name of a folder that a config gives
            raise ValueError(f"only {', '.join(DOWNLOADS)} can be downloaded")
        with _socket_timeout(DOWNLOAD_TIMEOUT_S), contextlib.redirect_stdout(sys.stderr):
            getattr(datasets, torchvision_class)(data_root, download=True)
    # torchvision also reads the files; our own reader reports damaged ones better.
    except (RuntimeError, OSError, HTTPException, ValueError, AssertionError) as error:
        return " ".join(str(error).split())
    return "the download left them out"


@contextlib.contextmanager
def _download_lock(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, or no lock if the folder cannot be written or locked."""
    lock = FileLock(folder / DOWNLOAD_LOCK)
    # A download into such a folder fails, and the message has the reason.
    with contextlib.suppress(OSError, RuntimeError):
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def validate_labels(labels: Tensor, *, num_classes: int, path: Path) -> None:
    """Refuse labels (num_samples,) that are not classes.

    Raises:
        UserError: a label is out of range; the message has the first one.
    """
    wrong = ((labels < 0) | (labels >= num_classes)).nonzero()
    if len(wrong):
        position = int(wrong[0])
        raise UserError(
            f"{path} has label {int(labels[position])} for sample {position}, expected 0 to "
            f"{num_classes - 1}; {REMEDY}"
        )


@contextlib.contextmanager
def _socket_timeout(timeout_s: float) -> Iterator[None]:
    """Limit the wait of new Python sockets: torchvision has no timeout of its own."""
    previous = socket.getdefaulttimeout()
    socket.setdefaulttimeout(timeout_s)
    try:
        yield
    finally:
        socket.setdefaulttimeout(previous)
