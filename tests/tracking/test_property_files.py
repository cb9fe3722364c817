"""Whatever a file's bytes have become: it is read as it was, or rejected in one line that names it.

Where a format has no checksum, other content that is valid is read, and is of the right types.
"""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import latest_checkpoint
from configs import LAPTOP, compose_raw, freeze, resolved
from generated_runs import lines_of, write_run
from hypothesis import given
from hypothesis import strategies as st
from properties import assert_one_line, damaged, examples, faulty
from sweeps import planned
from texts import csv_text

from ddp_runner.checkpoint.manifest import MANIFEST, STATE, facts_of, manifest_text, read_manifest
from ddp_runner.checkpoint.store import load_checkpoint, save_checkpoint
from ddp_runner.cli.messages import user_error
from ddp_runner.cli.resume import resumed_overrides, with_resumed
from ddp_runner.compare.analysis import compare
from ddp_runner.compare.formats import FORMATS
from ddp_runner.compare.run_reader import read_runs
from ddp_runner.config.load import to_config
from ddp_runner.config.resolve import resolve
from ddp_runner.config.schema import Config
from ddp_runner.config.training import CheckpointConfig
from ddp_runner.data.load_dataset import load_dataset
from ddp_runner.data.sources.offline import FakeImages
from ddp_runner.errors import UserError
from ddp_runner.sweep.sweep_dir import (
    PLAN,
    PlannedJob,
    change_plan,
    read_plan,
    restarted,
    unfinished_sweep,
    with_jobs,
)
from ddp_runner.sweep.sweep_table import sweep_table
from ddp_runner.tracking.alive import standing
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.tracking.run_record import read_run_record, write_run_record


@contextmanager
def folder() -> Iterator[Path]:
    """An empty folder for one example."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@contextmanager
def rejected_in_one_line(*named: Path) -> Iterator[list[str]]:
    """Take a UserError for an answer, if it is one line that names one of the files or folders."""
    sentences: list[str] = []
    try:
        yield sentences
    except UserError as error:
        sentences.append(str(error))
    for sentence in sentences:
        assert sentence.isprintable()
        assert any(str(one) in sentence for one in named), sentence


def equal(one: Any, other: Any) -> bool:
    """Return whether two states hold the same, tensors bit by bit."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return (
            isinstance(other, dict)
            and one.keys() == other.keys()
            and all(equal(one[key], other[key]) for key in one)
        )
    return type(one) is type(other) and bool(one == other)


STATE_SAVED = {"step": 600, "name": "toy", "model": {"weight": torch.arange(6.0)}, "odd": [None, 1]}


@cache
def checkpoint() -> tuple[bytes, bytes]:
    """Return the bytes of a checkpoint's state and manifest."""
    with folder() as path:
        saved = save_checkpoint(
            path,
            STATE_SAVED,
            step=600,
            metrics={"eval/f1": 0.5, "eval/loss": float("nan")},
            config=CheckpointConfig(),
            log=pytest.fail,
        )
        return (saved / STATE).read_bytes(), (saved / MANIFEST).read_bytes()


def write_checkpoint(path: Path, state: bytes, manifest: bytes) -> Path:
    """Write a checkpoint's files into a new folder."""
    path.mkdir()
    (path / STATE).write_bytes(state)
    (path / MANIFEST).write_bytes(manifest)
    return path


@st.composite
def checkpoints(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """State and manifest, of which one or both are not as they were."""
    state, manifest = checkpoint()
    which = draw(st.integers(0, 4))
    if which <= 1:
        state = draw(st.one_of(damaged(state), damaged(state), st.binary(max_size=99)))
    if which >= 1:
        manifest = draw(faulty(manifest, is_json=True))
    return state, manifest


@pytest.mark.full
@given(checkpoints())
@examples(300)
def test_a_checkpoint_is_loaded_as_it_was_or_rejected(files: tuple[bytes, bytes]) -> None:
    """Neither another state nor another step or metric ever comes of it."""
    with folder() as here:
        whole = write_checkpoint(here / "step-00000600", *checkpoint())
        path = write_checkpoint(here / "step-00000700", *files)
        known = read_manifest(whole)
        with rejected_in_one_line(path):
            found = read_manifest(path)
            assert (found.step, found.metrics) == (known.step, known.metrics)
        with rejected_in_one_line(path) as errors_of:
            assert equal(load_checkpoint(path), STATE_SAVED)
        logged: list[str] = []
        latest = latest_checkpoint(here, log=logged.append)
        assert latest == (whole if errors_of else path)
        assert all(sentence.isprintable() for sentence in logged)


@given(st.one_of(damaged(checkpoint()[0]), st.binary(max_size=200)))
@examples(100)
def test_a_state_with_the_right_checksum_is_plain_data_or_rejected(state: bytes) -> None:
    """Whoever wrote it wrote the manifest, too."""
    with folder() as here:
        path = write_checkpoint(here / "step-00000001", state, b"")
        (path / MANIFEST).write_text(
            manifest_text({STATE: facts_of(path / STATE)}, step=1, metrics={})
        )
        with rejected_in_one_line(path):
            assert isinstance(load_checkpoint(path), dict)


RECORD = {
    "status": "preempted",
    "work_hash": "abc",
    "launches": ["agent here"],
    "wall_s": 1.5,
    "startup_s": 0.5,
    "metrics": {"train/loss": 0.5, "perf/samples_per_s": 100.0},
    "sessions": [{"started_at": 1.0, "wall_s": 1.0}],
}


@given(faulty(json.dumps(RECORD).encode(), is_json=True))
@examples(200)
def test_a_record_is_a_mapping_or_rejected(content: bytes) -> None:
    """Nobody goes on with a run whose record is damaged, and a table of a sweep shows the rest."""
    with folder() as here:
        run = here / "job"
        run.mkdir()
        (run / "run.json").write_bytes(content)
        with rejected_in_one_line(run / "run.json"):
            assert isinstance(read_run_record(run), dict)
        with rejected_in_one_line(run / "run.json"):
            write_run_record(run, status="running")
            assert read_run_record(run)["status"] == "running"
        (run / "run.json").write_bytes(content)
        assert standing(RunDir(run)).status
        planned(here, "job")
        assert all(line.isprintable() for line in sweep_table(here).splitlines())


COMMAND = ["-m", "seed=1,2"]


@cache
def plan_bytes() -> bytes:
    """Return the bytes of a sweep's plan."""
    jobs = [PlannedJob("id1", "seed=1"), PlannedJob("id2", "seed=2", "no"), PlannedJob("id3", "x")]
    with folder() as here:
        change_plan(here, lambda plan: with_jobs(jobs, restarted(COMMAND, plan)))
        return (here / PLAN).read_bytes()


@pytest.mark.full
@given(faulty(plan_bytes(), is_json=True))
@examples(400)
def test_a_plan_holds_jobs_or_is_rejected(content: bytes) -> None:
    """Of the right types, each with a folder below the sweep's; and the sweep can continue."""
    with folder() as here:
        sweep = here / "sweep"
        sweep.mkdir()
        path = sweep / PLAN
        path.write_bytes(content)
        with rejected_in_one_line(path) as errors_of:
            plan = read_plan(sweep)
            for job_id, job in plan.jobs.items():
                assert (job_id, str(job_id)) == (job.job_id, job_id)
                assert (sweep / job.folder).parent == sweep
                assert Path(job.folder).name == job.folder
                assert isinstance(job.fault, str | None)
            assert all(isinstance(one, str) for one in plan.command)
        assert unfinished_sweep(here, command=COMMAND, retry_failed=True) in (sweep, None)
        with rejected_in_one_line(path) as again:
            assert all(line.isprintable() for line in sweep_table(sweep).splitlines())
            change_plan(
                sweep, lambda plan: with_jobs([PlannedJob("n", "n")], restarted(COMMAND, plan))
            )
        assert bool(again) == bool(errors_of)


@cache
def run_files() -> dict[str, bytes]:
    """Return the bytes of what a comparison reads of a run."""
    with folder() as here:
        run = write_run(here / "run", lines=lines_of([1.0, 90.0, 100.0]))
        return {name: (run / name).read_bytes() for name in READ_BY_COMPARE}


READ_BY_COMPARE = ("run.json", ".hydra/config.yaml", "metrics.jsonl")
ODD_YAML = (
    b'a: !!int ""\n',
    b'a: !!float ""\n',
    b"a: !!bool x\n",
    b"a: !!timestamp x\n",
    b"a: 0x_\n",
    b"a: 2001-99-99\n",
    b"a: 0001-01-01T00:00:00+23:00\n",
    b"? [a]\n: 1\n",
    b"a: !!set {}\n",
    *(
        b"1: 2\n",
        b"null: 1\n",
        b"a: &a [*a]\n",
        b"<<: 1\n",
        b"a: !!binary x\n",
        b"? {}\n",
        b"---\n",
    ),
    b"a: !!omap [x]\n",
    b"a: =\n",
    b"world_size: 1:60:60\n",
    b"model: null\n",
    b"model: [1]\n",
    b"seed: .nan\n",
    b"launch: 3\n",
    b"allowed_targets: x\n",
    b"a: [" * 3000,
    b"- " * 3000,
    b"model: ${seed}\n",
    b"seed: ${seed}\n",
    b"seed: ${a\n",
    b"resume: x\n",
    b"model: {1: 2}\n",
)


@st.composite
def faulty_yaml(draw: st.DrawFn, content: bytes) -> bytes:
    """A YAML file that is damaged, or that holds what YAML allows and no config does."""
    if draw(st.booleans()):
        return draw(faulty(content))
    lines, odd = content.splitlines(keepends=True), draw(st.sampled_from(ODD_YAML))
    place = draw(st.integers(0, len(lines)))
    return b"".join([*lines[:place], odd, *lines[place + draw(st.integers(0, 1)) :]])


@st.composite
def faulty_runs(draw: st.DrawFn) -> tuple[str, bytes]:
    """One of a run's files, and what has become of it."""
    name = draw(st.sampled_from(READ_BY_COMPARE))
    content = run_files()[name]
    if name.endswith(".yaml"):
        return name, draw(faulty_yaml(content))
    if name.endswith(".json"):
        return name, draw(faulty(content, is_json=True))
    *lines, last = content.splitlines(keepends=True)
    changed = draw(st.one_of(faulty(last, is_json=True), faulty(content)))
    return name, b"".join([*lines, changed])


@pytest.mark.full
@given(faulty_runs())
@examples(150)
def test_a_faulty_run_is_compared_or_left_out_in_one_line(fault: tuple[str, bytes]) -> None:
    """The good one beside it is compared, and every table can be printed."""
    name, content = fault
    with folder() as here:
        write_run(here / "good", lines=lines_of([1.0, 90.0, 100.0]), record={"started_at": 1.0})
        faulty_run = write_run(here / "odd", lines=lines_of([1.0, 90.0, 100.0]))
        (faulty_run / name).write_bytes(content)
        comparison = compare(read_runs([here]))
        compared = [run.folder.name for row in comparison.rows for run in row.runs]
        left_out = [remark.run.folder.name for remark in comparison.skipped]
        assert "good" in compared
        assert sorted(compared + left_out) == ["good", "odd"]
        for remark in (*comparison.skipped, *comparison.notes):
            assert len(remark.sentence.splitlines()) == 1
        for form in ("table", "markdown"):
            assert all(line.isprintable() for line in FORMATS[form](comparison).splitlines())


@cache
def frozen() -> tuple[bytes, Any]:
    """Return the bytes of a run's frozen config, and what a command composes beside it."""
    with folder() as here:
        config, _ = resolved("model=toy")
        freeze(here, config, choices={"model": "toy"})
        return (here / ".hydra" / "config.yaml").read_bytes(), compose_raw("model=toy")


@pytest.mark.full
@given(st.data())
@examples(150)
def test_a_frozen_config_resolves_or_is_rejected(data: st.DataObject) -> None:
    """What is damaged names the file; what breaks a rule names the key."""
    content, composed = frozen()
    with folder() as here:
        (here / ".hydra").mkdir()
        path = here / ".hydra" / "config.yaml"
        path.write_bytes(data.draw(faulty_yaml(content)))
        raw = composed.copy()
        raw.resume = str(here)
        with rejected_in_one_line(path) as errors_of:
            raw = with_resumed(raw, ())
        if errors_of:
            return
        try:
            config, _ = resolve(to_config(raw), hardware=LAPTOP)
            assert isinstance(config, Config)
        except Exception as error:
            explained = user_error(error)
            if explained is None:
                raise
            assert_one_line(str(explained))


@given(faulty_yaml(b"dataset: digits\nmodel: toy\noptimizer: sgd\n"))
@examples(50)
def test_the_choices_of_a_run_are_options_or_none(content: bytes) -> None:
    """What is implied of them are overrides of groups, whatever the file has become."""
    with folder() as here:
        (here / ".hydra").mkdir()
        (here / ".hydra" / "choices.yaml").write_bytes(content)
        (here / "model").mkdir()
        (here / "model" / "toy.yaml").touch()
        _, implied = resumed_overrides([f"resume={here}"], folders=[here])
        assert implied in ([], ["model=toy"])


TEXTS = 'label,review\r\n1,"a ""good"" one,\nyes"\r\n0,好 bad\r\n1.0,\r\n,x\r\n0,last\r\n'
ENCODINGS = (
    "utf-8",
    "utf-16",
    "gb18030",
    "latin-1",
    "utf-7",
    "utf-32",
    "idna",
    "punycode",
    "cp1252",
    "unicode_escape",
    "raw_unicode_escape",
    "utf_8_sig",
    "shift_jis",
    "hz",
    "utf_16_le",
)


@st.composite
def csv_files(draw: st.DrawFn) -> tuple[bytes, str]:
    """A CSV file that is not as it was, and the encoding that its options name."""
    encoding = draw(st.sampled_from(ENCODINGS))
    written = draw(st.sampled_from(["utf-8", "utf-16", "gb18030", "utf-7"]))
    content = draw(st.one_of(st.just(TEXTS), st.text(max_size=40))).encode(written, "replace")
    return draw(faulty(content)), encoding


@given(csv_files(), st.sampled_from([",", ";", "\t", " ", "1", "好", "a"]))
@examples(300)
def test_a_csv_file_gives_texts_and_classes_or_is_rejected(
    file: tuple[bytes, str], delimiter: str
) -> None:
    """Each text has characters that can be written again, and each class is one."""
    content, encoding = file
    with folder() as here:
        path = here / "file.csv"
        path.write_bytes(content)
        with rejected_in_one_line(path):
            source = csv_text(path, encoding=encoding, delimiter=delimiter)
            rows, _ = source.rows(path)
            assert rows
            assert all(row.text.strip() and row.text.encode() for row in rows)
            assert all(type(row.label) is int and row.label in range(2) for row in rows)


TINY = FakeImages("tiny", 3, 2, channels=1, height=4, width=4, num_classes=3, seed=0)


@pytest.fixture(scope="module")
def cached(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[Path, bytes]]]:
    """Give the folder of a dataset's files, and its cache, which each example damages."""
    root = tmp_path_factory.mktemp("cached")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("DDP_RUNNER_CACHE", str(root / "cache"))
        load_dataset(TINY, data_root=root, log=lambda _: None)
        files = (root / "cache").glob("tiny-*/*")
        yield root, {path: path.read_bytes() for path in sorted(files)}


@given(st.data())
@examples(100)
def test_a_cache_of_any_bytes_gives_the_dataset(
    cached: tuple[Path, dict[Path, bytes]], data: st.DataObject
) -> None:
    """It is used if it is whole, and built anew if it is not."""
    root, whole = cached
    for path, content in whole.items():
        path.write_bytes(content)
    mapped = load_dataset(TINY, data_root=root, log=pytest.fail)
    # A file that is mapped must not be written to, as this test is about to do.
    inputs, targets = mapped.train.inputs.clone(), mapped.eval.targets.clone()
    path = data.draw(st.sampled_from(list(whole)))
    # The manifest is written whole; what a power cut leaves of it is its beginning.
    end = data.draw(st.integers(0, len(whole[path]) - 1))
    is_manifest = path.name == MANIFEST
    path.write_bytes(whole[path][:end] if is_manifest else data.draw(faulty(whole[path])))
    found = load_dataset(TINY, data_root=root, log=lambda _: None)
    assert torch.equal(found.train.inputs, inputs)
    assert torch.equal(found.eval.targets, targets)
    assert found.digest == mapped.digest
