"""TensorBoard's tabs in a real browser show the numbers of the runs.

Needs the driver playwright (in the dev group) and a Chromium on the PATH, for example from
``apt-get install chromium``. DDP_RUNNER_SCREENSHOTS names a folder for the screenshots.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import browser_path, browser_tab
from commands import run_command, wait_for
from run_folders import metrics, record, run_dirs
from tensorboard_server import get_json, serve_tensorboard

pytestmark = [pytest.mark.full, pytest.mark.browser, pytest.mark.slow]
TIME_LIMIT_MS = 240_000
# The text of each cell of the HParams tab; it is outside of the table's own tree.
ROWS = """grid => [...grid.shadowRoot.querySelectorAll("#header tr, #items tr")].map(
    row => [...row.querySelectorAll("slot")].map(
        slot => slot.assignedNodes().map(node => node.innerText).join("").trim()))"""


@pytest.fixture(scope="module")
def chromium() -> str:
    """Return the path of a browser; skip the tests without a driver or a browser."""
    return browser_path()


@pytest.fixture(scope="module")
def sweep(chromium: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a sweep over world sizes, whose second job was resumed for two more steps."""
    folder = tmp_path_factory.mktemp("sweep")
    keys = ("train.max_steps=4", "train.log_every_steps=1", "batch.global_size=20")
    end = run_command("-m", "model=convnet", "world_size=1,2", *keys, folder=folder)
    assert end.exit_code == 0, end.stderr
    second = end.run_dirs[1]
    end = run_command(f"resume='{second}'", "train.max_steps=6", folder=folder)
    assert end.exit_code == 0, end.stderr
    assert record(second)["step"] == 6
    return second.parent


@pytest.fixture
def page(chromium: str) -> Iterator[Any]:
    """Give a tab of a headless browser."""
    with browser_tab(chromium, width=1800, height=1400) as tab:
        tab.set_default_timeout(TIME_LIMIT_MS)
        yield tab


def tags(logdir: Path) -> dict[str, set[str]]:
    """Return the tags of each run by the name that TensorBoard gives it."""
    return {str(run.relative_to(logdir)): set(record(run)["metrics"]) for run in run_dirs(logdir)}


def save_screenshot(page: Any, name: str, folder: Path) -> None:
    """Save what the browser shows."""
    folder = Path(os.environ.get("DDP_RUNNER_SCREENSHOTS", folder))
    page.screenshot(path=folder / f"{name}.png")


def shown(value: float) -> str:
    """Return a number as the charts' tables write it."""
    return f"{value:.4g}"


def test_time_series_names_each_run_by_its_overrides(
    sweep: Path, page: Any, tmp_path: Path
) -> None:
    """Each has its last value; for the resumed run that is the value after the resume."""
    with serve_tensorboard(sweep, folder=tmp_path, wanted=tags(sweep)) as url:
        page.goto(f"{url}/#timeseries")
        card = page.locator("card-view", has_text="accuracy").first
        for run in run_dirs(sweep):
            row = card.locator("tb-data-table-content-row", has_text=run.name)
            row.get_by_text(shown(record(run)["metrics"]["eval/accuracy"])).first.wait_for()
        assert {run.name for run in run_dirs(sweep)} == {"world_size=1", "world_size=2"}
        save_screenshot(page, "time_series", tmp_path)


def test_images_has_a_confusion_matrix_for_each_evaluation(
    sweep: Path, page: Any, tmp_path: Path
) -> None:
    """Each run has a card with all its evaluations, also those before a resume."""
    with serve_tensorboard(sweep, folder=tmp_path, wanted=tags(sweep)) as url:
        page.goto(f"{url}/#images")
        cards = page.locator("tf-image-loader", has_text="visuals/confusion_matrix")
        cards.nth(1).locator("img").first.wait_for()
        assert cards.count() == 2
        save_screenshot(page, "images", tmp_path)
        query = "tag=visuals%2Fconfusion_matrix&sample=0"
        for run in run_dirs(sweep):
            images = get_json(f"{url}/data/plugin/images/images?run={run.name}&{query}")
            evaluated = [line["step"] for line in metrics(run) if "eval/loss" in line]
            assert [image["step"] for image in images] == evaluated
    assert evaluated == [4, 6]  # of the resumed run


def test_hparams_shows_every_metric_of_every_run(sweep: Path, page: Any, tmp_path: Path) -> None:
    """A row for each run and a column for each metric, with its last value in every cell."""
    runs = run_dirs(sweep)
    with serve_tensorboard(sweep, folder=tmp_path, wanted=tags(sweep)) as url:
        page.set_viewport_size({"width": 3600, "height": 1400})
        page.goto(f"{url}/#hparams")
        boxes = page.locator("tf-hparams-query-pane .metric-checkbox")
        boxes.first.wait_for()
        for box in boxes.all():  # TensorBoard ticks the first five
            if box.get_attribute("aria-checked") == "false":
                box.click()
        grid = page.locator("tf-hparams-table-view vaadin-grid")
        wanted = {name for run in runs for name in record(run)["metrics"]}
        wait_for(lambda: wanted <= set(grid.evaluate(ROWS)[0]) and len(grid.evaluate(ROWS)) > 1)
        save_screenshot(page, "hparams", tmp_path)
        header, *lines = grid.evaluate(ROWS)
    rows = [dict(zip(header, line, strict=False)) for line in lines]
    assert [row["Trial ID"] for row in rows] == [run.name for run in runs]
    for run, row in zip(runs, rows, strict=True):
        final = record(run)["metrics"]
        assert {name: float(row[name]) for name in final} == pytest.approx(final, rel=1e-4)
        assert float(row["world_size"]) == record(run)["world_size"]
        assert final.keys() >= {"train/loss", "eval/accuracy", "perf/samples_per_s"}
