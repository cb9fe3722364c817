"""Freezing and parameter groups by name: what each pattern chooses, and how a run keeps to it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn
from train_states import TOY, Trace, build, compose_config, flat_weights, run_loop, take_steps

from ddp_runner.config.schema import Config
from ddp_runner.dist_env import DistEnv
from ddp_runner.errors import UserError
from ddp_runner.train.optimizers import build_optimizer, freeze, parameter_groups
from ddp_runner.train.schedules import build_schedule
from ddp_runner.train.snapshot import restore

NUM_STEPS = 6


def network() -> nn.Module:
    """Return a network of two parts, each with weights of two dims and of one."""
    return nn.ModuleDict(
        {"body": nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3)), "head": nn.Linear(3, 2)}
    )


def names_in(module: nn.Module, groups: list[dict[str, Any]]) -> list[list[str]]:
    """Return the names of the parameters in each group."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return [[names[id(parameter)] for parameter in group["params"]] for group in groups]


def test_the_first_match_counts_and_the_rest_is_the_last_group() -> None:
    """In the order of the groups; each parameter is in one of them."""
    module = network()
    groups = parameter_groups(
        module,
        groups=[{"match": "head.*", "lr": 0.5}, {"match": "*.bias", "weight_decay": 0.0}],
        no_decay=False,
    )
    assert names_in(module, groups) == [
        ["head.weight", "head.bias"],
        ["body.0.bias", "body.1.bias"],
        ["body.0.weight", "body.1.weight"],
    ]
    keys = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    assert keys == [{"lr": 0.5}, {"weight_decay": 0.0}, {}]


def test_no_decay_is_for_biases_and_norms_unless_a_group_says_otherwise() -> None:
    """A group is split in two, and keeps its other keys in both."""
    module = network()
    groups = parameter_groups(
        module, groups=[{"match": "head.*", "weight_decay": 0.1}], no_decay=True
    )
    assert names_in(module, groups) == [
        ["head.weight", "head.bias"],
        ["body.0.weight"],
        ["body.0.bias", "body.1.weight", "body.1.bias"],
    ]
    assert [group.get("weight_decay") for group in groups] == [0.1, None, 0.0]
    (first, second) = parameter_groups(
        module.get_submodule("head"), groups=[{"match": "*", "lr": 0.5}], no_decay=True
    )
    assert (first["lr"], second["lr"], second["weight_decay"]) == (0.5, 0.5, 0.0)


def test_frozen_parameters_are_in_no_group() -> None:
    """And an empty rest is no group: torch would reject it."""
    module = network()
    freeze(module, ["body.*"])
    assert [name for name, one in module.named_parameters() if one.requires_grad] == [
        "head.weight",
        "head.bias",
    ]
    groups = parameter_groups(module, groups=[{"match": "*", "lr": 0.5}], no_decay=False)
    assert names_in(module, groups) == [["head.weight", "head.bias"]]


def test_a_shared_parameter_is_found_by_either_name_and_is_in_one_group() -> None:
    """As the weights of an embedding that are those of the output layer, too."""
    module = nn.ModuleDict({"embed": nn.Embedding(5, 3), "out": nn.Linear(3, 5, bias=False)})
    module.get_submodule("out").weight = module.get_parameter("embed.weight")
    groups = parameter_groups(module, groups=[{"match": "out.*", "lr": 0.5}], no_decay=False)
    assert names_in(module, groups) == [["embed.weight"]]
    freeze(module, ["out.weight"])
    assert not module.get_parameter("embed.weight").requires_grad


@pytest.mark.parametrize(
    ("frozen", "groups", "sentence"),
    [
        (["haed.*"], [], "params.freeze (haed.*) matches no parameter of the model; the nearest "
         "are head."),
        ([], [{"match": "head", "lr": 1}], "params.groups.0.match (head) matches no parameter"),
        (["head.*"], [{"match": "head.*", "lr": 1}], "params.groups.0.match (head.*) gets no "
         "parameter: all that it matches are frozen or in an earlier group"),
        ([], [{"match": "head.*", "lr": 1}, {"match": "head.bias", "lr": 2}],
         "params.groups.1.match (head.bias) gets no parameter"),
    ],
)  # fmt: skip
def test_a_pattern_without_parameters_is_one_line(
    frozen: list[str], groups: list[dict[str, Any]], sentence: str
) -> None:
    """A mistyped name would otherwise train with the wrong rate, and nobody would notice."""
    module = network()

    def choose() -> None:
        freeze(module, frozen)
        parameter_groups(module, groups=groups, no_decay=False)

    with pytest.raises(UserError) as error:
        choose()
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


def test_without_these_keys_the_optimizer_is_the_plain_one() -> None:
    """Its groups and its state are those of earlier checkpoints."""
    config, module = compose_config(*TOY, "optimizer=adamw"), network()
    found = build_optimizer(config, module).state_dict()
    keys = {key: config.optimizer[key] for key in ("lr", "weight_decay")}
    assert found == torch.optim.AdamW(module.parameters(), **keys).state_dict()


GROUPS = "params.groups=[{match:net2.*,lr:0.01,momentum:0.5}]"
FROZEN = "params.freeze=[net1.bias]"
DECAY = ("params.no_decay=true", "optimizer.weight_decay=0.1", "optimizer.momentum=0.9")


def reference(env: DistEnv, config: Config) -> torch.Tensor:
    """Take the steps with an optimizer whose groups were made by hand, without the frozen bias."""
    state = build(env, replace(config, params=type(config.params)()))
    net1, net2 = state.module.get_submodule("net1"), state.module.get_submodule("net2")
    state.optimizer = torch.optim.SGD(
        [
            {"params": [net2.weight], "lr": 0.01, "momentum": 0.5, "weight_decay": 0.1},
            {"params": [net2.bias], "lr": 0.01, "momentum": 0.5, "weight_decay": 0.0},
            {"params": [net1.weight], "lr": 0.05, "momentum": 0.9, "weight_decay": 0.1},
        ]
    )
    state.schedule = build_schedule(config, state.optimizer, total_steps=9, steps_per_epoch=4)
    return take_steps(env, config, NUM_STEPS, state=state).weights


def trained(env: DistEnv, config: Config) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights of a rank before and after some steps."""
    state = build(env, config)
    before = flat_weights(state.module)
    return before, take_steps(env, config, NUM_STEPS, state=state).weights


def test_a_run_with_groups_takes_the_steps_of_torchs_groups() -> None:
    """Bit for bit; under DDP nobody waits for a frozen parameter, which does not even decay."""
    config = compose_config(*TOY, *DECAY, GROUPS, FROZEN)
    ((_, found),) = run_ranks(trained, 1, config)
    assert torch.equal(found, run_ranks(reference, 1, config)[0])
    config = compose_config(*TOY, *DECAY, GROUPS, FROZEN, world_size=2)
    for before, after in run_ranks(trained, 2, config):
        changed = (before != after).split([100, 10, 50, 5])  # net1 of (10, 10), net2 of (5, 10)
        assert [bool(one.any()) for one in changed] == [True, False, True, True]


def loop(env: DistEnv, config: Config, folder: Path, stop_after: int | None = None) -> Trace:
    """Run from the newest checkpoint to the end or a stop."""
    return run_loop(env, config, max_steps=NUM_STEPS, folder=folder, stop_after=stop_after)


def test_a_resumed_run_keeps_its_groups_and_their_schedule(tmp_path: Path) -> None:
    """The logged rate is that of the last group, which has the optimizer's own keys."""
    keys = (*TOY, *DECAY, GROUPS, FROZEN, "scheduler=cosine", "train.log_every_steps=1")
    config = compose_config(*keys, f"train.max_steps={NUM_STEPS}")
    (whole,) = run_ranks(loop, 1, config, tmp_path / "whole")
    run_ranks(loop, 1, config, tmp_path / "cut", 3)
    (resumed,) = run_ranks(loop, 1, config, tmp_path / "cut")
    assert torch.equal(resumed.weights, whole.weights)
    rates = [line["train/lr"] for line in whole.lines if "train/lr" in line]
    assert rates[0] == 0.05


def other_groups(
    env: DistEnv, config: Config, others: list[Config], folder: Path
) -> list[list[dict[str, Any]] | str]:
    """Resume under other configs; return the groups that the optimizer then has, or the error."""
    run_loop(env, config, max_steps=3, folder=folder)
    answers: list[list[dict[str, Any]] | str] = []
    for other in others:
        state = build(env, other)
        try:
            restore(state, folder, log=print)
            answers.append(state.optimizer.state_dict()["param_groups"])
        except UserError as error:
            answers.append(str(error))
    return answers


def test_a_resume_may_change_the_groups_and_their_values(tmp_path: Path) -> None:
    """What was saved belongs to parameters by their names; a frozen one is left out."""
    config = compose_config(*TOY, GROUPS)
    changed = "params.groups=[{match:net2.*,lr:0.5,momentum:0.25}]"
    changes = (changed, "params.groups=[{match:net1.*,lr:0.01,momentum:0.5}]", FROZEN)
    others = [compose_config(*TOY, change) for change in changes]
    ((groups, moved, frozen),) = run_ranks(other_groups, 1, config, others, tmp_path)
    for found, expected in (
        (groups, [(0.5, 0.25, 2), (0.05, 0.0, 2)]),
        (moved, [(0.01, 0.5, 2), (0.05, 0.0, 2)]),
        (frozen, [(0.05, 0.0, 3)]),
    ):
        assert isinstance(found, list)
        values = [(one["lr"], one["momentum"], len(one["params"])) for one in found]
        assert values == expected


def error_of(env: DistEnv, config: Config) -> str:
    """Return the error with which a rank rejects a config."""
    with pytest.raises(UserError) as error:
        build(env, config)
    return str(error.value)


def test_a_model_that_is_wholly_frozen_has_nothing_to_train() -> None:
    """An optimizer without parameters would raise an error that names none of this."""
    (error,) = run_ranks(error_of, 1, compose_config(*TOY, "params.freeze=['*']"))
    assert "model=toy has no parameter that requires a gradient" in error
