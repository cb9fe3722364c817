"""A resumed run equals one that was never interrupted, and nothing foreign is resumed."""

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from tiers import first_of
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from train_states import (
    MNIST_NET,
    NO_DROPOUT,
    STEPS_PER_EPOCH,
    TOLERANCES,
    TOY,
    Trace,
    at,
    build,
    compose_config,
    equal,
    run_loop,
    with_work,
)

from ddp_runner.checkpoint.saved_objects import PARTS
from ddp_runner.checkpoint.store import load_checkpoint, save_checkpoint
from ddp_runner.config.schema import Config
from ddp_runner.config.training import CheckpointConfig
from ddp_runner.data.splits import TensorSplit
from ddp_runner.dist_env import DistEnv
from ddp_runner.errors import UserError
from ddp_runner.train.snapshot import restore, snapshot
from ddp_runner.train.state import TrainState

NUM_STEPS = 3 * STEPS_PER_EPOCH
MID_EPOCH, EPOCH_END = STEPS_PER_EPOCH + 2, STEPS_PER_EPOCH
SMALL_BATCH = ("batch.global_size=8", "train.epochs=4")
LARGE_BATCH = ("batch.global_size=16", "train.epochs=8")
KEYS = ("scheduler=cosine", f"train.max_steps={NUM_STEPS}", "train.log_every_steps=1")


def config_of(*overrides: str, world_size: int = 2) -> Config:
    """Return a config whose run takes NUM_STEPS steps and logs each of them."""
    return compose_config(*KEYS, *overrides, world_size=world_size)


def loop(env: DistEnv, config: Config, folder: Path, stop_at: int | None = None) -> Trace:
    """Go on from what the folder holds, to the end or until the last rank is asked to stop."""
    # With several ranks a wish is counted in the step after it.
    stop_after = None if stop_at is None else stop_at - (env.world_size > 1)
    return run_loop(env, config, max_steps=NUM_STEPS, folder=folder, stop_after=stop_after)


def whole(env: DistEnv, config: Config) -> Trace:
    """Run without an interruption."""
    return run_loop(env, config, max_steps=NUM_STEPS)


@cache
def uninterrupted(*overrides: str) -> list[Trace]:
    """Return the traces of two ranks that nobody stopped."""
    return run_ranks(whole, 2, config_of(*overrides))


def figures(*traces: Trace) -> list[dict[str, float]]:
    """Return what was logged, without the speed, which is never the same."""
    lines = [line for trace in traces for line in trace.lines]
    return [{k: v for k, v in line.items() if not k.startswith("perf/")} for line in lines]


def told_by_checkpoints(*traces: Trace) -> dict[int, dict[str, float]]:
    """Return the metrics of the checkpoints that were saved last for their step."""
    return {step: message for trace in traces for step, message in trace.saved.items()}


@pytest.mark.full
@pytest.mark.parametrize("stop_at", first_of([MID_EPOCH, EPOCH_END]))
def test_resumed_run_equals_the_uninterrupted_one(tmp_path: Path, stop_at: int) -> None:
    """With dropout, momentum and a schedule, all figures and weights are the same, bit by bit.

    And saving each step costs no bit.
    """
    config = config_of(*MNIST_NET, "checkpoint.every_steps=1")
    first = run_ranks(loop, 2, config, tmp_path, stop_at)
    second = run_ranks(loop, 2, config, tmp_path)
    for stopped, resumed, expected in zip(first, second, uninterrupted(*MNIST_NET), strict=True):
        assert (stopped.status, stopped.progress.step) == ("preempted", stop_at)
        assert resumed.status == "completed"
        assert figures(stopped, resumed) == figures(expected)
        assert torch.equal(resumed.weights, expected.weights)
        assert resumed.stand == expected.stand
        found = told_by_checkpoints(stopped, resumed)
        assert {**found, **told_by_checkpoints(expected)} == found


@pytest.mark.parametrize("num_steps", [EPOCH_END, MID_EPOCH])
def test_a_stop_in_the_last_step_loses_no_evaluation(tmp_path: Path, num_steps: int) -> None:
    """The run completes, its epoch whole or not; resumed once more it does nothing."""
    for trace in run_ranks(last_step, 2, config_of(*TOY), tmp_path, num_steps):
        first, second = trace
        assert (first.status, first.progress.step) == ("completed", num_steps)
        assert [line["step"] for line in first.lines if "eval/loss" in line][-1] == num_steps
        assert {"train/loss", "eval/loss"} <= first.saved[num_steps].keys()
        assert first.place == divmod(num_steps, STEPS_PER_EPOCH)
        assert (second.status, second.lines, second.saved) == ("completed", [], {})


def last_step(env: DistEnv, config: Config, folder: Path, num_steps: int) -> list[Trace]:
    """Ask for a stop that is agreed on in the last step, then resume."""
    return [
        run_loop(env, config, max_steps=num_steps, folder=folder, stop_after=stop_after)
        for stop_after in (num_steps - 1, None)
    ]


def unevaluated(env: DistEnv, config: Config, folder: Path) -> Trace:
    """Resume a run that was saved after its last step and before the evaluation."""
    state = build(env, config)
    state = at(state, epoch=1, step=EPOCH_END, owes_evaluation=True)
    content = snapshot(state)
    if env.is_rank_zero:
        save_checkpoint(
            folder, content, step=EPOCH_END, metrics={}, config=CheckpointConfig(keep=1), log=print
        )
    return run_loop(env, config, max_steps=EPOCH_END, folder=folder, state=state)


def test_an_evaluation_that_is_missing_is_made_by_the_resume(tmp_path: Path) -> None:
    """The run was killed after the last step, before its evaluation."""
    for trace in run_ranks(unevaluated, 2, config_of(*TOY), tmp_path):
        assert [line["step"] for line in trace.lines if "eval/loss" in line] == [EPOCH_END]
        assert trace.place == (1, 0)
        assert "eval/loss" in trace.saved[EPOCH_END]


@pytest.fixture(scope="module")
def stopped_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the checkpoints of a run of two ranks that was stopped amid an epoch."""
    folder = tmp_path_factory.mktemp("stopped")
    run_ranks(loop, 2, config_of(*MNIST_NET, *NO_DROPOUT), folder, MID_EPOCH)
    return folder


@pytest.mark.full
@pytest.mark.parametrize(
    ("mode", "world_size", "grad_accum_steps"),
    first_of([("ddp", 4, 1), ("single", 1, 1), ("ddp", 1, 2), ("ddp", 4, 2)]),
)
def test_run_resumes_at_another_world_size_and_mode(
    tmp_path: Path, stopped_run: Path, mode: str, world_size: int, grad_accum_steps: int
) -> None:
    """The global batches stay the same, so that losses and weights agree to rounding."""
    shutil.copytree(stopped_run, tmp_path, dirs_exist_ok=True)
    keys = (f"parallelism={mode}", f"train.grad_accum_steps={grad_accum_steps}")
    config = config_of(*MNIST_NET, *NO_DROPOUT, *keys, world_size=world_size)
    found = run_ranks(loop, world_size, config, tmp_path)[0]
    expected = uninterrupted(*MNIST_NET, *NO_DROPOUT)[0]
    tolerances = TOLERANCES[torch.float32]
    torch.testing.assert_close(found.losses, expected.losses[MID_EPOCH:], **tolerances)
    torch.testing.assert_close(found.weights, expected.weights, **tolerances)


def attempts(
    env: DistEnv, config: Config, others: list[Config], folder: Path, stop_at: int
) -> list[str]:
    """Leave a checkpoint, then take it up under each other config; return how that went."""
    run_loop(env, config, max_steps=NUM_STEPS, folder=folder, stop_after=stop_at)
    answers = []
    for other in others:
        try:
            step = restore(build(env, other), folder, log=lambda _: None)
            answers.append(f"resumed at step {step}")
        except UserError as error:
            answers.append(str(error))
    return answers


def test_foreign_checkpoint_is_rejected_with_what_differs(tmp_path: Path) -> None:
    """One line has the key that differs, with the checkpoint's value and the run's."""
    single = (*TOY, "parallelism=single")
    foreign = {
        "fit|model|net1.weight": (
            "model._target_=torch.nn.Linear",
            "+model.in_features=10",
            "+model.out_features=5",
        ),
        "fit|optimizer|the optimizer was SGD and is Adam now; keep it": ("optimizer=adam",),
        "fit|scheduler|was LambdaLR and is ReduceLROnPlateau now": ("scheduler=plateau",),
        "has|ema|this run restores": ("ema.decay=0.9",),
        "fit|data|27 training samples then, 28 now": ("dataset.num_samples=28",),
        "fit|batches|inside epoch 2|seed=0|seed=1": ("seed=1",),
        "batch.global_size=8|batch.global_size=4": ("batch.global_size=4",),
    }
    others = [config_of(*single, *keys, world_size=1) for keys in foreign.values()]
    config = config_of(*single, world_size=1)
    (answers,) = run_ranks(attempts, 1, config, [*others, config], tmp_path, MID_EPOCH)
    assert answers.pop() == f"resumed at step {MID_EPOCH}"
    for parts, answer in zip(foreign, answers, strict=True):
        assert str(tmp_path) in answer
        assert len(answer.splitlines()) == 1
        for part in parts.split("|"):
            assert part in answer


def test_batch_size_may_change_between_epochs(tmp_path: Path) -> None:
    """Nothing of the next epoch has been used up then."""
    config, other = (
        config_of(*TOY, f"batch.global_size={size}", f"train.max_steps={EPOCH_END}", world_size=1)
        for size in (8, 4)
    )
    (answers,) = run_ranks(attempts, 1, config, [other], tmp_path, None)
    assert answers == [f"resumed at step {NUM_STEPS}"]


def by_epochs(env: DistEnv, config: Config, folder: Path) -> Trace:
    """Train the epochs that are left."""
    return run_loop(env, config, max_steps=None, folder=folder)


@pytest.mark.full
@pytest.mark.parametrize(("before", "after"), [(8, 16), (16, 8)])
@pytest.mark.parametrize("scheduler", ["cosine", "step"])
def test_a_resume_with_another_batch_size_trains_the_epochs_that_are_left(
    tmp_path: Path, before: int, after: int, scheduler: str
) -> None:
    """From epoch 4 on it takes the steps and rates of a run that always had the new size."""
    steps_per_epoch = {8: 4, 16: 2}  # of 27 samples
    keys = [*TOY, f"scheduler={scheduler}", "train.log_every_steps=1"]
    keys += ["scheduler.every_epochs=3"] if scheduler == "step" else []

    def config(size: int, epochs: int) -> Config:
        return compose_config(*keys, f"batch.global_size={size}", f"train.epochs={epochs}")

    run_ranks(by_epochs, 1, config(before, 4), tmp_path)
    (resumed,) = run_ranks(by_epochs, 1, config(after, 8), tmp_path)
    (expected,) = run_ranks(by_epochs, 1, config(after, 8), tmp_path / "whole")
    assert (resumed.status, resumed.place) == ("completed", (8, 0))
    steps_before = 4 * steps_per_epoch[before]
    assert resumed.progress.step == steps_before + 4 * steps_per_epoch[after]
    rates = [
        [line["train/lr"] for line in trace.lines if "train/lr" in line]
        for trace in (resumed, expected)
    ]
    assert rates[0] == rates[1][4 * steps_per_epoch[after] :]


def schedule_step(env: DistEnv, config: Config, other: Config, folder: Path) -> int:
    """Train, resume under another config, and return the step of the schedule."""
    run_loop(env, config, max_steps=None, folder=folder)
    state = build(env, other)
    restore(state, folder, log=print)
    return int(state.schedule.scheduler.last_epoch)


def test_a_schedule_with_a_memory_keeps_its_step_at_another_batch_size(tmp_path: Path) -> None:
    """Its rates came about step by step: another count would not fit them."""
    keys = (*TOY, "scheduler._target_=torch.optim.lr_scheduler.StepLR", "+scheduler.step_size=10")
    config, other = (compose_config(*keys, *last) for last in (SMALL_BATCH, LARGE_BATCH))
    assert run_ranks(schedule_step, 1, config, other, tmp_path) == [4 * STEPS_PER_EPOCH]


def test_a_run_of_so_many_steps_keeps_its_schedule_at_another_batch_size(tmp_path: Path) -> None:
    """Its measure are the steps: those that it has taken count, whatever was in them."""
    keys = (*TOY, "scheduler=cosine")
    config = compose_config(*keys, "batch.global_size=8", f"train.max_steps={2 * STEPS_PER_EPOCH}")
    other = compose_config(*keys, "batch.global_size=16", "train.max_steps=20")
    assert run_ranks(schedule_step, 1, config, other, tmp_path) == [2 * STEPS_PER_EPOCH]


def keys_of_the_group(
    env: DistEnv, config: Config, other: Config, folder: Path
) -> dict[str, object]:
    """Train, resume under another config, and return what is in the optimizer's group."""
    run_loop(env, config, max_steps=2, folder=folder)
    state = build(env, other)
    restore(state, folder, log=print)
    return dict(state.optimizer.param_groups[0])


def test_a_resumed_run_takes_the_optimizers_keys_that_it_is_given(tmp_path: Path) -> None:
    """Not only its rate, of which the next resume is to know as well."""
    given = {"lr": 0.02, "momentum": 0.5, "weight_decay": 0.25}
    other = compose_config(*TOY, *(f"optimizer.{key}={value}" for key, value in given.items()))
    (found,) = run_ranks(keys_of_the_group, 1, compose_config(*TOY), other, tmp_path)
    assert {**found, **given, "initial_lr": 0.02} == found


def scaler_states(env: DistEnv, config: Config, folder: Path) -> list[dict[str, Any]]:
    """Return how a run leaves its scaler, and how it takes it up again."""
    first, second = build(env, config), build(env, config)
    first = replace(first, scaler=torch.amp.GradScaler("cpu", init_scale=128.0))
    run_loop(env, config, max_steps=2, folder=folder, state=first)
    second = replace(second, scaler=torch.amp.GradScaler("cpu"))
    restore(second, folder, log=print)
    return [first.scaler.state_dict(), second.scaler.state_dict()]


def test_a_resumed_run_keeps_the_scale_that_it_had_found(tmp_path: Path) -> None:
    """With the first one its steps would overflow once more."""
    ((saved, resumed),) = run_ranks(scaler_states, 1, compose_config(*TOY), tmp_path)
    assert saved["scale"] == 128.0
    assert resumed == saved


def with_a_scaler(env: DistEnv, config: Config, folder: Path) -> int | None:
    """Resume a run that scaled no loss as one that does."""
    run_loop(env, config, max_steps=2, folder=folder)
    state = build(env, config)
    state = replace(state, scaler=torch.amp.GradScaler("cpu", enabled=True))
    return restore(state, folder, log=print)


def test_a_run_may_go_on_in_fp16(tmp_path: Path) -> None:
    """Its checkpoint has no scale yet."""
    assert run_ranks(with_a_scaler, 1, compose_config(*TOY), tmp_path) == [2]


def of_the_old_order(env: DistEnv, config: Config, folder: Path, in_epoch: int) -> str:
    """Resume a checkpoint as versions wrote it that had another order of samples."""
    state = build(env, config)
    state = at(state, epoch=1, step=4 + in_epoch, in_epoch=in_epoch)
    content = snapshot(state)
    content["objects"]["batches"]["order"]["the version of the order"] -= 1
    save_whatever(folder, content, step=state.progress.step)
    try:
        return f"resumed at {restore(state, folder, log=print)}"
    except UserError as error:
        return str(error)


@pytest.mark.parametrize(("in_epoch", "message"), [(2, "inside epoch 2"), (0, "resumed at 4")])
def test_an_epoch_of_another_order_cannot_be_finished(
    tmp_path: Path, in_epoch: int, message: str
) -> None:
    """Some samples would come twice and others never; between epochs nothing is lost."""
    config = compose_config(*TOY)
    (answer,) = run_ranks(of_the_old_order, 1, config, tmp_path, in_epoch)
    assert message in answer
    assert len(answer.splitlines()) == 1


def misfit(env: DistEnv, config: Config, folder: Path) -> str:
    """Resume a checkpoint that claims to be of this model and has another shape."""
    state = at(build(env, config), step=1)
    content = snapshot(state)
    content["objects"]["model"]["net1.weight"] = torch.zeros(3, 3)
    save_checkpoint(folder, content, step=1, metrics={}, config=CheckpointConfig(keep=1), log=print)
    with pytest.raises(UserError) as error:
        restore(state, folder, log=print)
    return str(error.value)


def test_weights_of_another_shape_are_rejected(tmp_path: Path) -> None:
    """As when a model's code changed since: the answer names the parameter."""
    (answer,) = run_ranks(misfit, 1, config_of(*TOY, world_size=1), tmp_path)
    sentence = (
        "net1.weight is (3, 3) there and (10, 10) in the model; give weights of the same model"
    )
    assert sentence in answer
    assert "Error" not in answer
    assert len(answer.splitlines()) == 1


@pytest.mark.parametrize("scheduler", ["constant", "cosine"])
def test_resumed_run_takes_the_rate_that_it_is_given(tmp_path: Path, scheduler: str) -> None:
    """A smaller optimizer.lr, the way out of a diverged run, holds from the next step on."""
    keys = (*TOY, f"scheduler={scheduler}")
    smaller = config_of(*keys, "optimizer.lr=0.001")
    run_ranks(loop, 2, config_of(*keys), tmp_path, MID_EPOCH)
    found, expected = (
        [line["train/lr"] for line in trace.lines if "train/lr" in line]
        for trace in (run_ranks(loop, 2, smaller, tmp_path)[0], run_ranks(whole, 2, smaller)[0])
    )
    assert found == expected[MID_EPOCH:]


def save_whatever(folder: Path, content: Any, *, step: int = 1) -> None:
    """Save whatever it is as a checkpoint whose checksums are right."""
    save_checkpoint(
        folder, content, step=step, metrics={}, config=CheckpointConfig(keep=1), log=print
    )


def error_of(state: TrainState, config: Config, folder: Path) -> str:
    """Return the sentence with which the folder's checkpoint is rejected. Collective."""
    with pytest.raises(UserError) as error:
        restore(state, folder, log=lambda _: None)
    assert "\n" not in str(error.value)
    return str(error.value)


def without(key: str) -> Callable[[dict[str, Any]], Any]:
    """Return what drops a part of a state."""
    return lambda content: {name: part for name, part in content.items() if name != key}


def of(name: str, change: Callable[[Any], Any]) -> Callable[[dict[str, Any]], Any]:
    """Return what changes the state of one object."""

    def forge(content: dict[str, Any]) -> dict[str, Any]:
        objects = content["objects"]
        return content | {"objects": objects | {name: change(objects[name])}}

    return forge


FORGED: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a list": lambda content: [content],
    "nothing": lambda content: {},
    "objects": lambda content: content | {"objects": [1]},
    "data": of("data", lambda _: [1]),
    "place": of("batches", lambda _: [1]),
    "order": of("batches", lambda place: place | {"order": [1]}),
    "progress": of("progress", lambda _: [1]),
    "optimizer": of("optimizer", lambda _: []),
    "optimizer's groups": of("optimizer", lambda state: state | {"settings": None}),
    "schedule": of("scheduler", lambda _: {}),
    "parameters": of("model", lambda _: {"a": 1}),
    **{f"no {part}": without(part) for part in sorted(PARTS)},
}


def errors_of(env: DistEnv, config: Config, folder: Path) -> dict[str, str]:
    """Return the sentence for each forged state, by its name."""
    state = build(env, config)
    content = snapshot(at(state, step=1, in_epoch=1))
    answers = {}
    for number, (name, forge) in enumerate(FORGED.items()):
        save_whatever(folder / str(number), forge(dict(content)))
        answers[name] = error_of(state, config, folder / str(number))
    save_whatever(folder / "whole", content)
    assert restore(state, folder / "whole", log=print) == 1
    return answers


def test_a_forged_checkpoint_is_rejected_in_one_sentence(tmp_path: Path) -> None:
    """Its checksums are right, and what it holds is not what a run saves."""
    (answers,) = run_ranks(errors_of, 1, config_of(*TOY, world_size=1), tmp_path)
    assert list(answers) == list(FORGED)
    assert all(str(tmp_path) in answer for answer in answers.values())


def all_damaged(env: DistEnv, config: Config, folder: Path) -> tuple[str, list[str]]:
    """Return how a rank answers to a folder where nothing is whole, and what it says of none."""
    logged_lines: list[str] = []
    asked = replace(config, resume="a run")
    assert restore(build(env, asked), folder / "none", log=logged_lines.append) is None
    return error_of(build(env, config), config, folder), logged_lines


def test_where_nothing_is_whole_every_rank_rejects(tmp_path: Path) -> None:
    """Rank 0 looks, and all end with its sentence; without any checkpoint the run begins."""
    for step in (1, 2):
        save_whatever(tmp_path, {}, step=step)
        os.truncate(tmp_path / f"step-{step:08d}" / "state.pt", 7)
    first, second = run_ranks(all_damaged, 2, config_of(*TOY), tmp_path)
    assert first == second
    assert first[0].startswith("nothing is left to resume from: every checkpoint in ")
    assert first[1] == [f"{tmp_path / 'none'} has no checkpoint: the run begins at step 0"]


def sharded(env: DistEnv, config: Config) -> list[Any]:
    """Return what a rank would save of a split parameter and moment, and what of foreign shards."""
    state = build(env, config)
    mesh = init_device_mesh("cpu", (env.world_size,))
    whole = state.module.net1.weight
    part = distribute_tensor(whole.detach(), mesh, [Shard(0)])
    state.optimizer.state[whole]["momentum_buffer"] = part
    state.module.net1.weight = nn.Parameter(part)
    saved = snapshot(state)["objects"]
    moment = saved["optimizer"]["state"]["#0"]["momentum_buffer"]  # the module has another now
    state.optimizer.state[whole]["momentum_buffer"] = whole.detach().as_subclass(Foreign)
    with pytest.raises(UserError) as error:
        snapshot(state)
    return [whole.detach(), saved["model"]["net1.weight"], moment, str(error.value)]


class Foreign(Tensor):
    """Looks like a tensor of which torch keeps a part on each rank, and that cannot be gathered."""

    __module__ = "torch.distributed.foreign"


def test_shards_are_saved_as_whole_tensors_or_not_at_all() -> None:
    """Rank 0 alone keeps them; on every rank alike a foreign shard is rejected by its key."""
    first, second = run_ranks(sharded, 2, config_of(*TOY))
    for found in first[1:3]:
        assert torch.equal(found, first[0])
        assert type(found) is Tensor
    assert second[1:3] == [None, None]
    for answer in (first, second):
        assert "['momentum_buffer'] is a Foreign, so each rank has only a part" in answer[3]


def other_data(env: DistEnv, config: Config, folder: Path) -> dict[str, str]:
    """Return how a checkpoint answers to other samples than those it was saved with."""
    state = build(env, config)
    data = replace(state.work.dataset, digest="a")
    state = with_work(state, dataset=data)
    save_whatever(folder, snapshot(at(state, step=1)))
    more = TensorSplit(data.train.inputs[:20], data.train.targets[:20])
    fewer = TensorSplit(data.eval.inputs[:5], data.eval.targets[:5])
    others = {
        "train": replace(data, train=more),
        "eval": replace(data, eval=fewer),
        "content": replace(data, digest="b"),
    }
    answers = {}
    for name, dataset in others.items():
        other = with_work(state, dataset=dataset)
        answers[name] = error_of(other, config, folder)
    drawn = with_work(state, dataset=replace(data, digest=None))
    assert restore(drawn, folder, log=print) == 1
    return answers


def test_a_run_goes_on_with_the_data_that_it_began_with_only(tmp_path: Path) -> None:
    """The message has both numbers of samples."""
    (answers,) = run_ranks(other_data, 1, config_of(*TOY, world_size=1), tmp_path)
    assert "27 training samples then, 20 now; put" in answers["train"]
    assert "40 evaluation samples then, 5 now; put" in answers["eval"]
    assert "27 training samples, but different ones" in answers["content"]


@pytest.mark.parametrize("scheduler", ["constant", "cosine"])
def test_the_last_checkpoint_of_a_resumed_run_is_that_of_an_undisturbed_one(
    tmp_path: Path, scheduler: str
) -> None:
    """In every part: the schedule's counters as well as the tensors."""
    config = config_of(*TOY, f"scheduler={scheduler}", "optimizer.momentum=0.9", world_size=1)
    run_ranks(loop, 1, config, tmp_path / "whole")
    run_ranks(loop, 1, config, tmp_path / "parts", MID_EPOCH)
    run_ranks(loop, 1, config, tmp_path / "parts")
    name = f"step-{NUM_STEPS:08d}"
    one, other = (load_checkpoint(tmp_path / run / name) for run in ("whole", "parts"))
    assert one.keys() == other.keys()
    assert [key for key in one if not equal(one[key], other[key])] == []
