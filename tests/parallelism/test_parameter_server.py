"""The parameter server: both modes, a lost trainer, resuming. Its parity is in test_parity."""

import os
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import train_states
from commands import background, run_command, wait_for, wait_for_end
from configs import config_error
from own_steps import WORDS
from ranks import run_ranks
from run_folders import assert_same_state, last_step, metrics, record, reproducible_metrics
from torch import Tensor, nn
from train_states import TOY, build, compose_config, run_loop, take_steps

from ddp_runner.config.schema import Config
from ddp_runner.data.splits import TensorSplit
from ddp_runner.dist_env import DistEnv
from ddp_runner.parallelism.mode import Engine, Sums
from ddp_runner.parallelism.parameter_server import (
    ParameterServer,
    copy_parts,
    flatten_gradients,
    flatten_state,
)
from ddp_runner.train import loop
from ddp_runner.train.first_batch import try_first_batch

PS = ("parallelism=ps", "train.num_threads=1")
# Dropout and momentum: a resumed run must find both as they were.
STOPPABLE = (
    *PS, "world_size=3", "model=mnist_net", "optimizer.momentum=0.9", "dataset=fake_images",
    "dataset.num_samples=64", "dataset.eval_samples=16", "batch.global_size=8", "train.epochs=10",
    "train.log_every_steps=1",
)  # fmt: skip
SQUARES = (*TOY, "train.step=own_steps.squares", "allowed_targets=[own_steps]")
# Steps enough for a signal to come in the midst of them.
LONG = (
    *PS, "world_size=4", "model=mnist_net", "dataset=fake_images", "batch.per_rank=16",
    "train.epochs=4", "parallelism.mode=async", "optimizer.lr=0.01",
)  # fmt: skip


def pid_of(folder: Path, rank: int) -> int:
    """Return a trainer's process, which its log names; 0 while it does not."""
    for path in folder.rglob(f"rank-{rank}.log"):
        if match := re.search(rf"rank {rank} is process (\d+)", path.read_text()):
            return int(match[1])
    return 0


def kill(pid: int) -> None:
    """Kill one process; 0 would be this one's whole group."""
    assert pid > 0
    os.kill(pid, signal.SIGKILL)


@pytest.mark.full
def test_both_modes_train_from_one_trainer_up(tmp_path: Path) -> None:
    """Each leaves staleness, waiting and pushes; only asynchronous pushes can be stale."""
    end = run_command(
        "-m",
        *PS,
        "model=toy",
        "optimizer=adam",
        "train.max_steps=24",
        "parallelism.needs.num_servers=1",
        "parallelism.mode=sync,async",
        "world_size=2,4",
        "hydra.sweep.dir=sweep",
        folder=tmp_path,
    )
    assert (end.exit_code, end.stderr) == (0, "")
    assert len(end.run_dirs) == 4
    for run_dir in end.run_dirs:
        fields, is_sync = record(run_dir), "mode=sync" in run_dir.name
        num_trainers = fields["world_size"] - 1
        assert (fields["status"], fields["step"]) == ("completed", 24)
        lines = [line for line in metrics(run_dir) if "ps/pushes_per_s" in line]
        for line in lines:
            assert line["ps/num_trainers"] == num_trainers
            assert line["ps/pushes_per_s"] > 0
            assert line["ps/trainer_wait_ms"] > 0
            assert line["ps/server_wait_ms"] > 0
        # Each trainer's parameters are as old as the pushes of the others since it got them.
        steady = lines[-1]["ps/staleness_mean"]
        assert steady == 0 if is_sync or num_trainers == 1 else 0 < steady <= 2 * num_trainers


@pytest.mark.full
@pytest.mark.slow
def test_a_stopped_run_goes_on_where_it_stood(tmp_path: Path) -> None:
    """Synchronous, with dropout: the resumed run equals the undisturbed one, bit for bit."""
    undisturbed = run_command(
        *STOPPABLE, "hydra.run.dir=undisturbed", folder=tmp_path / "a"
    ).run_dir
    folder = tmp_path / "b"
    with background(*STOPPABLE, folder=folder) as process:
        wait_for(lambda: last_step(folder) >= 11)
        os.kill(process.pid, signal.SIGINT)
        end = wait_for_end(process, folder)
    assert end.exit_code == 130
    assert record(end.run_dir)["step"] < record(undisturbed)["step"]
    resumed = run_command(f"resume={end.run_dir}", folder=folder)
    assert (resumed.exit_code, resumed.stderr) == (0, "")

    def deterministic_metrics(run_dir: Path) -> list[dict[str, object]]:
        return [
            {key: value for key, value in line.items() if not key.startswith("ps/")}
            for line in reproducible_metrics(run_dir)
        ]

    assert deterministic_metrics(resumed.run_dir) == deterministic_metrics(undisturbed)
    assert_same_state(resumed.run_dir, undisturbed)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["async", pytest.param("sync", marks=pytest.mark.slow)])
def test_a_lost_trainer_is_named_and_the_group_restarts(tmp_path: Path, mode: str) -> None:
    """From the last checkpoint, with all trainers, as in every other mode."""
    keys = (f"parallelism.mode={mode}", "launch.max_restarts=1", "checkpoint.every_steps=10")
    with background(*LONG, *keys, folder=tmp_path, spares=4) as process:
        wait_for(lambda: last_step(tmp_path) >= 20)
        kill(pid_of(tmp_path, 2))
        end = wait_for_end(process, tmp_path)
    assert (end.exit_code, end.stderr) == (0, "")
    assert record(end.run_dir)["status"] == "completed"
    log = (end.run_dir / "logs" / "rank-0.log").read_text()
    assert "restart 1 of 1: rank 2 was killed by SIGKILL" in log
    assert re.search(r"resumed from \S+step-0*[1-9]\d*0\b", log)
    assert metrics(end.run_dir)[-2]["ps/num_trainers"] == 3


@dataclass
class Computed(Engine):
    """Computes what a test wants for a batch's number."""

    compute: Callable[[int], Tensor]

    def backward(self, state: Any, batch: Any) -> Sums:
        """Leave gradients; the loss is the answer."""
        return Sums([self.compute(batch.number)], None, {})


def engine_of(
    mode: ParameterServer,
    env: DistEnv,
    module: nn.Module,
    compute: Callable[[int], Tensor] = lambda number: torch.zeros(()),
    *,
    steps_ahead: Callable[[int], int] = lambda number: 1,
    timeout_s: float = 240,
) -> Any:
    """Return a rank's engine without a run around it, and its state as an attribute."""
    batches = SimpleNamespace(seed=0, share=env.rank, step_at=numbered)
    config = SimpleNamespace(
        backend=SimpleNamespace(timeout_s=timeout_s), batch=SimpleNamespace(count="samples")
    )
    state = SimpleNamespace(
        module=module,
        work=SimpleNamespace(config=config, layout=mode.layout(env)),
        batches=batches,
        scalars=(),
        timer=SimpleNamespace(mark=lambda part: None),
        steps_ahead=steps_ahead,
    )
    engine: Any = mode.engine(state, Computed(compute))
    engine.state = state
    return engine


def numbered(number: int) -> Any:
    """Return a batch that has nothing but its number."""
    return SimpleNamespace(number=number, global_count=1)


def collected(server: Any, number: int) -> Tensor:
    """Let the server collect the gradients of a batch; return the loss."""
    loss: Tensor = server.backward(server.state, numbered(number)).loss
    return loss


def applied_batches(env: DistEnv, num_steps: int) -> list[int]:
    """Return the batches that a rank computed or, on the server, applied; stop at a step."""
    mode = ParameterServer("ps", mode="async")
    module, computed, first, period = nn.Linear(3, 1), list[int](), 100, 25

    def compute(number: int) -> Tensor:
        computed.append(number)
        module(torch.ones(1, 3)).sum().backward()
        return torch.tensor(float(number))

    engine = engine_of(
        mode, env, module, compute, steps_ahead=lambda number: period - len(computed) % period
    )
    if env.rank:
        assert engine.serve(engine.state) == "preempted"
        return computed
    server, under_way = engine, set[bool]()
    while not server.may_stop(len(computed) >= num_steps):
        computed.append(int(collected(server, first + len(computed))))
        if len(computed) % period == 0:
            assert server.may_stop(True)
            assert sorted(computed) == list(range(first, first + len(computed)))
        elif len(computed) < num_steps:
            under_way.add(not server.may_stop(True))
    assert True in under_way
    assert len(computed) <= num_steps + 2
    server.close("preempted")
    return computed


@pytest.mark.full
def test_each_batch_is_applied_once_and_none_is_under_way_at_a_boundary() -> None:
    """A stop waits for what the trainers still compute: at most a batch of each."""
    applied, *computed = run_ranks(applied_batches, 4, 510)
    wanted = Counter(range(100, 100 + len(applied)))
    assert Counter(applied) == wanted
    assert Counter(step for steps in computed for step in steps) == wanted


def rests(env: DistEnv, config: Config) -> list[tuple[str, int, bool]]:
    """Return each save and evaluation of a run, its step, and whether nothing was under way."""
    state, found = build(env, config), list[tuple[str, int, bool]]()

    def noted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **keywords: Any) -> Any:
            found.append((name, state.progress.step, state.engine.may_stop(True)))
            state.engine.may_stop(False)
            return call(*args, **keywords)

        return wrapped

    with (
        patch.object(train_states, "snapshot", noted("save", train_states.snapshot)),
        patch.object(loop, "evaluate", noted("evaluation", loop.evaluate)),
    ):
        run_loop(env, config, max_steps=17, state=state)
    return found


def test_nothing_is_under_way_at_a_save_or_an_evaluation() -> None:
    """Inside an epoch, at its end and at the last step: trainers wait for each other there."""
    periods = ("checkpoint.every_steps=4", "train.eval_every_steps=6", "batch.global_size=3")
    keys = ("parallelism.mode=async", "train.eval_every_epochs=1")
    found, *_ = run_ranks(rests, 4, compose_config(*TOY, *PS, *periods, *keys, world_size=4))
    assert {step for name, step, _ in found if name == "save"} >= {4, 8, 12, 16, 17}
    assert {step for name, step, _ in found if name == "evaluation"} >= {6, 12, 17}
    assert all(is_at_rest for _, _, is_at_rest in found)


def partly_trained(env: DistEnv, config: Config) -> dict[str, Tensor]:
    """Return the parameters of a model with a frozen and an unused one after some steps."""
    torch.set_default_dtype(torch.float64)
    state = build(env, config)
    state.module.net1.weight.requires_grad_(False)
    state.module.unused = nn.Parameter(torch.ones(3))
    state.optimizer.param_groups[0]["params"].append(state.module.unused)
    take_steps(env, config, 6, state=state)
    return {name: one.detach() for name, one in state.module.named_parameters()}


def test_parameters_without_a_gradient_stay_as_they_are() -> None:
    """Neither weight decay nor momentum moves a frozen or an unused one, as in one process."""
    keys = (*TOY, "optimizer.weight_decay=0.5", "optimizer.momentum=0.9")
    (single,) = run_ranks(partly_trained, 1, compose_config(*keys, "parallelism=single"))
    served, *_ = run_ranks(partly_trained, 3, compose_config(*keys, "parallelism=ps", world_size=3))
    assert torch.equal(served["unused"], torch.ones(3, dtype=torch.float64))
    for name, expected in single.items():
        torch.testing.assert_close(served[name], expected, rtol=1e-13, atol=1e-14)


def patient_steps(env: DistEnv, how: str) -> list[int]:
    """Return the batches collected by a server that is busy for longer than the timeout."""
    mode = ParameterServer("ps", mode=how)
    module = nn.Linear(3, 1)

    def compute(step: int) -> Tensor:
        module(torch.ones(1, 3)).sum().backward()
        return torch.tensor(step / (2 if how == "sync" else 1))

    engine = engine_of(mode, env, module, compute, timeout_s=2)
    if env.rank:
        assert engine.serve(engine.state) == "completed"
        return []
    applied = []
    for step in range(4):
        if step == 2:
            time.sleep(4.5)  # an evaluation, a slow disk
        applied.append(int(collected(engine, step)))
    engine.close("completed")
    return applied


@pytest.mark.full
@pytest.mark.parametrize("how", ["sync", "async"])
def test_trainers_outlast_a_server_that_is_busy(how: str) -> None:
    """However long it evaluates or saves: the timeout is for one that says nothing at all."""
    applied, *_ = run_ranks(patient_steps, 3, how)
    assert sorted(applied) == [0, 1, 2, 3]


def drawn_numbers(env: DistEnv, config: Config) -> list[float]:
    """Return what each step of a trainer draws, as its dropout would."""
    state, drawn = build(env, config), list[float]()
    state.module.register_forward_pre_hook(lambda *_: drawn.append(float(torch.rand(()))))
    take_steps(env, config, 2, state=state)
    return drawn


def test_each_step_of_each_trainer_draws_its_own_dropout() -> None:
    """With one mask for all, a batch would drop the same units in each of its shares or steps."""
    config = compose_config(*TOY, *PS, world_size=3)
    _, first, second = run_ranks(drawn_numbers, 3, config)
    assert len({*first, *second}) == 4


def served_buffers(env: DistEnv) -> list[float]:
    """Return the statistics of a BatchNorm that each trainer sets to its rank."""
    mode = ParameterServer("ps", mode="sync")
    norm = nn.BatchNorm1d(2)

    def compute(step: int) -> Tensor:
        norm(torch.tensor([[1.0, 2.0], [3.0, 5.0]])).sum().backward()
        norm.running_mean.fill_(env.rank)
        return torch.zeros(())

    engine = engine_of(mode, env, norm, compute)
    if env.rank == 0:
        collected(engine, 0)
        engine.close("completed")
    else:
        assert engine.serve(engine.state) == "completed"
    return [*norm.running_mean.tolist(), int(norm.num_batches_tracked)]


def test_the_server_has_the_buffers_of_the_first_trainer() -> None:
    """It is the server's model that is evaluated and saved, and it runs no forward itself."""
    assert run_ranks(served_buffers, 3)[0] == [1.0, 1.0, 1]


def loads(env: DistEnv, config: Config) -> int:
    """Return how many pieces of training data this rank loads in three steps."""
    state, load, loaded = build(env, config), TensorSplit.load, list[object]()

    def counting(split: TensorSplit, *args: Any, **keys: Any) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in load(split, *args, **keys):
            loaded.append(batch)
            yield batch

    with patch.object(TensorSplit, "load", counting):
        take_steps(env, config, 3, state=state)
    return len(loaded)


def test_the_server_loads_no_training_data() -> None:
    """Its trainers compute all shares; it knows the batches by their numbers."""
    server, *trainers = run_ranks(loads, 3, compose_config(*TOY, *PS, world_size=3))
    assert (server, trainers) == (0, [3, 3])


def served_scalars(env: DistEnv, config: Config) -> dict[str, float]:
    """Return the training step's scalars after two steps, where the loop has them."""
    state = build(env, config)
    try_first_batch(state)
    trace = take_steps(env, config, 2, state=state)
    return {name: one for name, one in trace.scalars.items() if name != "worst"}  # no sum


@pytest.mark.parametrize("keys", [SQUARES, (*WORDS, "batch.global_size=8")])
def test_the_scalars_of_a_training_step_come_with_the_push(keys: tuple[str, ...]) -> None:
    """The server has those of one process, per sample or per token."""
    (whole,) = run_ranks(served_scalars, 1, compose_config(*keys, "parallelism=single"))
    served, *_ = run_ranks(served_scalars, 3, compose_config(*keys, *PS, world_size=3))
    assert whole
    assert served == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize("wide", ["parameter", "buffer", "count"])
def test_a_message_rounds_no_number_of_the_model(wide: str) -> None:
    """A third in float64 is another number in float32, and so is a large count."""
    module = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1))
    if wide == "parameter":
        module.append(nn.Linear(1, 1).double())
    if wide == "buffer":
        module.register_buffer("mean", torch.zeros(2, dtype=torch.float64))
    if wide == "count":
        module.register_buffer("seen", torch.tensor(2**24 + 1))
    sent = [*module.parameters(), *module.buffers()]
    for one in sent:
        if one.is_floating_point():
            nn.init.constant_(one, 1 / 3)
    for one in module.parameters():
        one.grad = one.detach().clone()
    message = flatten_gradients(module, torch.zeros(0))
    assert message.dtype == torch.float64
    received = [torch.zeros_like(one) for one in module.buffers()]
    copy_parts(message[-sum(one.numel() for one in received) :], received)
    assert all(map(torch.equal, received, module.buffers()))
    sent = [*module.parameters(), *module.buffers()]
    received = [torch.zeros_like(one) for one in sent]
    copy_parts(flatten_state(module), received)
    assert all(map(torch.equal, received, sent))


def test_a_batchnorm_alone_makes_no_message_longer() -> None:
    """Its count of batches is an int64, and small."""
    assert flatten_state(nn.BatchNorm1d(1)).dtype == torch.float32


def wide_loss(env: DistEnv) -> float:
    """Return the loss of a third that a trainer of a model in float64 pushes."""
    mode = ParameterServer("ps", mode="sync")
    module, loss = nn.Linear(3, 1).double(), torch.zeros(())

    def compute(step: int) -> Tensor:
        module(torch.ones(1, 3).double()).sum().backward()
        return torch.tensor(1 / 3, dtype=torch.float64)

    engine = engine_of(mode, env, module, compute)
    if env.rank == 0:
        loss = collected(engine, 0)
        engine.close("completed")
    else:
        assert engine.serve(engine.state) == "completed"
    return float(loss)


def test_the_loss_of_a_model_in_float64_arrives_as_it_was() -> None:
    """A trainer's facts are numbers of their own, and not of the default type."""
    assert run_ranks(wide_loss, 2)[0] == 1 / 3


def clocked(env: DistEnv) -> list[dict[str, float]]:
    """Return the server's figures of a step, and of one after an evaluation; clocks are set."""
    mode = ParameterServer("ps", mode="sync")
    module, now, figures = nn.Linear(3, 1), [0.0], list[dict[str, float]]()

    def passing() -> float:
        now[0] += 1  # each look at a trainer's clock takes a second
        return now[0]

    def compute(step: int) -> Tensor:
        now[0] += 5
        module(torch.ones(1, 3)).sum().backward()
        return torch.zeros(())

    with patch.object(time, "perf_counter", passing if env.rank else lambda: now[0]):
        server = engine_of(mode, env, module, compute)
        if env.rank:
            assert server.serve(server.state) == "completed"
            return figures
        for step, (begins, ends) in enumerate([(10, 12), (50, 54)]):
            now[0] = begins
            collected(server, step)
            now[0] = ends
            figures.append(server.metrics())
        server.close("completed")
    return figures


def test_figures_are_of_the_steps_alone() -> None:
    """A trainer's own work is no waiting, and what comes between two steps no time of theirs."""
    figures, *_ = run_ranks(clocked, 3)
    assert [one["ps/trainer_wait_ms"] for one in figures] == [1000, 1000]
    assert [one["ps/pushes_per_s"] for one in figures] == [2 / 2, 2 / 4]


@pytest.mark.parametrize(
    ("overrides", "rule"),
    [
        (("world_size=1",), "needs 2 ranks or more and world_size is 1; write world_size=2"),
        (("parallelism.needs.num_servers=2",), "parallelism.needs.num_servers (2) must be 1"),
        (("parallelism.mode=later",), "(later) must be sync or async"),
        (
            ("world_size=4", "batch.global_size=100"),
            "not divisible by the ranks with samples of their own (3); use 99 or 102",
        ),
    ],
)
def test_what_does_not_fit_is_rejected(overrides: tuple[str, ...], rule: str) -> None:
    """One line with the rule, before anything starts."""
    assert rule in config_error("parallelism=ps", *overrides)
