"""The tests that gpu.py runs; a row counts those that passed."""

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial

from gpu_commands import MissingError, Rows, need, run, tried
from gpu_setup import BENCHMARKS, Row, Setup, missing

TESTS = BENCHMARKS.parent / "tests"
GPU_TESTS = str(TESTS / "parallelism" / "test_gpu.py")
TABLE = str(TESTS / "simgpu" / "test_table.py")


def one_gpu(setup: Setup) -> Rows:
    """The tests that need one GPU."""
    yield from _tests(setup, "tests that need one GPU", "-m", "gpu", GPU_TESTS)


def two_gpus(setup: Setup) -> Rows:
    """The tests that need two GPUs, and nccl's all-reduce between two ranks."""
    collectives = str(TESTS / "collectives" / "test_collectives.py")
    yield from _tests(setup, "tests that need two GPUs", "-m", "multi_gpu", GPU_TESTS, collectives)
    yield from tried("two_gpus", "all-reduce over nccl", partial(_all_reduce, setup))


def _all_reduce(setup: Setup) -> Rows:
    if setup.kind != "cuda" or setup.count < 2:
        raise MissingError("it needs two CUDA devices")
    words = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"
    printed = run(*words, str(BENCHMARKS / "collectives.py"), "--turns", "5", setup=setup)
    yield Row("two_gpus", "all-reduce over nccl", "passed", note=printed[-1500:])


def table(setup: Setup) -> Rows:
    """The table of all modes on the GPU, or a row of it on the simulated one, beside the CPU."""
    if setup.kind == "cuda":
        environ = {"DDP_RUNNER_TEST_DEVICE": "cuda"}
        yield from _tests(setup, "table of modes, CUDA beside the CPU", "-m", "simgpu", TABLE,
                          environ=environ)  # fmt: skip
        return
    chosen = "-m", "simgpu", "-k", "on_the_cpu and ddp-2-fp32-memory]", TABLE
    yield from _tests(setup, "table of modes, simulated GPU beside the CPU", *chosen)


def hardware(setup: Setup) -> Rows:
    """The tests of what a machine has, and of the rules that follow."""
    files = ["host/test_hardware.py", *([] if setup.rehearses else ["config/test_resolve.py"])]
    named = [str(TESTS / file) for file in files]
    yield from _tests(setup, "tests of hardware and its rules", *named)


def _tests(setup: Setup, what: str, *words: str, environ: Mapping[str, str] | None = None) -> Rows:
    yield from tried("tests", what, partial(_run_tests, setup, what, words, environ or {}))


def _run_tests(setup: Setup, what: str, words: Sequence[str], environ: Mapping[str, str]) -> Rows:
    need("pytest", "psutil")
    options = ["-m", "pytest", "-q", "-rfEs", "--tb=short", "-p", "no:cacheprovider"]
    options += ["-o", "addopts=--import-mode=importlib", "--rootdir", str(BENCHMARKS.parent)]
    options += ["-c", str(BENCHMARKS.parent / "pyproject.toml")]
    workers = min(8, len(os.sched_getaffinity(0)) // 2)
    if workers > 1 and not missing("xdist"):
        options += ["-n", str(workers), "--dist", "load"]
    if not missing("pytest_benchmark"):
        options += ["-p", "no:benchmark"]  # it warns of xdist
    try:
        printed = run(*options, *words, setup=setup, on_device=False, environ=environ)
    except RuntimeError as error:
        printed = str(error)
        if printed.startswith("exit code 5"):
            raise MissingError("no test was collected") from error
        printed = f"FAILED\n{printed}"
    last = printed.strip().splitlines()[-1]
    passed = sum(map(int, re.findall(r"(\d+) passed", last)))
    reasons = Counter[str]()
    for count, reason in re.findall(r"^SKIPPED \[(\d+)\] \S+ (.*)", printed, re.MULTILINE):
        reasons[reason] += int(count)
    skipped = "; ".join(f"{count} skipped: {reason}" for reason, count in reasons.items())
    note = f"{last.strip('= ')}{'; ' * bool(skipped)}{skipped}"
    if printed.startswith("FAILED"):
        yield Row("tests", what, "FAILED", passed, "tests", note=printed)
    elif not passed:
        raise MissingError(skipped or last)
    else:
        yield Row("tests", what, "passed", passed, "tests", note=note)
