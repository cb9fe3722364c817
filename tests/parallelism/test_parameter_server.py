"""The parameter server: both modes, lost trainers, resuming. Its parity is in test_parity."""

import os
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from commands import background, run_command, wait_for, wait_for_end
from configs import config_error
from own_steps import WORDS
from ranks import run_ranks
from run_folders import assert_same_state, last_step, metrics, record, reproducible_metrics
from torch import Tensor, nn
from train_states import TOY, build, compose_config, take_steps

from ddp_runner.config.schema import Config
from ddp_runner.data.splits import TensorSplit
from ddp_runner.dist_env import DistEnv
from ddp_runner.parallelism.mode import Duties
from ddp_runner.parallelism.parameter_server.messages import (
    copy_parts,
    flatten_gradients,
    flatten_state,
)
from ddp_runner.parallelism.parameter_server.mode import ParameterServer
from ddp_runner.parallelism.parameter_server.server import Server
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
        assert (fields["status"], fields["step"], fields["lost_ranks"]) == ("completed", 24, [])
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
def test_an_asynchronous_run_outlives_its_trainers(tmp_path: Path) -> None:
    """Two of three are killed: it says so, goes on with the third, and completes."""
    with background(*LONG, folder=tmp_path) as process:
        wait_for(lambda: last_step(tmp_path) >= 20)
        for rank in (1, 3):
            kill(pid_of(tmp_path, rank))
        end = wait_for_end(process, tmp_path)
    assert (end.exit_code, end.stderr) == (0, "")
    fields = record(end.run_dir)
    assert (fields["status"], sorted(fields["lost_ranks"])) == ("completed", [1, 3])
    assert "rank 3 is lost (its process ended); the run continues with" in end.stdout
    assert metrics(end.run_dir)[-2]["ps/num_trainers"] == 1
    assert fields["metrics"]["eval/accuracy"] > 0.9


@pytest.mark.full
@pytest.mark.parametrize(
    ("mode", "ranks", "sentence"),
    [
        ("async", (1, 2, 3), "all trainers are lost (ranks "),
        ("async", (0,), "rank 0 was killed by SIGKILL"),
        ("sync", (2,), "rank 2 was killed by SIGKILL"),
    ],
)
def test_a_run_that_lost_too_much_fails(
    tmp_path: Path, mode: str, ranks: tuple[int, ...], sentence: str
) -> None:
    """The server, all trainers, or one of a synchronous run: named, and nothing is left behind."""
    with background(*LONG, f"parallelism.mode={mode}", folder=tmp_path) as process:
        wait_for(lambda: last_step(tmp_path) >= 20)
        for rank in ranks:
            kill(pid_of(tmp_path, rank) or _server(tmp_path))
        end = wait_for_end(process, tmp_path)
    assert end.exit_code == 1
    assert sentence in end.stderr.splitlines()[0]
    assert record(end.run_dir)["status"] == "failed"


def _server(folder: Path) -> int:
    (log,) = folder.rglob("rank-0.log")
    match = re.search(r"this is rank 0, process (\d+)", log.read_text())
    assert match is not None
    return int(match[1])


def duties(
    module: nn.Module,
    compute: Callable[[int], Tensor] = lambda number: torch.zeros(()),
    *,
    num_steps: int = 0,
    first_step: int = 0,
    outstanding: tuple[int, ...] = (),
    timeout_s: float = 240,
) -> Duties:
    """Return what a test without a launcher asks of server and trainers."""
    return Duties(
        module=module,
        first_step=first_step,
        num_steps=num_steps,
        outstanding=outstanding,
        compute=compute,
        timeout_s=timeout_s,
        ended=set,
        mark=lambda part: None,
        log=print,
    )


def collected(server: Server, number: int) -> Tensor:
    """Let the server collect the gradients of a batch; return the loss."""
    return server.compute(SimpleNamespace(), SimpleNamespace(number=number))


def computed_steps(env: DistEnv, num_steps: int) -> list[int]:
    """Return the batches that this trainer computed; rank 2 falls silent after its third."""
    mode = ParameterServer("ps", mode="async")
    module, steps = nn.Linear(3, 1), list[int]()

    def compute(step: int) -> Tensor:
        steps.append(step)
        if env.rank == 2 and len(steps) == 4:
            raise InterruptedError
        module(torch.ones(1, 3)).sum().backward()
        return torch.tensor(float(step))

    if env.rank == 0:
        server = mode.start_server(duties(module, num_steps=num_steps, first_step=100))
        losses = [int(collected(server, step)) for step in range(100, 100 + num_steps)]
        server.close("completed")
        assert server.lost == [2]
        return losses
    try:
        assert mode.run_trainer(duties(module, compute)) == "completed"
    except InterruptedError:
        groups = torch.distributed.distributed_c10d._world.pg_map
        (link,) = (group for group in groups if group is not torch.distributed.group.WORLD)
        torch.distributed.distributed_c10d._abort_process_group(link)
        return steps[:-1]
    return steps


def test_each_batch_is_computed_once_even_if_a_trainer_is_lost() -> None:
    """What the lost one held is given to another; nothing beyond the last step is begun."""
    applied, *computed = run_ranks(computed_steps, 4, 50)
    wanted = Counter(range(100, 150))
    assert Counter(applied) == wanted
    assert Counter(step for steps in computed for step in steps) == wanted
    assert len(computed[1]) == 3


def partly_trained(env: DistEnv, config: Config) -> dict[str, Tensor]:
    """Return the parameters of a model with a frozen and an unused one after some steps."""
    torch.set_default_dtype(torch.float64)
    state = build(env, config)
    state.module.net1.weight.requires_grad_(False)
    state.module.unused = nn.Parameter(torch.ones(3))
    state.optimizer.param_groups[0]["params"].append(state.module.unused)
    take_steps(env, config, 6, state=state)
    return {name: one.detach() for name, one in state.module.named_parameters()}


def test_batches_that_wait_for_a_trainer_are_outstanding() -> None:
    """A run that is stopped before it has handed out what was left over leaves it once more."""
    asked = duties(nn.Linear(1, 1), num_steps=4, outstanding=(7, 3))
    server = Server(asked, groups=[], waits_for_all=False)
    assert server.outstanding(None) == (3, 7)


def test_parameters_without_a_gradient_stay_as_they_are() -> None:
    """Neither weight decay nor momentum moves a frozen or an unused one, as in one process."""
    keys = (*TOY, "optimizer.weight_decay=0.5", "optimizer.momentum=0.9")
    (single,) = run_ranks(partly_trained, 1, compose_config(*keys, "parallelism=single"))
    served, *_ = run_ranks(partly_trained, 3, compose_config(*keys, "parallelism=ps", world_size=3))
    assert torch.equal(served["unused"], torch.ones(3, dtype=torch.float64))
    for name, expected in single.items():
        torch.testing.assert_close(served[name], expected, rtol=1e-13, atol=1e-14)


def applied_steps(env: DistEnv, folder: Path) -> list[int]:
    """Stop an asynchronous run while trainer 2 holds its first batch, and go on from there."""
    mode = ParameterServer("ps", mode="async")
    module, stopped = nn.Linear(3, 1), folder / "stopped"
    outstanding, applied = (), list[int]()
    for num_steps in (10, 20):  # of 30
        if env.rank == 0:
            place = len(applied)
            server = mode.start_server(
                duties(
                    module,
                    num_steps=30 - place,
                    first_step=place,
                    outstanding=outstanding,
                    timeout_s=30,
                )
            )
            applied += [int(collected(server, place + i)) for i in range(num_steps)]
            outstanding = server.outstanding(None)
            assert (len(outstanding) > 0) == (len(applied) < 30)
            stopped.touch()
            server.close("preempted")
            continue

        def compute(step: int) -> Tensor:
            while env.rank == 2 and not stopped.exists():
                time.sleep(0.01)
            module(torch.ones(1, 3)).sum().backward()
            return torch.tensor(float(step))

        assert mode.run_trainer(duties(module, compute, timeout_s=30)) == "preempted"
    return applied


def test_a_stopped_asynchronous_run_applies_each_batch_once(tmp_path: Path) -> None:
    """What was handed out and not applied when it stopped is computed again, and nothing else."""
    applied, *_ = run_ranks(applied_steps, 4, tmp_path)
    assert Counter(applied) == Counter(range(30))
    assert sorted(applied[:10]) != list(range(10)), "it stopped at a place without a gap"


def patient_steps(env: DistEnv, how: str) -> list[int]:
    """Return the batches collected by a server that is busy for longer than the timeout."""
    mode = ParameterServer("ps", mode=how)
    module = nn.Linear(3, 1)
    if env.rank == 0:
        server = mode.start_server(duties(module, num_steps=4, timeout_s=2))
        applied = []
        for step in range(4):
            if step == 2:
                time.sleep(4.5)  # an evaluation, a slow disk
            applied.append(int(collected(server, step)))
        server.close("completed")
        assert server.lost == []
        return applied

    def compute(step: int) -> Tensor:
        module(torch.ones(1, 3)).sum().backward()
        return torch.tensor(step / (2 if how == "sync" else 1))

    assert mode.run_trainer(duties(module, compute, timeout_s=2)) == "completed"
    return []


@pytest.mark.full
@pytest.mark.parametrize("how", ["sync", "async"])
def test_trainers_outlast_a_server_that_is_busy(how: str) -> None:
    """However long it evaluates or saves: the timeout is for one that says nothing at all."""
    applied, *_ = run_ranks(patient_steps, 3, how)
    assert sorted(applied) == [0, 1, 2, 3]


def silent_server(env: DistEnv) -> str:
    """Return what a trainer says of a server whose process stands still."""
    mode = ParameterServer("ps", mode="sync")
    module = nn.Linear(3, 1)
    pids: list[int] = [0]
    if env.rank == 0:
        pids = [os.getpid()]
    torch.distributed.broadcast_object_list(pids, src=0)
    if env.rank == 0:
        mode.start_server(duties(module, num_steps=1, timeout_s=2))
        os.kill(os.getpid(), signal.SIGSTOP)
        return ""
    try:
        mode.run_trainer(duties(module, timeout_s=2))
    except RuntimeError as error:
        return str(error)
    finally:
        os.kill(pids[0], signal.SIGCONT)
    return "it never noticed"


def test_a_server_that_stands_still_is_noticed() -> None:
    """Its signs of life come from its process: a stopped one sends none."""
    _, sentence = run_ranks(silent_server, 2)
    assert "imed out" in sentence


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

    if env.rank == 0:
        server = mode.start_server(duties(norm, num_steps=1))
        collected(server, 0)
        server.close("completed")
    else:
        assert mode.run_trainer(duties(norm, compute)) == "completed"
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
    state.setup = replace(state.setup, scalars=try_first_batch(state).scalars)
    take_steps(env, config, 2, state=state)
    return {name: float(one) for name, one in state.scalars.items() if name != "worst"}  # no sum


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

    if env.rank == 0:
        server = mode.start_server(duties(module, num_steps=1))
        loss = collected(server, 0)
        server.close("completed")
    else:
        assert mode.run_trainer(duties(module, compute)) == "completed"
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
        if env.rank:
            assert mode.run_trainer(duties(module, compute)) == "completed"
            return figures
        server = mode.start_server(duties(module, num_steps=2))
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
        (("world_size=1",), "needs a server and a trainer, world_size is 1; use 2 or more"),
        (("parallelism.needs.num_servers=2",), "parallelism.needs.num_servers (2) must be 1"),
        (("parallelism.mode=later",), "(later) must be sync or async"),
        (("world_size=4", "batch.global_size=100"), "not divisible by trainers (3); use 99 or 102"),
    ],
)
def test_what_does_not_fit_is_rejected(overrides: tuple[str, ...], rule: str) -> None:
    """One line with the rule, before anything starts."""
    assert rule in config_error("parallelism=ps", *overrides)
