"""What DDP sends of the gradients: that it trains, how many bytes it takes, what cannot be."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from configs import config_error
from ranks import run_ranks
from torch.nn.parallel import DistributedDataParallel
from train_states import MNIST_NET, NO_DROPOUT, Trace, build, compose_config, take_steps

from ddp_runner.check.gradients import mean_gradients, own_gradients, synced_gradients
from ddp_runner.compare.parity import promises_parity
from ddp_runner.compare.run import Run
from ddp_runner.config.schema import Config
from ddp_runner.dist_env import DistEnv
from ddp_runner.host.hardware import Hardware
from ddp_runner.parallelism.comm_hooks import powersgd
from ddp_runner.parallelism.ddp import all_reduce_bytes, why_unknown

NET = (*MNIST_NET, *NO_DROPOUT)
START_STEP = 3
POWERSGD = (
    "parallelism.comm_hook=powersgd",
    f"parallelism.powersgd.start_step={START_STEP}",
)
LOCAL = ("parallelism.post_local_sgd.period=2",)
HOOKS = {
    "bf16": ("parallelism.comm_hook=bf16",),
    "fp16": ("parallelism.comm_hook=fp16",),
    "powersgd": POWERSGD,
    "powersgd in buckets": (*POWERSGD, "parallelism.bucket_cap_mb=0"),
    "unused": ("parallelism.find_unused_parameters=true", "parallelism.comm_hook=bf16"),
    "static": ("parallelism.static_graph=true", *POWERSGD),
}
NUM_STEPS = 8


def config_of(*keys: str) -> Config:
    """Return the config of mnist_net on two ranks."""
    return compose_config(*NET, *keys, world_size=2)


def trained(env: DistEnv, configs: Mapping[str, Config]) -> dict[str, tuple[Trace, Any]]:
    """Take the steps of each config; return them, and the bytes of an all-reduce."""
    torch.version.cuda = None  # DDP then refuses torch's own bf16 hook by its name
    found = {}
    for name, config in configs.items():
        state = build(env, config)
        trace = take_steps(env, config, NUM_STEPS, state=state)
        found[name] = trace, (all_reduce_bytes(state.model), why_unknown(state.model))
    return found


@pytest.fixture(scope="module")
def results() -> list[dict[str, tuple[Trace, Any]]]:
    """Return what each rank found, for each hook."""
    configs = {"plain": config_of(), **{name: config_of(*keys) for name, keys in HOOKS.items()}}
    return run_ranks(trained, 2, configs)


@pytest.mark.parametrize("hook", HOOKS)
def test_steps_are_near_those_without_a_hook(
    results: list[dict[str, tuple[Trace, Any]]], hook: str
) -> None:
    """Equal on all ranks, and inexact from the step on at which the hook begins."""
    plain, (own, other) = results[0]["plain"][0], (result[hook][0] for result in results)
    begins = START_STEP if "powersgd" in str(HOOKS[hook]) else 0
    near = 0.1 if begins else 2e-2
    assert torch.equal(own.weights, other.weights)
    assert own.losses[: begins + 1] == plain.losses[: begins + 1]
    assert own.losses != plain.losses
    torch.testing.assert_close(own.losses, plain.losses, rtol=near, atol=0.0)


def test_the_bytes_are_those_that_are_sent(
    results: list[dict[str, tuple[Trace, Any]]],
) -> None:
    """Half for 16 bits; of PowerSGD they are unknown, and so no number is claimed."""
    found = {name: sent for name, (_, sent) in results[0].items()}
    (plain,), nothing = found["plain"]
    assert nothing == ""
    assert found["bf16"] == found["fp16"] == ((plain // 2,), "")
    assert results[0]["bf16"][0].losses != results[0]["fp16"][0].losses
    assert found["powersgd"] == ((), "PowerSGD sends two thin matrices for each large one")


class _Bucket:
    """A bucket of a device, of which PowerSGD asks nothing else here."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def buffer(self) -> torch.Tensor:
        return torch.empty(1, device=self._kind)


@pytest.mark.parametrize(("kind", "num_waits"), [("cpu", 1), ("meta", 0)])
def test_powersgd_finishes_a_bucket_before_the_next_one_on_the_cpu(
    kind: str, num_waits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else gloo's threads may start the collectives of two buckets in another order by rank."""
    waits = list[str]()

    class Result:
        def wait(self) -> None:
            waits.append(kind)

    name = "ddp_runner.parallelism.comm_hooks.powerSGD_hook.powerSGD_hook"
    monkeypatch.setattr(name, lambda state, bucket: Result())
    state: Any = type("State", (), {"own": None})
    bucket: Any = _Bucket(kind)
    powersgd(state, bucket)
    assert len(waits) == num_waits


def checked(env: DistEnv, configs: list[Config]) -> list[tuple[bool, str]]:
    """Return what task=check finds about the mean of the gradients."""
    found = []
    for config in configs:
        state = build(env, config)
        assert isinstance(state.model, DistributedDataParallel)
        batch = next(state.setup.batches.epoch(0))
        own = own_gradients(state, batch)
        finding = mean_gradients(state, own, synced_gradients(state, batch))
        found.append((finding.ok, finding.detail.rpartition("; ")[2]))
    return found


def test_a_check_says_what_a_hook_changes() -> None:
    """Rounded gradients get their tolerance, and PowerSGD is not checked in silence."""
    configs = [config_of(*HOOKS[name]) for name in ("bf16", "powersgd")]
    assert run_ranks(checked, 2, configs)[0] == [
        (True, "comm_hook=bf16 may be off by 0.02 of the largest"),
        (True, "these are sent as they are: comm_hook=powersgd begins at a later step"),
    ]


@pytest.mark.parametrize(
    ("keys", "is_promised"),
    [
        ({"parallelism.comm_hook": None}, True),
        ({"parallelism.comm_hook": "bf16"}, False),
        ({"parallelism.post_local_sgd.period": 2}, False),
    ],
)
def test_a_comparison_promises_no_parity_of_inexact_steps(
    keys: dict[str, Any], is_promised: bool, tmp_path: Path
) -> None:
    """Their losses may differ, which is no fault; and they are no reference."""
    assert promises_parity(Run(tmp_path, config=keys)) is is_promised


OWN_LOOP = ("task=own_loops.train", "allowed_targets=[own_loops]")
REFUSED = {
    ("parallelism.comm_hook=int8",): "must be null or one of bf16, fp16, powersgd",
    (*POWERSGD, "parallelism.powersgd.start_step=1"): "must be a whole number, 2 or greater",
    (*POWERSGD, "parallelism.powersgd.matrix_approximation_rank=0"): "1 or greater",
    (*POWERSGD, "parallelism.powersgd.start_step=9", "train.max_steps=9"): "no step would compress",
    (*POWERSGD, "parallelism.find_unused_parameters=true"): "find_unused_parameters=false",
    (*POWERSGD, *OWN_LOOP): "a loop of your own",
    ("parallelism.comm_hook=bf16", "backend=mpi"): "does not work with backend=mpi",
    (*POWERSGD, "backend=mpi"): "would wait for itself",
    (*LOCAL, "parallelism.post_local_sgd.period=0"): "null or a whole number, 1 or greater",
    (*LOCAL, "parallelism.post_local_sgd.start_step=-1"): "must be 0 or greater",
    (*LOCAL, "parallelism.post_local_sgd.start_step=9", "train.max_steps=9"): "train on its own",
    (*LOCAL, "parallelism.comm_hook=bf16"): "are both hooks, and DDP takes one",
    (*LOCAL, "ema.decay=0.9"): "each rank has its own; write ema.decay=null",
    (*LOCAL, "task=check"): "task=check compares equal ranks",
    (*LOCAL, *OWN_LOOP): "a loop of your own",
    ("train.compile=true", "parallelism.bucket_cap_mb=0"): "must be 1 or greater with train.comp",
    ("parallelism.static_graph=true", "train.grad_accum_steps=2"): "cannot skip gradient syncs",
    (
        "parallelism=ddp_mp",
        "model=toy_mp",
        "+parallelism.comm_hook=bf16",
    ): "a replica on one device",
}


@pytest.mark.parametrize("keys", REFUSED)
def test_pairs_that_fail_are_refused_before_any_rank_starts(keys: tuple[str, ...]) -> None:
    """Each of them crashes, hangs or goes wrong in silence; the line names the fix."""
    assert REFUSED[keys] in config_error("world_size=2", *keys)


@pytest.mark.parametrize(
    ("keys", "words"), [(POWERSGD, "NaN for good"), (LOCAL, "ranks would skip different ones")]
)
def test_scaled_losses_are_refused_where_an_overflow_would_stay(
    keys: tuple[str, ...], words: str
) -> None:
    """The scaler skips a step, but not what a hook has kept, nor on other ranks."""
    line = config_error(
        "world_size=2",
        "train.precision=fp16",
        *keys,
        hardware=Hardware(num_gpus=2, num_cores=4),
    )
    assert words in line
