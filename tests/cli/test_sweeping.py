"""The jobs of a sweep are composed and planned as Hydra and a command alone do it, much sooner."""

import pickle
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from unittest.mock import Mock

import pytest
from configs import LAPTOP
from hydra import initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import Container, DictConfig, OmegaConf, open_dict
from tiers import first_of

from ddp_runner.cli import sweeping
from ddp_runner.cli.command import compose, parse
from ddp_runner.cli.compose import ROOT_CONFIG, register
from ddp_runner.cli.messages import user_error
from ddp_runner.cli.plan import Invocation, plan
from ddp_runner.cli.sweeping import Jobs
from ddp_runner.config.schema import CONFIG_DIR
from ddp_runner.errors import UserError
from ddp_runner.job import Job

GRIDS = (
    "optimizer.lr=0.1 model=toy_slow ++train.added=3 +model.extra={a:1}",
    "~model.name name=${seed} data_root=${oc.env:HOME}",
    "metrics=[top_k,pixel_accuracy] ~scheduler +own=three",
    "train.no=1",
    "seed=1",
    "seed=2 model=toy",
    "optimizer=adam optimizer.lr=0.1 optimizer.lr=0.2",
    "hydra.job.name=other seed=3 +experiment=null",
    "model={a:1}",
    "train.epochs=many",
    "model=no",
    "model@other=toy",
    "other@train=1",
)


Outcome = tuple[DictConfig, str | None]  # a composed job, or its error


@dataclass(frozen=True)
class Grid:
    """A grid, and what Hydra composes its jobs to: most cases ask for the same jobs."""

    words: tuple[str, ...]
    composed: DictConfig  # what all jobs have in common
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    def by_hydra(self, job: str) -> Outcome:
        """Return what Hydra composes a job to."""
        if job not in self.outcomes:
            with grid_loader() as loader:
                compose_job = partial(loader.load_sweep_config, self.composed)
                self.outcomes[job] = outcome(compose_job, job.split())
        return self.outcomes[job]


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> Grid:
    """Compose what the jobs of a grid with a group of the user's own have in common."""
    folder = tmp_path_factory.mktemp("groups")
    (folder / "own").mkdir()
    (folder / "own" / "three.yaml").write_text("# @package _global_\nname: three\n")
    words = (
        "model=convnet",
        f"hydra.searchpath=[{folder}]",
        "hydra.job.config.override_dirname.kv_sep=:",
        "hydra.sweep.subdir='${hydra:job.num}'",
    )
    with grid_loader() as loader:
        return Grid(words, loader.load_configuration(ROOT_CONFIG, [*words], RunMode.MULTIRUN))


@pytest.mark.parametrize("overrides", first_of(GRIDS, num_quick=2))
def test_a_job_is_composed_as_hydra_composes_it(grid: Grid, overrides: str) -> None:
    """With the same keys, flags and hydra node, or the same error, whatever came before it."""
    with grid_loader():
        jobs = Jobs(grid.composed, Invocation(parse(grid.words), None, 0.0, {}))
        compose_job = partial(jobs.compose, number=3)
        before = ("seed=7", "seed=9")
        after = ("seed=8 train.epochs=9", "seed=6 train.epochs=4", "seed=1")
        for job in (*before, overrides, *after):
            expected, fault = grid.by_hydra(job)
            found, own_fault = outcome(compose_job, job.split())
            assert own_fault == fault
            if fault is not None:
                continue
            assert (found.hydra.job.num, found.hydra.job.id) == (3, "3")
            for one in (found, expected):
                with open_dict(one):
                    one.hydra.job.num, one.hydra.job.id = 0, "0"
                    # Each composition is told the folders again.
                    one.hydra.overrides.hydra, one.hydra.runtime.config_sources = [], []
            assert OmegaConf.to_yaml(found) == OmegaConf.to_yaml(expected)
            assert found == expected
            assert flags(found) == flags(expected)


def test_the_options_of_groups_are_composed_once_for_all_jobs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four choices and a hundred jobs: Hydra reads its YAMLs four times."""
    command = parse(["-m", "model=toy"])
    reads = Mock(side_effect=sweeping.compose_config)
    monkeypatch.setattr(sweeping, "compose_config", reads)
    compose_job = Jobs(compose(command), Invocation(command, None, 0.0, {})).compose
    for seed, optimizer, model in product(range(25), ("sgd", "adam"), ("toy", "convnet")):
        words = [f"seed={seed}", f"optimizer={optimizer}", f"model={model}"]
        job = compose_job(words, seed)
        assert (job.seed, job.model.name, job.hydra.job.num) == (seed, model, seed)
    assert reads.call_count == 4


SHAPES = (
    # What is common to the jobs, and a value of each for every job.
    ("model=convnet", ["dataset.num_samples=64 seed=1", "dataset.num_samples=128 seed=2"]),
    ("model=toy parallelism=fsdp world_size=2", ["train.precision=bf16", "train.precision=fp32"]),
    ("model=toy data_root=${oc.env:MINE}", ["seed=1", "optimizer.lr=5", "seed=2",
                                            "optimizer.lr=-1"]),
    ("model=toy", ["name=Secret-1", "name=null", "name='a,b'", "tags=[x]", "tags=[y,z]"]),
    ("model=toy notes=${user.x}-${hydra:job.num} +user.x=0", ["seed=3", "seed=4"]),
    ("model=toy", ["user.x=${seed}", "+user.y=3", "params.groups=[{match:a,lr:1}]",
                   "params.groups=[{match:b,lr:2}]", "params.groups=[3]", "train.epochs=x"]),
    ("model=toy +user.x=1", ["user.x=2", "user.x={a:1}", "user.x=[1]", "user.x=null"]),
    ("experiment=cosine", ["optimizer=adam optimizer.lr=0.1", "optimizer=adam optimizer.lr=0.2"]),
    ("task=collectives world_size=2", ["collectives.ops=[all_reduce]", "collectives.ops=[3]",
                                      "collectives.ops=[broadcast]", "train.epochs=3"]),
    ("model=toy", ["optimizer._target_=torch.optim.Adam optimizer.lr=0.1",
                   "optimizer._target_=torch.optim.SGD optimizer.lr=0.2"]),
    ("model=toy", ["seed=1", "seed=???", "seed=2", "seed=many"]),
)  # fmt: skip


@pytest.mark.parametrize(("common", "jobs"), first_of(SHAPES, num_quick=2))
def test_a_job_is_planned_as_its_command_alone(
    common: str, jobs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it has in common with the jobs before it: the same job, or the same error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MINE", str(tmp_path))
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    text = "# @package _global_\ndefaults: [override /scheduler: cosine]\noptimizer: {lr: 0.3}\n"
    (tmp_path / "conf" / "experiment" / "cosine.yaml").write_text(text)
    words = ["--config-dir=conf", *common.split()]
    composed_alone = dict[str, bytes]()  # a job is composed once, and planned twice
    of_sweep = Jobs(
        compose(parse(words)), sweep := Invocation(parse([*words, "-m"]), None, 0.0, {})
    )
    for number, job in enumerate([*jobs, *jobs[::-1]]):
        command = parse([*words, *shlex.split(job, posix=False)])
        alone = Invocation(command, None, 0.0, {})
        task_words = [str(one.input_line) for one in command.overrides]

        def by_sweep(task_words: list[str] = task_words, number: int = number) -> Job:
            composed = of_sweep.compose(task_words, number)
            return of_sweep.plan(composed, lambda _: (LAPTOP, None))

        def by_command(job: str = job, alone: Invocation = alone, number: int = number) -> Job:
            if job not in composed_alone:
                composed_alone[job] = pickle.dumps(compose(alone.command))
            composed = pickle.loads(composed_alone[job])
            with open_dict(composed):
                composed.hydra.job.num = number
            return plan(composed, LAPTOP, alone)

        assert _described(by_sweep) == _described(by_command), job
    assert sweep.warnings == ()


def test_a_job_gets_no_secret_of_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is hidden and what is written follow from each job's own keys."""
    monkeypatch.setenv("FIRST", "secret-one")
    monkeypatch.setenv("SECOND", "secret-two")
    command = parse(["-m", "model=toy", "+user.which=FIRST", "notes='${oc.env:${user.which}}'"])
    jobs = Jobs(compose(command), Invocation(command, None, 0.0, {}))
    for number, (name, value) in enumerate(
        [("FIRST", "secret-one"), ("SECOND", "secret-two"), ("FIRST", "secret-one")]
    ):
        words = [str(one.input_line) for one in command.overrides]
        composed = jobs.compose([*words, f"user.which={name}"], number)
        job = jobs.plan(composed, lambda _: (LAPTOP, None))
        assert (job.config.notes, job.secrets.values) == (value, {value: f"${{oc.env:{name}}}"})
        assert job.secrets.written(job.config).notes == "${oc.env:${user.which}}"


def test_a_swept_value_that_reads_the_environment_is_written_as_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With another job's text, a resume would read the other variable."""
    command = parse(["-m", "model=toy"])
    jobs = Jobs(compose(command), Invocation(command, None, 0.0, {}))
    for number, name in enumerate(["FIRST", "SECOND", "FIRST"]):
        monkeypatch.setenv(name, f"secret of {name}")
        text = f"${{oc.env:{name}}}"
        composed = jobs.compose(["model=toy", f"notes='{text}'"], number)
        job = jobs.plan(composed, lambda _: (LAPTOP, None))
        assert job.config.notes == f"secret of {name}"
        assert job.secrets.written(job.config).notes == text


def _described(make: Callable[[], Job]) -> object:
    try:
        return make()
    except Exception as error:
        return str(user_error(error))


@contextmanager
def grid_loader() -> Iterator[ConfigLoader]:
    """Give Hydra's loader."""
    register()
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONFIG_DIR), job_name="ddp_runner", version_base="1.3"):
        yield GlobalHydra.instance().config_loader()


def outcome(compose_job: Callable[[list[str]], DictConfig], job: list[str]) -> Outcome:
    """Return the composed job, or the sentence that rejects it."""
    try:
        return compose_job(job), None
    except (HydraException, ValueError, UserError) as error:
        return OmegaConf.create(), str(user_error(error, job)).partition(";")[0]


def flags(node: Container) -> list[object]:
    """Return the flags of a config and of all that it contains."""
    keys = node if isinstance(node, DictConfig) else range(len(node))
    children = [] if node._is_none() or node._is_missing() else map(node._get_node, keys)
    below = [
        flags(one) for one in children if OmegaConf.is_config(one) and not one._is_interpolation()
    ]
    return [node._metadata.flags, *below]
