"""Run TorchX's command line, and read the job files that it prints."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml

SCHEMA = "1.31"  # an older Kubernetes; later ones only add fields
TORCHX = str(Path(sys.executable).with_name("torchx"))
# A dry run asks no cluster; --workspace= builds no image.
KUBERNETES = (
    *("run", "-s", "kubernetes", "--workspace=", "--dryrun"),
    *("-cfg", "queue=default,validate_spec=False"),
)


def torchx(*args: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command of TorchX to its end."""
    return subprocess.run(
        [TORCHX, *args], cwd=folder, capture_output=True, text=True, timeout=600, check=False
    )


def kubernetes_job(*args: str, folder: Path) -> dict[str, Any]:
    """Return the job file that TorchX makes of our component with these arguments."""
    end = torchx(*KUBERNETES, "ddp_runner.torchx:run", *args, folder=folder)
    assert end.returncode == 0, end.stderr
    job: dict[str, Any] = yaml.safe_load(end.stdout.partition("=== SCHEDULER REQUEST ===")[2])
    return job


def validate_pod(template: dict[str, Any]) -> None:
    """Check the pod of a job by Kubernetes' own schema."""
    validate_manifest({"apiVersion": "v1", "kind": "Pod", **template})


def validate_manifest(manifest: dict[str, Any]) -> None:
    """Check an object by Kubernetes' own schema, which must know every field."""
    kubernetes_validate.validate(manifest, SCHEMA, strict=True)
