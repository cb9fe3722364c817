"""The manifest of a checkpoint: step, metrics, sizes and checksums of its files. Torch-free."""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ddp_runner.errors import UserError, any_error, os_errors
from ddp_runner.files import file_sha256, json_safe, read_file

FORMAT_VERSION = 3
SHARDED_VERSION = 4  # of a checkpoint with tensors in further files
STATE = "state.pt"
MANIFEST = "manifest.json"
WEIGHTS_INDEX = "model.safetensors.index.json"  # Hugging Face's: the file of each tensor
CHECKSUM = "sha256"  # key of the checksum of all other fields


class FileFacts(NamedTuple):
    """Size in bytes, and SHA-256 in hexadecimal, of a file of a checkpoint."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The facts of one checkpoint."""

    step: int
    metrics: dict[str, float | None]  # None: the value was not finite
    files: dict[str, FileFacts]  # by name, state.pt first


def facts_of(path: Path) -> FileFacts:
    """Return the facts of a file on the disk."""
    return FileFacts(path.stat().st_size, file_sha256(path))


def manifest_text(
    files: Mapping[str, FileFacts], *, step: int, metrics: Mapping[str, float]
) -> str:
    """Return the content of a checkpoint's manifest, with a checksum of the manifest itself."""
    fields = {
        "format_version": FORMAT_VERSION if len(files) == 1 else SHARDED_VERSION,
        "step": step,
        "metrics": json_safe(metrics),
        "files": {name: facts._asdict() for name, facts in files.items()},
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
        if version in (FORMAT_VERSION, SHARDED_VERSION):
            return _manifest(fields)
    raise UserError(
        f"checkpoint {path} has format version {version}, this program reads {FORMAT_VERSION} "
        f"and {SHARDED_VERSION}",
        "resume it with the program that wrote it",
    )


def _manifest(fields: dict[str, Any]) -> Manifest:
    if fields.pop(CHECKSUM, None) != _checksum(fields):
        raise ValueError("fields that do not match their checksum")
    files = {
        name: FileFacts(_whole_number(facts["size"]), str(facts["sha256"]))
        for name, facts in fields["files"].items()
    }
    if STATE not in files or any(Path(name).name != name for name in files):
        raise ValueError(f"files {', '.join(files)} where {STATE} and files beside it belong")
    return Manifest(
        step=_whole_number(fields["step"]),
        metrics={name: _finite(value) for name, value in fields["metrics"].items()},
        files=files,
    )


def verify(
    path: Path, *, fix: str | None = None, verifier: int = 0, num_verifiers: int = 1
) -> Manifest:
    """Return the manifest, after a comparison with the files' sizes and SHA-256.

    Several verifiers, numbered from 0, each read a part of the files.

    Raises:
        UserError: a file cannot be read, or differs from the manifest.
    """
    manifest = read_manifest(path, fix=fix)
    for name in [*manifest.files][verifier::num_verifiers]:
        expected = manifest.files[name]
        with os_errors(f"checkpoint {path} is damaged: {name}", fix=fix):
            found = facts_of(path / name)
        if found != expected:
            raise UserError(
                f"checkpoint {path} is damaged: expected {name} of {expected.size} bytes with "
                f"SHA-256 {expected.sha256[:8]}…, found {found.size} bytes with "
                f"{found.sha256[:8]}…",
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
