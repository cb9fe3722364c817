"""Keep tests apart: whatever a test leaves behind is undone, and fails that test."""

import gc
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path
from random import Random

import psutil
import pytest

# Here and in the helpers, imports that take long come late: a single test starts at once.
# Variables that libraries set when they are imported, and multiprocessing's own processes.
LIBRARY_VARIABLES = ("KMP_", "PYTEST_", "TORCHINDUCTOR_", "TRITON_")
OF_GPUS = ("gpu", "multi_gpu", "simgpu")  # marks
MULTIPROCESSING = ("multiprocessing.forkserver", "multiprocessing.resource_tracker")
LONG_TABLE, EVERY = 3, 24  # in a table of 3 `full` cases or more, every 24th stays `full`
GRACE_S = 60.0  # at most: a thread or process may take a while to end
# Torch's threads wait for each other in a busy loop. Where more threads run than there are cores,
# as here, that costs most of the time. OpenMP reads the variable when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def pytest_configure(config: pytest.Config) -> None:
    """Handle signals as a command does, and let a test that is given by its name run.

    A shell ignores these signals for a pytest in the background or under nohup. The commands that
    the tests start would inherit it, from here or from the servers that start here.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for ignored in (signal.SIGHUP, signal.SIGQUIT):
        signal.signal(ignored, signal.SIG_DFL)
    if "PYTEST_XDIST_WORKER" not in os.environ:  # the workers inherit the variables
        shared = tempfile.TemporaryDirectory(prefix="tests-")
        os.environ["DDP_RUNNER_TEST_COMPOSED"] = shared.name
        config.add_cleanup(shared.cleanup)
        if config.getoption("numprocesses", None) and not config.option.collectonly:  # of xdist
            from warm import start_mother

            mother = start_mother(Path(shared.name))
            config.add_cleanup(mother.wait)
            config.add_cleanup(mother.kill)  # the last to be added is the first to run
    is_default = config.option.markexpr == "not full and not slow"
    if is_default and config.args and all("::" in argument for argument in config.args):
        config.option.markexpr = ""


@pytest.hookimpl(tryfirst=True)  # before pytest chooses by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave most cases of a long table to the tier `slow`, and begin with the longest files.

    Otherwise a long file that starts last would run alone at the end.
    """
    tables = dict[tuple[Path, str], list[pytest.Item]]()
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if "full" in marks and not marks & {"slow", *OF_GPUS[:2]}:
            tables.setdefault((item.path, getattr(item, "originalname", "")), []).append(item)
    for cases in tables.values():
        if len(cases) >= LONG_TABLE:
            for number, case in enumerate(cases):
                if number % EVERY:
                    case.add_marker(pytest.mark.slow)
    longest = {
        *("test_exact_resume.py", "test_meetings.py", "test_new_project.py", "test_parity.py"),
        *("test_restarts.py", "test_runs.py", "test_slurm.py", "test_your_own.py"),
    }
    items.sort(key=lambda item: item.path.name not in longest)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Hide the GPUs from a test that is not about them: it is the same test on every machine."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        if not any(map(item.get_closest_marker, OF_GPUS)):
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        return (yield)


def pytest_collection_finish() -> None:
    """Leave what has been imported and collected to no later garbage collection: it stays."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def session_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Give a dataset cache for all tests of a session, which no other program uses."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("DDP_RUNNER_CACHE", str(folder))
        yield folder


@pytest.fixture
def data_root() -> Path:
    """Return the folder of the real datasets; skip the test if it is not set."""
    if "DDP_RUNNER_DATA_ROOT" not in os.environ:
        pytest.skip("needs real MNIST, not shipped: set DDP_RUNNER_DATA_ROOT to its folder")
    return Path(os.environ["DDP_RUNNER_DATA_ROOT"])


@pytest.fixture
def rng() -> Random:
    """Return random numbers of a new seed, which is printed and can be given again."""
    seed = int(os.environ.get("DDP_RUNNER_TEST_SEED", time.time_ns()))
    print(f"to repeat: DDP_RUNNER_TEST_SEED={seed}")  # pytest shows it on a failure
    return Random(seed)


@pytest.fixture
def short_temp() -> Iterator[Path]:
    """Give a temporary folder with a short path, because sockets lie below it."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture(autouse=True)
def nothing_left_over() -> Iterator[None]:
    """Fail a test that leaves a variable, a changed folder, a process group, thread or process."""
    environ, folder = dict(os.environ), Path.cwd()
    threads, pids = set(threading.enumerate()), _pids()
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
    if hydra := sys.modules.get("hydra.core.global_hydra"):
        hydra.GlobalHydra.instance().clear()
    if (dist := sys.modules.get("torch.distributed")) and dist.is_initialized():
        leaks.append("a process group")
        dist.destroy_process_group()
    deadline = time.monotonic() + GRACE_S
    while (left := _left(threads, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    for pid in _new_pids(pids) if left else ():
        with suppress(psutil.NoSuchProcess):
            psutil.Process(pid).kill()
    if leaks + left:
        pytest.fail(f"left over: {'; '.join(leaks + left)}", pytrace=False)


def _left(threads: set[threading.Thread], pids: set[int]) -> list[str]:
    """Name the threads and processes that a test has started for itself and not ended."""
    return [f"thread {thread.name}" for thread in set(threading.enumerate()) - threads] + [
        f"process {pid}" for pid in _new_pids(pids)
    ]


def _new_pids(before: set[int]) -> set[int]:
    shared = {*_servers()}
    if ranks := sys.modules.get("ranks"):
        shared |= {*ranks.rank_pids()}
    return {pid for pid in _pids() - before - shared if not _belongs_to_multiprocessing(pid)}


def _servers() -> list[int]:
    """Return the servers of warm processes: another process may have forked them."""
    return warm.server_pids() if (warm := sys.modules.get("warm")) else []


def _pids() -> set[int]:
    """Return all processes below this one and its servers."""
    return {pid for root in (os.getpid(), *_servers()) for pid in _descendants(root)}


def _descendants(pid: int) -> Iterator[int]:
    """Yield the processes below one; psutil alone would read those of the whole machine."""
    if not sys.platform.startswith("linux"):
        yield from (process.pid for process in psutil.Process(pid).children(recursive=True))
        return
    threads = list[Path]()
    with suppress(OSError):  # the process has ended meanwhile
        threads += Path(f"/proc/{pid}/task").iterdir()
    for thread in threads:
        children = list[int]()
        with suppress(OSError):  # the thread has ended meanwhile
            children = [*map(int, (thread / "children").read_text().split())]
        for child in children:
            yield child
            yield from _descendants(child)


def _belongs_to_multiprocessing(pid: int) -> bool:
    try:
        process = psutil.Process(pid)
        # The fork server's children have its command line as well, but another parent.
        command = " ".join(process.cmdline())
        return process.ppid() == os.getpid() and any(name in command for name in MULTIPROCESSING)
    except psutil.NoSuchProcess:
        return True  # it has ended meanwhile
