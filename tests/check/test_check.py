"""task=check: every promise of data parallelism, kept by good models and broken one at a time."""

from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path

import pytest
import torch
from broken_models import (
    no_sync,
    other_data,
    other_start,
    same_eval_share,
    same_share,
    summed,
    untouched,
)
from commands import CommandResult, run_command
from configs import config_error
from orders import steps_of
from own_steps import WORDS
from ranks import run_ranks
from run_folders import record
from tiers import named, selected
from train_states import MNIST_NET, build, compose_config

from ddp_runner.check.check_task import run_checks
from ddp_runner.check.checks import wait_for_mean
from ddp_runner.check.rank_differences import Verdict, differences, largest_difference
from ddp_runner.dist_env import DistEnv
from ddp_runner.train.state import TrainState

WORLD_SIZE = 3
SMALL = ("batch.global_size=6", "dataset.num_samples=27")
TOY = ("model=toy", *SMALL)
GOOD = {
    "toy": TOY,
    "accumulation": (*TOY, "batch.global_size=12", "train.grad_accum_steps=2"),
    "two stages": ("model=toy_mp", "parallelism=ddp_mp", *SMALL),
    "bf16": (*TOY, "train.precision=bf16"),
    "BatchNorm": ("model=convnet", "dataset=fake_images", *SMALL),
    "dropout": (*MNIST_NET, *SMALL),
    "own data and step, by tokens": (*WORDS, "batch.global_size=6"),
    "fewer samples than ranks to evaluate": (*TOY, "dataset.eval_samples=2"),
}


def of_class(name: str) -> tuple[str, ...]:
    """Return the command line of a broken model."""
    return (*TOY, f"model._target_=broken_models.{name}", "allowed_targets=[broken_models]")


def farthest(env: DistEnv) -> float:
    """Return the largest difference where a rank has nothing to compare."""
    return largest_difference(torch.full((0,), float(env.rank)))


def test_a_rank_with_an_empty_shard_is_compared() -> None:
    """Such as that of a bias of one number."""
    assert run_ranks(farthest, 2) == [0.0, 0.0]


STEP = "a step is one process's, within rounding"
Break = Callable[[TrainState, DistEnv], TrainState]
# what is broken, the check that fails first, what it says
BROKEN: dict[str, tuple[tuple[str, ...], Break, str, str]] = {
    "share": (
        TOY,
        same_share,
        "each training sample is used once an epoch",
        "18 are in no batch (the first is sample ",
    ),
    "eval share": (
        TOY,
        same_eval_share,
        "each evaluation sample counts once",
        "27 are in no batch (the first is sample 13) and 13 are in several (the first is sample 0)",
    ),
    "data": (
        TOY,
        other_data,
        "all ranks hold the same data",
        "eval targets on rank 2 is not rank 0's (largest difference 0.25)",
    ),
    "start": (
        TOY,
        other_start,
        "all ranks begin with rank 0's weights",
        "net1.weight on rank 2 is not rank 0's (largest difference 0.5)",
    ),
    "constant": (
        of_class("Scaled"),
        untouched,
        STEP,
        "modules are wrong; scale, a plain attribute, on ranks 1, 2 is not rank 0's (largest ",
    ),
    "no sync": (
        TOY,
        no_sync,
        STEP,
        "net2: the gradient of its bias is this rank's own: not synchronised?",
    ),
    "sum": (
        TOY,
        summed,
        STEP,
        "is 3 times one process's (a sum where a mean belongs?); the same factor in all",
    ),
    "late parameter": (
        of_class("Late"),
        untouched,
        STEP,
        "the model: the gradient of its late is this rank's own",
    ),
    "idle layer": (
        of_class("Idle"),
        untouched,
        STEP,
        "the loss does not depend on idle.weight, idle.bias; write parallelism.find_unused_param",
    ),
    "wandering": (
        of_class("Wandering"),
        untouched,
        "parameters stay equal",
        "after step 2 net1.bias on ranks 1, 2 is not rank 0's (largest difference ",
    ),
    "buffer": (
        of_class("Counting"),
        untouched,
        "buffers are equal where evaluated and saved",
        "shift on ranks 1, 2 is not rank 0's (largest difference ",
    ),
    "attribute": (
        of_class("Averaging"),
        untouched,
        "all ranks compute the same outputs",
        "mean, a plain attribute, on ranks 1, 2 is not rank 0's (largest difference ",
    ),
    "mean loss": (
        (*TOY, "model.loss=torch.nn.functional.mse_loss"),
        untouched,
        "the loss is a sum over the samples",
        "2 samples give ",
    ),
    "random evaluation": (
        of_class("Dropping"),
        untouched,
        "all ranks compute the same outputs",
        "no tensor of the model differs: does its evaluation draw random numbers?",
    ),
}


def check_all(env: DistEnv, names: Sequence[str]) -> dict[str, list[Verdict]]:
    """Check good and broken states in turn, on ranks that stay."""
    found = {}
    cases = {name: (keys, untouched) for name, keys in GOOD.items()}
    cases |= {name: (keys, broken) for name, (keys, broken, *_) in BROKEN.items()}
    for name in names:
        keys, broken = cases[name]
        config = compose_config(*keys, world_size=WORLD_SIZE)
        found[name] = list(run_checks(broken(build(env, config), env)))
    return found


@pytest.fixture(scope="module")
def checked(request: pytest.FixtureRequest) -> dict[str, list[Verdict]]:
    """Return what three ranks found, the same on all of them."""
    first, *others = run_ranks(check_all, WORLD_SIZE, selected(request, "name"), timeout_s=240)
    assert all(other == first for other in others)
    found: dict[str, list[Verdict]] = first
    return found


@pytest.mark.parametrize("name", named(GOOD, quick=("toy",)))
def test_a_good_model_keeps_every_promise(name: str, checked: dict[str, list[Verdict]]) -> None:
    """All ten checks are made, and pass."""
    assert [finding for finding in checked[name] if not finding.ok] == []
    assert len(checked[name]) == 10


@pytest.mark.parametrize("name", named(BROKEN, quick=("share", "start", "no sync", "sum")))
def test_a_broken_promise_is_named(name: str, checked: dict[str, list[Verdict]]) -> None:
    """By the check that fails first, with the tensor, the ranks and how far they are apart."""
    _, _, check, detail = BROKEN[name]
    first = next(finding for finding in checked[name] if not finding.ok)
    assert first.name == check
    assert detail in first.detail


def unlike(env: DistEnv) -> list[str]:
    """Compare zeros of which there are others on each rank, or none."""
    tensors = {
        "kind": torch.zeros(2, dtype=(torch.float32, torch.int32)[env.rank]),
        "size": torch.zeros(2 + env.rank),
        "lack": torch.zeros(1) if env.rank == 0 else None,
        "same": torch.zeros(3),
    }
    return differences(tensors)


def test_tensors_of_another_kind_or_size_differ_whatever_they_hold() -> None:
    """Zeros have the same bytes in every type, so that no digest tells them apart."""
    expected = [
        "kind on rank 1 is not rank 0's (by rank: (2,) of float32; (2,) of int32)",
        "size on rank 1 is not rank 0's (by rank: (2,) of float32; (3,) of float32)",
        "lack on rank 1 is not rank 0's (by rank: (1,) of float32; none)",
    ]
    assert run_ranks(unlike, 2) == [expected] * 2


def unsynced_waits(env: DistEnv) -> list[Verdict]:
    """Measure how a rank that waits for nobody reads its gradients, by samples and by tokens."""
    found = []
    for keys in (TOY, GOOD["own data and step, by tokens"]):
        state = build(env, compose_config(*keys, world_size=WORLD_SIZE))
        batch = next(steps_of(state.batches))
        found.append(wait_for_mean(no_sync(state, env), batch))
    return found


def test_ranks_that_do_not_wait_are_found_out() -> None:
    """The last one is late by 300 ms, and the others can read their gradients long before."""
    for found in chain.from_iterable(run_ranks(unsynced_waits, WORLD_SIZE)):
        assert not found.ok
        assert "ms before that" in found.detail


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> CommandResult:
    """Return the experiment, on one rank too."""
    return run_command(
        "-m",
        "experiment=what_ddp_guarantees",
        "model=toy",
        "world_size=1,2",
        "hydra.sweep.dir=sweep",
        folder=tmp_path_factory.mktemp("check"),
    )


@pytest.mark.full
def test_the_command_reports_each_check(sweep: CommandResult) -> None:
    """Exit code 0, a line and a record for each, and a line for what one rank cannot show."""
    assert (sweep.exit_code, sweep.stderr) == (0, "")
    assert len(sweep.run_dirs) == 2
    for run_dir in sweep.run_dirs:
        fields = record(run_dir)
        assert (fields["status"], fields["error"]) == ("completed", None)
        assert len(fields["checks"]) == (10 if fields["world_size"] == 2 else 5)
        assert all(check["ok"] for check in fields["checks"])
        log = (run_dir / "logs" / "rank-0.log").read_text()
        for check in fields["checks"]:
            assert f"ok      {check['name']}: {check['detail']}" in log
        if fields["world_size"] == 1:
            assert fields["checks"][-1]["detail"] == "nothing to compare: one rank"


def test_a_broken_model_ends_the_command_with_its_name(tmp_path: Path) -> None:
    """It exits with 2, stderr names the parameter, and run.json has the whole report."""
    conf = tmp_path / "conf" / "model"
    conf.mkdir(parents=True)
    conf.joinpath("wandering.yaml").write_text(
        "# @package _global_\n"
        "defaults: [{override /dataset: random}]\n"
        "model: {name: wandering, _target_: broken_models.Wandering, num_stages: 1,\n"
        "        loss: ddp_runner.train.losses.mse}\n"
    )
    end = run_command(
        "--config-dir",
        "conf",
        "model=wandering",
        "task=check",
        "allowed_targets=[broken_models]",
        folder=tmp_path,
        environ={"PYTHONPATH": str(Path(__file__).parents[1] / "helpers")},
    )
    assert end.exit_code == 2
    (line,) = end.stderr.splitlines()
    assert line.startswith("error: task=check (3 of 10 failed): parameters stay equal: ")
    assert "net1.bias on rank 1 is not rank 0's (largest difference " in line
    fields = record(end.run_dir)
    assert fields["status"] == "failed"
    failed = [check["name"] for check in fields["checks"] if not check["ok"]]
    assert failed[0] == "parameters stay equal"


def test_a_mode_whose_ranks_differ_is_rejected() -> None:
    """A server computes no gradients."""
    message = "task=check compares equal ranks, not parallelism=ps; write parallelism=ddp"
    assert config_error("task=check", "parallelism=ps") == message
