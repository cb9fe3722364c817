"""The class of a saved optimizer or scheduler: another class of the same name is another class."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from ddp_runner.checkpoint.optimizer_state import (
    by_names,
    load_optimizer,
    load_scheduler,
    parameter_names,
    scheduler_state,
)
from ddp_runner.errors import UserError


def of_module(kind: type, module: str) -> Any:
    """Return a class of the same name, as another module defines it."""
    return type(kind.__name__, (kind,), {"__module__": module})


def load(saved_kind: Any, kind: Any, *, names_module: bool = True) -> None:
    """Load the state of an optimizer or a scheduler of one class into another."""
    module = nn.Linear(2, 2)
    names = parameter_names({"model": module})

    def build(kind: Any) -> Any:
        if issubclass(kind, torch.optim.Optimizer):
            return kind(module.parameters(), lr=0.1)
        return kind(torch.optim.SGD(module.parameters()), step_size=2)

    saved, new = build(saved_kind), build(kind)
    if isinstance(new, torch.optim.Optimizer):
        state, now = by_names(saved, names), by_names(new, names)
    else:
        state, now = scheduler_state(saved), scheduler_state(new)
    if not names_module:
        del state["module"]
    if isinstance(new, torch.optim.Optimizer):
        load_optimizer(new, {**state, "settings": state["groups"]}, now["groups"], names)
    else:
        load_scheduler(new, {"state": state, "settings": state}, now, None)


@pytest.mark.parametrize(("noun", "kind"), [("optimizer", torch.optim.SGD), ("scheduler", StepLR)])
def test_a_class_of_the_same_name_in_another_module_is_rejected(noun: str, kind: type) -> None:
    """Their states may mean different things."""
    name, mine = kind.__name__, of_module(kind, "mine.first")
    load(mine, mine)
    for other in (of_module(kind, "mine.second"), kind):
        module = "torch" if other is kind else "mine.second"
        with pytest.raises(UserError, match=f"{noun} was mine.first.{name} and is {module}.{name}"):
            load(mine, other)


@pytest.mark.parametrize("kind", [torch.optim.SGD, StepLR])
def test_a_class_that_moved_inside_torch_still_loads(kind: type) -> None:
    """A new version of torch may have it in another module."""
    load(of_module(kind, "torch.optim.old"), of_module(kind, "torch.optim.new"))


@pytest.mark.parametrize("kind", [torch.optim.SGD, StepLR])
def test_a_checkpoint_that_names_no_module_still_loads(kind: type) -> None:
    """Earlier versions saved the name of the class alone."""
    load(kind, kind, names_module=False)
    load(of_module(kind, "mine"), of_module(kind, "mine"), names_module=False)
