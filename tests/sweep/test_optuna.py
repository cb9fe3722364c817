"""A search: Optuna chooses the jobs of a sweep by the results of the jobs before."""

import os
import pickle
import signal
import sys
from functools import cache
from pathlib import Path

import psutil
import pytest
from commands import background, command_line, run_command, wait_for, wait_for_end
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf
from run_folders import last_step, record
from slow_models import CONVNET, slow_models
from sweeps import POLL_S, both_train, needs_two_cores, only_sweep, statuses, table_row
from tiers import first_of

from ddp_runner.cli.app import run
from ddp_runner.cli.command import compose, parse
from ddp_runner.errors import UserError
from ddp_runner.sweep.search import Search
from ddp_runner.sweep.search_space import search_direction

# Seed 153 of the sampler tries 0.1 and 0.01, both with seed 2, then 1e30, which diverges, and 0.1
# with seed 2 once more.
SEARCH = (
    *("-m", "hydra/sweeper=optuna", "sweep.objective=eval/accuracy", "train.epochs=8"),
    "hydra.sweeper.sampler.seed=153",
    *("optimizer.lr=choice(0.01,0.05,0.1,1e30)", "seed=choice(1,2,3)", "hydra.sweeper.n_trials=4"),
    *("hydra.sweeper.n_jobs=2", "world_size=1", "train.num_threads=1", "train.log_every_steps=1"),
    *("checkpoint.every_steps=10", *CONVNET),
)


@cache
def composed_search(*words: str) -> bytes:
    """Compose a search; return its settings, pickled."""
    return pickle.dumps(compose(parse(["hydra/sweeper=optuna", *words])).hydra.sweeper)


def search_settings(sampler: str = "tpe", **changed: object) -> DictConfig:
    """Return the settings of a search with a sampler, with these keys changed."""
    settings: DictConfig = pickle.loads(composed_search(f"hydra/sweeper/sampler={sampler}"))
    settings.update(changed)
    return settings


def test_a_search_without_a_metric_or_without_optuna_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one line that says what to write, or to install."""
    with pytest.raises(UserError, match=r"write sweep\.objective=eval/accuracy"):
        run(["-m", "hydra/sweeper=optuna", "seed=1,2"], started_at=0.0)
    monkeypatch.setitem(sys.modules, "optuna", None)
    node = search_settings()
    with pytest.raises(UserError, match=r"pip install 'ddp-runner\[optuna\]'"):
        Search(node, [], objective="eval/loss", folder=tmp_path, batch_size=1)


@pytest.mark.full
def test_a_search_names_the_best_and_is_not_made_twice(tmp_path: Path) -> None:
    """Three trials; a rate that is tried again takes its result; the same command adds none."""
    optuna = pytest.importorskip("optuna", reason="needs ddp-runner[optuna]")
    search = (
        *("-m", "hydra/sweeper=optuna", "sweep.objective=eval/loss", "model=toy", "world_size=1"),
        "hydra.sweeper.sampler.seed=0",
        *("optimizer.lr=choice(0.01,0.1)", "hydra.sweeper.n_trials=3", "train.max_steps=10"),
        "hydra.sweep.dir=sweep",
    )
    ends = [run_command(*search, folder=tmp_path) for _ in range(2)]
    assert [end.exit_code for end in ends] == [0, 0]
    sweep = tmp_path / "sweep"
    losses = {run_dir.name: record(run_dir)["metrics"]["eval/loss"] for run_dir in ends[1].run_dirs}
    assert set(statuses(sweep)) == set(losses)
    assert 1 <= len(losses) <= 2  # of two rates in three trials
    best = OmegaConf.load(sweep / "optimization_results.yaml")
    assert best.best_value == min(losses.values())
    assert f"optimizer.lr={best.best_params['optimizer.lr']}" == min(losses, key=losses.__getitem__)
    study = optuna.load_study(study_name="sweep", storage=f"sqlite:///{sweep / 'optuna.db'}")
    assert ends[0].stdout.count("its result is taken") == 3 - len(losses)
    assert table_row(ends[1].stdout, min(losses, key=losses.__getitem__))[1] == "completed"
    assert "\ntrial 2: " in ends[0].stdout  # as in the study; how many follow is not known
    assert "\ntrial " not in ends[1].stdout
    assert "the search has run all its trials; a larger hydra.sweeper.n_trials" in ends[1].stdout
    line = f"best: trial {study.best_trial.number}, eval/loss {best.best_value:.4g}, optimizer.lr="
    assert all(line in end.stdout for end in ends)
    more = run_command(*search, "hydra.sweeper.n_trials=4", "sweep.dry_run=true", folder=tmp_path)
    assert "1 valid job, 0 invalid jobs" in more.stdout
    other = (*search, "sweep.objective=perf/samples_per_s", "sweep.dry_run=true")
    assert "and the study sweep is to minimize" in run_command(*other, folder=tmp_path).stderr
    none = run_command(*search, "sweep.dry_run=true", folder=tmp_path)
    assert "the search has run all its trials" in none.stdout
    assert study.best_value == best.best_value
    assert len(study.trials) == 3


@pytest.mark.slow
@needs_two_cores
def test_a_search_is_stopped_goes_on_and_loses_a_slot(tmp_path: Path) -> None:
    """The seed makes the same command try the same jobs; a diverged one is a trial that failed.

    Started again with parallel jobs, the slot that is left takes those of the one that is killed.
    """
    pytest.importorskip("optuna", reason="needs ddp-runner[optuna]")
    slow = slow_models(tmp_path / "models")
    with background(*SEARCH, folder=tmp_path, environ=slow.environ) as process:
        wait_for(lambda: last_step(tmp_path) >= 3, every_s=POLL_S)
        os.kill(process.pid, signal.SIGINT)
        assert wait_for_end(process, tmp_path).exit_code == 130
    sweep = only_sweep(tmp_path)
    first, second, third = (
        f"optimizer.lr={rate},seed={seed}" for rate, seed in ((0.1, 2), (0.01, 2), ("1e+30", 2))
    )
    assert statuses(sweep) == {first: "preempted", second: "queued"}

    parallel = (*SEARCH, "sweep.parallel_jobs=2")
    with background(*parallel, folder=tmp_path, environ=slow.environ, fresh=True) as process:
        wait_for(lambda: both_train(process, tmp_path), every_s=POLL_S)
        slot(process.pid).kill()
        slow.release()
        end = wait_for_end(process, tmp_path)
    assert only_sweep(tmp_path) == sweep
    assert statuses(sweep) == {first: "completed", second: "completed", third: "failed"}
    assert end.exit_code == 2
    assert all(table_row(end.stdout, name) for name in (first, second, third))
    assert f"trial 3: {first} was run before: its result is taken" in end.stdout
    assert "error: a slot of the sweep ended with exit code -9; the other slots take" in end.stderr
    assert "Traceback" not in end.stderr
    assert "resumed from" in (sweep / first / "logs" / "rank-0.log").read_text()

    best = OmegaConf.load(sweep / "optimization_results.yaml")
    accuracies = {
        name: record(sweep / name)["metrics"]["eval/accuracy"] for name in (first, second)
    }
    winner = max(accuracies, key=accuracies.__getitem__)
    assert best.best_value == accuracies[winner]
    assert f"optimizer.lr={best.best_params['optimizer.lr']},seed=2" == winner


def slot(launcher_pid: int) -> psutil.Process:
    """Return one of the processes that run the jobs of a sweep side by side."""
    children = psutil.Process(launcher_pid).children()
    return next(one for one in children if "spawn_main" in command_line(one))


@pytest.mark.parametrize("sampler", first_of(["tpe", "grid", "random", "gp", "cmaes", "nsgaii"]))
def test_a_search_ends_with_each_sampler(tmp_path: Path, sampler: str) -> None:
    """A trial fails, another launcher tells one first, and the search is begun again."""
    pytest.importorskip("optuna", reason="needs ddp-runner[optuna]")
    node = search_settings(sampler, n_trials=6)
    node.sampler.seed = 1
    words = ["a=range(1,4)", "b=choice(x,y)", "same=3"]
    if sampler in ("gp", "cmaes"):
        words[1] = "b=interval(0.1,0.5)"
    overrides = OverridesParser.create().parse_overrides(words)

    def begin() -> Search:
        return Search(node, overrides, objective="eval/loss", folder=tmp_path, batch_size=2)

    mine, told = begin(), 0
    first = mine.ask()
    theirs = begin()  # the running trials are taken over
    assert [set(one) for one in theirs.ask()] == [set(one) for one in first]
    theirs.tell([0.5, "it failed"])
    mine.tell([0.5, "it failed"])
    while batch := mine.ask():
        assert all("same=3" in one for one in batch)
        mine.tell([float(told + number) for number, _ in enumerate(batch)])
        told += len(batch)
    mine.finish()
    assert told == 4
    assert begin().ask() == []
    retrying = Search(
        node, overrides, objective="eval/loss", folder=tmp_path, batch_size=2, retries=True
    )
    assert [set(one) for one in retrying.ask()] == [set(first[1])]
    with pytest.raises(UserError, match=r"would maximize eval/accuracy, and .* to minimize"):
        Search(node, overrides, objective="eval/accuracy", folder=tmp_path, batch_size=2)


def test_failed_values_are_tried_again_once_each_time_it_is_asked(tmp_path: Path) -> None:
    """Values that wait, run or were completed since are not; a retry replaces no new trial."""
    pytest.importorskip("optuna", reason="needs ddp-runner[optuna]")
    node = search_settings("random")
    overrides = OverridesParser.create().parse_overrides(["a=interval(0.1,0.5)"])

    def begin(num_trials: int, *, retries: bool = True) -> Search:
        node.n_trials = num_trials
        return Search(
            node, overrides, objective="eval/loss", folder=tmp_path, batch_size=9, retries=retries
        )

    def fail(search: Search) -> list[list[str]]:
        words = search.ask()
        search.tell(["it failed"] * len(words))
        return words

    first = fail(begin(2, retries=False))
    assert [fail(begin(2)) for _ in range(2)] == [first, first]
    begin(2)  # stopped before it asks: two wait
    stopped = begin(2)
    assert stopped.ask() == first
    stopped.tell([0.5, None])
    assert fail(begin(2)) == first[1:]  # the first was completed, and the second runs
    begin(2)
    new = fail(begin(4, retries=False))
    assert (len(new), new[0]) == (3, first[1])
    assert not [one for one in new[1:] if one in first]
    assert begin(4, retries=False).ask() == []


@pytest.mark.parametrize("seed", first_of(range(4)))
def test_a_grid_with_a_seed_tries_each_value_once(tmp_path: Path, seed: int) -> None:
    """All starts have the order of the seed."""
    pytest.importorskip("optuna", reason="needs ddp-runner[optuna]")
    node = search_settings("grid")
    node.sampler.seed = seed
    overrides = OverridesParser.create().parse_overrides(["a=choice(1,2,3)", "b=choice(x,y)"])
    tried = list[tuple[str, ...]]()
    for _ in range(6):
        search = Search(node, overrides, objective="eval/loss", folder=tmp_path, batch_size=1)
        tried += [tuple(one) for one in search.ask()]
        search.tell([0.5])
    assert len({*tried}) == 6


def test_two_seeds_try_other_values(tmp_path: Path) -> None:
    """Each trial has a seed of its own, of which no other search has one."""
    pytest.importorskip("optuna", reason="needs ddp-runner[optuna]")
    tried = list[str]()
    for seed in (0, 1):
        node = search_settings()
        node.sampler.seed = seed
        overrides = OverridesParser.create().parse_overrides(["a=interval(0.1,0.5)"])
        search = Search(
            node, overrides, objective="eval/loss", folder=tmp_path / str(seed), batch_size=4,
            is_dry=True,
        )  # fmt: skip
        tried += [word for (word,) in search.ask()]
    assert len({*tried}) == 8


@pytest.mark.parametrize(
    ("objective", "given", "direction"),
    [
        ("eval/mine_loss", None, "minimize"),
        ("eval/neg_log_loss", "maximize", "maximize"),  # the user knows better than its name
        ("eval/correct_share", "maximize", "maximize"),
        ("best/accuracy", None, "maximize"),
    ],
)
def test_the_metric_says_which_end_is_best(
    objective: str, given: str | None, direction: str
) -> None:
    """One that the runner knows always, and one of the user's own if it is a loss."""
    assert search_direction(objective, given) == direction


def test_an_own_metric_needs_a_direction() -> None:
    """Its name may end as that of a cost does."""
    with pytest.raises(UserError, match="eval/correct_share does not say which value is best; wr"):
        search_direction("eval/correct_share", None)


def test_a_launcher_ends_after_the_trials_that_others_run(tmp_path: Path) -> None:
    """It takes each of them once; one that a killed launcher never asked to its end is left out."""
    optuna = pytest.importorskip("optuna", reason="needs ddp-runner[optuna]")
    node = search_settings(n_trials=3)
    overrides = OverridesParser.create().parse_overrides(["a=interval(0.1,0.5)"])
    mine, theirs = (
        Search(node, overrides, objective="eval/loss", folder=tmp_path, batch_size=1, retries=False)
        for _ in range(2)
    )
    mine.ask()
    mine.tell([0.5])
    running = theirs.ask()
    mine.ask()
    mine.tell([0.4])
    storage = f"sqlite:///{tmp_path / 'optuna.db'}"
    optuna.load_study(study_name=tmp_path.name, storage=storage).ask()
    assert mine.ask() == running
    theirs.tell([0.3])
    mine.tell([0.3])
    assert mine.ask() == theirs.ask() == []
    mine.finish()
    assert OmegaConf.load(tmp_path / "optimization_results.yaml").best_value == 0.3


@pytest.mark.parametrize(
    ("word", "value"),
    first_of(
        [
            ("a=choice(@b)", "@b"),
            ("a=choice([on])", ["on"]),
            ("a=choice('b: [')", "b: ["),
            ("a=choice({b:['1',2]})", {"b": ["1", 2]}),
            ("a=choice('')", ""),
            ("a=choice(true)", True),
            ("a=choice(1e-3)", 0.001),
            ("a=range(3,4)", 3),
            ("a=interval(0.5,0.5)", 0.5),
        ],
        num_quick=5,
    ),
)
def test_the_best_value_is_written_as_its_job_got_it(
    tmp_path: Path, word: str, value: object
) -> None:
    """Also a text that YAML reads otherwise, or not at all."""
    pytest.importorskip("optuna", reason="needs ddp-runner[optuna]")
    node = search_settings(n_trials=1)
    overrides = OverridesParser.create().parse_overrides([word])
    search = Search(node, overrides, objective="eval/loss", folder=tmp_path, batch_size=1)
    assert len(search.ask()) == 1
    search.tell([0.5])
    search.finish()
    best = OmegaConf.load(tmp_path / "optimization_results.yaml")
    assert OmegaConf.to_container(best)["best_params"] == {"a": value}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["hydra.sweeper.direction=maximize"], "would keep the worst trial; leave hydra.sweeper"),
        (["hydra.sweeper.direction=down"], r"direction \(down\) must be minimize or maximize"),
        (["hydra.sweeper.n_trials=-1"], r"hydra\.sweeper\.n_trials \(-1\) must be a number"),
        (["hydra.sweeper.sampler._target_=os.getcwd"], "must be a class of optuna.samplers"),
        (["a=tag(log,interval(0,1))"], r"^a=tag.* needs a lower end above 0"),
        (["a=tag(lg,interval(1,2))"], r"^a=tag.* a search only knows the tag log"),
        (["a=interval(0.5,0.01)"], r"comes first; write interval\(0\.01,0\.5\)"),
        (["a=range(3,1)"], r"^a=range\(3,1\): the range is empty"),
        (["hydra/sweeper/sampler=grid", "a=interval(0,1)"], "a is an interval, and"),
    ],
)
def test_what_optuna_cannot_search_is_one_line(
    tmp_path: Path, words: list[str], sentence: str
) -> None:
    """It names the key."""
    pytest.importorskip("optuna", reason="needs ddp-runner[optuna]")
    of_hydra = [one for one in words if one.startswith("hydra")]
    node = compose(parse(["hydra/sweeper=optuna", *of_hydra])).hydra.sweeper
    overrides = OverridesParser.create().parse_overrides(
        [one for one in words if one not in of_hydra]
    )
    with pytest.raises(UserError, match=sentence):
        Search(node, overrides, objective="eval/loss", folder=tmp_path, batch_size=1)


@pytest.mark.full
def test_a_search_outlives_an_invalid_trial_and_not_its_study(tmp_path: Path) -> None:
    """The first trial of this seed is invalid; a study that is damaged is one line."""
    pytest.importorskip("optuna", reason="needs ddp-runner[optuna]")
    search = (
        *("-m", "hydra/sweeper=optuna", "hydra/sweeper/sampler=grid", "sweep.objective=eval/loss"),
        *("hydra.sweeper.sampler.seed=3", "optimizer.lr=choice(-1,-2,0.1)", "world_size=1"),
        *("model=toy", "train.max_steps=2", "hydra.sweep.dir=sweep"),
    )
    end = run_command(*search, folder=tmp_path)
    assert end.exit_code == 2
    assert [*statuses(tmp_path / "sweep").values()] == ["failed", "failed", "completed"]
    assert "best: trial " in end.stdout
    study = tmp_path / "sweep" / "optuna.db"
    study.write_bytes(study.read_bytes()[:3000])
    for words in ((), ("sweep.dry_run=true",)):
        (line,) = run_command(*search, *words, folder=tmp_path).stderr.splitlines()
        assert "cannot open the study (database disk image is malformed); repair" in line
