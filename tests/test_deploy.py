"""What runs in containers: the image's files, the plain Jobs of Kubernetes, and their page."""

import os
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from configs import resolved

from ddp_runner.dist_env import DistEnv
from ddp_runner.host.hardware import Hardware

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted((ROOT / "deploy" / "kubernetes").glob("*.yaml"))
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
PAGE = (ROOT / "docs" / "clusters.md").read_text(encoding="utf-8")
BIG = Hardware(num_gpus=8, num_cores=64)
SCHEMA = "1.31"  # an older Kubernetes; later ones only add fields
WORKDIR = "/app"  # of the image
GROUP = 1000  # of the image's user, who is not root


def manifests(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file."""
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def object_of(name: str, kind: str) -> dict[str, Any]:
    """Return a file's only object of a kind."""
    found = manifests(ROOT / "deploy" / "kubernetes" / f"{name}.yaml")
    (only,) = [one for one in found if one["kind"] == kind]
    return only


def with_job(arguments: list[str]) -> list[str]:
    """Return arguments with the Job's name, which Kubernetes writes there."""
    return [one.replace("$(JOB)", "resnet18-two-gpus") for one in arguments]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_file_is_what_kubernetes_accepts(path: Path) -> None:
    """By the schemas of its API; a field that they do not know is a mistake."""
    assert f"deploy/kubernetes/{path.name}" in PAGE
    for manifest in manifests(path):
        kubernetes_validate.validate(manifest, SCHEMA, strict=True)


@pytest.mark.parametrize("name", ["one_machine", "several_machines"])
def test_a_pod_that_replaces_another_goes_on_in_its_run_folder(name: str) -> None:
    """The Job's name names the folder, which is on a volume that the image's user may write to."""
    job = object_of(name, "Job")
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["args"][-2:] == ["hydra.run.dir=outputs/$(JOB)", "resume=auto"]
    fields = {one["name"]: one.get("valueFrom") for one in container["env"]}
    job_name = "metadata.labels['batch.kubernetes.io/job-name']"
    assert fields["JOB"] == {"fieldRef": {"fieldPath": job_name}}
    assert pod["securityContext"]["fsGroup"] == GROUP
    assert pod["terminationGracePeriodSeconds"] == 60
    (volumes_file,) = [path for path in FILES if path.stem == "volumes"]
    claims = {one["metadata"]["name"] for one in manifests(volumes_file)}
    volumes = {one["name"]: one for one in pod["volumes"]}
    mounted = {one["mountPath"]: volumes[one["name"]] for one in container["volumeMounts"]}
    for folder in ("outputs", "data"):
        claim = mounted[f"{WORKDIR}/{folder}"]["persistentVolumeClaim"]["claimName"]
        assert claim in claims
    assert mounted["/dev/shm"]["emptyDir"] == {"medium": "Memory"}


def test_the_run_on_one_machine_is_not_started_again_with_invalid_input() -> None:
    """Exit code 2 ends the Job, and a pod that the cluster took away does not count."""
    job = object_of("one_machine", "Job")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    invalid, taken = job["spec"]["podFailurePolicy"]["rules"]
    assert (invalid["action"], invalid["onExitCodes"]["values"]) == ("FailJob", [2])
    assert invalid["onExitCodes"]["containerName"] == container["name"]
    assert (taken["action"], taken["onPodConditions"][0]["type"]) == ("Ignore", "DisruptionTarget")
    config, _ = resolved(*with_job(container["args"]), hardware=Hardware(num_gpus=2, num_cores=8))
    assert config.world_size == 2


def test_the_pods_of_several_machines_meet_at_pod_zero() -> None:
    """Its host name follows from Job, Service and namespace; torchrun knows the flags."""
    from torch.distributed.run import get_args_parser

    job, service = object_of("several_machines", "Job"), object_of("several_machines", "Service")
    spec, template = job["spec"], job["spec"]["template"]
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    assert (service["spec"]["clusterIP"], service["spec"]["publishNotReadyAddresses"]) == (
        "None",
        True,
    )
    assert template["spec"]["subdomain"] == service["metadata"]["name"]
    (container,) = template["spec"]["containers"]
    program, *arguments = container["args"]
    flags = get_args_parser().parse_args(arguments)
    assert program == "torchrun"
    assert (flags.module, flags.training_script) == (True, "ddp_runner")
    assert int(flags.nnodes) == spec["completions"] == spec["parallelism"]
    assert int(flags.nproc_per_node) == int(container["resources"]["limits"]["nvidia.com/gpu"])
    host = f"$(JOB)-0.{service['metadata']['name']}.$(NAMESPACE).svc.cluster.local"
    assert flags.rdzv_endpoint == f"{host}:29400"
    assert (flags.rdzv_id, spec["completionMode"]) == ("$(JOB)", "Indexed")
    environ = {one["name"]: one["value"] for one in container["env"] if "value" in one}
    assert environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "55"  # within the pod's grace period
    assert (
        environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    )  # for a pod that replaces a lost one
    env = DistEnv(rank=0, local_rank=0, world_size=16, local_world_size=8)
    config, _ = resolved(*with_job(flags.training_script_args), hardware=BIG, env=env)
    assert config.world_size == 16


@pytest.mark.parametrize(
    ("arguments", "program"),
    [
        ((), "python -m ddp_runner"),
        (("model=toy", "name=a b"), "python -m ddp_runner model=toy name=a b"),
        (("-m", "seed=1,2"), "python -m ddp_runner -m seed=1,2"),
        (("--help",), "python -m ddp_runner --help"),
        (("~scheduler",), "python -m ddp_runner ~scheduler"),
        (("torchrun", "-m", "ddp_runner", "model=toy"), "torchrun -m ddp_runner model=toy"),
        (("sh", "-c", "echo sh $0", "a=b"), "sh a=b"),
    ],
)
def test_the_image_runs_the_runner_or_a_program(
    tmp_path: Path, arguments: tuple[str, ...], program: str
) -> None:
    """With programs that print how they were called."""
    for name in ("python", "torchrun"):
        (tmp_path / name).write_text(f'#!/bin/sh\necho {name} "$@"\n')
        (tmp_path / name).chmod(0o755)
    entrypoint = ROOT / "deploy" / "entrypoint.sh"
    assert os.access(entrypoint, os.X_OK)
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    end = subprocess.run(
        [entrypoint, *arguments], env=environ, capture_output=True, text=True, check=True
    )
    assert end.stdout.strip() == program


def test_the_image_gets_what_the_wheel_is_built_of_and_no_more() -> None:
    """Data, runs and secrets that lie in the checkout stay outside."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wheel = settings["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {*wheel["packages"], *wheel["force-include"], settings["project"]["readme"]}
    needed |= {"pyproject.toml", *settings["project"]["license-files"]}
    needed |= set(re.findall(r"^COPY (deploy/\S+)", DOCKERFILE, re.MULTILINE))
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert next(line for line in lines if not line.startswith("#")) == "*"
    assert {line[1:] for line in lines if line.startswith("!")} == needed
    assert all((ROOT / one).exists() for one in needed)
    extras = re.findall(r"^ARG EXTRAS=(\S+)", DOCKERFILE, re.MULTILINE)[0].split(",")
    assert set(extras) <= settings["project"]["optional-dependencies"].keys()


def test_the_image_is_what_the_job_files_expect() -> None:
    """Its user, and the folder that volumes are mounted below."""
    assert f"USER {GROUP}:{GROUP}" in DOCKERFILE
    assert f"WORKDIR {WORKDIR}\n" in DOCKERFILE
