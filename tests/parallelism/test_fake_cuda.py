"""Where every mode puts what on several GPUs, and in which precision; on GPUs that are not there.

What is shown: the devices and dtypes that torch's own rules give, through the real code. What is
not: numbers, speed, and what NCCL and the driver do. That needs tests/parallelism/test_gpu.py.
"""

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from configs import resolved
from fake_cuda import FakeGpus, fake_gpus
from train_states import Trace, at

from ddp_runner.checkpoint.store import save_checkpoint
from ddp_runner.config.instantiate import make
from ddp_runner.config.schema import Config, mode_needs
from ddp_runner.config.training import CheckpointConfig
from ddp_runner.data.dataset import Dataset
from ddp_runner.data.splits import TensorSplit
from ddp_runner.device import peak_memory_gib
from ddp_runner.dist_env import DistEnv
from ddp_runner.host.hardware import Hardware
from ddp_runner.metric_names import StepPart
from ddp_runner.parallelism.mode import rank_devices
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.train import build as building
from ddp_runner.train import export
from ddp_runner.train.build import build_setup, build_state
from ddp_runner.train.evaluation import evaluate
from ddp_runner.train.export import export_best
from ddp_runner.train.loop import train_step
from ddp_runner.train.snapshot import restore, snapshot
from ddp_runner.train.state import TrainState
from ddp_runner.train.step_timer import MOST_EVENTS, Exchange, StepTimer

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SMALL = ("dataset=fake_images", "dataset.num_samples=27", "batch.global_size=8")


@dataclass(frozen=True)
class Case:
    """A mode, a machine and a rank of it: its devices, and those that a forward computes on."""

    mode: str
    gpus: int
    ranks: int
    local_rank: int
    devices: tuple[int, ...]
    computes_on: tuple[int, ...]
    model: str = "mnist_net"
    binds_gpus: bool = False

    @property
    def env(self) -> DistEnv:
        """Rank 0, which saves, wherever it stands on its machine."""
        return DistEnv(0, self.local_rank, self.ranks, self.ranks)

    def config(self, *overrides: str) -> Config:
        """Return the config of the case, as the ranks of a launcher resolve it."""
        hardware = Hardware(self.gpus, 8, binds_gpus=self.binds_gpus)
        keys = (f"model={self.model}", f"parallelism={self.mode}", *SMALL, *overrides)
        config, warnings = resolved(*keys, hardware=hardware, env=self.env)
        assert (config.backend.name, config.backend.device, warnings) == ("nccl", "cuda", [])
        return config


CASES = {
    "single": Case("single", 2, 1, 0, (0,), (0,)),
    "dp": Case("dp", 2, 1, 0, (0,), (0, 1)),
    "ddp": Case("ddp", 2, 2, 1, (1,), (1,)),
    "ddp_mp": Case("ddp_mp", 4, 2, 1, (2, 3), (2, 3), model="mnist_net_mp"),
    "ddp, bound by Slurm": Case("ddp", 1, 2, 1, (0,), (0,), binds_gpus=True),
    "ddp_mp, bound by Slurm": Case(
        "ddp_mp", 2, 2, 1, (0, 1), (0, 1), model="mnist_net_mp", binds_gpus=True
    ),
}
MODES = ("single", "dp", "ddp", "ddp_mp")


def of(*names: str) -> pytest.MarkDecorator:
    """Run a test on the named cases."""
    return pytest.mark.parametrize("case", [CASES[name] for name in names], ids=names)


@cache
def real_dataset() -> Dataset:
    """Return a small set of images, with their numbers."""
    source = make("dataset", CASES["single"].config().dataset)
    dataset: Dataset = source.dataset(source.build(Path("data")))
    return dataset


def build(case: Case, config: Config, real: Dataset) -> TrainState:
    """Build a state as a rank does; inside `fake_gpus`."""

    def without_numbers(split: TensorSplit) -> TensorSplit:
        inputs, targets = split.inputs, split.targets
        return TensorSplit(
            torch.empty(inputs.shape, dtype=inputs.dtype),
            torch.empty(targets.shape, dtype=targets.dtype),
        )

    dataset = replace(real, train=without_numbers(real.train), eval=without_numbers(real.eval))
    mode = make("parallelism", config.parallelism)
    per_rank = mode_needs(config.parallelism).devices_per_rank
    devices = rank_devices(case.env, kind=config.backend.device, per_rank=per_rank)
    assert devices == tuple(torch.device("cuda", index) for index in case.devices)
    return build_state(build_setup(config, case.env, mode, devices=devices, dataset=dataset))


def take_epoch(state: TrainState, epoch: int = 0) -> None:
    """Take an epoch's first step and its last, of three samples; losses are where targets are."""
    for batch in (*state.setup.batches.epoch(epoch),)[:: state.setup.batches.steps_per_epoch - 1]:
        assert train_step(state, batch).device == state.setup.devices[-1]


def save(state: TrainState, config: Config, folder: Path, *, step: int, epoch: int) -> None:
    """Write a checkpoint as a rank does, without the numbers of its tensors."""
    content = snapshot(at(state, epoch=epoch, step=step))
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        save_checkpoint(
            folder,
            content,
            step=step,
            metrics={"eval/loss": float(step)},
            config=CheckpointConfig(),
            log=print,
        )


@pytest.mark.parametrize(
    ("case", "precision"),
    [
        (case, precision)
        for name, case in CASES.items()
        for precision in (DTYPES if name in MODES else ["fp32"])
    ],
    ids=lambda value: value if isinstance(value, str) else value.mode,
)
def test_a_step_computes_where_and_in_what_it_should(case: Case, precision: str) -> None:
    """Accumulated, clipped and stepped: parameters and gradients stay, every replica computes.

    Each forward runs in the dtype of train.precision, in DataParallel's threads as well.
    """
    config = case.config(
        f"train.precision={precision}", "train.clip_norm=1.0", "train.grad_accum_steps=2"
    )
    real, seen = real_dataset(), set[tuple[int, torch.dtype]]()

    def note(module: Any, inputs: Any, output: torch.Tensor) -> None:
        seen.add((output.device.index, output.dtype))

    with fake_gpus(case.gpus, ranks=case.ranks):
        state = build(case, config, real)
        for layer in (state.module.conv1, state.module.fc2):
            layer.register_forward_hook(note)
        state.model.train()
        take_epoch(state)
        for parameter in state.module.parameters():
            assert parameter.device.index in case.devices
            assert parameter.grad is not None
            assert parameter.grad.device == parameter.device
            assert parameter.grad.dtype == torch.float32
        assert seen == {(index, DTYPES[precision]) for index in case.computes_on}


@of("dp", "ddp", "ddp_mp")
def test_the_bare_model_is_evaluated_and_saved(case: Case, tmp_path: Path) -> None:
    """A checkpoint of each mode has the names of the model itself, and fits a single process."""
    config = case.config("optimizer=adamw")
    real = real_dataset()
    with fake_gpus(case.gpus, ranks=case.ranks):
        state = build(case, config, real)
        results, confusion = evaluate(state)
        content = snapshot(state)
    assert "eval/loss" in results
    assert confusion is not None
    single = CASES["single"]
    with fake_gpus(single.gpus):
        expected = build(single, single.config("optimizer=adamw"), real).module.state_dict()
    assert list(content["objects"]["model"]) == list(expected)


@of(*MODES)
def test_a_resumed_run_steps_as_before(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adam's moments are with their parameters, its step counts on the CPU, where they began.

    Nothing is loaded onto a GPU by itself, where it would lie beside what is there already.
    """
    # What torch chooses by itself for tensors on a GPU, though not for fake ones.
    keys = ("optimizer=adamw", "+optimizer.foreach=true", "train.precision=fp16")
    config, real, loaded_onto = case.config(*keys), real_dataset(), spy_on_loads(monkeypatch)
    with fake_gpus(case.gpus, ranks=case.ranks):
        state = build(case, config, real)
        take_epoch(state)
        save(state, config, tmp_path, step=4, epoch=1)
        state = build(case, config, real)
        assert restore(state, tmp_path, log=print) == 4
        take_epoch(state, 1)
        for parameter, content in state.optimizer.state.items():
            assert content["step"].device.type == "cpu"
            assert content["exp_avg"].device == parameter.device
    assert loaded_onto == ["cpu"]


def spy_on_loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list to which each torch.load adds where it puts its tensors."""
    loaded_onto, load = list[str](), torch.load

    def spy(*args: Any, map_location: Any = None, **kwargs: Any) -> Any:
        loaded_onto.append(str(map_location))
        return load(*args, map_location=map_location, **kwargs)

    monkeypatch.setattr(torch, "load", spy)
    return loaded_onto


@of("dp", "ddp_mp")
def test_the_best_model_is_evaluated_without_a_second_one_on_the_gpu(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end of a run nothing but the model's own tensors goes to a GPU."""
    keys = ("checkpoint.monitor=eval/loss", "checkpoint.mode=min", "checkpoint.load_best=true")
    config, real, loaded_onto = case.config(*keys), real_dataset(), spy_on_loads(monkeypatch)
    monkeypatch.setattr(export, "export_weights", lambda *_, **__: None)  # numbers
    trace = Trace()
    with fake_gpus(case.gpus, ranks=case.ranks):
        state = build(case, config, real)
        for step in (2, 4):
            save(state, config, tmp_path / "checkpoints", step=step, epoch=1)
        run_dir = RunDir(tmp_path)
        export_best(at(state, step=4), run_dir, logger=trace, log=trace.logged.append)
        devices = {parameter.device.index for parameter in state.module.parameters()}
    assert devices == set(case.devices)
    assert loaded_onto == ["cpu"]
    assert "best/loss" in trace.lines[0]


@of("dp", "ddp_mp")
@pytest.mark.parametrize("is_near", [True, False])
def test_data_may_lie_on_the_gpu_or_in_memory(
    case: Case, is_near: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small split lies on the rank's first GPU, a large one in memory; both are trained on."""
    if not is_near:
        monkeypatch.setattr(building, "MOST_GPU_DATA", 0)
    config = case.config("dataset.augmentation.horizontal_flip=true")
    real = real_dataset()
    with fake_gpus(case.gpus, ranks=case.ranks):
        state = build(case, config, real)
        split = state.setup.batches.split
        assert split.inputs.device.type == split.targets.device.type
        assert split.inputs.device == (state.setup.devices[0] if is_near else torch.device("cpu"))
        take_epoch(state)
        evaluate(state)


def timed_step(case: Case) -> FakeGpus:
    """Take one step of a case; return what was marked."""
    config, real = case.config(), real_dataset()
    with fake_gpus(case.gpus, ranks=case.ranks) as gpus:
        state = build(case, config, real)
        gpus.marks.clear()
        state.setup.timer.restart()
        train_step(state, next(state.setup.batches.epoch(0)))
    return gpus


def test_a_forward_ends_on_the_last_device() -> None:
    """Of a model cut in two, the second stage's forward is no part of the backward."""
    begin, forward, *rest = timed_step(CASES["ddp_mp"]).marks
    first, last = torch.device("cuda", 2), torch.device("cuda", 3)
    assert begin.after == {first}
    assert forward.after == {first, last}
    assert rest
    assert {mark.device for mark in (begin, forward, *rest)} == {first}
    assert timed_step(CASES["ddp"]).marks[1].after == {torch.device("cuda", 1)}


def test_times_are_read_once_the_gpu_has_passed_them() -> None:
    """However many parts there are between two lines: an event that is not over has no time."""
    with fake_gpus(1):
        pace = StepTimer(torch.device("cuda", 0))
        for _ in range(3 * MOST_EVENTS):
            pace.mark(StepPart.FORWARD)
            pace.add(samples=1)
        lap = pace.lap()
    assert lap.parts == {"forward": 1.0}


def test_exchanges_are_timed_by_the_gpu_alone() -> None:
    """Without waiting for it before the log line, however many events there are by then."""
    with fake_gpus(1) as gpus:
        pace = StepTimer(torch.device("cuda", 0))
        for _ in range(4):
            for part in (None, StepPart.FORWARD, StepPart.BACKWARD, StepPart.COMM):
                pace.mark(part)
            pace.mark(StepPart.OPTIMIZER)
            pace.add(samples=1)
        assert not any(mark.is_over for mark in gpus.marks)
        lap = pace.lap()
    # The first two exchanges are a warm-up; the optimizer's step belongs to the next exchange.
    assert lap.exchanges == (Exchange(work_ms=3.0, comm_ms=1.0),) * 2


def test_peak_memory_is_that_of_the_fullest_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What decides whether a model fits is one device's memory, not the sum."""
    peaks = [1 * 2**30, 3 * 2**30, 2 * 2**30]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: peaks[device])
    assert peak_memory_gib() == 3.0
