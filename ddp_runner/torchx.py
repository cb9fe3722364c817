"""The TorchX component: the same run on this machine, in Docker, under Slurm or on Kubernetes.

    torchx run -s local_cwd ddp_runner.torchx:run -j 1x2 -- model=toy

Needs the extra torchx. TorchX writes the job file, the scheduler starts torchrun on each machine,
and torchrun the ranks. docs/kubernetes.md has the commands.
"""

from pathlib import Path
from typing import Any

import yaml
from torchx import specs
from torchx.components import dist
from torchx.specs.finder import ComponentValidationException
from torchx.specs.overlays import set_overlay

from ddp_runner.errors import one_line

WORKDIR = "/app"  # of the image, see Dockerfile
GROUP = 1000  # of the image's user, who is not root
CORES_PER_RANK, MB_PER_RANK = 2, 4096  # a rank of torch takes 0.5 GiB before it has a model
GRACE_S = 60  # from the request to end to SIGKILL: to finish the step and write a checkpoint
ENVIRON = {
    "PYTHONUNBUFFERED": "1",
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(GRACE_S - 5),  # torchrun's own, for its ranks
    # Else torchrun publishes its address in the first rendezvous only, and the agent of a machine
    # that replaces a lost one waits for it in vain.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}


def run(
    *overrides: str,
    j: str = "1x2",
    image: str | None = None,
    name: str = "/",
    h: str | None = None,
    cpu: int = 0,
    gpu: int = 0,
    memory_mb: int = 0,
    outputs: str | None = None,
    data: str | None = None,
    mounts: list[str] | None = None,
    pod: str | None = None,
    env: dict[str, str] | None = None,
    max_retries: int = 0,
) -> specs.AppDef:
    """Run ddp_runner on MACHINES x RANKS processes.

    What comes after -- is the command line of ddp_runner. A retry goes on in the same run folder
    from the last checkpoint.

    Args:
        overrides: the keys of the run, as in model=resnet18 optimizer.lr=0.1
        j: machines x ranks of each, as in 2x8; 1:4x8 for an elastic number of machines
        image: the container image, built from the Dockerfile of ddp_runner
        name: the first part of the job's name
        h: a named resource of TorchX, in place of cpu, gpu and memory_mb
        cpu: cores of each machine; 0: 2 for each rank
        gpu: GPUs of each machine
        memory_mb: memory of each machine in MB; 0: 4096 for each rank
        outputs: where runs are kept: a volume (on Kubernetes a claim), or /FOLDER of the host
        data: the folder of datasets, given like outputs; it is mounted read-only
        mounts: more of them, as in type=volume,src=NAME,dst=/PATH
        pod: a YAML file with more fields of each pod, such as tolerations (Kubernetes)
        env: more environment variables, as in A=1,B=2
        max_retries: how often ranks, and jobs that were lost, are started again

    Raises:
        ComponentValidationException: the run folder would not outlive its container, or the file of
            the pod's fields cannot be read. TorchX prints it as one line.
    """
    own_mounts = [*_mount(outputs, "outputs"), *_mount(data, "data", "readonly"), *(mounts or [])]
    if image and not outputs and not mounts:
        raise ComponentValidationException(
            "the run folder would be lost with its container; give --outputs VOLUME, or --mounts "
            f"with a volume for {WORKDIR}/outputs"
        )
    _, _, ranks, _ = dist.parse_nnodes(j) if h is None else (0, 0, 0, "")
    app = dist.torchrun(
        *overrides,
        m="ddp_runner",
        j=j,
        name=name,
        h=h,
        cpu=cpu or CORES_PER_RANK * ranks,
        gpu=gpu,
        memMB=memory_mb or MB_PER_RANK * ranks,
        mounts=own_mounts,
        env=ENVIRON | {"PET_MAX_RESTARTS": str(max_retries)} | (env or {}),
        max_retries=max_retries,
        **({"image": image} if image else {}),
    )
    # Without a group the image's user could not write to a new volume.
    owner = {"fsGroup": GROUP, "fsGroupChangePolicy": "OnRootMismatch"}
    spec = {"securityContext": owner, "terminationGracePeriodSeconds": GRACE_S}
    for role in app.roles:
        set_overlay(role, "kubernetes", "V1Pod", {"spec": spec})
        if pod is not None:
            set_overlay(role, "kubernetes", "V1Pod", _fields(Path(pod)))
    return app


def _mount(source: str | None, folder: str, *options: str) -> list[str]:
    """Return TorchX's options that mount a volume, or a folder of the host, below the workdir."""
    if source is None:
        return []
    kind = "bind" if source.startswith("/") else "volume"
    return [f"type={kind}", f"src={source}", f"dst={WORKDIR}/{folder}", *options]


def _fields(path: Path) -> dict[str, Any]:
    """Return the fields of a pod from a YAML file."""
    try:
        fields = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ComponentValidationException(f"--pod {path}: {one_line(error)}") from error
    if not isinstance(fields, dict):
        raise ComponentValidationException(
            f"--pod {path} must hold fields of a pod, as in spec: {{nodeSelector: {{gpu: a100}}}}"
        )
    return fields
