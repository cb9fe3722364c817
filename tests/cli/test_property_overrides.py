"""Whatever a command line holds: it is planned, or rejected in one line; and nothing else happens.

The entry is given command lines of real keys, options and values of all kinds. It runs in this
process, up to where workers would be started.
"""

import contextlib
import io
import logging
import os
import pickle
import re
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from configs import LAPTOP, compose_raw
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from properties import assert_one_line, examples

import ddp_runner.cli.app
import ddp_runner.cli.start_runs
import ddp_runner.launch.launcher
import ddp_runner.sweep.local
from ddp_runner.cli.command import dotted_keys
from ddp_runner.cli.compose import ROOT_CONFIG, register
from ddp_runner.cli.messages import user_error
from ddp_runner.cli.plan import validate_files
from ddp_runner.config.identity import leaves
from ddp_runner.config.load import to_config
from ddp_runner.config.resolve import resolve
from ddp_runner.config.schema import CONFIG_DIR, Config
from ddp_runner.host.hardware import Hardware
from ddp_runner.job import COMPLETED, Job, Outcome
from ddp_runner.sweep.jobs import JobBatch, run_jobs
from ddp_runner.sweep.local import Local

FOREIGN = "foreign_package"  # the name of a module that nobody may import
EXIT_CODES = (0, 2)


@cache
def options() -> dict[str, list[str]]:
    """Return the options of each group in conf/ that a command line may choose."""
    groups: dict[str, list[str]] = {}
    for path in sorted(CONFIG_DIR.glob("*/*.yaml")):
        groups.setdefault(path.parent.name, []).append(path.stem)
    # Not optuna, which says on stderr what it does.
    return groups | {"hydra/sweeper": ["grid"], "hydra/job_logging": ["none"]}


@cache
def keys() -> list[str]:
    """Return every dotted key: the schema's, those of each option of each group, and Hydra's."""
    found = dict.fromkeys(_schema(Config))
    for path in sorted(CONFIG_DIR.glob("*/*.yaml")):
        content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        is_global = path.parent.name in ("experiment", "scaling")
        prefix = "" if is_global else f"{path.parent.name}."
        found |= dict.fromkeys(f"{prefix}{key}" for key, _ in leaves(content))
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        config = compose(ROOT_CONFIG, return_hydra_config=True)
        found |= dict.fromkeys(dotted_keys(OmegaConf.to_container(config)))
    return [key for key in found if re.fullmatch(r"[\w.]+", key)]


def _schema(kind: Any, prefix: str = "") -> Iterator[str]:
    for one in fields(kind):
        yield f"{prefix}{one.name}"
        if is_dataclass(one.type):
            yield from _schema(one.type, f"{prefix}{one.name}.")


# What the values are made of: as they are written on the command line.
TARGETS = (
    *(f"{FOREIGN}.Model", "os.getcwd", "torch.nn.Linear", "torch.nn.functional.mse_loss", "", "."),
    *("torch.optim.SGD", "ddp_runner.models.toy.ToyModel", "ddp_runner.models", "...", "a..b"),
)
INTERPOLATIONS = (
    *("${seed}", "${oc.env:HOME}", "${oc.env:NOT_SET_X}", "${oc.env:NOT_SET_X,3}", "${nowhere}"),
    *("${oc.decode:'[1'}", "${run_dir:}", "${sweep_dir:}", "${job_name:}", "${data_root:}", "${"),
    *("${hydra:runtime.cwd}", "${now:%Y}", "${.name}", "${...x}", "${oc.create:{a:1}}", "$", "}"),
    *("${oc.dict.keys:model}", "${oc.select:x.y,3}", "${unknown_resolver:1}", "${model}", "${}"),
    *("${batch.per_rank}", "${oc.deprecated:seed}", "${dataset.num_classes}", "${hydra:job.num}"),
)
SWEEPS = (
    *("1,2", "a,b", "range(3)", "range(0,1,0.5)", "range(3,0)", "choice(1,a)", "interval(0,1)"),
    *("glob(*)", "shuffle(1,2)", "sort(2,1)", "tag(x,1)", "int(3.5)", "bool(no)", "json_str({})"),
    *("range(1,2,0)", "choice()", "glob([a,b],exclude=a)", "extend_list(1)", "nothing(1)", "1,,2"),
)
texts = st.text(max_size=8)
numbers = st.one_of(
    st.integers(-(10**30), 10**30),
    st.integers(-2, 9),
    st.floats(),
    st.sampled_from(["1e999", "-1e-999", "0x10", "1_000", "-0", "+1", "9" * 5000, ".5", "1.", "٣"]),
).map(str)
quoted = texts.map(lambda text: "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'")
words = st.one_of(
    numbers,
    quoted,
    st.sampled_from(
        ["null", "true", "no", "auto", "text", "nan", "inf", "a b", "é", "''", "?", ""]
    ),
    st.sampled_from(["???", "tcp://h:1", "file://x", "'file:///dev/null/x'", "cuda", "x" * 300]),
    st.sampled_from(TARGETS),
    st.sampled_from(INTERPOLATIONS),
)
values = st.one_of(
    words,
    st.recursive(
        words,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3).map(lambda items: f"[{','.join(items)}]"),
            st.dictionaries(st.sampled_from(["a", "_target_", "'b c'", "1", "null"]), inner).map(
                lambda pairs: "{" + ",".join(f"{key}:{one}" for key, one in pairs.items()) + "}"
            ),
        ),
        max_leaves=4,
    ),
    st.sampled_from(SWEEPS),
    texts,
)
# Not one that leads away: what is asked for is done, and the folders that a command names are made.
CHOICES = st.sampled_from([(group, one) for group, some in options().items() for one in some])


@st.composite
def overrides(draw: st.DrawFn) -> str:
    """One override: of a key or a group, added, removed or changed."""
    if draw(st.integers(0, 3)) == 0:
        group, option = draw(CHOICES)
        other = draw(st.one_of(st.just(option), st.just(option), values))
        return f"{draw(st.sampled_from(['', '', '', '+', '++', '~']))}{group}={other}"
    key = draw(st.one_of(*[st.sampled_from(keys())] * 20, st.just(""), texts))
    if draw(st.integers(0, 9)) == 0:
        key += draw(st.sampled_from([".x", "@x", "x", ".", ".0", "[0]", "/x"]))
    sign = draw(st.sampled_from([*[""] * 9, "+", "++", "~"]))
    if sign == "~" and draw(st.booleans()):
        return f"~{key}"
    return f"{sign}{key}={draw(values)}"


FLAGS = st.sampled_from(
    [
        *(["-m"], ["-m"], ["-m"], ["--cfg", "job"], ["--cfg", "hydra", "--resolve"], ["--info"]),
        *(["--cfg", "all"], ["--cfg=nothing"], ["--package", "x"], ["--epochs", "3"], ["--run"]),
        *(["--config-dir", "."], ["--config-dir=nowhere"], ["--version"], ["--help"], ["-c"]),
        *(["--cfg", "job", "--package", "model"], ["-cn", "x"], ["--"], ["-"], ["--multirun=x"]),
        ["--hydra-help"],
    ]
)


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    """A command line: a few overrides, and now and then an option of Hydra's."""
    line = draw(st.lists(overrides(), min_size=1, max_size=3))
    if draw(st.integers(0, 4)) == 0:
        place = draw(st.integers(0, len(line)))
        line[place:place] = draw(FLAGS)
    return line


@dataclass
class Watch:
    """What this process does while it is watched; changes outside of a folder are kept from it."""

    folder: Path | None = None  # None: not watching
    events: list[str] = field(default_factory=list)

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        """Note the facts of an audit event: see the table of them in Python's documentation."""
        if self.folder is None:
            return
        if event == "import" and str(args[0]).partition(".")[0] == FOREIGN:
            self.events.append(f"import {args[0]}")
        elif event in ("os.system", "os.exec", "os.posix_spawn", "socket.connect"):
            self.events.append(f"{event} {args}")
        elif (event == "open" and _writes(args)) or event in (
            *("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "os.truncate"),
            "shutil.rmtree",
        ):
            for path in args[: 2 if event == "os.rename" else 1]:
                self._check_place(event, path)

    def _check_place(self, event: str, path: Any) -> None:
        if not isinstance(path, str | bytes | Path) or self.folder is None:
            return  # a descriptor: of a file that was opened
        # Not resolve(): a link itself is what would be changed.
        place = Path(os.path.normpath(Path(os.fsdecode(path)).absolute()))
        own = (self.folder, Path(os.devnull))
        is_compiled = place.suffix == ".pyc" or place.name == "__pycache__"
        if not place.is_relative_to(self.folder) and place not in own and not is_compiled:
            self.events.append(f"{event} {place}")
            raise PermissionError(13, "kept from it by the test", str(place))


def _writes(args: tuple[Any, ...]) -> bool:
    return isinstance(args[2], int) and bool(
        args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    )


WATCH = Watch()


@pytest.fixture(scope="module", autouse=True)
def _audit() -> None:
    sys.addaudithook(WATCH)  # for good: Python has no way to remove it


@pytest.fixture
def no_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the entry go up to where a process would be started."""

    def launched(job: Job, *_: object) -> Outcome:
        pickle.dumps(job)  # as it is sent to the workers
        return COMPLETED

    def in_turn(_: Local, batch: JobBatch) -> dict[str, Outcome]:
        """Run the jobs in place of slots, which are processes."""
        return run_jobs(batch, execute=ddp_runner.launch.launcher.launch)

    monkeypatch.setattr(ddp_runner.cli.app, "start_fork_server", lambda: None)
    for module in (ddp_runner.cli.start_runs, ddp_runner.sweep.local):
        monkeypatch.setattr(module, "start_fork_server", lambda: None)
        monkeypatch.setattr(module, "detect", lambda **_: LAPTOP)
    monkeypatch.setattr(Local, "_start_slots", lambda *_: None)
    monkeypatch.setattr(Local, "_run_in_slots", in_turn)
    monkeypatch.setattr(ddp_runner.launch.launcher, "run_ranks", launched)
    monkeypatch.setattr(ddp_runner.cli.start_runs, "git_revisions", dict)


@contextlib.contextmanager
def undone() -> Iterator[Path]:
    """Give an empty folder to be in; take back what Hydra changes of this process."""
    environ, before, argv = dict(os.environ), Path.cwd(), sys.argv[:]
    handlers = {number: signal.getsignal(number) for number in (*range(1, 4), 10, 12, 15)}
    levels = (logging.root.level, logging.root.handlers[:], logging.root.manager.disable)
    with tempfile.TemporaryDirectory() as name:
        here = Path(name).resolve() / "here"
        here.mkdir()
        (here / f"{FOREIGN}.py").write_text("raise AssertionError('it was imported')\n")
        os.chdir(here)
        GlobalHydra.instance().clear()
        os.environ.pop("HYDRA_FULL_ERROR", None)
        try:
            yield here
        finally:
            WATCH.folder = None
            os.chdir(before)
            GlobalHydra.instance().clear()
            os.environ.clear()
            os.environ.update(environ)
            sys.argv = argv
            for number, handler in handlers.items():
                signal.signal(number, handler)
            logging.root.setLevel(levels[0])
            logging.root.handlers[:] = levels[1]
            logging.disable(levels[2])


def answer(line: list[str]) -> tuple[Any, str, list[str]]:
    """Give a command line to the entry; return exit code, its output, and what it did outside."""
    logged = io.StringIO()
    with (
        undone() as here,
        contextlib.redirect_stderr(logged),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        sys.argv = ["ddp_runner", *line]
        sys.path.insert(0, str(here))
        WATCH.folder, WATCH.events = here, []
        try:
            ddp_runner.cli.app.main()
        except SystemExit as end:
            return end.code, logged.getvalue(), WATCH.events
        finally:
            WATCH.folder = None
            sys.path.remove(str(here))
    raise AssertionError("it ended without an exit code")


def check(line: list[str]) -> None:
    """Fail unless a command line ends with 0, or with 2 and one plain line, or one for each job."""
    code, logged, events = answer(line)
    sentences = logged.splitlines()
    assert code in EXIT_CODES, logged
    if code == 2:
        assert len(sentences) == 1 or {"-m", "--multirun"} & set(line), logged
        for sentence in sentences:
            assert sentence.startswith("error: ")
            assert_one_line(sentence)
    else:
        assert "Traceback" not in logged
    if not any("hydra" in one for one in line):  # whose keys name folders, and classes to make
        assert events == []


@pytest.mark.usefixtures("no_workers")
@given(command_lines())
@examples(25)
def test_a_command_line_is_planned_or_rejected_in_one_line(line: list[str]) -> None:
    """Nothing is written outside of the folder, nothing foreign is imported."""
    check(line)


@cache
def composed() -> tuple[list[str], Any]:
    """Return the keys of a config of many parts, and this config."""
    raw = compose_raw("model=bert", "parallelism=ps", "scheduler=cosine", "dataset=csv_text")
    raw = OmegaConf.merge(OmegaConf.structured(Config), raw)
    return [key for key, _ in leaves(OmegaConf.to_container(raw))], raw


plain = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.floats(), texts, st.sampled_from(TARGETS)),
    st.sampled_from(INTERPOLATIONS),
)
nested = st.recursive(
    plain,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(texts, st.integers(), st.just("_target_")), inner, max_size=3),
    ),
    max_leaves=5,
)


@pytest.mark.full
@given(st.data(), st.booleans())
@examples(50)
def test_any_value_of_any_key_resolves_or_is_rejected_in_one_line(
    data: st.DataObject, has_gpus: bool
) -> None:
    """Also of types that a command line cannot write, as a YAML of the user's own can."""
    register()
    known, raw = composed()
    changed = raw.copy()
    machine = Hardware(num_gpus=4 if has_gpus else 0, num_cores=4)
    try:
        for _ in range(data.draw(st.integers(1, 2))):
            key, value = data.draw(st.sampled_from(known)), data.draw(nested)
            OmegaConf.update(changed, key, value, merge=False, force_add=True)
        config, _ = resolve(to_config(changed), hardware=machine)
        validate_files(replace(config, data_root=str(Path("nowhere"))))
    except Exception as error:
        message = user_error(error)
        if message is None:
            raise
        assert_one_line(str(message))
