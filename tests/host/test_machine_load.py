"""The load says how much of a run's cores other processes used."""

import os
import shutil
import sys
from pathlib import Path

import pytest

from ddp_runner.host import machine_load, processes
from ddp_runner.host.machine_load import Load, load_record, measure_load


def write_proc(folder: Path, cores: dict[int, list[int]], processes: dict[int, list[int]]) -> None:
    """Write counters of cores (user nice system idle iowait irq softirq steal, two of guests)."""
    lines = [f"cpu{core} {' '.join(map(str, ticks))}" for core, ticks in cores.items()]
    folder.mkdir(exist_ok=True)
    (folder / "stat").write_text("\n".join(["cpu  1 2 3", *lines, "intr 5", ""]))
    for pid, (parent, *times) in processes.items():
        (folder / str(pid)).mkdir(exist_ok=True)
        middle = " ".join("0" for _ in range(9))
        text = f"{pid} (a ) name) S {parent} {middle} {' '.join(map(str, times))} 20 0"
        (folder / str(pid) / "stat").write_text(text)


@pytest.mark.skipif(sys.platform != "linux", reason="reads the counters of Linux")
def test_shares_are_of_the_cores_that_a_run_may_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks are one launcher's children; another core, another's child, itself do not count.

    The rank that ends meanwhile is counted with its parent.
    """
    for module in (machine_load, processes):
        monkeypatch.setattr(module, "PROC", tmp_path / "proc")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 2})
    monkeypatch.setattr(os, "getppid", lambda: 7)
    idle = [0] * 10
    ranks = {11: [7, 100, 20, 0, 0], 12: [7, 50, 0, 0, 0], 13: [8, 900, 0, 0, 0]}
    ranks[7] = [1, 30, 0, 500, 10]
    write_proc(tmp_path / "proc", {0: idle, 1: idle, 2: idle}, ranks)
    start = measure_load()
    cores = {
        0: [400, 0, 50, 500, 0, 0, 0, 50, 400, 0],
        1: [1000, *[0] * 9],
        2: [150, 0, 0, 750, 100, 0, 0, 0, 0, 0],
    }
    ranks = {11: [7, 300, 20, 60, 40], 13: [8, 2000, 0, 0, 0], 7: [1, 45, 0, 640, 20]}
    shutil.rmtree(tmp_path / "proc" / "12")
    write_proc(tmp_path / "proc", cores, ranks)
    load = load_record(start, measure_load())["end"]
    # 2000 ticks, 600 of them busy; of those the ranks took 200 and 100 of their children, and 100.
    assert load["busy_share_others"] == pytest.approx(200 / 2000)
    assert load["steal_share"] == pytest.approx(50 / 2000)


def test_what_the_system_does_not_say_is_none() -> None:
    """There may be no /proc, or no time may have passed."""
    load = load_record(Load(0.5), Load(1.5))
    nothing = {"busy_share_others": None, "steal_share": None}
    assert load == {"start": {"loadavg_1m": 0.5}, "end": {"loadavg_1m": 1.5, **nothing}}
    ticks = (1,) * 8
    assert load_record(Load(1.0, ticks), Load(1.0, ticks))["end"]["steal_share"] is None


def test_this_machine_has_a_load() -> None:
    """The shares between two measurements are between 0 and 1."""
    start = measure_load()
    sum(number * number for number in range(3_000_000))
    end = load_record(start, measure_load())["end"]
    for share in ("busy_share_others", "steal_share"):
        value = end[share]
        assert value is None or 0 <= value <= 1
