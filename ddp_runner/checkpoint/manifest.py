"""The manifest of a checkpoint: step, metrics, size and checksum of its state. Torch-free."""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_runner.errors import UserError, any_error, os_errors
from ddp_runner.files import file_sha256, json_safe, read_file

FORMAT_VERSION = 3
STATE = "state.pt"
MANIFEST = "manifest.json"
CHECKSUM = "sha256"  # key of the checksum of all other fields


@dataclass(frozen=True)
class Manifest:
    """The facts of one checkpoint."""

    step: int
    metrics: dict[str, float | None]  # None: the value was not finite
    size: int  # size of state.pt in bytes
    sha256: str  # SHA-256 of state.pt, hexadecimal


def manifest_text(state: Path, *, step: int, metrics: Mapping[str, float]) -> str:
    """Return the content of a state file's manifest, with a checksum of the manifest itself."""
    fields = {
        "format_version": FORMAT_VERSION,
        "step": step,
        "metrics": json_safe(metrics),
        "files": {STATE: {"size": state.stat().st_size, "sha256": file_sha256(state)}},
    }
    return json.dumps(fields | {CHECKSUM: _checksum(fields)}, indent=2, allow_nan=False)


def read_manifest(path: Path, *, fix: str | None = None) -> Manifest:
    """Return the manifest of a checkpoint folder.

    Raises:
        UserError: the manifest is missing, damaged or of another format.
    """
    with any_error(f"checkpoint {path} is damaged: {MANIFEST}", fix):
        fields = json.loads(read_file(path / MANIFEST))
        version = _whole_number(fields["format_version"])
        if version == FORMAT_VERSION:
            return _manifest(fields)
    raise UserError(
        f"checkpoint {path} has format version {version}, this program reads {FORMAT_VERSION}",
        "resume it with the program that wrote it",
    )


def _manifest(fields: dict[str, Any]) -> Manifest:
    if fields.pop(CHECKSUM, None) != _checksum(fields):
        raise ValueError("fields that do not match their checksum")
    file = fields["files"][STATE]
    return Manifest(
        step=_whole_number(fields["step"]),
        metrics={name: _finite(value) for name, value in fields["metrics"].items()},
        size=_whole_number(file["size"]),
        sha256=str(file["sha256"]),
    )


def verify(path: Path, *, fix: str | None = None) -> Manifest:
    """Return the manifest, after a comparison with the state's size and SHA-256.

    Raises:
        UserError: the state cannot be read, or differs from the manifest.
    """
    manifest = read_manifest(path, fix=fix)
    with os_errors(f"checkpoint {path} is damaged: {STATE}", fix=fix):
        size, sha256 = (path / STATE).stat().st_size, file_sha256(path / STATE)
    if (size, sha256) != (manifest.size, manifest.sha256):
        raise UserError(
            f"checkpoint {path} is damaged: expected {STATE} of {manifest.size} bytes with SHA-256 "
            f"{manifest.sha256[:8]}…, found {size} bytes with {sha256[:8]}…",
            fix,
        )
    return manifest


def _checksum(fields: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the fields as JSON with sorted keys."""
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def _whole_number(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{str(value)[:40]} where a whole number belongs")
    return value


def _finite(value: Any) -> float | None:
    if value is not None and type(value) not in (int, float):
        raise ValueError(f"{str(value)[:40]} where a metric's number belongs")
    return float(value) if value is not None and math.isfinite(value) else None
