"""Schedulers of torch as they are: by steps or by a metric, resumed, and with a wrong keyword."""

import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.optim import lr_scheduler
from train_states import TOY, Trace, build, compose_config, run_loop

from ddp_runner.config.schema import Config
from ddp_runner.dist_env import DistEnv
from ddp_runner.errors import UserError
from ddp_runner.train.schedules import build_schedule
from ddp_runner.train.snapshot import restore

NUM_STEPS = 12
TORCHS = "scheduler._target_=torch.optim.lr_scheduler."
OURS = "ddp_runner.train.schedules"
# Each evaluation but the first counts as none better: the rate falls by half after it.
PLATEAU = (
    "scheduler=plateau",
    "scheduler.patience=0",
    "scheduler.factor=0.5",
    "+scheduler.threshold=0.9",
    "train.log_every_steps=1",
)


def new_optimizer() -> torch.optim.Optimizer:
    """Return an optimizer of one weight, with a rate of 0.05."""
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.05)


def torchs(name: str, **keys: Any) -> dict[str, Any]:
    """Return the keys of a scheduler of torch."""
    return {"_target_": f"torch.optim.lr_scheduler.{name}", **keys}


COSINE_FACTOR = {"_target_": "math.cos", "_partial_": True}  # any function of a step will do
WARMUP = {**torchs("LinearLR", total_iters=3), "_partial_": True}
DECAY = {**torchs("ExponentialLR", gamma=0.5), "_partial_": True}
SCHEDULERS: dict[str, dict[str, Any]] = {
    "OneCycleLR": {"max_lr": 0.5},
    "CosineAnnealingLR": {"T_max": 12},
    "StepLR": {"step_size": 2},
    "MultiStepLR": {"milestones": [2, 4]},
    "ConstantLR": {"total_iters": 3},
    "ExponentialLR": {"gamma": 0.5},
    "LinearLR": {},
    "PolynomialLR": {},
    "CosineAnnealingWarmRestarts": {"T_0": 3},
    "CyclicLR": {"base_lr": 0.01, "max_lr": 0.1},
}
# They take a function, a metric or other schedulers.
OF_OTHERS = {
    "LambdaLR": torchs("LambdaLR", lr_lambda=COSINE_FACTOR),
    "MultiplicativeLR": torchs("MultiplicativeLR", lr_lambda=COSINE_FACTOR),
    "ReduceLROnPlateau": torchs("ReduceLROnPlateau", patience=0, threshold=0.9),
    "SequentialLR": {
        "_target_": "ddp_runner.train.schedules.sequential",
        "schedulers": [WARMUP, DECAY],
        "milestones": [3],
    },
    "ChainedScheduler": {
        "_target_": "ddp_runner.train.schedules.chained",
        "schedulers": [WARMUP, DECAY],
    },
}


@pytest.mark.parametrize(("name", "keys"), SCHEDULERS.items(), ids=SCHEDULERS)
def test_a_scheduler_of_torch_works_as_it_is(name: str, keys: dict[str, Any]) -> None:
    """With its own keywords; the steps of the run are given to those alone that take them."""
    given = [f"+scheduler.{key}={value}" for key, value in keys.items()]
    config = compose_config(*TOY, f"{TORCHS}{name}", *given)
    optimizer, reference = new_optimizer(), new_optimizer()
    schedule = build_schedule(config, optimizer, total_steps=NUM_STEPS, steps_per_epoch=4)
    steps = {"total_steps": NUM_STEPS} if name == "OneCycleLR" else {}
    expected = getattr(lr_scheduler, name)(reference, **keys, **steps)
    for _ in range(NUM_STEPS):
        assert optimizer.param_groups[0]["lr"] == reference.param_groups[0]["lr"]
        for one in (optimizer, reference):
            one.step()
        schedule.step()
        schedule.step_on_metrics({"eval/loss": 1.0})
        expected.step()


@pytest.mark.parametrize(
    ("words", "halfway"),
    [
        (("scheduler=cosineannealinglr",), 0.5),
        (("scheduler=cosineannealinglr", f"scheduler.T_max={NUM_STEPS // 2}"), 0.0),
        (("scheduler=cosine",), 0.5),
        (("scheduler=cosine", f"scheduler.total_steps={NUM_STEPS // 2}"), 0.0),
        (("scheduler._target_=own_steps.warming_up", "+scheduler.num_warmup_steps=1"), 0.5),
    ],
)
def test_the_steps_of_the_run_are_given_under_the_name_that_they_have(
    words: tuple[str, ...], halfway: float
) -> None:
    """Unless the config gives them."""
    optimizer = new_optimizer()
    peak = optimizer.param_groups[0]["lr"]
    config = replace(compose_config(*TOY, *words), allowed_targets=["own_steps"])
    schedule = build_schedule(config, optimizer, total_steps=NUM_STEPS, steps_per_epoch=4)
    for _ in range(NUM_STEPS // 2):
        optimizer.step()
        schedule.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(halfway * peak)


def test_no_scheduler_of_torch_is_left_out() -> None:
    """A new one shows up here."""
    known = {
        name
        for name, one in vars(lr_scheduler).items()
        if inspect.isclass(one) and issubclass(one, lr_scheduler.LRScheduler) and name[0] != "_"
    }
    assert known - {"LRScheduler"} == SCHEDULERS.keys() | OF_OTHERS.keys()


def test_schedulers_in_a_row_and_in_a_chain_are_torchs() -> None:
    """A config cannot give torch's own classes the optimizer of the schedulers inside."""
    for name, arguments in (("SequentialLR", {"milestones": [3]}), ("ChainedScheduler", {})):
        config = replace(compose_config(*TOY), scheduler={"name": "x", **OF_OTHERS[name]})
        optimizer, reference = new_optimizer(), new_optimizer()
        schedule = build_schedule(config, optimizer, total_steps=NUM_STEPS, steps_per_epoch=4)
        inner: list[Any] = [
            lr_scheduler.LinearLR(reference, total_iters=3),
            lr_scheduler.ExponentialLR(reference, gamma=0.5),
        ]
        whole: dict[str, Any] = {"schedulers": inner, **arguments}
        own = [reference] if name == "SequentialLR" else []
        expected = getattr(lr_scheduler, name)(*own, **whole)
        found = []
        for _ in range(NUM_STEPS):
            found.append(optimizer.param_groups[0]["lr"])
            assert found[-1] == reference.param_groups[0]["lr"]
            for one in (optimizer, reference):
                one.step()
            schedule.step()
            expected.step()
        assert len(set(found)) > 4


def resumed_runs(
    env: DistEnv, configs: dict[str, Config], folder: Path
) -> dict[str, tuple[list[float], list[float], bool]]:
    """Return the rates of a whole run and of one in two parts, and whether the weights are equal.

    The keys are the names of the configs.
    """
    found = {}
    for name, config in configs.items():
        whole = run_loop(env, config, max_steps=NUM_STEPS)
        first = run_loop(env, config, max_steps=NUM_STEPS, folder=folder / name, stop_after=5)
        rest = run_loop(env, config, max_steps=NUM_STEPS, folder=folder / name)
        same = torch.equal(rest.weights, whole.weights)
        found[name] = rates(whole), rates(first) + rates(rest), same
    return found


@pytest.mark.full
def test_every_scheduler_goes_on_after_a_resume(tmp_path: Path) -> None:
    """With two groups of parameters, whose rates both follow it."""
    config = compose_config(
        *TOY,
        "params.groups=[{match:net2.*,lr:0.01}]",
        "train.log_every_steps=1",
        f"train.max_steps={NUM_STEPS}",
        "allowed_targets=[math]",
    )
    all_keys = {name: torchs(name, **keys) for name, keys in SCHEDULERS.items()} | OF_OTHERS
    all_keys |= {
        "our constant": {"_target_": f"{OURS}.constant", "warmup_steps": 7},
        "our step": {"_target_": f"{OURS}.step_decay", "every_epochs": 1, "gamma": 0.5},
    }
    configs = {
        name: replace(config, scheduler={"name": "x", **keys}) for name, keys in all_keys.items()
    }
    (found,) = run_ranks(resumed_runs, 1, configs, tmp_path)
    assert list(found) == list(configs)
    for name, (whole, parts, has_same_weights) in found.items():
        assert whole == parts, name
        assert has_same_weights, name
        assert len(set(whole)) > 1, name


@pytest.mark.parametrize(
    ("name", "total_steps", "keys", "factors"),
    [
        ("constant", 4, {"warmup_steps": 3}, [0.25, 0.5, 0.75, 1.0, 1.0]),
        ("cosine", 6, {"warmup_steps": 3}, [0.25, 0.5, 0.75, 1.0, 0.75, 0.25, 0.0, 0.0]),
        ("cosine", 3, {"min_factor": 0.2}, [1.0, 0.8, 0.4, 0.2, 0.2]),
        ("cosine", 2, {"warmup_steps": 2}, [1 / 3, 2 / 3, 1.0, 0.0]),
        ("step", 9, {"every_epochs": 2, "gamma": 0.1}, [*[1.0] * 4, *[0.1] * 4, 0.01]),
        ("step", 4, {"every_epochs": 1, "gamma": 0.5, "warmup_steps": 3}, [0.25, 0.5, 0.375, 0.5]),
    ],
)
def test_our_schedules_follow_their_formula(
    name: str, total_steps: int, keys: dict[str, Any], factors: list[float]
) -> None:
    """Warm-up, peak and end; beyond the end of the run a cosine stays where it was."""
    given = [f"++scheduler.{key}={value}" for key, value in keys.items()]
    config = compose_config(*TOY, f"scheduler={name}", *given)
    optimizer = new_optimizer()
    schedule = build_schedule(config, optimizer, total_steps=total_steps, steps_per_epoch=2)
    rates = []
    for _ in factors:
        rates.append(optimizer.param_groups[0]["lr"] / 0.05)
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx(factors)


def error_message(env: DistEnv, config: Config) -> str:
    """Return the sentence with which a config is rejected as its objects are built."""
    with pytest.raises(UserError) as rejected:
        build(env, config)
    return str(rejected.value)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ("optimizer.momentum=0 optimizer.nesterov=true", "cannot be built: Nesterov momentum"),
        (f"{TORCHS}StepLR", "'step_size'; its keys are none; add another by +scheduler.KEY="),
        (f"{TORCHS}StepLR +scheduler.step_size=2 +scheduler.monitor=eval/loss",
         "StepLR counts steps and takes no metric; leave it out"),
    ],
)  # fmt: skip
def test_a_key_that_does_not_fit_is_named(overrides: str, sentence: str) -> None:
    """One line with the key, what takes it, and the nearest keyword that there is."""
    (message,) = run_ranks(error_message, 1, compose_config(*TOY, *overrides.split()))
    assert sentence in message
    assert len(message.splitlines()) == 1


def loop(env: DistEnv, config: Config, folder: Path, stop_after: int | None = None) -> Trace:
    """Run the loop from the newest checkpoint on, to its end or a stop. Collective."""
    max_steps = config.train.max_steps or NUM_STEPS
    return run_loop(env, config, max_steps=max_steps, folder=folder, stop_after=stop_after)


def rates(trace: Trace) -> list[float]:
    """Return the rate of each step."""
    return [line["train/lr"] for line in trace.lines if "train/lr" in line]


def test_the_rate_falls_where_the_evaluations_stand_still(tmp_path: Path) -> None:
    """After each evaluation on all ranks alike; a resumed run goes on with the same rates."""
    config = compose_config(*TOY, *PLATEAU, world_size=2)
    first, second = run_ranks(loop, 2, config, tmp_path / "whole")
    assert rates(first) == rates(second) == [0.05] * 8 + [0.025] * 4
    stopped, _ = run_ranks(loop, 2, config, tmp_path / "cut", 9)
    resumed, _ = run_ranks(loop, 2, config, tmp_path / "cut")
    assert rates(stopped) + rates(resumed) == rates(first)
    assert torch.equal(resumed.weights, first.weights)


@pytest.mark.parametrize(
    "scheduler", [PLATEAU, (f"{TORCHS}StepLR", "+scheduler.step_size=8", "+scheduler.gamma=0.5")]
)
def test_a_resumed_run_takes_a_new_rate_in_proportion(
    tmp_path: Path, scheduler: tuple[str, ...]
) -> None:
    """Half of the rate that the config had is half of what the scheduler has made of it."""
    keys = (*TOY, *scheduler, "train.log_every_steps=1")
    run_ranks(loop, 1, compose_config(*keys), tmp_path, 9)
    (resumed,) = run_ranks(loop, 1, compose_config(*keys, "optimizer.lr=0.025"), tmp_path)
    assert rates(resumed) == pytest.approx([0.0125] * 3, rel=1e-12)


@pytest.mark.parametrize(
    ("scheduler", "halved"),
    [
        ((f"{TORCHS}CosineAnnealingWarmRestarts", "+scheduler.T_0=5"), "optimizer.lr=0.025"),
        ((f"{TORCHS}OneCycleLR", "+scheduler.max_lr=0.5"), "++scheduler.max_lr=0.25"),
    ],
)
def test_all_rates_that_a_scheduler_remembers_change_in_proportion(
    tmp_path: Path, scheduler: tuple[str, ...], halved: str
) -> None:
    """Those that it goes back to, and between which it goes."""
    keys = (*TOY, *scheduler, "train.log_every_steps=1")
    (whole,) = run_ranks(loop, 1, compose_config(*keys), tmp_path / "whole")
    run_ranks(loop, 1, compose_config(*keys), tmp_path / "cut", 9)
    (resumed,) = run_ranks(loop, 1, compose_config(*keys, halved), tmp_path / "cut")
    assert rates(resumed) == pytest.approx([rate / 2 for rate in rates(whole)[9:]])
    assert len(rates(resumed)) == NUM_STEPS - 9


def test_a_longer_run_takes_the_schedule_of_its_own_length(tmp_path: Path) -> None:
    """OneCycleLR ends with its run; resumed for more steps, it has so many to go."""
    keys = (*TOY, f"{TORCHS}OneCycleLR", "+scheduler.max_lr=0.1", "train.log_every_steps=1")
    longer = compose_config(*keys, "train.max_steps=8")
    run_ranks(loop, 1, compose_config(*keys, "train.max_steps=4"), tmp_path)
    (resumed,) = run_ranks(loop, 1, longer, tmp_path)
    (whole,) = run_ranks(loop, 1, longer, tmp_path / "whole")
    assert resumed.error == ""
    assert rates(resumed) == pytest.approx(rates(whole)[4:])


# By scheduler: its keys, one that a resume changes, and its value then.
CHANGED = {
    "ReduceLROnPlateau": ({"patience": 0, "factor": 0.5}, "factor", 0.25),
    "StepLR": ({"step_size": 2, "gamma": 0.5}, "gamma", 0.25),
    "MultiStepLR": ({"milestones": [2, 9], "gamma": 0.5}, "gamma", 0.25),
    "ExponentialLR": ({"gamma": 0.9}, "gamma", 0.8),
    "CosineAnnealingLR": ({"T_max": 20, "eta_min": 0.0}, "eta_min", 0.01),
    "CosineAnnealingWarmRestarts": ({"T_0": 5, "eta_min": 0.0}, "eta_min", 0.01),
    "PolynomialLR": ({"total_iters": 20, "power": 1.0}, "power", 2.0),
}


def taken_keys(
    env: DistEnv, config: Config, changes: dict[str, tuple[Config, Config]], folder: Path
) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Train under each scheduler, resume with other keys; return both objects' settings."""
    found = {}
    for name, (first, other) in changes.items():
        run_loop(env, first, max_steps=6, folder=folder / name)
        state = build(env, other)
        assert restore(state, folder / name, log=print) == 6
        found[name] = (vars(state.schedule.scheduler), state.optimizer.param_groups[0])
        assert state.schedule.scheduler.last_epoch > 0
    return {
        name: ({key: one for key, one in of.items() if isinstance(one, int | float)}, dict(group))
        for name, (of, group) in found.items()
    }


def test_every_key_that_a_resume_gives_wins_under_every_scheduler(tmp_path: Path) -> None:
    """Those of the optimizer, too, whatever the scheduler keeps in its groups."""
    config, changes = compose_config(*TOY, "train.log_every_steps=1"), {}
    for name, (keys, key, value) in CHANGED.items():
        scheduler = {"name": "x", **torchs(name, **keys)}
        other = replace(
            config,
            optimizer={**config.optimizer, "weight_decay": 0.5, "momentum": 0.25},
            scheduler={**scheduler, key: value},
        )
        changes[name] = replace(config, scheduler=scheduler), other
    (found,) = run_ranks(taken_keys, 1, config, changes, tmp_path)
    for name, (settings, group) in found.items():
        _, key, value = CHANGED[name]
        assert settings[key] == value, name
        assert group["weight_decay"] == 0.5, name
        assert group["momentum"] == 0.25, name


@pytest.mark.parametrize(
    ("keys", "other"),
    [
        (("CosineAnnealingLR", "+scheduler.T_max=6"), "+scheduler.T_max=12"),
        (("StepLR", "+scheduler.step_size=2"), "+scheduler.step_size=4"),
        (("ExponentialLR", "+scheduler.gamma=0.5"), "+scheduler.gamma=0.9"),
        (("CosineAnnealingLR", "+scheduler.T_max=12"), "optimizer.lr=0.01"),
    ],
)
def test_a_scheduler_with_other_keys_has_the_rates_of_a_run_that_always_had_them(
    keys: tuple[str, str], other: str, tmp_path: Path
) -> None:
    """Also where it had come to 0, from which its own rule never comes back."""
    name, key = keys
    start = (*TOY, f"{TORCHS}{name}", key, "train.log_every_steps=1")
    changed = [one for one in start if one.partition("=")[0] != other.partition("=")[0]]
    longer = compose_config(*changed, other, "train.max_steps=12")
    run_ranks(loop, 1, compose_config(*start, "train.max_steps=6"), tmp_path)
    (resumed,) = run_ranks(loop, 1, longer, tmp_path)
    (whole,) = run_ranks(loop, 1, longer, tmp_path / "whole")
    assert rates(resumed) == pytest.approx(rates(whole)[6:], rel=1e-12)
    assert rates(resumed)[0] > 0
