"""What DDP sends of the gradients: that it trains, and what cannot be."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from commands import run_command
from configs import config_error
from pages import commands, write_files
from ranks import run_ranks
from run_folders import metrics, record
from torch import Tensor
from torch.futures import Future
from train_states import MNIST_NET, NO_DROPOUT, Trace, build, compose_config, take_steps

from ddp_runner.check.step_check import StepCheck
from ddp_runner.compare.parity import promises_parity
from ddp_runner.compare.recorded_run import RecordedRun
from ddp_runner.config.schema import Config
from ddp_runner.dist_env import DistEnv

PAGE = "docs/ddp.md"
NET = (*MNIST_NET, *NO_DROPOUT, f"allowed_targets=[{__name__}]")
OWN = f"{__name__}.Scaled"
HOOKS = {
    "bf16": ("parallelism.comm_hook=bf16",),
    "fp16": ("parallelism.comm_hook=fp16",),
    "unused": ("parallelism.find_unused_parameters=true", "parallelism.comm_hook=bf16"),
    "static": ("parallelism.static_graph=true", "parallelism.comm_hook=bf16"),
    "accumulated": ("train.grad_accum_steps=2", "parallelism.comm_hook=bf16"),
}
NUM_STEPS = 8


def mean(state: None, bucket: dist.GradBucket) -> Future[Tensor]:
    """Send a bucket as DDP does without a hook."""
    gradients = bucket.buffer().div_(dist.get_world_size())
    work = dist.all_reduce(gradients, async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: done.value()[0])


class Scaled:
    """A hook that is an object: the mean, times a factor."""

    def __init__(self, factor: float) -> None:
        self.factor, self.num_buckets = factor, 0

    def __call__(self, state: None, bucket: dist.GradBucket) -> Future[Tensor]:
        """Send a bucket."""
        self.num_buckets += 1
        return mean(state, bucket).then(lambda done: done.value() * self.factor)


OWN_HOOKS = {
    "function": f"parallelism.comm_hook={{_target_: {__name__}.mean, _partial_: true}}",
    "object": f"parallelism.comm_hook={{_target_: {OWN}, factor: 0.5}}",
}


def config_of(*keys: str) -> Config:
    """Return the config of mnist_net on two ranks."""
    return compose_config(*NET, *keys, world_size=2)


def trained(env: DistEnv, configs: Mapping[str, Config]) -> dict[str, Trace]:
    """Take the steps of each config."""
    torch.version.cuda = None  # DDP then rejects torch's own bf16 hook by its name
    return {name: take_steps(env, config, NUM_STEPS) for name, config in configs.items()}


@pytest.fixture(scope="module")
def results() -> list[dict[str, Trace]]:
    """Return what each rank found, for each hook."""
    configs = {name: config_of(*keys) for name, keys in HOOKS.items()}
    configs |= {name: config_of(key) for name, key in OWN_HOOKS.items()}
    configs |= {"plain": config_of(), "half": config_of("optimizer.lr=0.025")}
    return run_ranks(trained, 2, configs)


@pytest.mark.full
@pytest.mark.parametrize("hook", HOOKS)
def test_steps_are_near_those_without_a_hook(results: list[dict[str, Trace]], hook: str) -> None:
    """Equal on all ranks, and inexact from the second step on."""
    plain, (own, other) = results[0]["plain"], (result[hook] for result in results)
    assert torch.equal(own.weights, other.weights)
    assert own.losses[0] == pytest.approx(plain.losses[0])
    assert own.losses != plain.losses
    torch.testing.assert_close(own.losses, plain.losses, rtol=2e-2, atol=0.0)


@pytest.mark.full
def test_a_hook_of_the_users_own_decides_what_ranks_get(results: list[dict[str, Trace]]) -> None:
    """A function and an object: the plain mean takes the plain steps, half of it half of them."""
    first, second = results
    assert first["function"].losses == first["plain"].losses
    assert torch.equal(first["object"].weights, second["object"].weights)
    torch.testing.assert_close(first["object"].losses, first["half"].losses)


@pytest.mark.full
def test_the_hooks_round_differently(results: list[dict[str, Trace]]) -> None:
    """Each key is a hook of its own."""
    assert results[0]["bf16"].losses != results[0]["fp16"].losses


def checked(env: DistEnv, configs: list[Config]) -> list[tuple[bool, str]]:
    """Return what task=check finds about a step."""
    verdicts = [StepCheck(build(env, config)).verdict() for config in configs]
    return [(one.ok, one.detail.rpartition("; ")[2] if not one.ok else "") for one in verdicts]


@pytest.mark.full
def test_a_check_knows_what_a_hook_rounds() -> None:
    """Rounded gradients widen the bounds; a hook of the user's own must send the mean."""
    keys = (*HOOKS["bf16"], *OWN_HOOKS.values())
    assert run_ranks(checked, 2, [config_of(key) for key in keys])[0] == [
        (True, ""),
        (True, ""),
        (False, f"the comm_hook {OWN} sent them"),
    ]


@pytest.mark.parametrize(
    ("key", "value", "is_promised"),
    [("comm_hook", None, True), ("comm_hook", "bf16", False), ("comm_hook._target_", OWN, False)],
)
def test_a_comparison_promises_no_parity_of_inexact_steps(
    key: str, value: str | None, is_promised: bool, tmp_path: Path
) -> None:
    """Their losses may differ, which is no fault; and they are no reference."""
    run = RecordedRun(tmp_path, config={f"parallelism.{key}": value})
    assert promises_parity(run) is is_promised


@pytest.mark.full
def test_the_hook_of_the_page_trains(tmp_path: Path) -> None:
    """Its command, on a small model: without a step that is cut, the steps of a run without it."""
    write_files(PAGE, tmp_path)
    (own,) = (words for words in commands(PAGE) if any("_target_" in one for one in words))
    few = ("model=toy", "dataset.num_samples=24", "batch.global_size=8", "train.epochs=1")
    shared = (*few, "world_size=2", "train.log_every_steps=1", "train.num_threads=1")
    runs = {"own": own, "uncut": [*own, "parallelism.comm_hook.largest=1e9"], "plain": []}
    losses = {}
    for name, keys in runs.items():
        environ = {"PYTHONPATH": str(tmp_path)}
        words = (*keys, *shared, f"hydra.run.dir={name}")
        done = run_command(*words, folder=tmp_path, environ=environ)
        assert done.exit_code == 0, done.stderr
        assert record(tmp_path / name)["status"] == "completed"
        lines = metrics(tmp_path / name)
        losses[name] = [line["train/loss"] for line in lines if "train/loss" in line]
    assert losses["uncut"] == losses["plain"] != losses["own"]


REJECTED = {
    ("parallelism.comm_hook=int8",): "(int8) must be null, bf16 or fp16, or a mapping with the",
    ("parallelism.comm_hook={factor: 2}",): "a mapping with the _target_ of your own",
    ("parallelism.comm_hook=bf16", "backend=mpi"): "does not work with backend=mpi",
    ("train.compile=true", "parallelism.bucket_cap_mb=0"): "must be 1 or greater with train.comp",
    ("parallelism.static_graph=true", "train.grad_accum_steps=2"): "cannot skip gradient syncs",
    (
        "parallelism=ddp_mp",
        "model=toy_mp",
        "+parallelism.comm_hook=bf16",
    ): "a replica on one device",
}


@pytest.mark.parametrize("keys", REJECTED)
def test_pairs_that_fail_are_rejected_before_any_rank_starts(keys: tuple[str, ...]) -> None:
    """Each of them crashes, hangs or goes wrong in silence; the line names the fix."""
    assert REJECTED[keys] in config_error("world_size=2", *keys)
