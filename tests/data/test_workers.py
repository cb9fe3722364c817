"""The processes that load for a rank: what they load, and how they end."""

import multiprocessing
import os
import signal
import subprocess
import threading
import time
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import psutil
import pytest
from commands import wait_for
from own_data import end_workers
from tiers import first_of

from ddp_runner.data.loader import LoaderSplit
from ddp_runner.data.splits import MicroPlan
from ddp_runner.errors import UserError
from ddp_runner.host.processes import STOP_SIGNALS


class Local:
    """A dataset that cannot be pickled, and the process that loads it."""

    def __init__(self, mark: Path | None = None) -> None:
        self.lock, self.mark, self.function = threading.Lock(), mark, lambda value: value + 1

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> tuple[int, int]:
        if self.mark is not None and index == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.function(index), os.getpid()


def load_some(split: LoaderSplit, *indices: int) -> list[list[int]]:
    """Return a batch of two of each index."""
    pieces = [MicroPlan(range(index, index + 2)) for index in indices]
    return [[one.tolist() for one in batch] for batch in split.load(pieces, seed=0)]


def test_a_dataset_that_cannot_be_pickled_is_loaded() -> None:
    """Workers are forked on Linux."""
    split = LoaderSplit("train", Local(), num_workers=2)
    found = load_some(split, 0, 10, 20)
    end_workers(split)
    assert [values for values, _ in found] == [[1, 2], [11, 12], [21, 22]]
    assert os.getpid() not in {pid for _, pids in found for pid in pids}


def test_a_worker_that_dies_is_one_line(tmp_path: Path) -> None:
    """Killed for its memory, for example, or ended by a library."""
    split = LoaderSplit("train", Local(tmp_path), num_workers=2)
    with pytest.raises(
        UserError, match=r"loads the train samples has died \(.*(signal: Killed|exited unexp)"
    ) as caught:
        load_some(split, *range(0, 40, 4))
    assert "\n" not in str(caught.value)
    end_workers(split)


def test_stop_signals_do_not_end_a_worker() -> None:
    """They may reach every process of a run at once, and the rank still has to take a step."""
    split = LoaderSplit("train", Local(), num_workers=1)
    ((_, (pid, _)),) = load_some(split, 0)
    for signum in STOP_SIGNALS:
        # From another process: the rank's own SIGTERM ends it.
        subprocess.run(["kill", f"-{signum.value}", str(pid)], check=True)
    assert load_some(split, 10) == [[[11, 12], [pid, pid]]]
    end_workers(split)
    wait_for(lambda: not is_alive(pid))


def wait_with_workers(pipe: Any, how: str) -> None:
    """Start workers, send their numbers, and end or be ended while they work."""
    split = LoaderSplit("train", Local(), num_workers=2)
    loaded = split.load((MicroPlan(range(index, index + 2)) for index in range(900)), seed=0)
    pipe.send(sorted({next(loaded)[1][0].item() for _ in range(4)}))
    if how == "wait":
        time.sleep(600)
    globals()["kept"] = (split, loaded)  # still there at the end of the process


@pytest.mark.full
@pytest.mark.parametrize("how", first_of(["end", "wait"]))
def test_workers_end_with_their_rank(how: str) -> None:
    """However it ends: killed, or ordinarily with an epoch still open."""
    own, other = Pipe()
    # As a rank of a run, it inherits no thread and no lock: a fork of this process would.
    context: Any = multiprocessing.get_context("spawn")
    rank = context.Process(target=wait_with_workers, args=(other, how))
    rank.start()
    pids = own.recv()
    assert len(pids) == 2
    if how == "wait":
        assert all(map(psutil.pid_exists, pids))
        rank.kill()
    rank.join(60)
    assert rank.exitcode == (-signal.SIGKILL if how == "wait" else 0)
    wait_for(lambda: not any(map(is_alive, pids)))


def is_alive(pid: int) -> bool:
    """Return whether a process runs; an orphan may stay a zombie for a while."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
