"""What a checkpoint says about itself, and whether it is still true; used by ``checkpoint``.

Torch-free: a comparison of runs reads manifests too.
"""

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

from ddp_runner.errors import UserError

FORMAT_VERSION = 1
STATE = "state.pt"
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says about itself."""

    step: int
    metrics: dict[str, float | None]  # None: was not finite
    size: int  # of state.pt, bytes
    sha256: str  # of state.pt, hexadecimal


def read_manifest(path: Path) -> Manifest:
    """Returns the manifest of a checkpoint folder.

    Raises:
        UserError: It is missing, damaged or of another format.
    """
    try:
        fields = json.loads((path / MANIFEST).read_bytes())
        version, files = fields["format_version"], fields["files"]
        manifest = Manifest(
            step=int(fields["step"]),
            metrics={
                name: None if value is None else float(value)
                for name, value in dict(fields["metrics"]).items()
            },
            size=int(files[STATE]["size"]),
            sha256=str(files[STATE]["sha256"]),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"checkpoint {path} is damaged: expected a manifest in {MANIFEST}, found {error!r}"
        ) from error
    if version != FORMAT_VERSION:
        raise UserError(
            f"checkpoint {path} has format version {version}, this program reads {FORMAT_VERSION}"
        )
    return manifest


def verify(path: Path) -> None:
    """Raises UserError with what was expected and found, unless the state is as it was saved."""
    manifest = read_manifest(path)
    try:
        size, sha256 = measure(path / STATE)
    except OSError as error:
        raise UserError(f"checkpoint {path} is damaged: {STATE}: {error.strerror}") from error
    if (size, sha256) != (manifest.size, manifest.sha256):
        raise UserError(
            f"checkpoint {path} is damaged: expected {STATE} of {manifest.size} bytes with SHA-256 "
            f"{manifest.sha256}, found {size} bytes with {sha256}"
        )


def measure(path: Path) -> tuple[int, str]:
    """Returns a file's size in bytes and its SHA-256."""
    with path.open("rb") as file:
        return os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()
