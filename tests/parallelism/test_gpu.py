"""On real GPUs: every mode, precision and way to resume, mostly by the real command.

`gpu` takes one CUDA device, `multi_gpu` two; without them the tests are skipped.
"""

import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from commands import background, run_command, wait_for_end
from orders import steps_of
from ranks import run_ranks
from run_folders import metrics, record, run_dirs, tensors_in
from train_states import MNIST_NET, NO_DROPOUT, compose_config, evaluated, take_steps

from ddp_runner.config.instantiate import make
from ddp_runner.config.schema import Config
from ddp_runner.data.load_dataset import load_dataset
from ddp_runner.dist_env import DistEnv
from ddp_runner.train.build_state import build_state, build_work
from ddp_runner.train.loop import take_step
from ddp_runner.train.step_metrics import global_loss

NUM_GPUS = torch.cuda.device_count()
NUM_STEPS = 6
TF32 = 1e-2  # convolutions compute in TF32 by default, of ten bits
NET = ("model=mnist_net", "dataset=fake_images", "dataset.num_samples=512", "batch.global_size=64")
LOGGED = ("train.log_every_steps=1", "checkpoint.every_epochs=null")
STEPS = ("train.max_steps=8", *LOGGED)
GPT = ("model=gpt", "model.num_layers=2", "dataset.eval_fraction=0.001")
SPLIT = ("model=mnist_net_mp", *NET[1:], "parallelism=ddp_mp", "world_size=1")
Test = TypeVar("Test", bound=Callable[..., Any])


def gpu(test: Test) -> Test:
    """Mark a test that takes one GPU."""
    return pytest.mark.gpu(pytest.mark.skipif(NUM_GPUS < 1, reason="needs a CUDA device")(test))


def multi_gpu(test: Test) -> Test:
    """Mark a test that takes two GPUs."""
    needs = pytest.mark.skipif(NUM_GPUS < 2, reason=f"needs two CUDA devices, here are {NUM_GPUS}")
    return pytest.mark.multi_gpu(needs(test))


def run(folder: Path, *overrides: str) -> Path:
    """Run a command to its end; return its run folder."""
    done = run_command(*overrides, folder=folder)
    assert done.exit_code == 0, done.stdout + done.stderr
    return done.run_dir


def losses(run_dir: Path) -> list[float]:
    """Return the loss of each step that was logged."""
    return [line["train/loss"] for line in metrics(run_dir) if "train/loss" in line]


@gpu
def test_the_plain_command_computes_on_the_gpu(tmp_path: Path) -> None:
    """DDP over nccl, without a warning; the parts of a step and the memory are the GPU's."""
    run_dir = run(tmp_path, *NET, *STEPS, "world_size=1")
    found = record(run_dir)
    assert (found["backend"], found["devices"], found["warnings"]) == ("nccl", ["cuda:0"], [])
    assert losses(run_dir)[-1] < losses(run_dir)[0]
    line = next(line for line in metrics(run_dir) if "perf/forward_ms" in line)
    assert line["perf/peak_memory_gib"] > 0
    assert line["perf/forward_ms"] > 0
    assert line["perf/backward_ms"] > 0


@gpu
def test_the_gpu_takes_the_cpus_steps(tmp_path: Path) -> None:
    """Linear layers in fp32 to rounding, convolutions to TF32's."""
    for keys, tolerance in ((("model=toy",), 1e-4), ((*NET, *NO_DROPOUT), TF32)):
        one, other = (
            run(tmp_path / keys[0] / kind, *keys, *STEPS, "world_size=1", f"backend.device={kind}")
            for kind in ("cuda", "cpu")
        )
        assert losses(one) == pytest.approx(losses(other), rel=tolerance)


@gpu
@pytest.mark.parametrize(
    "keys",
    [
        (*NET, "parallelism=single", "train.precision=fp16", "train.clip_norm=1.0"),
        (*NET, "parallelism=ddp", "world_size=1", "train.precision=bf16"),
        (*NET, "parallelism=ddp", "world_size=1", "train.grad_accum_steps=4"),
    ],
    ids=["fp16, clipped", "bf16", "accumulated"],
)
def test_a_resumed_run_equals_the_undisturbed_one(tmp_path: Path, keys: tuple[str, ...]) -> None:
    """With Adam's moments, the loss's scale, and dropout's random numbers, which CUDA draws."""
    resumed_equals_undisturbed(tmp_path, *keys)


def resumed_equals_undisturbed(folder: Path, *keys: str) -> None:
    """Run eight steps, and four and four; compare losses and the state at the end."""
    keys = (*keys, "optimizer=adamw", "train.deterministic=true", *LOGGED)
    whole = run(folder / "whole", *keys, "train.max_steps=8")
    first = run(folder / "parts", *keys, "train.max_steps=4")
    assert run_command(f"resume={first}", "train.max_steps=8", folder=folder).exit_code == 0
    assert losses(first) == pytest.approx(losses(whole), rel=1e-6)
    content = "checkpoints/step-00000008/state.pt"
    one, other = (
        dict(tensors_in(torch.load(path / content, map_location="cpu", weights_only=True)))
        for path in (first, whole)
    )
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=1e-5, atol=1e-7)


@gpu
def test_deterministic_runs_are_equal_bit_for_bit(tmp_path: Path) -> None:
    """What train.deterministic promises, on cuDNN and cuBLAS."""
    keys = (*NET, *STEPS, "parallelism=single", "train.deterministic=true")
    one, other = (run(tmp_path / name, *keys) for name in ("one", "other"))
    assert losses(one) == losses(other)


@gpu
@pytest.mark.skipif(find_spec("triton") is None, reason="torch.compile needs triton on a GPU")
@pytest.mark.skipif(
    shutil.which("cc") is None and shutil.which("gcc") is None, reason="triton needs a C compiler"
)
def test_a_compiled_model_takes_the_same_steps(tmp_path: Path) -> None:
    """Inside DDP, and saved under the bare model's names."""
    keys = (*NET, *STEPS, "world_size=1", *NO_DROPOUT)
    plain = run(tmp_path / "plain", *keys)
    compiled = run(tmp_path / "compiled", *keys, "train.compile=true")
    assert losses(compiled) == pytest.approx(losses(plain), rel=TF32)


@gpu
def test_the_best_model_is_loaded_and_evaluated_at_the_end(tmp_path: Path) -> None:
    """With a checkpoint that is not the last; its weights are exported."""
    keys = ("checkpoint.monitor=train/lr", "scheduler=cosine", "checkpoint.load_best=true")
    run_dir = run(tmp_path, *NET, "train.epochs=2", "world_size=1", *keys)
    assert record(run_dir)["metrics"]["best/loss"] > 0
    assert (run_dir / "model.safetensors").exists()


@gpu
def test_two_ranks_on_one_gpu_are_rejected_by_name(tmp_path: Path) -> None:
    """NCCL would fail with an internal error; rank 0 says for both which two have the same GPU."""
    environ = {
        **{"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": "0"},
        **{"MASTER_ADDR": "localhost", "MASTER_PORT": str(29400 + os.getpid() % 500)},
    }
    with ExitStack() as stack:
        processes = [
            stack.enter_context(
                background(
                    "model=toy",
                    "backend=nccl",
                    folder=tmp_path / str(rank),
                    environ={**environ, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                )
            )
            for rank in range(2)
        ]
        done = [wait_for_end(one, tmp_path / str(rank)) for rank, one in enumerate(processes)]
    assert "ranks 0 and 1 both have GPU" in done[0].stdout + done[0].stderr
    assert 0 not in (done[0].exit_code, done[1].exit_code)


@cache
def losses_of_one_process() -> list[float]:
    """Return the losses of steps on the CPU."""
    config = compose_config(*MNIST_NET, *NO_DROPOUT, "parallelism=single")
    (trace,) = run_ranks(take_steps, 1, config, NUM_STEPS)
    found: list[float] = trace.losses
    return found


def losses_on(env: DistEnv, config: Config, devices_by_rank: list[list[str]]) -> list[float]:
    """Take steps on the given devices and evaluate; return the losses of the steps."""
    devices = tuple(torch.device(name) for name in devices_by_rank[env.rank])
    torch.cuda.set_device(devices[0])
    source = make("dataset", config.dataset)
    dataset = load_dataset(source, data_root=Path(config.data_root), log=lambda _: None)
    mode = make("parallelism", config.parallelism)
    state = build_state(build_work(config, env, mode, devices=devices, dataset=dataset))
    found = list[float]()
    for epoch in range(NUM_STEPS):
        for batch in steps_of(state.batches, epoch):
            if len(found) == NUM_STEPS:
                break
            loss = take_step(state, batch)
            found.append(global_loss(state, loss))
    evaluated(state)
    return found


@gpu
@pytest.mark.parametrize(
    ("mode", "model", "devices"),
    [
        ("ddp", "mnist_net", [["cuda:0"], ["cuda:0"]]),
        ("ddp_mp", "mnist_net_mp", [["cuda:0", "cuda:0"], ["cuda:0", "cuda:0"]]),
    ],
)
def test_ranks_that_share_a_gpu_take_one_processs_steps(
    mode: str, model: str, devices: list[list[str]]
) -> None:
    """Over gloo, which takes CUDA tensors; both stages of a split model may share the GPU, too."""
    keys = (f"model={model}", *MNIST_NET[1:], *NO_DROPOUT, f"parallelism={mode}")
    config = compose_config(*keys, world_size=2)
    for found in run_ranks(losses_on, 2, config, devices, timeout_s=200):
        assert found == pytest.approx(losses_of_one_process(), rel=TF32)


@gpu
@pytest.mark.parametrize(
    "keys",
    [
        (),
        ("parallelism.cpu_offload=true",),
        ("parallelism.reshard_after_forward=false", "ema.decay=0.9"),
        ("train.activation_checkpointing=true", "train.grad_accum_steps=2"),
        ("model.meta_init=false",),
    ],
    ids=["plain", "offloaded", "kept whole", "computed again", "built whole"],
)
def test_shards_on_one_gpu_take_the_steps_of_one_process(
    tmp_path: Path, keys: tuple[str, ...]
) -> None:
    """All of FSDP2 but the other ranks: hooks, streams, offloading, and a resume in between."""
    keys_of_all = [key for key in keys if not key.startswith("parallelism.")]
    whole = run(tmp_path / "whole", *GPT, *STEPS, "parallelism=single", *keys_of_all)
    split = (*GPT, *LOGGED, "parallelism=fsdp", "world_size=1", *keys)
    first = run(tmp_path / "split", *split, "train.max_steps=4")
    assert run_command(f"resume={first}", "train.max_steps=8", folder=tmp_path).exit_code == 0
    assert losses(first) == pytest.approx(losses(whole), rel=1e-3)


@multi_gpu
@pytest.mark.parametrize("mode", ["fsdp", "tp"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_split_model_takes_the_steps_of_one_gpu(
    tmp_path: Path, mode: str, precision: str
) -> None:
    """Over nccl; the first is resumed in the other form."""
    keys = (*GPT, *LOGGED, f"train.precision={precision}")
    one = run(tmp_path / "one", *keys, "train.max_steps=8", "parallelism=single")
    other = run(tmp_path / "two", *keys, "train.max_steps=4", f"parallelism={mode}", "world_size=2")
    assert record(other)["backend"] == "nccl"
    go_on = (f"resume={other}", "train.max_steps=8", "parallelism=single", "world_size=1")
    assert run_command(*go_on, folder=tmp_path).exit_code == 0
    tolerance = {"fp32": 1e-3, "bf16": 0.05}[precision]
    assert losses(other) == pytest.approx(losses(one), rel=tolerance)


@multi_gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_data_parallel_takes_the_steps_of_one_gpu(tmp_path: Path, precision: str) -> None:
    """Each replica computes in the same precision as one process does."""
    keys = (
        *NET,
        *STEPS,
        "model.dropout1=0.0",
        "model.dropout2=0.0",
        f"train.precision={precision}",
    )
    one, other = (run(tmp_path / mode, *keys, f"parallelism={mode}") for mode in ("single", "dp"))
    tolerance = {"fp32": TF32, "bf16": 0.05, "fp16": 0.02}[precision]
    assert losses(other) == pytest.approx(losses(one), rel=tolerance)


@multi_gpu
@pytest.mark.parametrize("clip", ["null", "1.0"])
def test_ddp_over_nccl_takes_the_steps_of_one_gpu(tmp_path: Path, clip: str) -> None:
    """Within what TF32 rounds; held to less, a comparison would call the parity broken."""
    keys = (*NET, *STEPS, *NO_DROPOUT, f"train.clip_norm={clip}")
    one = run(tmp_path / "one", *keys, "parallelism=single")
    other = run(tmp_path / "other", *keys, "world_size=2")
    assert record(other)["backend"] == "nccl"
    assert losses(other) == pytest.approx(losses(one), rel=TF32)
    assert any("perf/comm_share" in line for line in metrics(other))


@multi_gpu
def test_a_model_cut_in_two_takes_the_steps_of_the_whole(tmp_path: Path) -> None:
    """Each stage on its own GPU, with the marks of a step on both."""
    keys = (*STEPS, *NO_DROPOUT)
    one = run(tmp_path / "one", *NET, *keys, "parallelism=single")
    other = run(tmp_path / "other", *SPLIT, *keys)
    assert record(other)["devices"] == ["cuda:0", "cuda:1"]
    assert losses(other) == pytest.approx(losses(one), rel=TF32)


@multi_gpu
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize(
    "keys", [SPLIT, (*NET, "parallelism=dp"), (*NET, "world_size=2")], ids=["ddp_mp", "dp", "ddp"]
)
def test_modes_of_several_gpus_resume(
    tmp_path: Path, keys: tuple[str, ...], precision: str
) -> None:
    """With Adam's moments on both GPUs, and the random numbers of both."""
    resumed_equals_undisturbed(
        tmp_path, *keys, f"train.precision={precision}", "train.clip_norm=1.0"
    )


@multi_gpu
@pytest.mark.parametrize(
    "command",
    [
        "experiment=toy_model_parallel world_size=1",
        "experiment=split_net world_size=1 train.epochs=1 dataset=fake_images",
        "-m experiment=data_parallel parallelism=single,dp,ddp dataset.num_samples=2048",
        "-m task=collectives backend=gloo,nccl world_size=2 collectives.max_bytes=1048576",
        "task=check world_size=2 dataset=fake_images",
        "-m model=toy world_size=1 seed=0,1,2,3 sweep.parallel_jobs=2",
    ],
)
def test_the_systems_for_gpus_run(tmp_path: Path, command: str) -> None:
    """As the README has them, made short: no run fails, none leaves the GPUs for the CPU."""
    done = run_command(*command.split(), folder=tmp_path)
    assert done.exit_code == 0, done.stdout + done.stderr
    for run_dir in run_dirs(tmp_path):
        found = record(run_dir)
        assert found["status"] == "completed"
        assert found["warnings"] == []
        assert all(device.startswith("cuda") for device in found["devices"])


@multi_gpu
def test_a_sweep_over_world_sizes_leaves_the_gpus_with_a_warning(tmp_path: Path) -> None:
    """One rank more than there are GPUs computes on the CPU, and its run.json says so."""
    done = run_command("-m", "model=toy", f"world_size=1,{NUM_GPUS + 1}", folder=tmp_path)
    assert done.exit_code == 0, done.stdout + done.stderr
    warned = {
        found["world_size"]: " ".join(found["warnings"]) for found in map(record, done.run_dirs)
    }
    assert warned[1] == ""
    assert "visible and the run computes on the CPU" in warned[NUM_GPUS + 1]


@multi_gpu
def test_a_slow_rank_is_named_under_nccl(tmp_path: Path) -> None:
    """Not as the crash of the rank that waited for it."""
    done = run_command("experiment=slow_rank", "backend=nccl", folder=tmp_path)
    assert done.exit_code == 1
    assert "rank 1 did not reach the collective" in done.stdout + done.stderr


@multi_gpu
def test_ranks_that_see_their_own_gpu_alone_train_on_it(tmp_path: Path) -> None:
    """As Slurm binds GPUs to tasks: each rank has its GPU under the number 0."""
    environ = {
        **{"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"},
        **{"MASTER_ADDR": "localhost", "MASTER_PORT": str(29900 + os.getpid() % 500)},
    }
    own = ({"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2))
    with ExitStack() as stack:
        processes = [
            stack.enter_context(
                background(
                    "model=toy",
                    "backend=nccl",
                    "train.epochs=1",
                    f"hydra.run.dir={tmp_path / 'run'}",
                    folder=tmp_path / str(rank),
                    environ={**environ, **facts, "CUDA_VISIBLE_DEVICES": str(rank)},
                )
            )
            for rank, facts in enumerate(own)
        ]
        for rank, process in enumerate(processes):
            done = wait_for_end(process, tmp_path / str(rank))
            assert done.exit_code == 0, done.stdout + done.stderr
    assert record(tmp_path / "run")["devices"] == ["cuda:0"]
