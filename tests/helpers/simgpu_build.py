"""Build the simulated GPU of tests/simgpu once a machine, and run programs on it."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from ddp_runner.files import locked

DEVICE = Path(__file__).parents[1] / "simgpu" / "device"
UNITS = ("unit_operators.cpp", "unit_runtime.cpp")
FLAGS = ["-O1", "-g0", "-std=c++20", "-Wall", "-Wextra"]
UNUSED_S = 30 * 24 * 3600  # after which a build is removed
NAME = "_simgpu"
TORCH = (2, 15)


def environ(*, devices: int = 2, delay_us: int = 300, side_delay_us: int = 0) -> dict[str, str]:
    """Return the variables of a command that has simulated GPUs.

    Args:
        devices: how many, at most 8.
        delay_us: microseconds that a stream sleeps before each task.
        side_delay_us: what streams but the default one sleep before a task that nothing waits for.
    """
    paths = [str(DEVICE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "PYTHONPATH": os.pathsep.join(paths),
        "SIMGPU_LIBRARY": str(library()),
        "SIMGPU_DEVICES": str(devices),
        "SIMGPU_DELAY_US": str(delay_us),
        "SIMGPU_SIDE_DELAY_US": str(side_delay_us),
        "CUDA_VISIBLE_DEVICES": "",  # NVIDIA's GPUs come first
    }


def answers(program: Path, *arguments: str, **more: str) -> dict[str, Any]:
    """Return what a program prints as JSON, in a process of its own, with more variables."""
    done = subprocess.run(
        [sys.executable, str(program), *arguments],
        env={**os.environ, **environ(), **more},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@cache
def library() -> Path:
    """Return the compiled library; build it if there is none yet, or skip the test."""
    if reason := _missing():
        pytest.skip(reason)
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = root / "ddp_runner_tests" / f"simgpu-{_key()}"
    built = folder / f"{NAME}.so"
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / "lock"):
        if not built.exists():
            _build(built)
        built.touch()
    for other in folder.parent.glob(f"simgpu-*/{NAME}.so"):
        if time.time() - other.stat().st_mtime > UNUSED_S:
            shutil.rmtree(other.parent, ignore_errors=True)
    return built


def _missing() -> str | None:
    if not sys.platform.startswith("linux"):
        return "the simulated GPU needs Linux"
    if not shutil.which(_compiler()):
        return "the simulated GPU needs a C++ compiler"
    if tuple(map(int, version("torch").split(".")[:2])) < TORCH:
        return "the simulated GPU needs torch 2.15 or newer: it is not sound with 2.11"
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return "the simulated GPU needs Python's headers"
    return None


def _compiler() -> str:
    return os.environ.get("CXX", "c++")


def _key() -> str:
    compiler = subprocess.check_output([_compiler(), "--version"], text=True)
    parts = [version("torch"), sys.version, compiler, *FLAGS]
    parts += [path.read_text() for path in sorted((DEVICE / "src").iterdir())]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _build(built: Path) -> None:
    import ninja

    # Apart, so that a build which is stopped leaves no half of one; in a process of its own, since
    # it loads the library.
    with tempfile.TemporaryDirectory(dir=built.parent) as folder:
        cpus = len(os.sched_getaffinity(0))
        changed = {
            "PATH": os.pathsep.join([ninja.BIN_DIR, os.environ["PATH"]]),
            "MAX_JOBS": str(min(cpus, len(UNITS))),
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        }
        command = [sys.executable, __file__, folder]
        done = subprocess.run(
            command, env={**os.environ, **changed}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, (
            f"the simulated GPU does not build:\n{done.stdout}{done.stderr}"
        )
        (Path(folder) / built.name).replace(built)


def _compile(folder: str) -> None:
    from torch.utils.cpp_extension import load

    load(
        NAME,
        [str(DEVICE / "src" / unit) for unit in UNITS],
        extra_cflags=FLAGS,
        build_directory=folder,
        verbose=True,
        is_python_module=False,
        with_cuda=False,
    )


if __name__ == "__main__":
    _compile(sys.argv[1])
