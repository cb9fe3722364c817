"""A run that was killed at any step and resumed equals an undisturbed one, in every mode.

In the same mode and with as many ranks: bit for bit. In another, or with others: each sample once
an epoch, and losses that differ by rounding alone.
"""

import random
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from commands import background, rank_processes, run_command, wait_for
from modes import MESHES, MODES, PIPELINES, TENSOR_PARALLEL, has_stages, needs, smallest_world
from ranks import run_ranks
from run_folders import (
    assert_same_state,
    checkpoint_steps,
    last_step,
    reproducible_metrics,
    run_dirs,
)
from torch import Tensor, nn
from torch.nn import functional as F
from train_states import (
    TOLERANCES,
    Trace,
    build,
    compose_config,
    equal,
    loss_of,
    run_loop,
    with_loss,
)

from ddp_runner.checkpoint.store import load_checkpoint, newest_first
from ddp_runner.config.schema import Config
from ddp_runner.data.batches import NumberedBatches, StepBatch
from ddp_runner.data.splits import TensorSplit
from ddp_runner.dist_env import DistEnv
from ddp_runner.train.snapshot import rehearse
from ddp_runner.train.state import TrainState
from ddp_runner.train.step import StepOutput


class Tiny(nn.Module):
    """A small convolution and a linear layer, whole or in two stages; of the keys of mnist_net."""

    def __init__(
        self,
        *,
        num_classes: int,
        in_channels: int,
        dropout1: float,
        dropout2: float,
        batch_norm: bool = False,
        dev0: torch.device | None = None,
        dev1: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.dev0, self.dev1 = dev0, dev1
        self.conv = nn.Conv2d(in_channels, 4, kernel_size=3).to(dev0)
        self.norm = nn.BatchNorm2d(4).to(dev0) if batch_norm else nn.Identity()
        self.dropout1, self.dropout2 = nn.Dropout(dropout1), nn.Dropout(dropout2)
        self.hidden = nn.Linear(4 * 3 * 3, 12).to(dev1)
        self.last = nn.Linear(12, num_classes).to(dev1)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (batch, in_channels, 8, 8) to log-probabilities (batch, num_classes)."""
        features = F.max_pool2d(F.relu(self.norm(self.conv(images.to(self.dev0)))), 2)
        hidden = F.relu(self.hidden(self.dropout1(features).flatten(1).to(self.dev1)))
        return F.log_softmax(self.last(self.dropout2(hidden)), dim=1)


class Staged(nn.Module):
    """Linear layers for a pipeline; of the keys of mnist_net."""

    def __init__(
        self, *, num_classes: int, in_channels: int, dropout1: float, dropout2: float
    ) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64 * in_channels, 12), nn.Linear(12, num_classes)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(12, 12), nn.ReLU(), nn.Dropout(p)) for p in (dropout1, dropout2)
        )

    def forward(self, images: Tensor) -> Tensor:
        """Map images (batch, in_channels, 8, 8) to log-probabilities (batch, num_classes)."""
        hidden = self.embed(images)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)

    def embed(self, images: Tensor) -> Tensor:
        """Return what the first block takes."""
        return F.relu(self.first(images.flatten(1)))

    def head(self, hidden: Tensor) -> Tensor:
        """Return log-probabilities from what the last block returns."""
        return F.log_softmax(self.last(hidden), dim=1)


class Counting(torch.optim.SGD):
    """SGD whose rate falls with the steps that it has counted itself, in its groups."""

    def __init__(self, params: Any, *, lr: float, momentum: float, **_: Any) -> None:
        super().__init__(params, lr=lr, momentum=momentum)
        for group in self.param_groups:
            group["taken"] = 0

    def step(self, closure: Any = None) -> None:
        """Take a step."""
        for group in self.param_groups:
            group["taken"] += 1
            rate, group["lr"] = group["lr"], group["lr"] / group["taken"]
            super().step(closure)
            group["lr"] = rate


def mixed(model: nn.Module, batch: Any) -> StepOutput:
    """A step with mixup, whose pairs and shares come from NumPy and Python."""
    images, targets = batch
    order = torch.from_numpy(np.random.permutation(len(images)))
    kept = random.betavariate(0.4, 0.4) if model.training else 1.0
    outputs = model(kept * images + (1 - kept) * images[order])
    loss = kept * F.nll_loss(outputs, targets, reduction="sum")
    loss = loss + (1 - kept) * F.nll_loss(outputs, targets[order], reduction="sum")
    return StepOutput(loss, len(images), outputs=outputs, targets=targets)


# An epoch is a batch of 12 and one of a single sample, of which most ranks get none.
BASE = (
    "dataset=fake_images",
    "dataset.height=8",
    "dataset.width=8",
    "dataset.eval_samples=9",
    "dataset.num_samples=13",
    "batch.global_size=12",
    "train.epochs=3",
    "optimizer=momentum",
    "optimizer.lr=0.05",
    "train.log_every_steps=1",
    "checkpoint.every_steps=1",
    "checkpoint.keep=99",
    f"model._target_={__name__}.Tiny",
    f"allowed_targets=[{__name__}]",
    "model.dropout1=0.0",
    "model.dropout2=0.0",
)
NUM_STEPS = 6
MIXED = "mixup, an average and a plateau"
LARGE = 2.0**20  # times the loss: its scale makes it overflow
AUGMENTED = ("dataset.augmentation.horizontal_flip=true", "dataset.augmentation.crop_padding=2")
WARM_UP = ("scheduler=cosine", "scheduler.warmup_steps=2", "scheduler.min_factor=0.1")
ACCUMULATED = ("train.grad_accum_steps=2", "train.clip_norm=0.5")
DROPOUT = ("model.dropout1=0.3", "model.dropout2=0.5")
STAGED = (
    f"model._target_={__name__}.Staged",
    "+model.blocks=['blocks.*']",
    "+model.pipeline={embed:[first],head:[last]}",
    "train.grad_accum_steps=2",
)
# What a resumed run must find as it was, each alone and then all that go together.
CASES: dict[str, tuple[str, ...]] = {
    "plain": (),
    "accumulation": ACCUMULATED,
    "dropout": DROPOUT,
    "batch norm": ("+model.batch_norm=true",),
    "augmentation": AUGMENTED,
    "bf16": ("train.precision=bf16",),
    "adam": ("optimizer=adam",),
    "an optimizer that counts": (f"optimizer._target_={__name__}.Counting",),
    "warm-up": WARM_UP,
    "step": ("scheduler=step",),
    "plateau": (
        "scheduler=plateau",
        "scheduler.patience=0",
        "scheduler.factor=0.5",
        "+scheduler.threshold=0.9",
    ),
    "one cycle": (
        "scheduler._target_=torch.optim.lr_scheduler.OneCycleLR",
        "+scheduler.max_lr=0.1",
    ),
    MIXED: (
        f"train.step={__name__}.mixed",
        "ema.decay=0.9",
        "scheduler=plateau",
        "scheduler.patience=0",
        "scheduler.factor=0.5",
        "optimizer=adamw",
        *DROPOUT,
    ),
    "scaled loss": (f"optimizer.lr={0.05 / LARGE}",),
    "all": (
        "+model.batch_norm=true",
        "train.precision=bf16",
        "optimizer=adamw",
        *DROPOUT,
        *AUGMENTED,
        *WARM_UP,
        *ACCUMULATED,
    ),
}
# Each mode has the fewest ranks that show what it does; ddp has three too, since the sum of three
# depends on their order.
GROUPS = {
    **{mode: (mode, smallest_world(mode)) for mode in MODES},
    "ddp of three": ("ddp", 3),
    "one asynchronous trainer": ("ps parallelism.mode=async", 2),
    "asynchronous": ("ps parallelism.mode=async", 3),  # the order of its steps is random
}


@dataclass(kw_only=True)
class Watched(NumberedBatches):
    """Batches that note what is taken from them."""

    drawn: list[tuple[int, dict[int, float]]] = field(default_factory=list)

    def __iter__(self) -> Iterator[StepBatch]:
        """Note each batch that the loop takes."""
        yield from map(self.noted, super().__iter__())

    def step_at(self, number: int) -> StepBatch:
        """Note a batch that is asked for by its number."""
        return self.noted(super().step_at(number))

    def noted(self, batch: StepBatch) -> StepBatch:
        """Note the batch's number and each sample's weight; its bytes identify a sample."""
        found, numbers = Counter[int](), sample_numbers(self.split)
        for micro in batch.micro_batches:
            for one in micro.data[0] if micro.weight else ():
                found[numbers[one.numpy().tobytes()]] += micro.weight
        self.drawn.append((batch.number, dict(found)))
        return batch


def sample_numbers(split: TensorSplit) -> dict[bytes, int]:
    """Return the place of each sample by its bytes."""
    numbers = {one.numpy().tobytes(): number for number, one in enumerate(split.inputs)}
    assert len(numbers) == len(split)
    return numbers


def watched(state: TrainState) -> tuple[TrainState, list[tuple[int, dict[int, float]]]]:
    """Return a state that notes which samples it takes, and the notes."""
    given = {
        one.name: getattr(state.batches, one.name) for one in fields(state.batches) if one.init
    }
    batches = Watched(**given)
    return replace(state, batches=batches), batches.drawn


@dataclass
class RankSession:
    """What one rank did from a start, or a resume, to the end of the run."""

    trace: Trace
    drawn: list[tuple[int, dict[int, float]]]  # of each step that it computed gradients for


def config_of(group: str, *overrides: str) -> Config:
    """Return what a group trains."""
    mode, world_size = GROUPS[group]
    model = f"model=mnist_net{'_mp' if has_stages(mode.split()[0]) else ''}"
    keys = f"parallelism={mode}".split()
    if mode in TENSOR_PARALLEL:
        keys.append("+model.tensor_parallel={hidden:colwise,last:rowwise}")
    if mode in PIPELINES:
        keys += STAGED
    return compose_config(model, *BASE, *keys, *overrides, world_size=world_size)


def train_on(
    env: DistEnv, config: Config, folder: Path, *, with_scaler: bool = False
) -> RankSession:
    """Continue from what the folder holds, with a checkpoint at each step. Collective."""
    state, drawn = watched(build(env, config))
    if with_scaler:  # its scale goes up and down, and some steps are not taken
        large = loss_of(state)
        scaler = torch.amp.GradScaler(
            "cpu", 2.0**120, growth_factor=2.0**20, backoff_factor=2.0**-30, growth_interval=1
        )
        state = with_loss(state, lambda *both: LARGE * large(*both))
        state.scaler = scaler
    trace = run_loop(env, config, max_steps=None, folder=folder, state=state)
    dist.barrier()
    return RankSession(trace, drawn if state.work.layout.computes_batches else [])


def move(env: DistEnv, step: int, source: Path, target: Path) -> None:
    """Copy a checkpoint, and it alone. Collective."""
    if env.is_rank_zero:
        name = f"step-{step:08d}"
        shutil.copytree(source / name, target / name)
    dist.barrier()


def chain(env: DistEnv, config: Config, folder: Path, with_scaler: bool) -> list[RankSession]:
    """Return an undisturbed session, then one from each checkpoint of the session before."""
    sessions = []
    for step in range(NUM_STEPS):
        if step:
            move(env, step, folder / str(step - 1), folder / str(step))
        sessions.append(train_on(env, config, folder / str(step), with_scaler=with_scaler))
    return sessions


@dataclass(frozen=True)
class CaseSessions:
    """What the sessions of a case leave."""

    ranks: list[list[RankSession]]  # by rank, then by the step that it resumed from
    states: list[dict[str, Any]]  # the last checkpoint of each session


def cases_of(group: str) -> list[str]:
    """Return the cases that a mode has; one with a server scales no loss."""
    if group == "asynchronous":
        return []
    # On CPUs dp is one device, as single is; what a mesh has of its own are its shards.
    if group in PIPELINES:
        return ["dropout", MIXED]  # they take no BatchNorm
    if group not in MODES or group in ("dp", "ddp_mp", *MESHES):  # ddp_mp resumes as ddp does
        # Four ranks resume as two do, but with another mesh.
        few = ["plain", MIXED]
        return ["dropout", "all", *few] if GROUPS[group][1] < 4 else few
    return [case for case in CASES if "num_servers" not in needs(group) or case != "scaled loss"]


def run_case(group: str, case: str, folder: Path) -> CaseSessions:
    """Return what a group's sessions leave."""
    config = config_of(group, *CASES[case])
    ranks = run_ranks(chain, GROUPS[group][1], config, folder, case == "scaled loss")
    return CaseSessions(ranks, [last_state(folder / str(step)) for step in range(NUM_STEPS)])


def last_state(folder: Path) -> dict[str, Any]:
    """Return the state of a run's last checkpoint."""
    return load_checkpoint(newest_first(folder)[0])


def figures(trace: Trace, *, after: int) -> list[dict[str, float]]:
    """Return what was logged after a step, without what depends on the clock."""
    return [
        {key: value for key, value in line.items() if not key.startswith(("perf/", "ps/"))}
        for line in trace.lines
        if line["step"] > after
    ]


# Cases that `all` or MIXED cover, and that do not affect each other: one process resumes each of
# them alone, at a fraction of the cost. Elsewhere they show which part of `all` is at fault.
CONTAINED = {"accumulation", "augmentation", "bf16", "adam", "warm-up", "plateau"}
# What several ranks or shards add to these is in `all` and MIXED as well; ddp has them alone.
RANK_KEYS = {"plain", "dropout", "batch norm"}
SLOW = {
    "ddp": CONTAINED | {"step", "one cycle"},  # as in one process: each rank has its schedule
    "ps": CONTAINED | RANK_KEYS,
    "fsdp": RANK_KEYS,
    "tp": RANK_KEYS,
    "hsdp": RANK_KEYS,
    "fsdp_tp": RANK_KEYS,
}


def ways() -> Iterator[Any]:
    """Yield each group with each of its cases; by default all that a step depends on at once."""
    for group in GROUPS:
        for case in cases_of(group):
            is_quick = (
                case in ("all", MIXED)[: 1 + (group in ("ddp", "pp"))]
                and group in MODES
                and group not in ("dp", "ddp_mp", "tp")
            )
            marks = [] if is_quick else [pytest.mark.full]
            if case in SLOW.get(group, ()):
                marks.append(pytest.mark.slow)
            yield pytest.param(group, case, marks=marks)


@pytest.mark.parametrize(("group", "case"), list(ways()))
def test_from_any_step_a_resumed_run_is_the_undisturbed_one(
    group: str, case: str, tmp_path: Path
) -> None:
    """Figures, samples and their order, parameters and all that a checkpoint holds: bit for bit."""
    found = run_case(group, case, tmp_path)
    for sessions in found.ranks:
        whole = sessions[0]
        assert whole.trace.status == "completed"
        for step, session in enumerate(sessions):
            assert figures(session.trace, after=step) == figures(whole.trace, after=step), step
            assert len(session.trace.lines) == len(figures(whole.trace, after=step)), step
            assert session.drawn == whole.drawn[step:], step
            assert torch.equal(session.trace.weights, whole.trace.weights), step
            assert session.trace.stand == whole.trace.stand, step
    for step, content in enumerate(found.states):
        whole_state = found.states[0]
        assert content.keys() == whole_state.keys()
        ours, theirs = content["objects"], whole_state["objects"]
        assert [key for key in ours if not equal(ours[key], theirs[key])] == [], step
    if case == "scaled loss":
        schedule = found.states[0]["objects"]["scheduler"]["state"]["state"]
        assert 0 < schedule["last_epoch"] < NUM_STEPS, "all steps were taken"


def rehearsed(env: DistEnv, config: Config) -> list[tuple[int, bool]]:
    """Rehearse a model that was built for evaluation; return its forwards' samples and mode."""
    state, found = build(env, config), list[tuple[int, bool]]()
    state.module.eval()
    state.module.register_forward_hook(
        lambda module, inputs, _: found.append((len(inputs[0]), module.training))
    )
    rehearse(state)
    return found


@pytest.mark.parametrize(("is_static", "num_backwards"), [("false", 1), ("true", 2)])
def test_what_is_rehearsed_is_a_whole_micro_batch_in_training(
    is_static: str, num_backwards: int
) -> None:
    """Also where there are fewer samples: a compiled model and BatchNorm are made for no other.

    With a static graph, DDP forms its buckets anew only after the second backward.
    """
    keys = ("model=toy", "dataset.num_samples=4", "batch.global_size=30")
    config = compose_config(*keys, f"parallelism.static_graph={is_static}", world_size=3)
    assert run_ranks(rehearsed, 3, config) == [[(10, True)] * num_backwards] * 3


# Three steps an epoch, of 12, 12 and 8 samples; twelve can be cut in one, two, three and four.
SHARED = ("dataset.num_samples=32", "batch.global_size=12", "train.epochs=2", *AUGMENTED, *WARM_UP)
PLACES = {"between two epochs": 3, "amid an epoch": 4}
SYNCHRONOUS = [group for group in GROUPS if group not in ("asynchronous", "dp", *PIPELINES)]


def resume_elsewhere(
    env: DistEnv,
    config: Config,
    folder: Path,
    sources: list[str],
    target: str,
    steps: Sequence[int] = tuple(PLACES.values()),
) -> dict[tuple[str, int], RankSession]:
    """Resume from the checkpoints of other groups; return by group and step. Collective."""
    sessions = {}
    for source in sources:
        for step in steps:
            place = folder / f"{source} to {target}" / str(step)
            move(env, step, folder / source, place)
            sessions[source, step] = train_on(env, config, place)
    return sessions


def train_groups(groups: list[str], folder: Path, *overrides: str) -> dict[str, list[RankSession]]:
    """Train each group once, keep its checkpoints, and return its ranks' sessions."""
    return {
        group: run_ranks(
            train_on, GROUPS[group][1], config_of(group, *SHARED, *overrides), folder / group
        )
        for group in groups
    }


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[RankSession]]]:
    """Train each group but an asynchronous one; give the folder and the sessions."""
    folder = tmp_path_factory.mktemp("left")
    return folder, train_groups(SYNCHRONOUS, folder)


def readers(group: str, sessions: list[RankSession]) -> list[RankSession]:
    """Return the ranks that take samples of their own: of tensor parallelism one of two."""
    return sessions[:: 2 if group in TENSOR_PARALLEL else 1]


def samples_by_batch(*sessions: RankSession) -> dict[int, Counter[int]]:
    """Return how often each sample was in a batch, over all ranks."""
    found: dict[int, Counter[int]] = {}
    for session in sessions:
        for batch, samples in session.drawn:
            found.setdefault(batch, Counter()).update(samples)
    return found


def sources_of(target: str) -> list[str]:
    """Return the groups that a target goes on from: meshes meet each other and the plainest."""
    if target in MESHES:
        return ["single", "ddp of three", *MESHES]
    return [group for group in SYNCHRONOUS if group not in MESHES or GROUPS[group][1] == 2]


def targets() -> Iterator[Any]:
    """Yield each group with both places; between two epochs one of each kind of group."""
    for target in SYNCHRONOUS:
        for place in PLACES:
            is_slow = place == "between two epochs" and target not in ("ddp", "fsdp", "ps")
            marks = [pytest.mark.full, *([pytest.mark.slow] if is_slow else [])]
            yield pytest.param(target, place, marks=marks)


@pytest.mark.parametrize(("target", "place"), list(targets()))
def test_in_another_mode_or_world_a_run_takes_the_steps_that_are_left(
    target: str, place: str, left: tuple[Path, dict[str, list[RankSession]]]
) -> None:
    """From one group to another: losses to rounding, and each sample once an epoch."""
    folder, sources = left
    config, whole = config_of(target, *SHARED), sources["single"][0]
    ranks = run_ranks(
        resume_elsewhere,
        *(GROUPS[target][1], config, folder, sources_of(target), target, [PLACES[place]]),
        timeout_s=600,
    )
    tolerances = TOLERANCES[torch.float32]
    for (source, step), first in ranks[0].items():
        where = f"{source} to {target} at step {step}: "
        text = partial("{} {}".format, where)
        losses = sources[source][0].trace.losses[:step] + first.trace.losses
        torch.testing.assert_close(losses, whole.trace.losses, **tolerances, msg=text)
        torch.testing.assert_close(first.trace.weights, whole.trace.weights, **tolerances, msg=text)
        assert first.trace.stand == whole.trace.stand, where
        before = [
            RankSession(one.trace, one.drawn[:step]) for one in readers(source, sources[source])
        ]
        after = readers(target, [rank[source, step] for rank in ranks])
        found = samples_by_batch(*before, *after)
        assert found == samples_by_batch(whole), where
        for epoch in range(2):
            used = sum((found[3 * epoch + batch] for batch in range(3)), Counter())
            assert used == Counter(range(32)), where


@pytest.mark.full
def test_an_asynchronous_run_uses_each_sample_once_an_epoch(tmp_path: Path) -> None:
    """With a rate near zero, each loss identifies its batch, in any order."""
    still = ("optimizer.lr=1e-30", "dataset.augmentation=null")
    sources = train_groups(["single", "ddp"], tmp_path, *still)
    apart = ("checkpoint.every_steps=4", "checkpoint.every_epochs=1")
    sources |= train_groups(["asynchronous"], tmp_path, *still, *apart)
    expected = sources["single"][0].trace.losses
    ordered = sorted(expected)
    assert min(b - a for a, b in pairwise(ordered)) > 1e-3
    for step in PLACES.values():  # nothing is under way at a save
        applied = sources["asynchronous"][0].trace.losses[:step]
        assert sorted(applied) == pytest.approx(sorted(expected[:step]), rel=1e-5)
    ways = {
        "asynchronous": list(sources),
        "single": ["asynchronous"],
        "ddp of three": ["asynchronous"],
        "ps": ["asynchronous"],
    }
    for target, chosen in ways.items():
        config = config_of(target, *SHARED, *still)
        first, *_ = run_ranks(resume_elsewhere, GROUPS[target][1], config, tmp_path, chosen, target)
        for (source, step), session in first.items():
            losses = sources[source][0].trace.losses[:step] + session.trace.losses
            where = f"{source} to {target} at step {step}"
            assert sorted(losses) == pytest.approx(ordered, rel=1e-5), where
            assert session.trace.progress.step == NUM_STEPS, where


# All that a step depends on, on two ranks.
KILLED = (
    "model=mnist_net",
    "dataset=fake_images",
    "dataset.height=10",
    "dataset.width=10",
    "dataset.num_samples=60",
    "dataset.eval_samples=20",
    "batch.global_size=8",
    "train.epochs=4",
    "train.precision=bf16",
    "train.num_threads=1",
    "train.log_every_steps=1",
    "checkpoint.every_steps=3",
    *AUGMENTED,
    *WARM_UP,
    *ACCUMULATED,
)
NUM_KILLED_STEPS = 32


@pytest.mark.full
@pytest.mark.slow
def test_a_run_that_was_killed_twice_equals_one_that_was_not(tmp_path: Path, rng: Random) -> None:
    """First a rank, and the launcher starts anew; then the launcher: at random steps."""
    undisturbed = run_command(*KILLED, folder=tmp_path / "undisturbed").run_dir
    folder, first, second = tmp_path / "killed", rng.randrange(4, 12), rng.randrange(12, 22)
    with background(*KILLED, "launch.max_restarts=1", folder=folder) as process:
        wait_for(lambda: last_step(folder))
        ranks = rank_processes(process.pid)  # looked up beforehand: the run does not wait
        (run_dir,) = run_dirs(folder)
        wait_for(lambda: checkpoint_steps(run_dir) and last_step(folder) >= first)
        ranks[1].kill()
        log = run_dir / "logs" / "rank-0.log"
        wait_for(lambda: "resumed from" in log.read_text() and last_step(folder) >= second)
        process.kill()
    assert last_step(folder) < NUM_KILLED_STEPS
    resumed = run_command(f"resume={run_dir}", folder=folder)
    assert (resumed.exit_code, resumed.stderr) == (0, "")
    assert log.read_text().count("resumed from") == 2
    assert reproducible_metrics(run_dir) == reproducible_metrics(undisturbed), (first, second)
    assert_same_state(run_dir, undisturbed)
