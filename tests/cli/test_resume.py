"""What a resumed run brings: its groups and its frozen config, with this command's keys on top."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from commands import run_command
from configs import LAPTOP, compose_raw, config_error, freeze, resolved
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf
from run_folders import checkpoint_steps, record
from tiers import first_of

from ddp_runner.cli.command import compose, parse
from ddp_runner.cli.compose import register
from ddp_runner.cli.plan import Invocation, plan
from ddp_runner.cli.resume import dropped_trackers, resumed_overrides, with_resumed
from ddp_runner.compare.analysis import compare
from ddp_runner.compare.run_reader import read_runs
from ddp_runner.config.load import chosen_keys, to_config
from ddp_runner.config.resolve import resolve
from ddp_runner.config.schema import CONFIG_DIR, Config
from ddp_runner.dist_env import DistEnv
from ddp_runner.errors import UserError
from ddp_runner.job import Job
from ddp_runner.rank.session import _init_method
from ddp_runner.tracking.outputs import sibling_runs
from ddp_runner.tracking.run_record import write_run_record

CHOICES = {"model": "toy", "dataset": "random", "optimizer": "adam", "scheduler": "cosine"}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a run with another optimizer and schedule than the default ones, below outputs/."""
    monkeypatch.chdir(tmp_path)
    config, _ = resolved(*(f"{group}={option}" for group, option in CHOICES.items()))
    run_dir = Path("outputs", "toy", "first")
    write_run_record(run_dir, status="preempted")
    freeze(run_dir, config, choices=CHOICES)
    return run_dir


def test_tags_and_notes_come_with_the_run_and_trackers_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that somebody sent must not send what it reads here to a server of its choice."""
    monkeypatch.chdir(tmp_path)
    config, _ = resolved("trackers=[mlflow]", "tags=[first]", "notes=why")
    write_run_record(tmp_path, status="preempted")
    freeze(tmp_path, config, choices={"trackers": "[mlflow]"})
    again = resume(f"resume={tmp_path}", "tags=[second,third]")
    assert (again.tags, again.notes, again.trackers) == (["second", "third"], "why", {})
    given = resume(f"resume={tmp_path}", "trackers=[mlflow]", "trackers.mlflow.wait_s=3")
    assert given.trackers == {"mlflow": config.trackers["mlflow"] | {"wait_s": 3}}
    assert list(resume(f"resume={tmp_path}", "trackers=[wandb]").trackers) == ["wandb"]


def test_a_resume_says_that_it_sends_nothing(tmp_path: Path) -> None:
    """Unless the command speaks of trackers itself."""
    config, _ = resolved("trackers=[mlflow]")
    freeze(tmp_path, config)
    raw = compose_raw(f"resume={tmp_path}")
    (note,) = dropped_trackers(raw, [f"resume={tmp_path}"])
    assert "add trackers=[mlflow] with its keys and, for one of your own, --config-dir=" in note
    assert dropped_trackers(raw, [f"resume={tmp_path}", "trackers=[]"]) == []


def planned(*arguments: str, env: DistEnv | None = None) -> Job:
    """Return the job that a command line describes, in this process."""
    command = parse(arguments)
    return plan(compose(command), LAPTOP, Invocation(command, env, 0.0, {}))


@pytest.mark.full
def test_a_command_that_goes_on_finds_the_users_own_trackers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The option of --config-dir, the keys of the command, or all of an experiment's keys."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PLACE", "a secret place")
    (tmp_path / "mine.py").write_text("def __getattr__(name): ...")
    monkeypatch.syspath_prepend(str(tmp_path))
    conf = tmp_path / "my conf"
    keys = "{_target_: mine.Print, foo: 1, where: '${oc.env:PLACE}', words: [\"it's\", null]}"
    experiment = "# @package _global_\ndefaults:\n  - override /trackers: [print]\n"
    for name, text in {
        "trackers/print": f"mine: {keys}\n",
        "experiment/own": f"{experiment}trackers:\n  mine:\n    foo: 2\n",
    }.items():
        (conf / name).parent.mkdir(parents=True)
        (conf / f"{name}.yaml").write_text(text)
    own, allowed = f"--config-dir={conf}", "allowed_targets=[mine]"
    under_torchrun = DistEnv(0, 0, 1, 1, launcher="torchrun")
    for words, foo in (
        (("trackers=print", "+trackers.mine.bar='a b'"), 1),
        (("trackers=[print]", "trackers.mine.foo=3"), 3),
        (("experiment=own",), 2),
        (("experiment=own", "trackers.mine.foo=4"), 4),
    ):
        for env in (None, under_torchrun):
            job = planned("model=toy", "parallelism=single", own, allowed, *words, env=env)
            assert job.resume_arguments[:2] == (allowed, own)
            assert "a secret place" not in str(job.resume_arguments)
            again = planned("model=toy", "parallelism=single", *job.resume_arguments)
            assert again.config.trackers == job.config.trackers
            assert again.config.trackers["mine"]["foo"] == foo
            third = planned("model=toy", "parallelism=single", *again.resume_arguments)
            assert third.config.trackers == job.config.trackers
            assert third.resume_arguments == again.resume_arguments
    assert planned("model=toy").resume_arguments == ()


def resume(*arguments: str, env: DistEnv | None = None) -> Config:
    """Return what a command line that resumes a run resolves to, in this process."""
    command, _ = resumed_overrides(arguments, folders=[CONFIG_DIR])
    register()
    raw = compose_raw(*command)
    raw = with_resumed(raw, arguments, is_launched=env is not None)
    chosen = chosen_keys(arguments)
    return resolve(to_config(raw), hardware=LAPTOP, chosen=chosen, env=env)[0]


def test_keys_of_the_runs_own_groups_can_be_changed(run: Path) -> None:
    """Neither cosine nor adam is a default, and both have keys that the defaults lack."""
    config = resume(f"resume={run}", "scheduler.warmup_steps=1", "optimizer.weight_decay=0.5")
    assert (config.scheduler["name"], config.scheduler["warmup_steps"]) == ("cosine", 1)
    assert (config.optimizer["name"], config.optimizer["weight_decay"]) == ("adam", 0.5)
    assert resume(f"resume={run}", "scaling=strong").batch.global_size == 128
    assert resume(f"resume={run}", "optimizer=sgd").optimizer["name"] == "sgd"


def test_what_the_run_has_needs_no_plus(run: Path) -> None:
    """A key that only its command line added, of a loop or of another group."""
    path = run / ".hydra" / "config.yaml"
    frozen = yaml.safe_load(path.read_text())
    frozen |= {"task": "mine.train", "loop": {"steps": 2}}
    frozen["optimizer"]["fused"] = None
    path.write_text(yaml.safe_dump(frozen, sort_keys=False))
    again = (f"resume={run}", "allowed_targets=[mine]")
    config = resume(*again, "loop.steps=4", "optimizer.fused=true", "+loop.more=1")
    assert (config.loop, config.optimizer["fused"]) == ({"steps": 4, "more": 1}, True)
    for wrong in ("loop.stepz=4", "optimizer.fuse=true"):
        with pytest.raises(ConfigCompositionException, match="Could not override"):
            resume(*again, wrong)
    with pytest.raises(ConfigCompositionException, match="Could not override"):
        resume(*again, "optimizer=sgd", "optimizer.fused=true")


def test_files_of_the_dataset_follow_its_keys_again(tmp_path: Path) -> None:
    """Else a prediction of other pictures would be one of the run's; its own changes stay."""
    words = ("dataset=image_folder", "dataset.folder=a")
    config, _ = resolved(*words, "dataset.eval.root=/own", "dataset.height=8")
    write_run_record(tmp_path, status="preempted")
    freeze(tmp_path, config, choices={"dataset": "image_folder"})
    again = resume(f"resume={tmp_path}", "dataset.folder=b", f"data_root={tmp_path}").dataset
    assert again["train"]["root"] == f"{tmp_path}/b/train"
    assert again["eval"]["root"] == "/own"
    assert again["eval"]["transform"]["transforms"][0]["height"] == 8
    assert resume(f"resume={tmp_path}").dataset == config.dataset


def test_no_text_of_a_run_is_resolved_to_see_what_follows(tmp_path: Path) -> None:
    """A run may be anybody's: what it reads, and how long that takes, would be its choice."""
    config, _ = resolved("dataset=image_folder", "dataset.folder=a")
    nested = {f"x{depth}": f"${{dataset.x{depth + 1}}}" * 10 for depth in range(9)}
    asked = list[str]()
    OmegaConf.register_new_resolver("spied", lambda name: asked.append(name) or "a")
    write_run_record(tmp_path, status="preempted")
    for folder in ("${spied:secret}", "${dataset.x0}"):
        dataset = {**config.dataset, **nested, "x9": "a", "folder": folder}
        changed = replace(config, dataset=dataset)
        freeze(tmp_path, changed, choices={"dataset": "image_folder"})
        with pytest.raises(UserError):
            resume(f"resume={tmp_path}")
    assert not asked


def test_choices_that_no_file_can_have_are_none(run: Path) -> None:
    """They are not looked for: a name that is too long would be an error of the system."""
    (run / ".hydra" / "choices.yaml").write_text(f"model: {'x' * 400}\ndataset: random\n")
    _, implied = resumed_overrides([f"resume={run}"], folders=[CONFIG_DIR])
    assert implied == ["dataset=random"]


def test_last_is_the_newest_run(run: Path) -> None:
    """Whatever its name; a folder with odd characters is quoted for Hydra."""
    newest = run.with_name("a b=1,c='d'")
    shutil.copytree(run, newest)
    os.utime(newest / "run.json", (2e9, 2e9))
    assert resume("resume=last").resume == str(newest)
    for task in ("collectives", "check", "evaluate"):
        write_run_record(run.with_name(task), task=task, status="completed")
        os.utime(run.with_name(task) / "run.json", (3e9, 3e9))
    assert resume("resume=last").resume == str(newest)
    shutil.rmtree("outputs")
    with pytest.raises(UserError, match="resume=last finds no run below outputs"):
        resumed_overrides(["resume=last"], folders=[CONFIG_DIR])


def test_a_run_of_another_user_is_named_and_passed_over(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By resume=last and resume=auto, which name no folder; by its name it is resumed."""
    config, _ = resolved("resume=auto", "name=toy")
    assert [one.path for one in sibling_runs(config)] == [run]
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    with pytest.raises(UserError, match="resume=last finds no run below outputs"):
        resumed_overrides(["resume=last"], folders=[CONFIG_DIR])
    assert sibling_runs(config) == []
    assert sibling_runs(config, names_others=True) == []
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    for line in lines:
        assert line.startswith(f"{run}: skipped")
        assert line.endswith("resume=RUN")
    assert resume(f"resume={run}").scheduler["name"] == "cosine"


def test_only_groups_that_exist_here_are_implied(run: Path, tmp_path: Path) -> None:
    """A group of the user's own is found where this command says; nothing else gets into it."""
    own = {"model": "mine", "dataset": "random", "optimizer": "../../evil", "backend": "gloo"}
    (run / ".hydra" / "choices.yaml").write_text(yaml.safe_dump({**own, "hydra/launcher": "x"}))
    _, implied = resumed_overrides([f"resume={run}", "backend=auto"], folders=[CONFIG_DIR])
    assert implied == ["dataset=random"]
    mine = tmp_path / "conf" / "model" / "mine.yaml"
    mine.parent.mkdir(parents=True)
    mine.write_text("name: mine")
    for option in (["--config-dir", "conf"], ["--config-dir=conf"], ["-cd", "conf"]):
        command = parse([*option, f"resume={run}", "seed=1"])
        assert sorted(command.implied) == ["backend=gloo", "dataset=random", "model=mine"]
        assert command.arguments() == [f"resume={run}", *command.implied, "seed=1", *option]


def test_the_number_of_ranks_that_run_wins_over_the_frozen_one(run: Path) -> None:
    """The global batch stays: 4 ranks share what 2 had."""
    assert resume(f"resume={run}").world_size == 2
    env = DistEnv(rank=0, local_rank=0, world_size=4, local_world_size=4)
    config = resume(f"resume={run}", env=env)
    assert (config.world_size, config.batch.global_size, config.batch.per_rank) == (4, 40, 10)


def test_where_ranks_met_is_not_taken_over(run: Path) -> None:
    """A file or a port of the first launch may be gone, or somebody else's by now."""
    path = run / ".hydra" / "config.yaml"
    frozen = yaml.safe_load(path.read_text())
    frozen["launch"] |= {"init_method": "file:///tmp/gone", "node_rank": 1, "max_restarts": 3}
    path.write_text(yaml.safe_dump(frozen, sort_keys=False))
    launch = resume(f"resume={run}").launch
    assert (launch.init_method, launch.node_rank, launch.max_restarts) == (None, None, 3)


def test_a_run_keeps_its_model_and_needs_its_config(run: Path) -> None:
    """Both are said before any rank starts; a class that has moved is named by its new place."""
    kept = f"resume={run} trains ddp_runner.models.toy.ToyModel, and a run keeps its model"
    assert kept in config_error(f"resume={run}", "model=convnet")
    moved = resume(f"resume={run}", "model._target_=ddp_runner.models.toy.ToyMpModel")
    assert moved.model["_target_"].endswith("ToyMpModel")
    (run / ".hydra" / "config.yaml").unlink()
    assert "config.yaml, the config of the run, is missing" in config_error(f"resume={run}")


@pytest.mark.parametrize("group", ["model", "dataset", "parallelism", "optimizer", "scheduler"])
def test_a_frozen_config_that_was_cut_off_is_rejected(run: Path, group: str) -> None:
    """Filled up with defaults, it would be another run's."""
    path = run / ".hydra" / "config.yaml"
    text = path.read_text()
    path.write_text(text[: text.index(f"\n{group}:") + 1])
    assert f"{path} is damaged" in config_error(f"resume={run}")
    path.write_text(text.rstrip(".\n").rpartition("\n")[0])  # the last key alone is lost
    assert f"{path} is damaged" in config_error(f"resume={run}")
    of_an_older_version = text.removeprefix("---\n").removesuffix("...\n")
    path.write_text(of_an_older_version)
    assert resume(f"resume={run}").optimizer["name"] == "adam"
    path.write_text("")
    assert f"{path} is damaged" in config_error(f"resume={run}")


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ("launch.init_method=here", "must be tcp://HOST:PORT, or file:///PATH"),
        ("launch.init_method=file://x launch.nnodes=2 launch.rdzv_endpoint=h:1",
         "file:///PATH in a folder that all machines share"),
        ("launch.init_method=file:///x launch.nnodes=2 launch.rdzv_endpoint=h:1 "
         "launch.max_restarts=1", "works for one start"),
    ],
)  # fmt: skip
def test_a_rendezvous_that_cannot_be_is_rejected(overrides: str, sentence: str) -> None:
    """Before any rank waits for one that never comes."""
    assert sentence in config_error(*overrides.split())


def test_each_attempt_meets_at_a_file_of_its_own(tmp_path: Path) -> None:
    """One that was used has the addresses of ranks that are gone."""
    seen = set()
    for asked in ("file://rendezvous", f"file://{tmp_path}/store", "null"):
        config, _ = resolved("model=toy", f"launch.init_method={asked}")
        for scratch in ("one", "two"):
            for attempt in range(2):
                env = DistEnv(0, 0, 2, 2, restart_count=attempt)
                job = Job(config=config, started_at=0, provenance={}, temp=tmp_path / scratch)
                seen.add(_init_method(job, env))
    assert len(seen) == 12
    assert all(str(one).startswith(f"file://{tmp_path}/") for one in seen)


def test_torchrun_has_a_rendezvous_of_its_own() -> None:
    """The config's value is not used, and a warning says so."""
    env = DistEnv(0, 0, 2, 2, launcher="torchrun")
    config, warnings = resolved("launch.init_method=tcp://h:1", env=env)
    job = Job(config=config, started_at=0, provenance={})
    assert _init_method(job, env) == "env://"
    assert any("torchrun has its own rendezvous" in one for one in warnings)
    by_hand = DistEnv(0, 0, 2, 2)
    assert _init_method(job, by_hand) == "tcp://h:1"


@pytest.mark.full
def test_a_run_folder_of_the_users_is_taken_as_it_is_written(tmp_path: Path) -> None:
    """Also the current one; a change of folder, or a second name for it, is rejected."""
    toy = ("model=toy", "train.max_steps=2", "train.num_threads=1", "parallelism=single")
    end = run_command(*toy, "hydra.run.dir=.", folder=tmp_path)
    assert (end.exit_code, end.stderr) == (0, "")
    assert end.run_dirs == [tmp_path]
    assert record(tmp_path)["status"] == "completed"

    changed = run_command(*toy, "hydra.job.chdir=true", folder=tmp_path / "changed")
    assert changed.exit_code == 2
    assert "hydra.job.chdir are not for this program" in changed.stderr
    assert not (tmp_path / "changed" / "outputs").exists()
    both = run_command(f"resume={tmp_path}", "hydra.run.dir=other", folder=tmp_path / "both")
    assert both.exit_code == 2
    assert "name two folders; leave hydra.run.dir out" in both.stderr


@pytest.mark.full
@pytest.mark.parametrize(
    "keys",
    first_of(
        [["optimizer=adam"], ["dataset.seed=5", "scheduler=plateau", "dataset.num_samples=100"]]
    ),
)
def test_a_rejected_resume_leaves_the_run_as_it_was(keys: list[str], tmp_path: Path) -> None:
    """Its own config, its run.json and its checkpoints: the next resume without the key works."""
    run = tmp_path / "run"
    short = ("model=toy", "world_size=1", "train.max_steps=7", "checkpoint.every_steps=1")
    assert run_command(*short, f"hydra.run.dir={run}", folder=tmp_path).exit_code == 0
    kept = {
        path: path.read_bytes()
        for path in [run / "run.json", run / "metrics.jsonl", *(run / ".hydra").iterdir()]
    }
    saved = checkpoint_steps(run)
    for key in keys:
        rejected = run_command(f"resume={run}", "train.max_steps=12", key, folder=tmp_path)
        assert rejected.exit_code == 2
        (line,) = rejected.stderr.splitlines()
        assert line.startswith("error: ")
        assert {path: path.read_bytes() for path in kept} == kept
        assert checkpoint_steps(run) == saved
    resumed = run_command(f"resume={run}", "train.max_steps=12", folder=tmp_path)
    assert (resumed.exit_code, record(run)["step"]) == (0, 12)
    assert "nothing is left" not in resumed.stdout
    assert yaml.safe_load((run / ".hydra" / "config.yaml").read_text())["train"]["max_steps"] == 12


def test_what_a_resume_changes_is_recorded_and_needs_steps(tmp_path: Path) -> None:
    """A completed run keeps its config, else a comparison would show a result that no run had."""
    toy = ("model=toy", "train.max_steps=10", "world_size=1", "hydra.run.dir=run")
    assert run_command(*toy, folder=tmp_path).exit_code == 0
    run, more = tmp_path / "run", ("optimizer.lr=0.5", "scheduler=cosine")
    (run / "logs" / "failure.txt").write_text("of an earlier session")
    files = [run / "run.json", run / "logs" / "failure.txt", *(run / ".hydra").iterdir()]
    kept = {path: path.read_bytes() for path in files}
    for keys in (more, ("world_size=2",), ("train.max_steps=2", "train.precision=bf16")):
        rejected = run_command("resume=run", *keys, folder=tmp_path)
        assert rejected.exit_code == 2
        assert "run has already taken its 10 steps, so to change" in rejected.stderr
        assert {path: path.read_bytes() for path in kept} == kept
    resumed = run_command("resume=run", *more, "train.max_steps=12", folder=tmp_path)
    changes = ["scheduler=cosine (was constant)", "train.max_steps=12 (was 10)"]
    changes.append("optimizer.lr=0.5 (was 0.001)")
    assert f"this resume changes {', '.join(changes)}" in resumed.stdout
    assert record(run)["changes"] == [f"{change} at step 10" for change in changes]
    (note,) = (
        n.sentence for n in compare(read_runs([run])).notes if "last session's" in n.sentence
    )
    assert note.endswith(f"a resume changed {', '.join(record(run)['changes'])}")


@pytest.mark.full
def test_a_resume_with_nothing_left_to_train_says_so(tmp_path: Path) -> None:
    """A run that is longer than it is asked to be is rejected."""
    toy = ("model=toy", "train.max_steps=7", "train.num_threads=1", "hydra.run.dir=run")
    assert run_command(*toy, folder=tmp_path).exit_code == 0
    for keys in (["train.max_steps=2"], ["train.max_steps=null", "train.epochs=1"]):
        shorter = run_command("resume=run", *keys, folder=tmp_path)
        assert shorter.exit_code == 2
        line = f"run has already taken 7 steps, more than {keys[-1]}; leave it out, or start"
        assert line in shorter.stderr
    again = run_command("resume=run", folder=tmp_path)
    assert again.exit_code == 0
    line = "nothing is left to train: 7 steps and 1 epoch are done, and train.max_steps is 7"
    assert again.stdout.count(line) == 1
    assert record(tmp_path / "run")["step"] == 7
