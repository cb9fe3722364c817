"""The TorchX component: the job files that TorchX makes of it in a dry run."""

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from torchx_jobs import KUBERNETES, kubernetes_job, torchx, validate_pod

from ddp_runner.dist_env import dist_env
from ddp_runner.torchx import MB_PER_RANK, run

RANK = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h"}
COMPONENT = "ddp_runner.torchx:run"
TOLERATION = {"key": "spot", "operator": "Exists"}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The job file of two machines with eight GPUs each."""
    folder = tmp_path_factory.mktemp("job")
    (folder / "pod.yaml").write_text(yaml.safe_dump({"spec": {"tolerations": [TOLERATION]}}))
    return kubernetes_job(
        *("-j", "2x8", "--image", "registry/ddp-runner:1", "--gpu", "8", "--outputs", "runs"),
        *("--data", "/mnt/data", "--max_retries", "3", "--pod", "pod.yaml"),
        *("--", "model=resnet18", "name=a b"),
        folder=folder,
    )


def pods(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the pod of each machine."""
    return [task["template"] for task in job["spec"]["tasks"]]


def environ_of(container: dict[str, Any]) -> dict[str, str]:
    """Return the variables that a container starts with."""
    return {one["name"]: one["value"] for one in container["env"]}


def test_each_pod_starts_its_ranks_and_meets_the_others_at_the_first(job: dict[str, Any]) -> None:
    """Volcano sets the variable with the first pod's host."""
    (first,), (second,) = (pod["spec"]["containers"] for pod in pods(job))
    endpoints = []
    for container in (first, second):
        assert container["image"] == "registry/ddp-runner:1"
        assert container["command"][:2] == ["bash", "-c"]
        words = shlex.split(container["command"][2])
        assert words[-4:] == ["-m", "ddp_runner", "model=resnet18", "name=a b"]
        options = dict(zip(words[1:-4:2], words[2:-4:2], strict=True))
        assert (options["--nnodes"], options["--nproc_per_node"]) == ("2", "8")
        endpoints.append(options["--rdzv_endpoint"])
    assert environ_of(first)["TORCHX_RANK0_HOST"] == "localhost"
    hosts = ("TORCHX_RANK0_HOST", "VC_DDPRUNNER_0_HOSTS")
    assert endpoints == [f"${{{name}:=localhost}}:29500" for name in hosts]
    assert job["spec"]["plugins"] == {"env": [], "svc": ["--publish-not-ready-addresses"]}


def test_a_pod_has_room_for_its_ranks_and_keeps_what_must_outlive_it(job: dict[str, Any]) -> None:
    """Memory, shared memory, volumes that the image's user may write to, and the user's fields."""
    for pod in pods(job):
        spec = pod["spec"]
        (container,) = spec["containers"]
        limits = container["resources"]["limits"]
        assert limits == {"cpu": "16000m", "memory": f"{8 * MB_PER_RANK}M", "nvidia.com/gpu": "8"}
        volumes = {one["name"]: one for one in spec["volumes"]}
        mounted = {
            one["mountPath"]: volumes[one["name"]] | {"readOnly": one.get("readOnly", False)}
            for one in container["volumeMounts"]
        }
        assert mounted == {
            "/dev/shm": {"name": "dshm", "emptyDir": {"medium": "Memory"}, "readOnly": False},
            "/app/outputs": {
                "name": "mount-0",
                "persistentVolumeClaim": {"claimName": "runs"},
                "readOnly": False,
            },
            "/app/data": {
                "name": "mount-1",
                "hostPath": {"path": "/mnt/data"},
                "readOnly": True,
            },
        }
        assert (spec["securityContext"]["fsGroup"], spec["terminationGracePeriodSeconds"]) == (
            1000,
            60,
        )
        assert spec["tolerations"] == [TOLERATION]
        validate_pod(pod)


def test_a_lost_pod_starts_the_job_again_under_the_name_that_its_run_folder_has(
    job: dict[str, Any],
) -> None:
    """All pods of the job have this name, and so have those that replace them."""
    for task in job["spec"]["tasks"]:
        assert (task["maxRetry"], task["minAvailable"]) == (3, 1)
        assert {one["event"]: one["action"] for one in task["policies"]} == {
            "PodEvicted": "RestartJob",
            "PodFailed": "RestartJob",
        }
    assert job["spec"]["maxRetry"] == 3
    for pod in pods(job):
        (container,) = pod["spec"]["containers"]
        environ = environ_of(container)
        assert environ["PET_MAX_RESTARTS"] == "3"  # torchrun reads it
        (run_id,) = re.findall(r"--rdzv_id '([^']*)'", container["command"][2])
        assert run_id == job["metadata"]["name"]
        env = dist_env({**RANK, **environ, "TORCHELASTIC_RUN_ID": run_id})
        assert env is not None
        assert env.launch_id == f"torchx kubernetes://torchx/{run_id}"


def test_an_elastic_job_needs_its_first_machines_only(tmp_path: Path) -> None:
    """Of one to three machines one must be there."""
    job = kubernetes_job(
        "-j", "1:3x2", "--image", "I", "--outputs", "runs", "--", "model=toy", folder=tmp_path
    )
    assert [task["minAvailable"] for task in job["spec"]["tasks"]] == [1, 0, 0]
    assert all("--nnodes 1:3" in str(pod) for pod in pods(job))


def test_slurm_gets_one_job_that_it_may_queue_again(tmp_path: Path) -> None:
    """The script is run with an srun that prints what it gets."""
    end = torchx(
        *("run", "-s", "slurm", "--workspace=", "--dryrun", COMPONENT, "-j", "2x4", "--gpu", "4"),
        *("--max_retries", "2", "--", "model=toy"),
        folder=tmp_path,
    )
    assert end.returncode == 0, end.stderr
    script = "#!/bin/bash" + end.stdout.partition("#!/bin/bash")[2]
    directives = re.findall(r"^#SBATCH (--.*)$", script, re.MULTILINE)
    assert len(directives) == script.count("#SBATCH hetjob") + 1 == 2
    for number, line in enumerate(directives):
        assert f"--job-name=ddp_runner-{number} --requeue" in line
        assert f"--cpus-per-task=8 --mem={4 * MB_PER_RANK} " in f"{line} "
        assert "--gpus-per-node=4" in line or "--gpus-per-task=4" in line
    (tmp_path / "srun").write_text('#!/bin/bash\nprintf "%s\\0" "$@" > srun.txt; exit 1\n')
    (tmp_path / "scontrol").write_text('#!/bin/bash\necho "$@" > scontrol.txt\n')
    for name in ("srun", "scontrol"):
        (tmp_path / name).chmod(0o755)
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "41"}
    environ |= {"SLURM_RESTART_COUNT": "1"}
    script_file = tmp_path / "job.sh"
    script_file.write_text(script)
    subprocess.run(["bash", script_file], cwd=tmp_path, env=environ, check=False)
    words = (tmp_path / "srun.txt").read_text().split("\0")
    exports = [word for word in words if word.startswith("--export=ALL,")]
    commands = [word for word in words if word.startswith("torchrun ")]
    assert len(exports) == len(commands) == 2
    for exported, command in zip(exports, commands, strict=True):
        variables = dict(one.split("=", 1) for one in exported.split(",")[1:])
        assert "--rdzv_id '41'" in command
        assert "${SLURM_JOB_NODELIST_HET_GROUP_0:=localhost}:29500" in command
        env = dist_env({**RANK, **variables, "TORCHELASTIC_RUN_ID": "41"})
        assert env is not None
        assert env.launch_id == "torchx slurm://torchx/41"
    assert (tmp_path / "scontrol.txt").read_text() == "requeue 41\n"


def test_a_named_resource_replaces_the_single_numbers() -> None:
    """TorchX knows the machines of clouds by name."""
    (role,) = run("model=toy", h="gpu.small", j="1x1").roles
    assert (role.resource.gpu, role.resource.cpu) == (1, 8)
    (role,) = run("model=toy", cpu=3, memory_mb=2048).roles
    assert (role.resource.gpu, role.resource.cpu, role.resource.memMB) == (0, 3, 2048)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), r"lost with its container; give --outputs VOLUME, or --mounts with a volume for"),
        (("--outputs", "runs", "--pod", "no.yaml"), r"--pod no.yaml: .*No such file"),
        (("--outputs", "runs", "--pod", "list.yaml"), r"--pod list.yaml must hold fields of a pod"),
    ],
    ids=["no outputs", "no file", "no fields"],
)
def test_what_cannot_run_is_rejected_before_it_is_sent(
    tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    """One line, and no traceback."""
    (tmp_path / "list.yaml").write_text("- spec")
    end = torchx(
        *KUBERNETES, COMPONENT, "--image", "I", *arguments, "--", "model=toy", folder=tmp_path
    )
    assert end.returncode == 1
    assert re.search(message, end.stderr)
    assert "Traceback" not in end.stderr
