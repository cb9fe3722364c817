"""Plans side by side: a row for each, and one plot."""

from pathlib import Path

from generated_runs import write_run

from ddp_runner.compare.analysis import compare
from ddp_runner.compare.formats import as_text
from ddp_runner.compare.plots import figures
from ddp_runner.compare.run_reader import read_runs

BUSY = {"end": {"busy_share_others": 0.9}}


def test_plans_have_rows_and_a_plot(tmp_path: Path) -> None:
    """Memory and times over world size, a line per mode; a busy machine changes no plan."""
    for number, mode in enumerate(("ddp", "fsdp"), start=1):
        for size in (8, 64):
            metrics = {"plan/peak_gib": 80.0 * number / size, "plan/step_ms": 100.0 + size}
            write_run(
                tmp_path / f"{mode}-{size}",
                config={"task": "plan", "world_size": size, "parallelism.name": mode},
                lines=[{"step": 0, "epoch": 0, "time_s": 1.0, **metrics}],
                record={"task": "plan", "load": BUSY},
            )
    comparison = compare(read_runs([tmp_path]))
    assert comparison.warnings == ()
    text = as_text(comparison)
    assert "plan/peak_gib" in text
    assert "plan/step_ms" in text
    plots = figures(comparison)
    assert plots.keys() == {"plan"}
    plot = plots["plan"]
    assert not isinstance(plot, str)
    memory, step = plot.axes
    drawn = [
        {str(line.get_label()): [*map(float, line.get_ydata())] for line in axes.get_lines()}
        for axes in (memory, step)
    ]
    assert drawn[0] == {"ddp": [10.0, 1.25], "fsdp": [20.0, 2.5]}
    assert drawn[1] == {"ddp": [108.0, 164.0], "fsdp": [108.0, 164.0]}
