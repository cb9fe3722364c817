"""Runs on the simulated GPU, and the same on the CPU."""

import csv
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import simgpu_build
import torch
from commands import run_command
from run_folders import metrics, tensors_in

# On a machine with GPUs, such as cuda: the same rows run on these.
KIND = os.environ.get("DDP_RUNNER_TEST_DEVICE", "simgpu")
IS_SIMULATED = KIND == "simgpu"
MOST_DEVICES = 8 if IS_SIMULATED else torch.accelerator.device_count()
PARTS = simgpu_build.DEVICE.parent / "parts"
DELAY_US = 300  # before each task of each stream
LATE_US = 1_000_000  # longer than the default stream takes for what the host has given it
NET = ("model.dropout1=0", "model.dropout2=0", "model.channels_last=false")
GPT = ("model=gpt", "model.num_layers=2", "model.width=32", "model.feedforward=64")
PICTURES = ("dataset=fake_images", "dataset.num_samples=96", "dataset.eval_samples=24")
TEXT = ("dataset=text", "dataset.sequence_length=16", "dataset.eval_fraction=0.0005")
ACCUMULATED = "train.grad_accum_steps=2"
TRUSTED = "allowed_targets=[counted]"
FACTS = (
    *("dataset.num_classes=10", "dataset.channels=1", "dataset.height=28", "dataset.width=28"),
)
BATCHES = ("batch.global_size=12", "batch.eval_per_rank=3")  # 12 is divisible by 2, 3 and 4
STEPS = ("train.max_steps=6", "train.log_every_steps=6", "checkpoint.every_steps=3")
EPS = "optimizer.eps=1e-3"  # else AdamW makes much of what rounding left of small gradients
USUAL = (*BATCHES, *STEPS, "optimizer=adamw", EPS, "train.step=counted.step", TRUSTED)


States = dict[int, dict[str, torch.Tensor]]  # of checkpoints, by step and name


@dataclass(frozen=True)
class Row:
    """One row of the table: where and how a model is trained."""

    mode: str
    ranks: int
    precision: str = "fp32"
    # memory: tensors on the device. workers: a Dataset, whose workers' batches are pinned. loader:
    # one that the rank loads itself, into pageable memory. padded: texts in memory, of which a
    # batch is cut to its longest.
    source: str = "memory"
    more: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "-".join([self.mode, str(self.ranks), self.precision, self.source, *self.more])

    @property
    def micro_batches(self) -> int:
        """How many forwards a step has."""
        return 2 if ACCUMULATED in self.more else 1

    @property
    def keys(self) -> tuple[str, ...]:
        """The command line, but for the device and the precision."""
        ranks = (f"parallelism={self.mode}", f"world_size={self.ranks}")
        return (*self._model_and_data, *USUAL, *ranks, *self.more)

    @property
    def _model_and_data(self) -> tuple[str, ...]:
        is_gpt = self.mode in ("tp", "fsdp_tp", "pp")
        if self.source == "padded":
            return ("model=bag", "dataset=padded", "--config-dir", str(PARTS / "conf"))
        model = GPT if is_gpt else (f"model=mnist_net{'_mp' * (self.mode == 'ddp_mp')}", *NET)
        if self.source == "memory":
            return (*model, *(TEXT if is_gpt else PICTURES))
        name, facts = ("Texts", ()) if is_gpt else ("Pictures", FACTS)
        return (
            *(*model, "dataset=torch_dataset", *facts),
            f"dataset.train={{_target_:counted.{name},num_samples:96}}",
            f"dataset.eval={{_target_:counted.{name},num_samples:24,seed:1}}",
            *(
                ["dataset.num_workers=1"]
                if self.source == "workers"
                else ["dataset.pin_memory=false"]
            ),
        )


def need_devices(row: Row) -> None:
    """Skip a row that takes more devices than there are."""
    needed = row.ranks * (2 if row.mode == "ddp_mp" else 1)
    if needed > MOST_DEVICES:
        pytest.skip(f"needs {needed} devices, here are {MOST_DEVICES}")


def on_device(
    *keys: str, folder: Path, waits: Path | None = None, has_late_streams: bool = False
) -> Path:
    """Run a command on the simulated GPU to its end; return its run folder.

    Late streams, all but the default one, are behind it until something waits for them; else they
    are ahead of it.
    """
    environ = {"PYTHONPATH": str(PARTS)}
    if IS_SIMULATED:
        side_delay_us = LATE_US if has_late_streams else 0
        environ = simgpu_build.environ(
            devices=MOST_DEVICES, delay_us=DELAY_US, side_delay_us=side_delay_us
        )
        environ["PYTHONPATH"] += f":{PARTS}"
        environ |= {"COUNTED_WAITS": str(waits)} if waits else {}
    return _run(*keys, f"backend.device={KIND}", folder=folder, environ=environ)


def on_cpu(*keys: str, folder: Path) -> Path:
    """Run a command on the CPU to its end; return its run folder."""
    on_cpu = ("backend=gloo", "backend.device=cpu")
    return _run(*keys, *on_cpu, folder=folder, environ={"PYTHONPATH": str(PARTS)})


def _run(*keys: str, folder: Path, environ: dict[str, str]) -> Path:
    done = run_command(*keys, folder=folder, environ=environ)
    assert done.exit_code == 0, done.stdout + done.stderr
    (named,) = re.findall(r"^run +(\S+)", done.stdout, re.MULTILINE)
    return folder / named


def last_numbers(run_dir: Path) -> dict[str, float]:
    """Return the loss, the gradient's norm and the evaluation of the last line of each."""
    found = dict[str, float]()
    for line in metrics(run_dir):
        found |= {
            key: value
            for key, value in line.items()
            if key.startswith("eval/") or key in ("train/loss", "train/grad_norm")
        }
    return found


def states(run_dir: Path) -> States:
    """Return the tensors of each checkpoint, by step."""
    found: States = {}
    for path in sorted(run_dir.glob("checkpoints/step-*/state.pt")):
        state = torch.load(path, map_location="cpu", weights_only=True)
        found[int(path.parent.name.removeprefix("step-"))] = dict(tensors_in(state))
    return found


@dataclass(frozen=True)
class Waits:
    """What made the host wait between two forwards in a row, by its cause; see ``host_waits``."""

    step: dict[str, int]  # between the first forwards of the last two steps
    checkpoint: dict[str, int]  # between those around the checkpoint
    evaluation: dict[str, int]  # from the first to the last batch of the last evaluation
    pageable: int  # copies from pageable memory, which no GPU makes beside its work, in two steps


def host_waits(path: Path, *, rank: int, num_steps: int, micro_batches: int) -> Waits:
    """Return how often a rank's host has waited in a run, as ``counted.step`` noted.

    What comes in the first two steps may wait: DDP orders its buckets. The run has a checkpoint
    before its last three steps, and each step a forward for each of its micro-batches.
    """
    lines: list[Any] = [
        json.loads(line) for line in Path(f"{path}.{rank}").read_text().splitlines()
    ]
    is_training = [line["training"] for line in lines]
    end = len(lines) - is_training[::-1].index(True)
    start = end - num_steps * micro_batches
    assert all(is_training[start:end])
    assert not is_training[start - 1]  # of the model's first look at a batch
    before, after, second_last, last = lines[start:end:micro_batches][-4:]
    evaluation = [line["waits"] for line in lines[end:]]
    assert len(evaluation) > 1
    return Waits(
        step=_more(second_last["waits"], last["waits"]),
        checkpoint=_more(before["waits"], after["waits"]),
        evaluation=_more(evaluation[0], evaluation[-1]),
        pageable=last["pageable"] - after["pageable"],
    )


def _more(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    more = {cause: number - before.get(cause, 0) for cause, number in after.items()}
    return {cause: number for cause, number in more.items() if number}


def predictions(run_dir: Path) -> list[float]:
    """Return the numbers of a run's predictions, one sample after the other."""
    (path,) = run_dir.rglob("predictions.csv")
    with path.open(newline="") as file:
        _, *rows = csv.reader(file)
    return [float(number) for row in rows for number in row[1:]]  # after the split
