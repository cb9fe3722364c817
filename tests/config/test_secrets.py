"""What comes from the environment is used by a run and stands in none of its files."""

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from configs import LAPTOP, compose_raw, freeze, resolved
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from ranks import run_ranks
from run_folders import record

from ddp_runner.cli.app import run
from ddp_runner.cli.compose import register
from ddp_runner.cli.messages import user_error
from ddp_runner.cli.resume import with_resumed
from ddp_runner.config.load import chosen_keys, find_secrets, to_config
from ddp_runner.config.resolve import resolve
from ddp_runner.config.secrets import Secrets
from ddp_runner.data.sources.offline import RandomRegression
from ddp_runner.dist_env import DistEnv
from ddp_runner.errors import UserError
from ddp_runner.job import Job
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.tracking.run_record import versions
from ddp_runner.worker import run_task

SECRET = "hunter2-of-mine"
TREE = {
    "dataset": {
        "name": "plain",
        "token": "${oc.env:MY_SECRET}",
        "copy": "${.name}",
        "size": 3,
        "select": "${oc.select:model.nothing,5}",
    },
    "model": {
        "same": "${dataset.token}",
        "longer": "Bearer ${oc.env:MY_SECRET}!",
        "listed": ["x", "${oc.env:MY_SECRET}", ["${dataset.token}"]],
        "nested": {"deep": [{"t": "${oc.env:MY_SECRET}"}]},
        "selected": "${oc.select:dataset.token}",
        "decoded": "${oc.decode:${oc.env:MY_SECRET}}",
        "whole": "${dataset}",
        "values": "${oc.dict.values:dataset}",
        "made": "${oc.create:{t:[${oc.env:MY_SECRET}]}}",
        "spelled": "${oc.${model.word}:MY_SECRET}",
        "word": "env",
        "unset": "${oc.env:NOT_SET,usual}",
        "length": "${dataset.size}",
        "escaped": "$5",
    },
    "train": {"epochs": "${oc.decode:${oc.env:MY_NUMBER}}"},
    "world_size": "auto",
}
HIDDEN = {
    *(("dataset", "token"), ("train", "epochs")),
    *(("model", key) for key in ("same", "longer", "selected", "decoded", "whole", "values")),
    *(("model", key) for key in ("made", "spelled", "unset")),
    *(("model", "listed", 1), ("model", "listed", 2, 0), ("model", "nested", "deep", 0, "t")),
}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the variables that the configs read."""
    monkeypatch.setenv("MY_SECRET", SECRET)
    monkeypatch.setenv("MY_NUMBER", "7")


def at(tree: Any, place: tuple[str | int, ...]) -> Any:
    """Return what stands at a place of a nested tree."""
    for key in place:
        tree = tree[key]
    return tree


def test_a_value_from_the_environment_is_found_on_whatever_way_it_came(tmp_path: Path) -> None:
    """Direct, by way of other keys and resolvers, in longer texts, lists and whole groups."""
    raw = OmegaConf.create(TREE)
    secrets = find_secrets(raw)
    assert set(secrets.texts) == HIDDEN
    assert all(secrets.texts[place] == at(TREE, place) for place in HIDDEN)

    config = to_config(raw)
    assert (config.model["longer"], config.train.epochs) == (f"Bearer {SECRET}!", 7)
    freeze(tmp_path, secrets.written(config))
    text = RunDir(tmp_path).config.read_text()
    assert SECRET not in text
    frozen = yaml.safe_load(text)
    assert all(at(frozen, place) == at(TREE, place) for place in HIDDEN)
    assert (frozen["model"]["length"], frozen["dataset"]["copy"]) == (3, "plain")
    assert to_config(OmegaConf.load(tmp_path / ".hydra" / "config.yaml")) == config


def test_looking_for_secrets_leaves_the_resolver_as_it_was() -> None:
    """A config resolves afterwards as before, and a missing variable is named only then."""
    secrets = find_secrets(OmegaConf.create({"name": "${oc.env:NOT_SET}"}))
    assert secrets.texts == {("name",): "${oc.env:NOT_SET}"}
    assert OmegaConf.create({"a": "${oc.env:MY_SECRET}"}).a == SECRET


def test_a_sentence_shows_the_variable_in_place_of_its_value() -> None:
    """In every word of an error and of its causes; short values and parts of words stay."""
    raw = OmegaConf.create({"name": "${oc.env:MY_SECRET}", "seed": "${oc.env:MY_NUMBER}"})
    secrets = find_secrets(raw)
    message = f"a ({SECRET}) and {SECRET}s, 7 times"
    hidden = f"a (${{oc.env:MY_SECRET}}) and {SECRET}s, 7 times"
    assert secrets.hide(message) == hidden
    for error, attribute in ((SystemExit(message), "code"), (KeyboardInterrupt(message), "args")):
        with pytest.raises(type(error)) as left, secrets.hidden_in_errors():
            raise error
        assert (str(left.value), hidden in str(getattr(error, attribute))) == (hidden, True)
    with pytest.raises(ValueError, match=r"oc\.env:MY_SECRET"), secrets.hidden_in_errors():
        raise ValueError({"token": SECRET})
    missing = FileNotFoundError(2, "No such file", f"/no/{SECRET}")
    with pytest.raises(UserError) as rejected, secrets.hidden_in_errors():
        raise UserError(message) from missing
    assert str(rejected.value) == hidden
    assert "/no/${oc.env:MY_SECRET}" in str(rejected.value.__cause__)


def test_of_two_values_the_longer_one_is_hidden_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """One may begin as another does, and hold any sign; short ones and numbers are no secret."""
    values = {"USER_OF": "abcd", "KEY_OF": "abcd(+efgh", "SHORT": "abc", "PORT": "12345.6e7"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    secrets = find_secrets(OmegaConf.create({name: f"${{oc.env:{name}}}" for name in values}))
    hidden = "${oc.env:KEY_OF} of ${oc.env:USER_OF}, abc, 12345.6e7"
    assert secrets.hide("abcd(+efgh of abcd, abc, 12345.6e7") == hidden


def test_an_error_that_is_its_own_cause_has_an_end() -> None:
    """As those of OmegaConf in a debugger."""
    error = ValueError(f"no {SECRET}")
    error.__cause__ = error
    secrets = find_secrets(OmegaConf.create({"name": "${oc.env:MY_SECRET}"}))
    with pytest.raises(ValueError, match=r"no \$\{oc\.env:MY_SECRET\}"), secrets.hidden_in_errors():
        raise error


def test_without_secrets_an_errors_arguments_are_not_read() -> None:
    """A tensor of a broken device cannot be shown: that error would take the place of this one."""

    class Unreadable:
        def __str__(self) -> str:
            raise RuntimeError("the device is gone")

    with pytest.raises(ValueError, match="the loss") as caught, Secrets().hidden_in_errors():
        raise ValueError("the loss", Unreadable())
    assert caught.value.args[0] == "the loss"


def test_an_error_amid_another_tells_no_secret_either() -> None:
    """Nobody had to say that one is the cause of the other: the traceback shows both."""
    secrets = find_secrets(OmegaConf.create({"name": "${oc.env:MY_SECRET}"}))

    def fail() -> None:
        with secrets.hidden_in_errors():
            try:
                raise ValueError(f"no {SECRET}")
            except ValueError:
                dict[str, str]().pop("name")

    with pytest.raises(KeyError) as found:
        fail()
    assert str(found.value.__context__) == "no ${oc.env:MY_SECRET}"


@pytest.mark.parametrize(
    "words",
    [
        "train.epochs=SECRET",
        "-m seed=1,2 launch.init_method=SECRET sweep.parallel_jobs=2",
        "-m seed=1,2 hydra/launcher=slurm hydra.launcher.timeout_min=SECRET",
        "-m seed=1,2 hydra/sweeper=optuna sweep.objective=eval/loss hydra.sweeper.direction=SECRET",
    ],
)
def test_what_a_command_rejects_is_told_without_its_secrets(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by OmegaConf, which keeps a wrong value, and of keys that only a sweep reads."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MY_SECRET", SECRET)
    with pytest.raises((UserError, HydraException, OmegaConfBaseException)) as found:
        run(words.replace("SECRET", "${oc.env:MY_SECRET}").split(), started_at=0.0)
    line = str(user_error(found.value))
    assert SECRET not in line
    assert "(${oc.env:MY_SECRET})" in line


@dataclass(frozen=True)
class Noted(RandomRegression):
    """A dataset with keys for what a private store wants to know."""

    token: str = ""
    headers: Any = None
    fails: bool = False

    def dataset(self, tensors: Any) -> Any:
        """Return it, if the store takes the token."""
        assert (self.token, self.headers) == (SECRET, [{"auth": f"Bearer {SECRET}"}])
        if self.fails:
            raise RuntimeError(f"the store rejects {self.token}")
        return super().dataset(tensors)


NOTED = (
    *("model=toy", "dataset.num_samples=8", "batch.per_rank=2", "train.epochs=1"),
    *(f"dataset._target_={__name__}.Noted", f"allowed_targets=[{__name__}]"),
    *("+dataset.token=${oc.env:MY_SECRET}", "+dataset.headers=[{auth:'Bearer ${dataset.token}'}]"),
    *("dataset.name='${oc.decode:${oc.env:MY_SECRET}}'", "model.name=toy-${dataset.name}"),
)


def planned(run_dir: Path, *overrides: str) -> Job:
    """Return the job of a command line, as the command plans it."""
    register()
    keys = (*NOTED, "backend.device=cpu", "world_size=2", *overrides)
    raw = with_resumed(compose_raw(*keys), keys)
    config, warnings = resolve(to_config(raw), hardware=LAPTOP, chosen=chosen_keys(keys))
    return Job(
        config=config,
        started_at=time.time(),
        provenance={"versions": versions()},
        run_dir=run_dir,
        overrides=keys,
        secrets=find_secrets(raw),
        warnings=tuple(warnings),
    )


def whole_run(env: DistEnv, job: Job) -> str:
    """Run as a worker does; return how it ended, or its error."""
    env = replace(env, launcher="environment")  # so that the ranks meet where the config says
    try:
        return str(run_task(job, env).status)
    except (UserError, RuntimeError) as error:
        return str(error)


def files_with(text: str, folder: Path) -> list[Path]:
    """Return the files of a folder that hold a text."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 3
    return [path for path in files if text.encode() in path.read_bytes()]


def store(folder: Path) -> str:
    """Return the override that lets ranks meet in a file of their own."""
    return f"launch.init_method='{(folder / f'store-{time.time_ns()}').as_uri()}'"


def test_no_file_of_a_run_holds_a_secret_and_it_resumes(tmp_path: Path) -> None:
    """Neither the config, nor checkpoints, logs, TensorBoard or run.json; resuming reads it."""
    run_dir = tmp_path / "run"
    job = planned(run_dir, store(tmp_path))
    assert run_ranks(whole_run, 2, job, backend=None) == ["completed"] * 2
    assert files_with(SECRET, run_dir) == []
    frozen = yaml.safe_load((run_dir / ".hydra" / "config.yaml").read_text())
    assert frozen["dataset"]["headers"] == [{"auth": "Bearer ${dataset.token}"}]

    again = resolved(f"resume={run_dir}", *NOTED[-5:])[0]
    assert again.dataset == job.config.dataset
    more = planned(run_dir, store(tmp_path), "train.epochs=2", f"resume={run_dir}")
    assert run_ranks(whole_run, 2, more, backend=None) == ["completed"] * 2
    assert (record(run_dir)["epoch"], files_with(SECRET, run_dir)) == (2, [])


def test_a_failing_run_does_not_tell_a_secret(tmp_path: Path) -> None:
    """What somebody else's code says of it is written with the variable's name."""
    run_dir = tmp_path / "run"
    job = planned(run_dir, store(tmp_path), "+dataset.fails=true")
    logged = run_ranks(whole_run, 2, job, backend=None)
    assert logged == ["the store rejects ${oc.env:MY_SECRET}"] * 2
    assert record(run_dir)["error"]["sentence"] == "the store rejects ${oc.env:MY_SECRET}"
    assert "the store rejects ${oc.env:MY_SECRET}" in (run_dir / "logs/rank-1.log").read_text()
    assert files_with(SECRET, run_dir) == []


def with_other_secret(env: DistEnv, job: Job, other: Job) -> str:
    """Run with another secret on rank 1."""
    return whole_run(env, other if env.rank else job)


def test_ranks_with_different_secrets_reject_each_other_without_telling_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That they differ is found by a hash."""
    keys = (store(tmp_path),)
    job = planned(tmp_path / "run", *keys)
    monkeypatch.setenv("MY_SECRET", "another-one")
    other = planned(tmp_path / "run", *keys)
    for sentence in run_ranks(with_other_secret, 2, job, other, backend=None):
        assert "ranks were launched differently: the hash of values from oc.env is " in sentence
        assert SECRET not in sentence
        assert "another-one" not in sentence


def test_a_secret_that_is_given_when_resuming_is_found_as_well(tmp_path: Path) -> None:
    """A key of the command that resumes is kept as it was given, beside those that were frozen."""
    keys = ("model=toy", "dataset.num_samples=8")
    freeze(tmp_path, resolved(*keys)[0], overrides=keys)
    register()
    overrides = (f"resume={tmp_path}", "launch.rdzv_id=${oc.env:MY_SECRET}", "batch.per_rank=2")
    raw = with_resumed(compose_raw(*overrides), overrides)
    assert find_secrets(raw).texts == {("launch", "rdzv_id"): "${oc.env:MY_SECRET}"}
    assert to_config(raw).launch.rdzv_id == SECRET
