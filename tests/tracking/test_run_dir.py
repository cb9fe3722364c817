"""Run folders of any name, as messages show them."""

import resource
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock

import pytest
from configs import freeze
from hydra.core.override_parser.overrides_parser import OverridesParser
from rights import unreadable

from ddp_runner.config.schema import Config
from ddp_runner.errors import UserError
from ddp_runner.files import safe_name
from ddp_runner.tracking import run_dir
from ddp_runner.tracking.outputs import job_name
from ddp_runner.tracking.run_dir import InUseError, RunDir
from ddp_runner.tracking.run_folder_claim import clear_if_unbegun


@pytest.mark.parametrize(
    "name",
    [
        "outputs/run",
        "/tmp/2026-11-21_10-30-00",
        "outputs/s/world_size=2,optimizer.lr=0.1",
        "with space",
        "it's",
        'a "b"',
        "a\\'b",
        "$HOME",
        "[x]{y: z}",
        "日本",
        "a;b|c&d",
        "back\\slash",
        "end\\",
        "!x=1",
    ],
)
def test_a_printed_resume_is_what_shell_and_hydra_take(name: str) -> None:
    """Whatever its name, the folder comes out of both as it went in."""
    (argument,) = shlex.split(RunDir(Path(name)).resume_argument)
    assert OverridesParser.create().parse_override(argument).value() == name


@pytest.mark.parametrize("began", [False, True])
@pytest.mark.parametrize("kind", ["user", "other"])
def test_only_a_mistake_before_the_first_step_gives_the_folder_back(
    tmp_path: Path, kind: str, began: bool
) -> None:
    """The corrected command may use it; nothing else is ever deleted."""
    run_dir = RunDir(tmp_path / "run")
    (run_dir.path / ".hydra").mkdir(parents=True)
    run_dir.logs.mkdir()
    (run_dir.logs / "rank-0.log").write_text("traceback")
    (run_dir.path / "code-0.diff").touch()
    run_dir.record.write_text(f'{{"error": {{"kind": "{kind}"}}}}')
    if began:
        run_dir.metrics.touch()
    clear_if_unbegun(run_dir)
    assert bool(list(run_dir.path.iterdir())) == (began or kind != "user")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("0.21759085167606332", "0.2176"),
        ("-1.2345678912345678e-05", "-1.235e-05"),
        ("0.0001", "0.0001"),
        ("64", "64"),
        ("1.2.34567", "1.2.34567"),
    ],
)
def test_a_job_of_a_search_has_a_short_name(value: str, shown: str) -> None:
    """Long numbers are rounded; what a person would type stays as it is."""
    assert job_name([f"optimizer.lr={value}", "seed=1"]) == f"optimizer.lr={shown},seed=1"


@pytest.mark.parametrize(
    "name", ["", ".", "..", "...", " ", "../up", "a/../../b", "/etc", "a\0b", "漢" * 150, "é" * 300]
)
def test_any_text_is_one_folder_below_its_parent(name: str, tmp_path: Path) -> None:
    """Neither the parent itself nor anything outside it, and never too long for a file system."""
    folder = tmp_path / safe_name(name)
    assert folder.resolve().parent == tmp_path.resolve()
    folder.mkdir()
    folder.with_name(f"{folder.name}-2026-01-01_00-00-00-2").mkdir()


def test_a_name_that_is_one_folder_stays_as_it_is() -> None:
    """Only what no folder can have is changed."""
    for name in ("model=toy,optimizer.lr=0.1", "a b", "漢字", "..a", "x" * 200):
        assert safe_name(name) == name


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Let writing to a file fail from this byte on, as on a full disk."""
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, usual[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)


@pytest.mark.parametrize("file", ["config.yaml", "overrides.yaml"])
def test_a_frozen_config_is_replaced_whole_or_not_at_all(file: str, tmp_path: Path) -> None:
    """A disk that is full, or a kill, in the middle of it leaves the one before."""
    overrides = ["seed=1"]
    freeze(tmp_path, Config(seed=1), overrides=overrides)
    before = {path.name: path.read_bytes() for path in (tmp_path / ".hydra").iterdir()}
    assert b"seed: 1" in before["config.yaml"]
    long = ["x" * 500] if file == "overrides.yaml" else []
    with largest_file(200), pytest.raises(UserError, match="cannot be written") as rejected:
        freeze(tmp_path, Config(seed=2), overrides=long)
    assert "\n" not in str(rejected.value)
    assert (tmp_path / ".hydra" / "config.yaml").read_bytes() == before["config.yaml"]
    if file == "overrides.yaml":
        assert (tmp_path / ".hydra" / file).read_bytes() == before[file]
    freeze(tmp_path, Config(seed=3), overrides=long)
    assert "seed: 3" in (tmp_path / ".hydra" / "config.yaml").read_text()


def test_a_folder_that_cannot_be_searched_for_links_is_named(tmp_path: Path) -> None:
    """The run would write to files in it, and one of them may be a link."""
    (tmp_path / "logs").mkdir()
    with unreadable(tmp_path / "logs"), pytest.raises(UserError, match="logs cannot be read"):
        RunDir(tmp_path).locked().__enter__()
    with RunDir(tmp_path).locked():
        pass


def test_a_folder_whose_holder_ends_right_now_is_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file with its name may be gone between any two looks at it."""
    with RunDir(tmp_path).locked(), monkeypatch.context() as patch:
        patch.setattr(run_dir, "read_file", Mock(side_effect=FileNotFoundError))
        with pytest.raises(InUseError, match="is in use by another process"):
            RunDir(tmp_path).locked().__enter__()


def test_a_job_of_a_sweep_is_resumed_by_a_word_that_can_be_read() -> None:
    """Its folder has an equals sign, which Hydra wants in quotes."""
    assert RunDir(Path("sweep/seed=1")).resume_argument == "\"resume='sweep/seed=1'\""
