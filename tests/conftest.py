"""Fixtures that keep tests apart: what one leaves behind is undone, and named as its failure."""

import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hydra.core.global_hydra import GlobalHydra
from hypothesis import HealthCheck, settings
from hypothesis.configuration import set_hypothesis_home_dir
from warm import start_server

# What libraries set when they are imported, and multiprocessing's own helpers, stay.
LIBRARY_VARIABLES = ("KMP_", "PYTEST_", "TORCHINDUCTOR_", "TRITON_")
HELPERS = ("multiprocessing.forkserver", "multiprocessing.resource_tracker")
GRACE_S = 60.0  # at most: a thread or process that was told to end may still be on its way

# Two profiles of the property tests: `quick` tries the same examples every time, `thorough` others
# and fifty times as many. A busy machine is no failure, and the fixtures below are for whole tests.
for profile, factor in {"quick": 1, "thorough": 50}.items():
    settings.register_profile(
        profile,
        max_examples=100 * factor,
        derandomize=profile == "quick",
        deadline=None,
        database=None,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


def pytest_configure() -> None:
    """Keep out of the checkout what hypothesis remembers of Unicode and of the code."""
    set_hypothesis_home_dir(Path(tempfile.gettempdir()) / f"hypothesis-{os.getuid()}")


def pytest_sessionstart() -> None:
    """Start the server of ranks and commands, which imports torch while pytest collects tests."""
    # Ignored where pytest runs in the background or under nohup: the commands that the tests start
    # would inherit that, and keep it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for ignored in (signal.SIGHUP, signal.SIGQUIT):
        signal.signal(ignored, signal.SIG_DFL)
    start_server("pytest")  # which is the main module of every rank


@pytest.fixture(scope="session", autouse=True)
def session_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A dataset cache that the tests of a session share, and that no other program sees."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("DDP_RUNNER_CACHE", str(folder))
        yield folder


@pytest.fixture
def data_root() -> Path:
    """The folder with the real datasets; without it the test is skipped."""
    if "DDP_RUNNER_DATA_ROOT" not in os.environ:
        pytest.skip("real datasets are too large to ship; DDP_RUNNER_DATA_ROOT names none")
    return Path(os.environ["DDP_RUNNER_DATA_ROOT"])


@pytest.fixture(autouse=True)
def nothing_left_over() -> Iterator[None]:
    """Fail a test that leaves a variable, a folder change, a group, a thread or a process."""
    environ, folder = dict(os.environ), Path.cwd()
    threads, processes = set(threading.enumerate()), _processes()
    yield
    leaks = []
    changed = {
        name
        for name in environ.keys() | os.environ.keys()
        if environ.get(name) != os.environ.get(name) and not name.startswith(LIBRARY_VARIABLES)
    }
    if changed:
        leaks.append(f"environment variables {sorted(changed)}")
    for name in changed:
        os.environ.pop(name, None)
        if name in environ:
            os.environ[name] = environ[name]
    if Path.cwd() != folder:
        leaks.append(f"the current folder {Path.cwd()}")
        os.chdir(folder)
    GlobalHydra.instance().clear()
    if (dist := sys.modules.get("torch.distributed")) and dist.is_initialized():
        leaks.append("a process group")
        dist.destroy_process_group()
    deadline = time.monotonic() + GRACE_S
    while (left := _left(threads, processes)) and time.monotonic() < deadline:
        time.sleep(0.01)
    for process in _processes() - processes:
        process.kill()
    if leaks + left:
        pytest.fail(f"left over: {'; '.join(leaks + left)}", pytrace=False)


def _left(threads: set[threading.Thread], processes: set[psutil.Process]) -> list[str]:
    return [f"thread {one.name}" for one in set(threading.enumerate()) - threads] + [
        f"process {one.pid}" for one in _processes() - processes
    ]


def _processes() -> set[psutil.Process]:
    """Return the descendants of this process, without multiprocessing's helpers."""
    return {one for one in psutil.Process().children(recursive=True) if not _is_helper(one)}


def _is_helper(process: psutil.Process) -> bool:
    try:
        # The fork server's children have its command line as well, but another parent.
        command = " ".join(process.cmdline())
        return process.ppid() == os.getpid() and any(helper in command for helper in HELPERS)
    except psutil.NoSuchProcess:
        return True  # it ended meanwhile
