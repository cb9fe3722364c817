"""A machine has the GPUs that torch can use, and the cores that its cgroups allow."""

import os
import platform
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ddp_runner.device import open_devices
from ddp_runner.errors import UserError
from ddp_runner.host import hardware
from ddp_runner.host.hardware import (
    Accelerators,
    binds_gpus,
    detect,
    memory_bytes,
    quota_cores,
    torch_build,
    why_unusable,
)

NUM_CORES = 64
GPU = (torch.device("cuda", 0),)


@pytest.fixture
def cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty tree of cgroups, as of a machine with 64 cores."""
    monkeypatch.setattr(hardware, "CGROUPS", tmp_path / "fs")
    monkeypatch.setattr(hardware, "OWN_CGROUPS", tmp_path / "self")
    if sys.platform == "linux":
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(NUM_CORES)))
    return tmp_path


@pytest.mark.parametrize(
    ("own", "files", "cores"),
    [
        ("0::/", {"cpu.max": "400000 100000"}, 4),
        ("0::/", {"cpu.max": "max 100000"}, None),
        ("0::/", {}, None),
        ("0::/", {"cpu.max": "50000 100000"}, 1),
        ("0::/", {"cpu.max": "350000 100000"}, 3),
        ("0::/", {"cpu.max": "broken"}, None),
        ("0::/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "200000 100000"}, 2),
        ("0::/a/b", {"a/b/cpu.max": "800000 100000", "a/cpu.max": "600000 100000"}, 6),
        ("0::/a", {"b/cpu.max": "100000 100000"}, None),
        ("4:cpu,cpuacct:/docker/1",
         {"cpu,cpuacct/cpu.cfs_quota_us": "300000", "cpu,cpuacct/cpu.cfs_period_us": "100000"}, 3),
        ("3:cpuset:/\n1:cpu:/job",
         {"cpu/job/cpu.cfs_quota_us": "250000", "cpu/job/cpu.cfs_period_us": "50000",
          "cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 5),
        ("1:cpuset:/", {"cpuset/cpu.cfs_quota_us": "1", "cpuset/cpu.cfs_period_us": "1"}, None),
    ],
)  # fmt: skip
def test_cores_are_those_that_the_cgroups_pay_for(
    cgroups: Path, own: str, files: dict[str, str], cores: int | None
) -> None:
    """In both versions, the tightest limit of the process's group and those above it counts."""
    (cgroups / "self").write_text(f"{own}\n")
    for name, text in files.items():
        (cgroups / "fs" / name).parent.mkdir(parents=True, exist_ok=True)
        (cgroups / "fs" / name).write_text(f"{text}\n")
    assert quota_cores() == cores
    if sys.platform == "linux":
        assert detect().num_cores == (cores or NUM_CORES)


@pytest.mark.skipif(sys.platform != "linux", reason="needs an affinity mask")
@pytest.mark.parametrize(("granted", "cores"), [("6", 6), ("99", NUM_CORES), ("", NUM_CORES)])
def test_a_slurm_job_keeps_to_its_cores_where_nothing_binds_it(
    cgroups: Path, monkeypatch: pytest.MonkeyPatch, granted: str, cores: int
) -> None:
    """Without a plugin that binds tasks, each may run on every core of the machine."""
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", granted)
    assert detect().num_cores == cores


@pytest.mark.parametrize(
    ("own", "files", "limit"),
    [
        ("0::/", {"memory.max": "max"}, None),
        ("0::/", {"memory.max": "2097152"}, 2**21),
        ("0::/a/b", {"a/b/memory.max": "max", "a/memory.max": "1048576"}, 2**20),
        ("4:memory:/a", {"memory/a/memory.limit_in_bytes": "9223372036854771712"}, None),
        ("4:memory:/a\n1:cpu:/", {"memory/a/memory.limit_in_bytes": "4096"}, 4096),
        ("1:cpu:/a", {"cpu/a/memory.limit_in_bytes": "4096"}, None),
    ],
)
def test_memory_is_what_the_cgroups_leave(
    cgroups: Path, own: str, files: dict[str, str], limit: int | None
) -> None:
    """In both versions, the tightest limit of the process's group and those above it counts."""
    (cgroups / "self").write_text(f"{own}\n")
    for name, text in files.items():
        (cgroups / "fs" / name).parent.mkdir(parents=True, exist_ok=True)
        (cgroups / "fs" / name).write_text(f"{text}\n")
    assert memory_bytes() == (limit or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


@pytest.mark.parametrize("kind", ["RLIMIT_AS", "RLIMIT_DATA"])
def test_memory_is_what_ulimit_leaves(
    kind: str, cgroups: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ulimit -v and -d count."""
    limits = {getattr(resource, kind): (2**30, resource.RLIM_INFINITY)}
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits.get(which, unlimited))
    assert memory_bytes() == 2**30


def test_a_machine_without_cgroups_has_its_cores(cgroups: Path) -> None:
    """Without /proc/self/cgroup there is no limit."""
    assert quota_cores() is None


def test_the_build_of_torch_is_known_without_importing_it() -> None:
    """It equals what torch says, in a process that has not imported torch."""
    code = (
        "import sys; from ddp_runner.host.hardware import torch_build; "
        "print(torch_build()); assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    expected = {kind: getattr(torch.version, kind) for kind in ("cuda", "hip", "xpu")}
    assert done.stdout.strip() == str(expected) == str(torch_build())


@pytest.mark.parametrize(
    ("text", "build"),
    [
        ("__version__ = '2.11.0+cpu'\ncuda: Optional[str] = None\nhip: Optional[str] = None\n",
         {"cuda": None, "hip": None}),
        ("cuda = '12.8'\nhip = None\ndebug = False\n", {"cuda": "12.8", "hip": None}),
        ('cuda: Optional[str] = None\nhip: Optional[str] = "6.2.4"\n',
         {"cuda": None, "hip": "6.2.4"}),
        ("something else", {}),
    ],
)  # fmt: skip
def test_a_version_file_is_read_as_torch_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, build: dict[str, str | None]
) -> None:
    """The file may have types or not; from any other file, nothing is read."""
    (tmp_path / "version.py").write_text(text)

    class Spec:
        origin = str(tmp_path / "__init__.py")

    monkeypatch.setattr(hardware, "find_spec", lambda name: Spec)
    assert torch_build() == build


@pytest.mark.parametrize(
    ("num_visible", "driver_cuda", "build", "reason"),
    [
        (0, 0, {"cuda": None, "hip": None}, None),
        (2, 13000, {"cuda": "13.2", "hip": None}, None),
        (2, 13020, {"cuda": "12.8", "hip": None}, None),
        (2, 12080, {}, None),
        (2, 12080, {"cuda": None, "hip": None},
         "2 GPUs are visible and torch was built without CUDA; install a build with CUDA ("),
        (1, 12080, {"cuda": "13.2", "hip": None},
         "1 GPU is visible and the driver (CUDA 12.8) is too old for torch (CUDA 13.2); update it, "
         "or install a torch for CUDA 12"),
        (0, 0, {"cuda": None, "hip": "6.2"}, None),
    ],
)  # fmt: skip
def test_gpus_that_torch_cannot_use_have_a_reason(
    num_visible: int, driver_cuda: int, build: dict[str, str | None], reason: str | None
) -> None:
    """The build or the driver's age is the reason; without GPUs there is none."""
    fault = why_unusable(num_visible, driver_cuda, build)
    assert (fault or "").startswith(reason or "")
    assert (fault is None) == (reason is None)


def test_unusable_gpus_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then world_size, backend and slots are those of a machine without GPUs."""
    monkeypatch.setattr(hardware, "_cuda_driver", lambda: (2, 12080))
    monkeypatch.setattr(hardware, "torch_build", lambda: {"cuda": None, "hip": None})
    machine = detect()
    assert machine.num_gpus == 0
    assert "without CUDA" in str(machine.unusable)
    assert machine.share(2).unusable == machine.unusable
    monkeypatch.setattr(hardware, "torch_build", lambda: {"cuda": "12.4", "hip": None})
    assert (detect().num_gpus, detect().unusable) == (2, None)


def test_other_kinds_are_those_that_torch_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch is asked if its build or a plug-in may support some; NVIDIA's GPUs come first."""
    asked = list[bool]()

    def known(*, is_rank: bool) -> Accelerators | str:
        asked.append(is_rank)
        return answer

    monkeypatch.setattr(hardware, "known_to_torch", known)
    monkeypatch.setattr(hardware, "entry_points", lambda group: [])
    monkeypatch.setattr(hardware, "_cuda_driver", lambda: (0, 0))
    monkeypatch.setattr(hardware, "torch_build", lambda: {"cuda": None, "hip": None, "xpu": "1"})
    answer: Accelerators | str = ("xpu", 3, "xccl")
    machine = detect(is_rank=True)
    assert (machine.num_gpus, machine.kind, machine.backend) == (3, "xpu", "xccl")
    answer = "torch cannot say; repair it"
    assert (detect().num_gpus, detect().unusable) == (0, answer)
    assert asked == [True, False, False]
    monkeypatch.setattr(hardware, "torch_build", lambda: {"cuda": "13.2", "hip": None})
    assert (detect().num_gpus, detect().kind) == (0, "cuda")
    monkeypatch.setattr(hardware, "_cuda_driver", lambda: (2, 13020))
    monkeypatch.setattr(hardware, "entry_points", lambda group: ["npu"])
    assert (detect().num_gpus, detect().kind) == (2, "cuda")
    assert len(asked) == 3
    if platform.machine() == "arm64" or sys.platform == "linux":
        monkeypatch.setattr(sys, "platform", "darwin")
        monkeypatch.setattr(platform, "machine", lambda: "arm64")
        assert (detect().num_gpus, detect().kind, detect().backend) == (1, "mps", "gloo")


@pytest.mark.full
def test_torch_is_asked_in_another_process() -> None:
    """The answer comes, and this process has not imported torch."""
    code = (
        "import sys; from ddp_runner.host.hardware import known_to_torch; "
        "print(known_to_torch(is_rank=False)); assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("("), done.stderr


@pytest.mark.parametrize(
    ("environ", "binds"),
    [
        ({}, False),
        ({"SLURM_PROCID": "1"}, False),
        ({"SLURM_PROCID": "1", "SLURM_GPUS_PER_TASK": "1"}, True),
        ({"SLURM_PROCID": "1", "SLURM_TRES_PER_TASK": "cpu=4,gres/gpu=1"}, True),
        ({"SLURM_PROCID": "1", "SLURM_TRES_PER_TASK": "cpu=4"}, False),
        ({"SLURM_PROCID": "1", "SLURM_GPU_BIND": "per_task:1"}, True),
        ({"SLURM_PROCID": "1", "SLURM_GPU_BIND": "none", "SLURM_GPUS_PER_TASK": "1"}, False),
        ({"SLURM_PROCID": "0", "SLURM_GPUS_PER_TASK": "1", "TORCHELASTIC_RUN_ID": "x"}, False),
        ({"SLURM_GPUS_PER_TASK": "1"}, False),
    ],
)
def test_slurm_says_whether_a_task_sees_its_own_gpus(environ: dict[str, str], binds: bool) -> None:
    """Ranks that torchrun starts inside of one task share what that task sees."""
    assert binds_gpus(environ) == binds


def test_a_gpu_that_torch_cannot_open_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver may have broken since: the sentence has torch's first line and the fixes."""

    def fail(device: torch.device) -> None:
        raise RuntimeError("CUDA unknown error - this may be due to an environment.\nMore.\n")

    monkeypatch.setattr(torch.accelerator, "set_device_index", fail)
    with pytest.raises(UserError) as error:
        open_devices(GPU, precision="fp32")
    assert "cannot use cuda:0 (CUDA unknown error - this may" in str(error.value)
    assert str(error.value).endswith("or write backend=gloo backend.device=cpu")
    assert "\n" not in str(error.value)
    open_devices((torch.device("cpu"),), precision="bf16")


def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the first GPU be opened where there is none."""
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda device: None)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: None)


@pytest.mark.parametrize("is_supported", [True, False])
def test_bf16_is_rejected_where_it_would_be_emulated(
    monkeypatch: pytest.MonkeyPatch, is_supported: bool
) -> None:
    """A T4 or V100 has none, and is slower with it than without."""

    def supported(including_emulation: bool = True) -> bool:
        return including_emulation or is_supported

    without_gpu(monkeypatch)
    monkeypatch.setattr(torch.cuda, "_exchange_device", lambda device: -1)
    monkeypatch.setattr(torch.cuda, "_maybe_exchange_device", lambda device: -1)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    open_devices(GPU, precision="fp16")
    assert torch.backends.fp32_precision == "ieee"  # products of fp32 are computed as such
    if is_supported:
        open_devices(GPU, precision="bf16")
        return
    with pytest.raises(UserError, match=r"on cuda:0 \(Tesla T4\).*write train.precision=fp16"):
        open_devices(GPU, precision="bf16")


@pytest.mark.parametrize("capability", [(7, 5), (8, 0)])
def test_tf32_is_set_where_it_exists(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]
) -> None:
    """It holds for matrices and convolutions, so that perf/mfu compares with one peak."""
    without_gpu(monkeypatch)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    monkeypatch.setattr(torch.backends, "fp32_precision", "none")
    if capability < (8, 0):
        with pytest.raises(UserError, match=r"\(Tesla T4\); write train.precision=fp32"):
            open_devices(GPU, precision="tf32")
        return
    open_devices(GPU, precision="tf32")
    backends = torch.backends
    assert backends.cuda.matmul.fp32_precision == backends.cudnn.conv.fp32_precision == "tf32"
