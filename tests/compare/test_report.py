"""``report.html``: what it shows, that nothing in it comes from outside, and that it is at work."""

import base64
import hashlib
import json
import re
import shutil
import socket
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from browser import browser_path, browser_tab
from generated_runs import SINGLE, lines_of, write_run
from html_pages import Element, read_page
from tiers import first_of

from ddp_runner.compare import report as report_page
from ddp_runner.compare.__main__ import run
from ddp_runner.compare.analysis import compare
from ddp_runner.compare.cards import SIZE, curves, thinned
from ddp_runner.compare.columns import results_table
from ddp_runner.compare.run_reader import read_run, read_runs
from ddp_runner.tracking.alive import LOST, standing
from ddp_runner.tracking.run_dir import RunDir

STYLE = (Path(report_page.__file__).parent / "templates" / "page.css").read_text(encoding="utf-8")
# Each would end or begin something in HTML, CSS, a script, a template, mathtext or a terminal.
HOSTILE = (
    "<script>alert(1)</script>\"'</style></title></svg><img src=https://evil.example/x "
    "onerror=alert(2)>\u202egnp.exe $x^$ {{7*7}} {% x %} \x1b[31m\x00"
)
SVG = "data:image/svg+xml;base64,"
VISIBLE = HOSTILE.replace("\u202e", "\\u202e").replace("\x1b", "\\x1b").replace("\x00", "\\x00")
TAGS = (
    "html head meta title style body header p button h1 span b a nav section h2 h3 label input "
    "output div table caption thead tr th tbody td main figure figcaption small svg "
    "path rect img details summary dl dt dd ul li pre script"
)


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return six settings in two modes, one with two seeds, and a run that failed on its way."""
    folder = tmp_path_factory.mktemp("compared") / "outputs"
    for seed, lr in ((0, 0.1), (1, 0.1), (0, 0.2), (0, 0.3)):
        name = f"single-{lr}-{seed}"
        lines = lines_of([1.0, 1000 * lr], losses=[2.0, lr], eval__accuracy=[0.5, 1 - lr])
        keys = {**SINGLE, "optimizer.lr": lr, "seed": seed}
        write_run(folder / name, config=keys, lines=lines, record={"host": "n1"})
    for lr in (0.1, 0.2, 0.3):
        keys = {"optimizer.lr": lr, "world_size": 2, "batch.per_rank": 32}
        lines = lines_of([1.0, 1500 * lr], losses=[2.0, lr], perf__forward_ms=[2.0, 1.0])
        load = {"end": {"busy_share_others": 0.5 if lr == 0.3 else 0.0}}
        record = {"host": "n2", "load": load}
        write_run(folder / f"ddp-{lr}", config=keys, lines=lines, record=record)
    write_run(folder / "evaluation", record={"of_run": "single-0.1-0", "task": "evaluate"})
    error = {"rank": 1, "kind": "crash", "sentence": "rank 1 raised RuntimeError: no"}
    record = {"status": "failed", "error": error, "metrics": None}
    lines = lines_of([1.0, 2.0, 3.0], losses=[3.0, 2.0, 1.5])
    (write_run(folder / "lost", lines=lines, record=record) / "logs").mkdir()
    (folder / "lost" / "logs" / "failure.txt").write_text("Traceback\n  <module> & more\n")
    return folder


@pytest.fixture(scope="module")
def written(outputs: Path) -> Path:
    """Return the report about them."""
    return report(outputs)


@pytest.fixture
def lost(outputs: Path, tmp_path: Path) -> Path:
    """Return a copy of the run that failed."""
    return Path(shutil.copytree(outputs / "lost", tmp_path / "outputs" / "lost"))


def report(path: Path, *options: str) -> Path:
    """Write the report about a folder with the command; return its path."""
    folder = path.parent / "report"
    run([str(path), "--out", str(folder), *options])
    return folder / "report.html"


def cells(table: Element) -> list[list[Element]]:
    """Return the cells of a table's rows, without its head."""
    rows = [row for row in table.all("tr") if "tbody" in row.parents]
    return [[one for one in row.inside if one.tag in ("th", "td")] for row in rows]


def texts(table: Element) -> list[list[str]]:
    """Return the same as text."""
    return [[cell.text.strip() for cell in row] for row in cells(table)]


def captioned(page: Element, caption: str) -> Element:
    """Return the table with a caption."""
    (table,) = [one for one in page.all("table") if one.all("caption")[0].text == caption]
    return table


def facts(page: Element) -> dict[str, str]:
    """Return the pairs of all lists of names and values."""
    names, values = page.all("dt"), page.all("dd")
    return {name.text: value.text for name, value in zip(names, values, strict=True)}


def test_the_table_holds_the_comparison(outputs: Path, written: Path) -> None:
    """All columns, those of the terminal at first; a mean with its spread; the best is marked."""
    page = read_page(written)
    comparison = compare(read_runs([outputs]))
    (table,) = page.all("table", id="results")
    shown = results_table(comparison).columns
    heads = table.all("th", scope="col")
    assert [head.text for head in heads] == ["#", *(column.title for column in shown)]
    more = ["more" in head.attributes.get("class", "").split() for head in heads]
    assert more == [False, *(not column.is_brief for column in shown)]
    titles = [column.key for column in shown]
    rows = [dict(zip(["#", *titles], row, strict=True)) for row in cells(table)]
    assert len(rows) == len(comparison.rows) == 6
    accuracies = [row["eval/accuracy"].attributes.get("class", "") for row in rows]
    best = [row for row, words in zip(rows, accuracies, strict=True) if "best" in words]
    assert [row["eval/accuracy"].text for row in best] == ["0.9000 ± 0.0000"]
    assert best[0]["eval/accuracy"].attributes["data-v"] == "0.9"
    assert best[0]["optimizer.lr"].text == "0.1"
    assert best[0]["runs"].text == "2"
    doubtful = [row["remark"].text == "busy machine" for row in rows]
    assert doubtful.count(True) == 1
    speeds = [float(row["samples_per_s"].attributes["data-v"]) for row in rows]
    marked = ["best" in row["samples_per_s"].attributes["class"].split() for row in rows]
    assert max(speeds) == 450.0 == speeds[doubtful.index(True)]
    assert [speed for speed, is_best in zip(speeds, marked, strict=True) if is_best] == [300.0] * 2
    assert "best" not in "".join(row["optimizer.lr"].attributes["class"] for row in rows)


def test_every_section_has_its_numbers(written: Path) -> None:
    """Scaling, parity, the keys that differ and those that do not, machines, skipped runs."""
    page = read_page(written)
    speedups = {tuple(row[1:4]): row[5] for row in texts(captioned(page, "Speedup and efficiency"))}
    assert speedups["ddp", "2", "0.1"] == "1.50x"
    parity = captioned(page, "Losses compared with the simplest mode on the fewest ranks")
    assert {row[-1] for row in texts(parity)} == {"ok"}
    settings = captioned(page, "All keys that differ")
    by_key = {row[0]: row[1:] for row in texts(settings)}
    assert by_key["parallelism.bucket_cap_mb"] == ["25"] * 3 + ["-"] * 3
    assert sorted(by_key["seed"]) == ["0"] * 5 + ["0, 1"]
    assert "model.name" not in by_key
    assert facts(page)["model.name"] == "toy"  # what all share
    machines = captioned(page, "When and where each run ran")
    heads = [head.text for head in machines.all("th", scope="col")]
    assert {row[heads.index("hosts")] for row in texts(machines)} == {"n1", "n2", "here"}
    assert "torch" not in heads
    assert facts(page)["torch"] == version("torch")
    lost, evaluation = texts(captioned(page, "Runs that are not compared"))
    assert lost == ["s1 lost", "failed: rank 1 raised RuntimeError: no"]
    assert evaluation[0] == "s2 evaluation"
    assert evaluation[1].startswith("an evaluation of single-0.1-0")
    assert len(page.all("details", class_="run")) == 9
    assert "the runs used 2 hosts (n1, n2)" in page.text


def test_links_lead_to_places_in_the_page(written: Path) -> None:
    """Each id is there once, and each link has its target."""
    page = read_page(written)
    ids = [one.attributes["id"] for one in page.inside if "id" in one.attributes]
    assert len(ids) == len(set(ids))
    links = [one.attributes["href"] for one in page.inside if "href" in one.attributes]
    assert len(links) > 20
    assert {link.removeprefix("#") for link in links} <= set(ids)


def test_nothing_comes_from_outside(written: Path) -> None:
    """No address in any attribute, style or script, and the policy forbids what is not the page's.

    Its hashes are those of the only style and the only script, so no other one runs.
    """
    page, text = read_page(written), written.read_text(encoding="utf-8")
    for element in page.inside:
        for name, value in element.attributes.items():
            assert name not in ("srcset", "action", "style", "background", "poster")
            assert name != "src" or (element.tag == "img" and value.startswith(SVG))
            assert not name.startswith("on")
            assert "://" not in value
            assert name != "href" or value.startswith("#")
    assert "://" not in text
    assert not re.search(r"@import|url\(", text)
    (style,), (script,) = page.all("style"), page.all("script")
    (policy,) = page.all("meta", **{"http-equiv": "Content-Security-Policy"})
    rules = dict(rule.strip().split(" ", 1) for rule in policy.attributes["content"].split(";"))
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
    for name, element in (("style-src", style), ("script-src", script)):
        digest = base64.b64encode(hashlib.sha256(element.text.encode()).digest()).decode()
        assert rules[name] == f"'sha256-{digest}'"
    assert rules["img-src"] == "data:"
    others = {"style-src", "script-src", "img-src"}
    assert set(rules) == {"default-src", "base-uri", "form-action", *others}


@pytest.mark.parametrize("what", ["several runs", "one run"])
def test_hostile_text_stays_text(tmp_path: Path, what: str) -> None:
    """In every place of a run: no element of its own, and what hides is shown as its escape."""
    outputs = tmp_path / "outputs"
    fields: dict[str, Any] = {
        **dict.fromkeys(
            ("host", "git_revision", "code_diff", "stopped_early", "notes", "task"), HOSTILE
        ),
        **{key: [HOSTILE, 5, None] for key in ("tags", "warnings", "hosts", "devices")},
        "versions": {"torch": HOSTILE, HOSTILE: HOSTILE},
        "load": {"end": {HOSTILE: HOSTILE}},
        "sessions": [{"started_at": HOSTILE, "wall_s": [HOSTILE]}, 5],
        "confusion_matrix": [[1, HOSTILE], [2, 3]],
        "not_in_backend": [{HOSTILE: HOSTILE}, 5],
        "directions": {HOSTILE: "max"},
        HOSTILE: {HOSTILE: [HOSTILE]},
    }
    more = {
        f"{group}{HOSTILE}{unit}": [1.0, 2.0, 4.0]
        for group, unit in (("eval__", ""), ("perf__", "_ms"))
    }
    lines = lines_of([1.0, 2.0, 3.0], perf__forward_ms=[1.0, 2.0, 3.0], **more)
    name = HOSTILE.replace("/", "").replace("\x00", "")
    # YAML has no NUL.
    keys = {"optimizer.name": HOSTILE.replace("\x00", ""), "dataset.name": "x" * 300}
    for size in (1, 2) if what == "several runs" else (1,):
        config = {**keys, "world_size": size, "batch.per_rank": 64 // size}
        folder = write_run(outputs / name / str(size), config=config, lines=lines, record=fields)
        (folder / ".hydra" / "overrides.yaml").write_text(json.dumps([HOSTILE]))
        (folder / "logs").mkdir()
        (folder / "logs" / "failure.txt").write_text(HOSTILE)
    if what == "several runs":
        error = {"sentence": HOSTILE}
        write_run(outputs / "lost", record={"status": "failed", "error": error, "metrics": 5})
        write_run(outputs / "odd", record={"status": HOSTILE, "versions": [1], "load": "x"})
    path = report(outputs / name / "1" if what == "one run" else outputs)
    page, text = read_page(path), path.read_text(encoding="utf-8")
    assert {one.tag for one in page.inside} <= set(TAGS.split())
    assert len(page.all("script")) == len(page.all("style")) == len(page.all("title")) == 1
    assert "alert" not in page.all("script")[0].text
    assert len(plots(page)) == (4 if what == "several runs" else 0)
    assert not [one for one in page.inside if any(key.startswith("on") for key in one.attributes)]
    assert not re.search("[\u202e\x1b\x00]", text)
    assert page.text.count(VISIBLE) > (30 if what == "several runs" else 8)


def test_one_run_has_a_page_of_its_own(tmp_path: Path) -> None:
    """How to repeat it, its sessions, config, values, step parts, confusion, tags and warnings."""
    sessions = [
        {"started_at": 1e9, "startup_s": 2.0, "wall_s": 60.0},
        {"started_at": 1e9 + 100, "startup_s": 1.0, "wall_s": 7500.0},
    ]
    record = {
        "tags": ["baseline", "paper"],
        "notes": "first line\nsecond line",
        "sessions": sessions,
        "warnings": ["the data are few"],
        "confusion_matrix": [[9, 1], [0, 5]],
        "num_parameters": 29034,
        "field_of_tomorrow": {"flops": 5},
        "own_groups": ["--config-dir=/my conf"],
    }
    lines = lines_of(
        [1.0, 2.0, 3.0], perf__forward_ms=[1.0, 8000.0, 8000.0], eval__accuracy=[0.5, 0.75, 0.625]
    )
    folder = write_run(tmp_path / "a-run", lines=lines, record=record)
    overrides = ["optimizer.lr=0.1", "name='two words'"]
    (folder / ".hydra" / "overrides.yaml").write_text(json.dumps(overrides))
    page = read_page(report(folder))
    assert page.all("h1")[0].text == "a-run"
    assert not page.all("table", id="results")
    assert "completed" in page.all("header")[0].text
    (command,) = page.all("pre", class_="command")
    start, own = "python -m ddp_runner", "'--config-dir=/my conf'"
    assert command.text == f"""{start} {own} optimizer.lr=0.1 'name='"'"'two words'"'"''"""
    assert texts(captioned(page, "Sessions")) == [
        ["1", "2001-09-09 01:46:40 UTC", "2.000 s", "1 min"],
        ["2", "2001-09-09 01:48:20 UTC", "1.000 s", "2 h 5 min"],
    ]
    values = {row[0]: row[1:4] for row in texts(captioned(page, "Metrics"))}
    assert values["eval/accuracy"] == ["0.6250", "0.5000", "0.7500"]
    parts = texts(captioned(page, "Parts of a step, median without the warm-up"))
    assert parts == [["forward", "8,000", "30%"], ["rest", "18,667", "70%"]]
    confusion = [one for one in page.all("table") if "Confusion" in one.all("caption")[0].text]
    assert [texts(one) for one in confusion] == [[["0", "9", "1"], ["1", "0", "5"]]]
    known = facts(page)
    assert (known["optimizer.lr"], known["train.epochs"]) == ("0.1", "2")  # the whole config
    assert known["number of parameters"] == "29,034"
    assert known["field of tomorrow"] == "flops 5"  # fields of later versions appear by themselves
    assert [tag.text for tag in page.all("p", class_="tags")[0].all("span")] == record["tags"]
    assert page.all("p", class_="notes")[0].text == record["notes"]
    assert "the data are few" in page.text


@pytest.mark.parametrize(
    ("overrides", "groups"),
    first_of(
        [
            (["train.epochs=9"], ["; rm -r ."]),
            (["resume=outputs/a", "train.epochs=9"], []),  # the keys it began with are gone
            (["train.epochs=9"], None),  # another launcher's command
        ]
    ),
)
def test_a_command_that_does_not_repeat_the_run_is_not_shown_as_one(
    tmp_path: Path, overrides: list[str], groups: list[str] | None
) -> None:
    """Its keys are, under their own name."""
    record = {"own_groups": groups}
    folder = write_run(tmp_path / "run", lines=lines_of([1.0]), record=record)
    (folder / ".hydra" / "overrides.yaml").write_text(json.dumps(overrides))
    page = read_page(report(folder))
    (shown,) = page.all("pre", class_="command")
    assert shown.text == "\n".join(overrides)
    labels = [one.text for one in page.all("p", class_="label")]
    assert labels == ["Keys of its last command"]


def test_a_lost_run_has_the_word_of_status_in_every_format(tmp_path: Path) -> None:
    """Its run.json says that it runs, and no process does."""
    record = {"status": "running", "host": socket.gethostname()}
    gone = write_run(tmp_path / "runs" / "gone", lines=lines_of([1.0, 2.0]), record=record)
    write_run(tmp_path / "runs" / "good", lines=lines_of([1.0, 2.0]))
    assert standing(RunDir(gone)).status == LOST
    both = read_page(report(tmp_path / "runs"))
    for name in ("txt", "md", "json"):
        text = (tmp_path / "report" / f"comparison.{name}").read_text()
        assert "lost; last sign of life" in text
        assert "killed" not in text
    table = captioned(both, "When and where each run ran")
    statuses = [one.text for one in table.all("th")].index("status")
    assert [row[statuses] for row in texts(table)] == ["completed", "lost"]
    (page_status,) = read_page(report(gone)).all("span", class_="lost")
    assert page_status.text == "lost"


@pytest.mark.parametrize("status", ["failed", "preempted", "running"])
def test_a_run_that_did_not_complete_shows_how_far_it_came(lost: Path, status: str) -> None:
    """Why, the end of its traceback, its last values and its curves, though it has no row."""
    record = json.loads((lost / "run.json").read_text())
    (lost / "run.json").write_text(json.dumps(record | {"status": status}))
    page = read_page(report(lost))
    (reason,) = page.all("p", class_="reason")
    assert reason.text.startswith("still starting" if status == "running" else f"{status}: rank 1")
    values = {row[0]: row[1] for row in texts(captioned(page, "Metrics"))}
    assert values["train/loss"] == "1.500"
    assert "train/loss" in [one.all("b")[0].text for one in page.all("figure", class_="curve")]
    assert facts(page)["optimizer.lr"] == "0.1"
    assert "<module> & more" in page.text


@pytest.mark.parametrize(
    "name",
    [
        *("run.json", "metrics.jsonl", ".hydra/config.yaml", ".hydra", ".hydra/overrides.yaml"),
        *("logs", "logs/failure.txt"),
    ],
)
def test_a_run_with_links_is_not_read(lost: Path, tmp_path: Path, name: str) -> None:
    """A report is passed on: its config, say, could be any YAML file of this machine."""
    (lost / ".hydra" / "overrides.yaml").write_text("- seed=77")
    (lost / name).rename(tmp_path / "secret")
    (lost / name).symlink_to(tmp_path / "secret")
    page = read_page(report(lost))
    assert f"{name} is a link" in page.all("p", class_="reason")[0].text
    for shown in ("optimizer.lr", "train/loss", "seed=77", "<module>"):
        assert shown not in page.text


def test_many_runs_have_a_table_but_no_details(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No link leads nowhere then, and the page says how to get a run's own."""
    monkeypatch.setattr(report_page, "MAX_DETAILED", 2)
    for seed in range(3):
        keys = {"seed": seed}
        write_run(tmp_path / "outputs" / str(seed), config=keys, lines=lines_of([1.0, 2.0]))
    page = read_page(report(tmp_path / "outputs", "--each"))
    assert len(cells(page.all("table", id="results")[0])) == 3
    assert not page.all("details", class_="run")
    assert not [one for one in page.all("a") if one.attributes["href"].startswith("#run-")]
    assert "3 runs have no details here" in page.text


def test_the_tables_of_many_settings_have_the_best_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A browser could not show ten thousand; the page says which it shows, and where all are."""
    monkeypatch.setattr(report_page, "MAX_ROWS", 2)
    for number, loss in enumerate((3.0, 1.0, 2.0)):
        record = {"metrics": {"train/loss": loss, "eval/loss": loss}}
        config = {"optimizer.lr": 0.1 + number}
        write_run(tmp_path / "outputs" / str(number), config=config, record=record)
    page = read_page(report(tmp_path / "outputs"))
    rows = [[cell.text for cell in row] for row in cells(page.all("table", id="results")[0])]
    assert [{"0.1", "1.1", "2.1"} & {*row} for row in rows] == [{"1.1"}, {"2.1"}]
    assert "2 of 3, the best by eval/loss; comparison.csv has all" in page.text
    assert "3 runs compared" in page.text


def test_settings_have_rows_where_they_are_more_than_the_keys(tmp_path: Path) -> None:
    """A page of a thousand settings is as wide as the keys in which they differ."""
    for lr in (0.1, 0.2, 0.3):
        write_run(tmp_path / "outputs" / str(lr), config={"optimizer.lr": lr})
    table = captioned(read_page(report(tmp_path / "outputs")), "All keys that differ")
    assert [head.text for head in table.all("th", scope="col")] == ["# setting", "optimizer.lr"]
    assert [row[1:] for row in texts(table)] == [["0.1"], ["0.2"], ["0.3"]]
    assert all(f"optimizer.lr {row[1]}" in row[0] for row in texts(table))


def plots(page: Element) -> dict[str, ElementTree.Element]:
    """Return the plots of a page as XML, by their titles."""
    images = {one.attributes["alt"]: one.attributes["src"] for one in page.all("img")}
    return {
        title: ElementTree.fromstring(base64.b64decode(url.removeprefix(SVG), validate=True))
        for title, url in images.items()
    }


def test_plots_are_pictures_with_a_title_and_no_ground(written: Path) -> None:
    """In the dark a filter inverts them, so that a white ground would be a black one."""
    drawn = plots(read_page(written))
    assert len(drawn) == 4
    assert "Training loss by optimizer step" in drawn
    for plot in drawn.values():
        ground = plot.find(".//{*}g[@id='patch_1']/{*}path")
        assert ground is not None
        assert ground.attrib["style"].startswith("fill: none")


def schemes() -> dict[str, tuple[str, str]]:
    """Return the variables of the stylesheet: their colours in the light and in the dark."""
    found = re.findall(r"(--[\w-]+): light-dark\((#\w{6}), (#\w{6})\)", STYLE)
    return {name: (light, dark) for name, light, dark in found}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_legible_in_both_schemes(scheme: str) -> None:
    """At least 4.5:1 on every ground, which is level AA of WCAG 2.2; 3:1 for curves."""
    colours = {name: pair[scheme == "dark"] for name, pair in schemes().items()}

    def luminance(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    def contrast(one: str, other: str) -> float:
        high, low = sorted((luminance(colours[one]), luminance(colours[other])), reverse=True)
        return (high + 0.05) / (low + 0.05)

    for text in ("--text", "--quiet", "--link", "--good", "--bad", "--warn"):
        for ground in ("--page", "--raised", "--hover"):
            assert contrast(text, ground) >= 4.5, (text, ground)
    assert contrast("--plot", "--page") >= 4.5


def test_a_curve_keeps_spikes_and_gaps(tmp_path: Path) -> None:
    """However few its points; a value that is not finite breaks its line; a constant has none."""
    values = [1.0] * 1000
    values[637] = 9.0
    lines = [
        {"step": step, "time_s": 1.0, "train/loss": value, "train/lr": 0.1}
        for step, value in enumerate(values)
    ]
    lines[200]["train/loss"] = float("nan")
    (curve,) = curves(read_run(write_run(tmp_path / "run", lines=lines)), num_points=60)
    assert (curve.name, curve.low, curve.high) == ("train/loss", 1.0, 9.0)
    first, second = (part.split(" ") for part in curve.path.split("M")[1:])
    places = [tuple(map(int, pair.split(","))) for pair in (*first, *second)]
    assert len(places) < 130
    assert (round(SIZE * 637 / 999), 0) in places
    assert places[0] == (0, SIZE)
    assert all(before[0] <= after[0] for before, after in pairwise(places))
    assert int(first[-1].split(",")[0]) < SIZE * 200 / 999 < int(second[0].split(",")[0])
    points = [(float(step), value) for step, value in enumerate(values)]
    assert thinned(points[:50], 60) == points[:50]


@pytest.mark.full
@pytest.mark.browser
def test_a_browser_sorts_filters_and_asks_for_nothing(written: Path) -> None:
    """From the disk, in the light and in the dark, wide and narrow, with the keyboard as well."""
    address = written.as_uri()
    with browser_tab(browser_path(), width=1400, height=900) as tab:
        requests: list[str] = []
        faults: list[str] = []
        tab.on("request", lambda request: requests.append(request.url))
        tab.on("console", lambda message: faults.append(message.text))
        tab.on("pageerror", lambda error: faults.append(str(error)))
        tab.emulate_media(color_scheme="dark")
        tab.goto(address)
        ground = "getComputedStyle(document.body).backgroundColor"
        dark = tab.evaluate(ground)
        tab.emulate_media(color_scheme="light")
        assert tab.evaluate(ground) == "rgb(255, 255, 255)" != dark
        tab.click("#theme")
        assert tab.evaluate(ground) == dark
        loaded = "all => all.map(one => one.naturalWidth > 0 && getComputedStyle(one).filter)"
        inverted = tab.locator(".plot img").evaluate_all(loaded)
        assert inverted == ["invert(1) hue-rotate(180deg)"] * 4

        column = "#results tbody td:nth-child({0}), #results tbody th:nth-child({0})"
        titles = tab.locator("#results thead th").all_text_contents()
        place = column.format(titles.index("samples/s") + 1)

        def speeds() -> list[float]:
            shown = tab.locator(place).filter(visible=True).all_text_contents()
            return [float(text.split(" ")[0].replace(",", "")) for text in shown]

        button = tab.locator("#results thead button", has_text="samples/s")
        before = speeds()
        button.click()
        assert speeds() == sorted(before) != before
        tab.keyboard.press("Enter")
        assert speeds() == sorted(before, reverse=True)
        heads = tab.locator("#results th[aria-sort]")
        assert heads.evaluate_all("all => all.map(one => one.ariaSort)") == ["descending"]

        tab.fill("input[type=search]", "ddp 0.2")
        assert speeds() == [300.0]
        assert tab.locator("output[data-count]").text_content() == "1 of 6"
        tab.fill("input[type=search]", "single")
        assert speeds() == [300.0, 200.0, 100.0]

        tab.locator("#results tbody th a").filter(visible=True).first.click()
        opened = tab.locator("details.run[open]")
        assert opened.count() == 1
        curve = opened.locator(".curve", has_text="train/loss").first
        curve.locator("svg").hover()
        assert re.match(r"step \d+: [\d.]+$", curve.locator("figcaption output").text_content())
        tab.set_viewport_size({"width": 400, "height": 800})
        assert tab.evaluate("document.documentElement.scrollWidth") == 400
        assert not faults
        assert requests == [address]


@pytest.mark.full
@pytest.mark.browser
def test_filters_find_what_is_shown(tmp_path: Path) -> None:
    """Not in hidden columns, and not across cells."""
    outputs = tmp_path / "outputs"
    for number, name in enumerate("abcdef"):
        keys = {"optimizer.name": name, "optimizer.lr": 0.1 * (number + 1)}
        write_run(outputs / str(number), config=keys, lines=lines_of([1.0, 77.0 + number]))
    with browser_tab(browser_path(), width=1400, height=900) as tab:
        tab.goto(report(outputs).as_uri())
        count = tab.locator("output[data-count]")
        hidden = tab.locator("#results tbody tr").first.locator(".more")
        words = hidden.evaluate_all("all => all.map(one => one.textContent.trim())")
        shown = tab.locator("#results tbody").inner_text()
        word = next(one for one in words if one not in shown)
        for text, expected in ((word, "0 of 6"), ("c0.3", "0 of 6"), ("0.3", "1 of 6")):
            tab.fill("input[type=search]", text)
            assert count.text_content() == expected, text
        tab.fill("input[type=search]", word)
        tab.check("[data-all]")  # now it is shown
        assert count.text_content() != "0 of 6"


@pytest.mark.full
@pytest.mark.browser
def test_the_metrics_of_unlike_runs_are_on_the_first_screen(tmp_path: Path) -> None:
    """However many keys differ; those come after the metrics."""
    outputs = tmp_path / "outputs"
    for number in range(8):
        keys = {f"model.a_long_name_{key}": number * 12 + key for key in range(12)}
        lines = lines_of([1.0, 2.0], eval__loss=[0.5, 0.25], eval__accuracy=[0.5, 0.75])
        write_run(outputs / str(number), config=keys, lines=lines)
    with browser_tab(browser_path(), width=1280, height=900) as tab:
        tab.goto(report(outputs).as_uri())
        for metric in ("eval/accuracy", "eval/loss", "train/loss"):
            box = tab.locator("#results thead th", has_text=metric).bounding_box()
            assert box["x"] + box["width"] <= 1280
            assert box["y"] + box["height"] <= 900
