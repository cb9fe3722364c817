"""A command line is read once: into options, overrides, and whether it is a sweep."""

import re
from pathlib import Path

import pytest
from configs import LAPTOP

from ddp_runner.cli.app import main, run
from ddp_runner.cli.command import compose, is_sweep, parse
from ddp_runner.cli.compose import compose_config
from ddp_runner.cli.plan import Invocation, job_folder, plan
from ddp_runner.errors import UserError


def test_keys_may_stand_on_both_sides_of_an_option(tmp_path: Path) -> None:
    """Hydra gets the keys first; what the user wrote identifies a sweep, and stays as it is."""
    written = ["model=toy", "-m", "--config-dir", str(tmp_path), "seed=1,2", "+tag.x=a b"]
    command = parse(written)
    assert command.written == tuple(written)
    keys = ["model=toy", "seed=1,2", "+tag.x=a b"]
    assert command.arguments() == [*keys, "-m", "--config-dir", str(tmp_path)]
    sweeps = [one.input_line for one in command.overrides if one.is_sweep_override()]
    assert sweeps == ["seed=1,2"]
    assert [one.key_or_group for one in command.overrides] == ["model", "seed", "tag.x"]
    assert command.folders == (f"file://{tmp_path}",)
    assert command.is_multirun
    assert not command.only_shows


@pytest.mark.parametrize("option", ["--hydra-help", "--cfg=job", "--info", "-sc"])
def test_what_only_shows_something_runs_nothing(option: str) -> None:
    """Hydra answers these options by itself."""
    keys = ["query=bash"] if option == "-sc" else ["model=toy"]
    command = parse([*keys, option])
    assert command.only_shows
    assert command.arguments() == ([option, *keys] if option == "-sc" else [*keys, option])


def test_help_shows_the_groups_and_keys_of_the_user_as_well(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is the page of conf/hydra/help, whose resolvers list both."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "my_net.yaml").write_text("# @package _global_\nseed: 7\n")
    assert run(["--help", "--config-dir", str(tmp_path)], started_at=0.0) == 0
    page = capsys.readouterr().out
    groups = page.partition("Groups (group=option):")[2].partition("Keys (key=default):")[0]
    assert "model: bert, " in groups
    assert "my_net" in groups
    assert "hydra" not in groups
    assert "\ntrain.epochs=" in page
    assert "${" not in page


def test_a_yaml_can_make_the_command_a_sweep() -> None:
    """By hydra.mode, as experiment=scaling_study does; several values need no -m then."""
    for arguments, expected in (
        ([], False),
        (["-m", "seed=1,2"], True),
        (["hydra.mode=MULTIRUN", "seed=range(3)"], True),
        (["experiment=scaling_study", "seed=1,2"], True),
    ):
        command = parse(arguments)
        assert is_sweep(command, compose(command)) is expected
    with pytest.raises(UserError, match="write -m for a sweep"):
        compose(parse(["seed=1,2"]))


def test_a_job_is_named_by_what_the_sweep_varies() -> None:
    """A key that is the same for all jobs is left out, unless the name would be empty."""
    command = parse(["-m", "model=toy", "seed=1,2", "optimizer.lr=0.1,0.2"])
    job = compose_config(["model=toy", "seed=2", "optimizer.lr=0.1"])
    assert job_folder(job, command) == "seed=2,optimizer.lr=0.1"
    assert job_folder(compose_config(["model=toy"]), parse(["-m", "model=toy"])) == "model=toy"
    one = ["seed=1", "++sweep.retry=failed", "sweep.dry_run=true"]
    assert job_folder(compose_config(one), parse(["-m", *one])) == "seed=1"
    twice = parse(["-m", "model=toy", "seed=0", "seed=1,2"])
    assert job_folder(compose_config(["model=toy", "seed=2"]), twice) == "seed=2"
    for subdir, name in (("job-${seed}", "job-2"), ("toy/${seed}", "toy-2"), ("..", "_..")):
        named = compose_config(["seed=2", f"hydra.sweep.subdir={subdir}"])
        assert job_folder(named, command) == name


def test_a_command_knows_how_it_finds_the_users_own_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By words that find them from any folder; no override of a job holds them."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf").mkdir()
    place = "hydra.searchpath=[file:///elsewhere]"
    command = parse(["--config-dir", "conf", place, "seed=1"])
    assert command.own_groups == (f"--config-dir={tmp_path / 'conf'}", place)
    assert parse(["seed=1"]).own_groups == ()


def test_the_version_is_that_of_this_program(capsys: pytest.CaptureFixture[str]) -> None:
    """With those of the libraries that it stands on."""
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code is None
    assert re.match(r"python [\d.]+, ddp_runner [\d.]+, torch \d", capsys.readouterr().out)


def test_a_name_with_an_equals_sign_needs_no_quotes() -> None:
    """As Tab completes the folder of a sweep's job."""
    command = parse(["hydra.run.dir=out/seed=1", "notes=a=b c", "seed=3"])
    assert [one.value() for one in command.overrides[:1]] == ["out/seed=1"]
    assert compose(command).hydra.run.dir == "out/seed=1"
    assert compose(command).notes == "a=b c"


def test_keys_of_ones_own_are_named_by_others() -> None:
    """They stand below user, and in no other place."""
    command = parse(["+user.rate=0.25", "optimizer.lr=${user.rate}"])
    job = plan(compose(command), LAPTOP, Invocation(command, None, 0.0, {}))
    assert (job.config.optimizer["lr"], job.config.user) == (0.25, {"rate": 0.25})
