"""What a user sees in TensorBoard: its tabs in a real browser, with the numbers of the runs.

Needs the driver playwright (in the dev group) and a Chromium on the PATH, for example from
``apt-get install chromium``. DDP_RUNNER_SCREENSHOTS names a folder for the screenshots.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from boards import answer, served
from commands import metrics, record, run_command, run_dirs, wait_for

pytestmark = [pytest.mark.browser, pytest.mark.slow]
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
TIME_LIMIT_MS = 240_000
# The rows of the HParams tab: each cell's text, which lies outside of the table's own tree.
ROWS = """grid => [...grid.shadowRoot.querySelectorAll("#header tr, #items tr")].map(
    row => [...row.querySelectorAll("slot")].map(
        slot => slot.assignedNodes().map(node => node.innerText).join("").trim()))"""


@pytest.fixture(scope="module")
def chromium() -> str:
    """The path of a browser; without driver or browser the tests are skipped."""
    pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    browsers = [path for name in BROWSERS if (path := shutil.which(name))]
    if not browsers:
        pytest.skip(f"no {' or '.join(BROWSERS)} here: a browser comes with the system, not by pip")
    return browsers[0]


@pytest.fixture(scope="module")
def sweep(chromium: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep over world sizes, of which the second job was resumed for two steps more."""
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
    """A tab of a headless browser."""
    from playwright.sync_api import sync_playwright

    # A root without a user namespace, as in a container, has no sandbox.
    options = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=options)
        tab = browser.new_page(viewport={"width": 1800, "height": 1400})
        tab.set_default_timeout(TIME_LIMIT_MS)
        yield tab
        browser.close()


def tags(logdir: Path) -> dict[str, set[str]]:
    """Return the tags of each run by the name that TensorBoard gives it."""
    return {str(run.relative_to(logdir)): set(record(run)["metrics"]) for run in run_dirs(logdir)}


def keep_picture(page: Any, name: str, folder: Path) -> None:
    """Save what the browser shows."""
    folder = Path(os.environ.get("DDP_RUNNER_SCREENSHOTS", folder))
    page.screenshot(path=folder / f"{name}.png")


def shown(value: float) -> str:
    """Return a number as the charts' tables write it."""
    return f"{value:.4g}"


def test_time_series_shows_each_run_under_what_it_varies(
    sweep: Path, page: Any, tmp_path: Path
) -> None:
    """With its last value; the resumed run's is the one that it came to in the end."""
    with served(sweep, folder=tmp_path, wanted=tags(sweep)) as url:
        page.goto(f"{url}/#timeseries")
        card = page.locator("card-view", has_text="accuracy").first
        for run in run_dirs(sweep):
            row = card.locator("tb-data-table-content-row", has_text=run.name)
            row.get_by_text(shown(record(run)["metrics"]["eval/accuracy"])).first.wait_for()
        assert {run.name for run in run_dirs(sweep)} == {"world_size=1", "world_size=2"}
        keep_picture(page, "time_series", tmp_path)


def test_images_has_a_confusion_matrix_for_each_evaluation(
    sweep: Path, page: Any, tmp_path: Path
) -> None:
    """A card for each run, whose slider goes over the evaluations; a resume keeps the earlier."""
    with served(sweep, folder=tmp_path, wanted=tags(sweep)) as url:
        page.goto(f"{url}/#images")
        cards = page.locator("tf-image-loader", has_text="visuals/confusion_matrix")
        cards.nth(1).locator("img").first.wait_for()
        assert cards.count() == 2
        keep_picture(page, "images", tmp_path)
        query = "tag=visuals%2Fconfusion_matrix&sample=0"
        for run in run_dirs(sweep):
            images = answer(f"{url}/data/plugin/images/images?run={run.name}&{query}")
            evaluated = [line["step"] for line in metrics(run) if "eval/loss" in line]
            assert [image["step"] for image in images] == evaluated
    assert evaluated == [4, 6]  # of the resumed run


@pytest.mark.parametrize("what", ["sweep", "one resumed run"])
def test_hparams_shows_every_metric_of_every_run(
    sweep: Path, page: Any, tmp_path: Path, what: str
) -> None:
    """A row for each run, a column for each metric, in each cell its last value; no cell blank."""
    runs = run_dirs(sweep) if what == "sweep" else run_dirs(sweep)[1:]
    logdir = sweep if what == "sweep" else runs[0]
    with served(logdir, folder=tmp_path, wanted=tags(logdir)) as url:
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
        keep_picture(page, f"hparams_{what.replace(' ', '_')}", tmp_path)
        header, *lines = grid.evaluate(ROWS)
    rows = [dict(zip(header, line, strict=False)) for line in lines]
    assert [row["Trial ID"] for row in rows] == (
        [run.name for run in runs] if what == "sweep" else ["."]
    )
    for run, row in zip(runs, rows, strict=True):
        final = record(run)["metrics"]
        assert {name: float(row[name]) for name in final} == pytest.approx(final, rel=1e-4)
        assert float(row["world_size"]) == record(run)["world_size"]
        assert final.keys() >= {"train/loss", "eval/accuracy", "perf/samples_per_s"}


def test_custom_scalars_show_the_same_charts_for_all_runs(
    sweep: Path, page: Any, tmp_path: Path
) -> None:
    """By category; pointed at, a chart tells the values; one shows what a step's time goes into."""
    with served(sweep, folder=tmp_path, wanted=tags(sweep)) as url:
        page.goto(f"{url}/#custom_scalars")
        cards = page.locator("tf-custom-scalar-multi-line-chart-card")
        for chart in ("accuracy", "learning rate", "samples per second", "what a step's time"):
            card = cards.filter(has_text=chart).first
            card.locator("text=/Matches .[1-9]/").wait_for()
            assert card.locator("svg path").count() > 1
        parts = cards.filter(has_text="what a step's time")
        for part in ("data", "forward", "backward", "comm", "wait", "optimizer"):
            assert f"perf/{part}_ms (world_size=2)" in parts.evaluate(
                "card => card.shadowRoot?.textContent ?? card.textContent"
            )
        chart = cards.filter(has_text="accuracy").first.locator("vz-line-chart2")
        place = chart.bounding_box()
        page.mouse.move(place["x"] + place["width"] / 2, place["y"] + place["height"] / 2)
        page.mouse.move(place["x"] + place["width"] - 20, place["y"] + place["height"] / 2)
        for run in run_dirs(sweep):
            row = page.locator("tr", has_text=f"eval/accuracy ({run.name})")
            row.get_by_text(shown(record(run)["metrics"]["eval/accuracy"])).first.wait_for()
        keep_picture(page, "custom_scalars", tmp_path)
    assert len(metrics(run_dirs(sweep)[1])) == 8  # six steps, two evaluations
