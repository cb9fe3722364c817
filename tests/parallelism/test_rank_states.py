"""What differs by rank is saved for each: a resumed run equals the uninterrupted one."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import run_command
from ranks import run_ranks
from run_folders import metrics
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel
from train_states import (
    MNIST_NET,
    Trace,
    build,
    compose_config,
    equal,
    flat_weights,
    run_loop,
    take_steps,
)

from ddp_runner.checkpoint.store import latest_checkpoint, load_checkpoint
from ddp_runner.config.schema import Config
from ddp_runner.dist_env import DistEnv
from ddp_runner.parallelism.rank_state import averaged, rank_state
from ddp_runner.train.evaluation import evaluate
from ddp_runner.train.loop import train_step
from ddp_runner.train.snapshot import snapshot

POWERSGD = (
    "parallelism.comm_hook=powersgd",
    "parallelism.powersgd.start_step=2",
    "parallelism.bucket_cap_mb=0",
)
LOCAL = ("parallelism.post_local_sgd.period=3", "parallelism.post_local_sgd.start_step=2")
KEYS = {"powersgd": POWERSGD, "post-local SGD": LOCAL}
STOPPED, LAST = 5, 9  # steps; the first is amid an epoch, and between two averages
AVERAGED = (3, 6, 9)  # steps after which the weights are averaged


def config_of(*keys: str, world_size: int = 2) -> Config:
    """Return the config of a run that logs each step and keeps all checkpoints."""
    always = (f"train.max_steps={LAST}", "train.log_every_steps=1", "checkpoint.every_steps=1")
    every = ("checkpoint.keep=20", "checkpoint.every_epochs=null")
    return compose_config(*MNIST_NET, *always, *every, *keys, world_size=world_size)


def halves(env: DistEnv, config: Config, whole: Path, folder: Path) -> tuple[Trace, Trace]:
    """Train without an interruption; and stop after some steps, then go on with a new state."""
    uninterrupted = run_loop(env, config, max_steps=LAST, folder=whole)
    saved_less = replace(config, checkpoint=replace(config.checkpoint, every_steps=None))
    run_loop(env, saved_less, max_steps=LAST, folder=folder, stop_after=STOPPED - 1)
    return uninterrupted, run_loop(env, saved_less, max_steps=LAST, folder=folder)


def own(folder: Path) -> Any:
    """Return a folder's newest checkpoint."""
    path = latest_checkpoint(folder, log=print)
    assert path is not None
    return load_checkpoint(path)


@pytest.mark.parametrize("name", ["static graph", *KEYS])
def test_a_resumed_run_equals_the_uninterrupted_one(name: str, tmp_path: Path) -> None:
    """Bit for bit, though it saved at other steps: no save changes the training."""
    whole, folder = tmp_path / "whole", tmp_path / "halves"
    keys = KEYS.get(name, (*POWERSGD, "parallelism.static_graph=true"))
    ranks = run_ranks(halves, 2, config_of(*keys), whole, folder)
    for uninterrupted, resumed in ranks:
        assert any("resumed from" in line for line in resumed.logged)
        assert resumed.losses == uninterrupted.losses[-len(resumed.losses) :]
        assert torch.equal(resumed.weights, uninterrupted.weights)
    first, second = (own(one) for one in (whole, folder))
    assert first["position"]["step"] == second["position"]["step"] == LAST
    torch.testing.assert_close(first["ranks"], second["ranks"], rtol=0, atol=0)
    torch.testing.assert_close(first["model"], second["model"], rtol=0, atol=0)


def resume_with(env: DistEnv, config: Config, folder: Path) -> list[str]:
    """Go on with a folder's run under another config; return what was logged."""
    return run_loop(env, config, max_steps=LAST, folder=folder).logged


def saved_runs(env: DistEnv, configs: dict[str, Config], folder: Path) -> None:
    """Train each config up to STOPPED, and keep the last checkpoint."""
    for name, config in configs.items():
        run_loop(env, config, max_steps=STOPPED, folder=folder / name)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the checkpoints of two ranks, for each of KEYS."""
    folder = tmp_path_factory.mktemp("saved")
    configs = {name: config_of("checkpoint.every_steps=null", *keys) for name, keys in KEYS.items()}
    run_ranks(saved_runs, 2, {**configs, "plain": config_of()}, folder)
    return folder


@pytest.mark.parametrize(
    ("name", "keys", "world_size", "words"),
    [
        ("powersgd", POWERSGD, 1, "PowerSGD begins with new matrices and drops the gradients that "
         "it had not sent yet: the checkpoint is of world_size=2 and this run has 1"),
        ("powersgd", (*POWERSGD, "parallelism.powersgd.matrix_approximation_rank=2"), 2,
         "the checkpoint has matrix_approximation_rank=1 bucket_cap_mb=0 static_graph=False, this "
         "run matrix_approximation_rank=2 bucket_cap_mb=0 static_graph=False"),
        ("post-local SGD", LOCAL, 1, "all ranks go on with the averaged weights and rank 0's state "
         "of the optimizer: the checkpoint is of world_size=2 and this run has 1"),
        ("plain", POWERSGD, 1, "the checkpoint has no state of it"),
        ("powersgd", (), 1, "the checkpoint's states by rank are dropped: this run has none"),
    ],
)  # fmt: skip
def test_a_state_that_does_not_fit_is_dropped_in_words(
    saved: Path, name: str, keys: tuple[str, ...], world_size: int, words: str, tmp_path: Path
) -> None:
    """The run goes on at the same step, and one line says what it lost."""
    folder = shutil.copytree(saved / name, tmp_path / "run")
    resumed = config_of(*keys, world_size=world_size)
    (logged, *_) = run_ranks(resume_with, world_size, resumed, folder)
    assert sum(words in line for line in logged) == 1
    if keys:
        assert own(folder)["ranks"][0]["state"].get("iter", LAST) == LAST


def local_steps(env: DistEnv, config: Config) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """Return the weights after each step; the saved and the evaluated model, and what is left."""
    state = build(env, config)
    weights, batches = list[Tensor](), state.setup.batches
    state.model.train()
    while len(weights) < STOPPED:
        for batch in batches.epoch(len(weights) // 4):
            train_step(state, batch)
            weights.append(flat_weights(state.module).clone())
            if len(weights) == STOPPED:
                break
    saved = snapshot(state, config)["model"]
    names = [name for name, _ in state.module.named_parameters()]
    with averaged(state.model):
        evaluated = flat_weights(state.module).clone()
    flat = torch.cat([saved[name].flatten() for name in names])
    return weights, flat, evaluated, flat_weights(state.module)


def test_replicas_are_averaged_where_they_are_saved_and_evaluated() -> None:
    """They differ between two averages, and go on as they were after a save or an evaluation."""
    first, second = run_ranks(local_steps, 2, config_of(*LOCAL))
    differ = [not torch.equal(one, other) for one, other in zip(first[0], second[0], strict=True)]
    assert differ == [step > 2 and step not in AVERAGED for step in range(1, STOPPED + 1)]
    mean = (first[0][-1] + second[0][-1]) / 2
    for weights, saved, evaluated, left in (first, second):
        torch.testing.assert_close(saved, mean)
        assert torch.equal(saved, evaluated)
        assert torch.equal(left, weights[-1])


def eval_loss(env: DistEnv, config: Config, weights: dict[str, Tensor]) -> float:
    """Return the loss of some weights on the evaluation set."""
    state = build(env, config)
    state.module.load_state_dict(weights)
    return evaluate(state)[0]["eval/loss"]


def test_a_run_evaluates_and_exports_the_mean_of_its_replicas(tmp_path: Path) -> None:
    """Not rank 0's weights, nor a mean of what each rank finds with its own."""
    few = ("model=toy", "dataset.num_samples=24", "batch.global_size=8", "train.max_steps=3")
    local = ("world_size=2", "parallelism.post_local_sgd.period=100", "optimizer.lr=0.3")
    run = run_command(*few, *local, "train.num_threads=1", folder=tmp_path).run_dir
    saved, exported = own(run / "checkpoints"), load_file(run / "model.safetensors")
    torch.testing.assert_close(dict(saved["model"]), exported, rtol=0, atol=0)
    assert not equal(dict(saved["ranks"][0]["model"]), exported)
    (loss,) = run_ranks(eval_loss, 1, compose_config(*few, "parallelism=single"), exported)
    (found,) = [line["eval/loss"] for line in metrics(run) if "eval/loss" in line]
    assert found == pytest.approx(loss, rel=1e-6)


def torchs_recipe(env: DistEnv, config: Config, plain: Config) -> tuple[Tensor, Tensor]:
    """Take the same steps by the runner and by torch's own parts."""
    ours = take_steps(env, config, LAST)
    state = build(env, plain)
    assert isinstance(state.model, DistributedDataParallel)
    hook = PostLocalSGDState(None, None, 2, post_local_gradient_allreduce=False)
    state.model.register_comm_hook(hook, post_localSGD_hook)
    averager = PeriodicModelAverager(period=3, warmup_steps=2)
    state.optimizer.register_step_post_hook(
        lambda optimizer, _, __: averager.average_parameters(optimizer.param_groups)
    )
    return ours.weights, take_steps(env, plain, LAST, state=state).weights


def test_weights_are_averaged_when_torch_averages_them() -> None:
    """Its own hook and averager take the same steps; only they forget the memory format."""
    flat = ("model.channels_last=false", "train.max_steps=9")
    configs = [compose_config(*MNIST_NET, *flat, *keys, world_size=2) for keys in (LOCAL, ())]
    for ours, theirs in run_ranks(torchs_recipe, 2, *configs):
        assert torch.equal(ours, theirs)


def has_state(env: DistEnv, configs: list[Config]) -> list[bool]:
    """Return whether the ranks of a config have a state of their own."""
    return [rank_state(build(env, config).model) is not None for config in configs]


def test_other_runs_save_nothing_by_rank() -> None:
    """Their checkpoints stay as they were."""
    configs = [config_of(*keys) for keys in ((), ("parallelism.comm_hook=bf16",), POWERSGD)]
    assert run_ranks(has_state, 2, configs)[0] == [False, False, True]
