"""What run.restore names is saved and restored, and a checkpoint of something else is one line."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, StepLR

from ddp_runner.checkpoint.saved_objects import Saver
from ddp_runner.checkpoint.store import save_checkpoint
from ddp_runner.config.training import CheckpointConfig
from ddp_runner.dist_env import DistEnv
from ddp_runner.errors import UserError
from ddp_runner.own_loop.wrapping import build_saver, validate_objects
from ddp_runner.parallelism.single import Single
from ddp_runner.tracking.run_dir import RunDir


def session(env: DistEnv, folder: Path, *, task: str = "mine.train") -> Any:
    """Return the parts of a session that saving needs."""
    config = SimpleNamespace(task=task, resume=None, checkpoint=CheckpointConfig())
    devices = (torch.device("cpu"),)
    return SimpleNamespace(
        mode=Single("single"),
        config=config,
        env=env,
        devices=devices,
        run_dir=RunDir(folder),
        log=lambda _: None,
    )


def objects() -> dict[str, Any]:
    """Return one of each kind."""
    module = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(module.parameters())
    return {
        "module": module,
        "optimizer": optimizer,
        "scheduler": StepLR(optimizer, 1, gamma=0.5),
        "best": {"score": 0.0, "at": [1, 2]},
    }


def save(saver: Saver, ours: Any) -> None:
    """Save the state of step 3."""
    content = saver.snapshot(3)
    if ours.env.is_rank_zero:
        save_checkpoint(
            ours.run_dir.checkpoints,
            content,
            step=3,
            metrics={},
            config=CheckpointConfig(),
            log=print,
        )
    torch.distributed.barrier()


def load(given: dict[str, Any], ours: Any) -> int | None:
    """Load the newest checkpoint; return its step."""
    folder = ours.run_dir.checkpoints
    found = build_saver(ours, given).restore(folder, is_resumed=True, log=ours.log)
    return found and found[0]


def saved_and_restored(env: DistEnv, folder: Path) -> tuple[Any, ...]:
    """Return what a rank had when it saved, and what it has after it has restored."""
    ours, given = session(env, folder), objects()
    saver = build_saver(ours, given)
    torch.manual_seed(env.rank)
    given["module"](torch.ones(1, 2)).sum().backward()
    given["optimizer"].step()
    given["scheduler"].step()
    given["best"].update(score=0.5)
    save(saver, ours)
    again = objects()
    again["best"]["other"] = 1
    step = load(again, ours)
    equal = torch.equal(again["module"].weight, given["module"].weight)
    rates = [one["optimizer"].param_groups[0]["lr"] for one in (given, again)]
    return step, equal, rates[0] == rates[1] != 1e-3, again["best"]


def test_objects_come_back(tmp_path: Path) -> None:
    """A dict of plain values is updated in place."""
    ranks = run_ranks(saved_and_restored, 2, tmp_path)
    for step, _, has_rate, best in ranks:
        assert (step, has_rate, best) == (3, True, {"score": 0.5, "at": [1, 2]})
    assert ranks[0][1], "rank 0's weights"


def error_of(call: Callable[[], object]) -> str:
    """Return the error line of a call."""
    with pytest.raises(UserError) as caught:
        call()
    return str(caught.value)


def errors(env: DistEnv, folder: Path) -> list[str]:
    """Return what is said of each checkpoint that does not fit."""
    ours, given = session(env, folder), objects()
    save(build_saver(ours, given), ours)
    other = given | {"module": nn.Linear(3, 3)}
    lines = [
        error_of(lambda: load({"module": given["module"]}, ours)),
        error_of(lambda: load(other, ours)),
        error_of(lambda: load(given, session(env, folder, task="other.train"))),
    ]
    with torch.no_grad():
        given["module"].bias[0] = torch.nan
    return [*lines, error_of(lambda: build_saver(ours, given).snapshot(3))]


def test_what_does_not_fit_is_one_line(tmp_path: Path) -> None:
    """Other names, other shapes, another task, and a parameter that is not finite."""
    (lines,) = run_ranks(errors, 1, tmp_path)
    path = tmp_path / "checkpoints" / "step-00000003"
    rule = f"checkpoint {path} has best, module, optimizer, scheduler, and this run restores module"
    assert lines[0].startswith(f"{rule}; ")
    assert lines[0].endswith(f"start a new run with model.weights={path}")
    assert lines[1].startswith(f"checkpoint {path} does not fit module: its state does not fit")
    assert lines[2].startswith(f"checkpoint {path} was made by task=mine.train, and this is task=")
    assert lines[3].startswith("parameter module.bias became NaN or infinite by step 3")


def test_an_object_without_a_state_is_rejected_at_once() -> None:
    """Long before the first checkpoint would fail."""
    with pytest.raises(UserError, match="best, a float, has no state_dict and load_state_dict"):
        validate_objects({"best": 0.5})


class Remembering(nn.Module):
    """A module with a buffer that each rank fills by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("hidden", torch.zeros(2))


def by_rank(env: DistEnv, folder: Path) -> dict[str, Any]:
    """Save what differs between two ranks; return what each has after a restore."""
    lines = list[str]()
    ours = session(env, folder)
    ours.log = lines.append
    given: dict[str, Any] = {"model": Remembering(), "state": {"at": 100 + env.rank}, "same": {}}
    if env.world_size == 2:
        given["model"].hidden += env.rank
        given["state"]["hidden"] = torch.full((3,), float(env.rank))
        save(build_saver(ours, given), ours)
        given = {"model": Remembering(), "state": {}, "same": {"more": 1}}
    assert load(given, ours) == 3
    found = {"at": given["state"]["at"], "same": given["same"], "lines": lines[:-1]}
    return found | {
        "hidden": given["state"]["hidden"].tolist(),
        "buffer": given["model"].hidden.tolist(),
    }


def test_what_differs_between_ranks_comes_back_by_rank(tmp_path: Path) -> None:
    """A carried hidden state, in a dict or a buffer; with fewer ranks a line says what is taken."""
    for rank, found in enumerate(run_ranks(by_rank, 2, tmp_path)):
        assert found["at"] == 100 + rank
        assert (found["hidden"], found["buffer"]) == ([rank] * 3, [rank] * 2)
        assert (found["same"], found["lines"]) == ({}, [])
    (alone,) = run_ranks(by_rank, 1, tmp_path)
    assert (alone["at"], alone["buffer"]) == (100, [0, 0])
    (line,) = alone["lines"]
    assert line.startswith("model, state differed between 2 ranks in checkpoint ")
    assert line.endswith("and this run has 1: all take rank 0's")


def grown(env: DistEnv, folder: Path) -> str:
    """Return how an optimizer with one group takes the state of one that had got another."""
    module, added, ours = nn.Linear(2, 2), nn.Linear(2, 2), session(env, folder)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
    given = {"module": module, "added": added, "optimizer": optimizer}
    saver = build_saver(ours, given)
    optimizer.add_param_group({"params": [*added.parameters()], "lr": 0.01})
    added(module(torch.ones(1, 2))).sum().backward()
    optimizer.step()
    save(saver, ours)
    fresh = torch.optim.Adam(module.parameters(), lr=0.1)
    error = error_of(lambda: load(given | {"optimizer": fresh}, ours))
    fresh.add_param_group({"params": [*added.parameters()], "lr": 0.01})
    assert load(given | {"optimizer": fresh}, ours) == 3
    assert [group["lr"] for group in fresh.param_groups] == [0.1, 0.01]
    assert len(fresh.state) == 4
    return error


def test_an_optimizer_with_fewer_groups_than_it_had_is_one_line(tmp_path: Path) -> None:
    """The states of the others would be lost without a word."""
    (error,) = run_ranks(grown, 1, tmp_path)
    assert "it had 2 groups of parameters, with added.weight, added.bias" in error


def objects_of() -> dict[str, Any]:
    """Return an optimizer with a warm-up and a cosine."""
    module = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    warm_up = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))
    cosine = CosineAnnealingLR(optimizer, 20)
    return {"a": module, "b": optimizer, "warm_up": warm_up, "cosine": cosine}


def two_schedulers(env: DistEnv, folder: Path) -> list[float]:
    """Return the rates of ten steps, undisturbed and with a restore after the sixth."""
    rates = []
    for is_cut in (False, True):
        given, ours = objects_of(), session(env, folder)
        saver = build_saver(ours, given)
        for step in range(10):
            given["b"].step()
            given["warm_up" if step < 3 else "cosine"].step()
            if step == 5 and is_cut:
                save(saver, ours)
                given = objects_of()
                assert load(given, ours) == 3
        rates.append(given["b"].param_groups[0]["lr"])
    return rates


def test_two_schedulers_in_turn_go_on_with_the_saved_rate(tmp_path: Path) -> None:
    """A warm-up that has ended must not set its rate once more."""
    ((whole, resumed),) = run_ranks(two_schedulers, 1, tmp_path)
    assert resumed == whole


def rates_after(env: DistEnv, folder: Path) -> list[tuple[float, float]]:
    """Return the rates that an optimizer and its scheduler resume with, in either order."""
    rates = []
    for names in (("optimizer", "scheduler"), ("scheduler", "optimizer")):
        ours = session(env, folder / names[0])
        for gamma in (0.5, 0.1):
            optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0)
            both = {"optimizer": optimizer, "scheduler": StepLR(optimizer, 1, gamma=gamma)}
            given = {name: both[name] for name in names}
            saver = build_saver(ours, given)
            if gamma == 0.5:
                for _ in range(2):
                    optimizer.step()
                    both["scheduler"].step()
                save(saver, ours)
        assert load(given, ours) == 3
        rates.append((optimizer.param_groups[0]["lr"], both["scheduler"].get_last_lr()[0]))
    return rates


def test_the_order_of_an_optimizer_and_its_scheduler_changes_no_rate(tmp_path: Path) -> None:
    """The scheduler has the last word: here two steps of the resume's own factor."""
    (rates,) = run_ranks(rates_after, 1, tmp_path)
    assert rates == [pytest.approx((0.01, 0.01))] * 2


class Fixed(torch.optim.Optimizer):
    """An optimizer without a learning rate."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"size": 0.1})

    def step(self, closure: Any = None) -> None:
        """Take a step of one size."""
        for group in self.param_groups:
            for one in group["params"]:
                one.data.sub_(group["size"])


def without_a_rate(env: DistEnv, folder: Path) -> int:
    """Return the step at which an optimizer without a rate goes on."""
    ours, given = session(env, folder), {"module": nn.Linear(2, 2)}
    given["optimizer"] = Fixed(given["module"].parameters())
    save(build_saver(ours, given), ours)
    return load(given, ours)


def test_an_optimizer_needs_no_learning_rate(tmp_path: Path) -> None:
    """It resumes as it trains."""
    assert run_ranks(without_a_rate, 1, tmp_path) == [3]
