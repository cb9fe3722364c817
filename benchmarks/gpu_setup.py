"""What gpu.py measures with: this machine's devices, the sizes of the workloads, and the rows.

It imports torch in ``probe`` alone, which runs in a process of its own.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parent
HELPERS = BENCHMARKS.parent / "tests" / "helpers"
TEXT_TOKENS = 327_680  # of the training split of the text; its file has as many to evaluate on
TEXT_FILE = "text.txt"
NEEDED = {  # modules that the runner's own records need, by the package to install
    "hydra": "hydra-core", "omegaconf": "omegaconf", "tensorboard": "tensorboard",
    "PIL": "pillow", "safetensors": "safetensors",
}  # fmt: skip


@dataclass(frozen=True)
class Workload:
    """A model and its batches: the runner and the loop by hand train the same."""

    model: str
    batch: int  # samples of a rank and step
    every: int  # steps of a log line; the first line is the warm-up and does not count
    epoch: int  # steps of an epoch on one rank
    steps: int
    size: int = 0  # pixels of a side, or tokens of a sample
    channels: int = 1
    layers: int | None = None  # fewer than the model's, for a rehearsal

    @property
    def unit(self) -> str:
        """What its speed counts."""
        return "tokens/s" if self.is_text else "samples/s"

    @property
    def is_text(self) -> bool:
        """Whether it trains a language model."""
        return self.model.startswith("gpt")

    def per_sample(self) -> int:
        """Return how many units a sample has."""
        return self.size if self.is_text else 1

    def num_samples(self, ranks: int) -> int:
        """Return the samples of an epoch; every batch is full."""
        return TEXT_TOKENS // self.size if self.is_text else self.batch * self.epoch * ranks

    def keys(self, ranks: int) -> list[str]:
        """Return the command line of the runner, but for the device and the precision."""
        words = [
            f"model={self.model}", f"world_size={ranks}", f"batch.global_size={self.batch * ranks}",
            f"train.max_steps={self.steps}", f"train.log_every_steps={self.every}",
            "train.eval_every_epochs=0", "checkpoint.every_epochs=null",
        ]  # fmt: skip
        if self.is_text:
            text = f"dataset.path={TEXT_FILE}", f"dataset.sequence_length={self.size}"
            words += [] if self.layers is None else [f"model.num_layers={self.layers}"]
            return [*words, "dataset=text", *text, "dataset.eval_fraction=0.5"]
        words.append(f"dataset.num_samples={self.num_samples(ranks)}")
        if self.model == "toy":
            return words
        if self.model == "resnet18":
            words.append("model.small_images=true")
        sides = f"dataset.height={self.size}", f"dataset.width={self.size}"
        return [*words, "dataset=fake_images", f"dataset.channels={self.channels}", *sides]


REAL = {
    "toy": Workload("toy", batch=20, every=500, epoch=4000, steps=4000),
    "gpt_10m": Workload("gpt_10m", batch=64, every=20, epoch=20, steps=100, size=256),
    "gpt_124m": Workload("gpt_124m", batch=8, every=10, epoch=40, steps=40, size=1024),
    "convnet": Workload("convnet", batch=512, every=40, epoch=40, steps=400, size=28),
    "resnet18": Workload("resnet18", batch=512, every=30, epoch=30, steps=150, size=32, channels=3),
}
TINY = {
    "toy": Workload("toy", batch=20, every=50, epoch=200, steps=200),
    "gpt_10m": Workload("gpt_10m", batch=2, every=2, epoch=640, steps=4, size=16, layers=2),
    "convnet": Workload("convnet", batch=16, every=4, epoch=4, steps=12, size=28),
    "resnet18": Workload("resnet18", batch=2, every=1, epoch=2, steps=3, size=16, channels=3),
}


def workload(name: str, *, rehearses: bool) -> Workload:
    """Return a workload in the size of a measurement or of a rehearsal."""
    return (TINY if rehearses else REAL)[name]


@dataclass(frozen=True)
class Row:
    """One line of the results."""

    part: str
    what: str
    outcome: str = "measured"  # or passed, skipped, FAILED
    value: float | None = None
    unit: str = ""
    against: str = ""
    its_value: float | None = None
    note: str = ""  # for skipped and FAILED the reason
    details: Mapping[str, Any] = field(default_factory=dict)  # in the JSON file alone

    @property
    def ratio(self) -> float | None:
        """The value as a multiple of what it is compared with."""
        return self.value / self.its_value if self.value is not None and self.its_value else None

    def facts(self) -> dict[str, Any]:
        """Return what the JSON file has."""
        return asdict(self) | {"ratio": self.ratio}


@dataclass(frozen=True)
class Setup:
    """The devices to measure on, and where to write."""

    rehearses: bool  # tiny sizes
    kind: str  # cuda, simgpu or cpu: torch's device type
    count: int  # devices; 0 on the CPU
    torch: str
    seen: Sequence[str]  # lines about the machine
    environ: Mapping[str, str]  # of a program that uses the devices
    scratch: str

    @property
    def folder(self) -> Path:
        """Where runs, data and caches go; it is removed at the end."""
        return Path(self.scratch)

    @property
    def data_root(self) -> Path:
        """The folder of the text, and of generated MNIST files."""
        return self.folder / "data"

    @property
    def rows(self) -> Path:
        """The file to which the parts append their rows."""
        return self.folder / "rows.jsonl"

    def measured(self) -> list[dict[str, Any]]:
        """Return the rows so far, as the JSON file has them."""
        return [*map(json.loads, self.rows.read_text().splitlines())] if self.rows.exists() else []

    def on_device(self) -> list[str]:
        """Return the keys of the runner that choose the device."""
        return [f"backend.device={self.kind}", *(["backend=gloo"] if self.kind == "cpu" else [])]


def missing(*modules: str) -> list[str]:
    """Return which modules this interpreter lacks, without importing them."""
    return [name for name in modules if find_spec(name) is None]


def probe(*, rehearses: bool, scratch: Path) -> Setup:
    """Return the setup that a process of its own finds; a broken driver ends that one alone."""
    words = [sys.executable, __file__]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode:
        raise SystemExit(f"torch cannot be imported here:\n{done.stderr}")
    found = json.loads(done.stdout.splitlines()[-1])
    is_real = found["kind"] == "cuda"
    return Setup(rehearses=rehearses or not is_real, scratch=str(scratch), **found)


def _probe() -> None:
    import torch

    count = torch.cuda.device_count()
    names = ", ".join(torch.cuda.get_device_name(index) for index in range(count))
    cores = len(os.sched_getaffinity(0))
    python = ".".join(map(str, sys.version_info[:3]))
    seen = [f"Python {python}, torch {torch.__version__} for CUDA {torch.version.cuda}, "
            f"{cores} cores", f"{count} CUDA devices: {names or 'none'}"]  # fmt: skip
    kind, environ = "cuda", dict[str, str]()
    if not count:
        kind, count, environ, why = _simulated()
        seen.append(f"rehearsal on {kind}{why}")
    found = {"kind": kind, "count": count, "seen": seen, "environ": environ}
    print(json.dumps(found | {"torch": torch.__version__}))


def _simulated() -> tuple[str, int, dict[str, str], str]:
    """Return the simulated GPU's kind, number and variables; the CPU's, and why, without it."""
    sys.path.insert(0, str(HELPERS))
    try:
        import simgpu_build

        return "simgpu", 2, simgpu_build.environ(devices=2, delay_us=0), ", two simulated GPUs"
    except BaseException as error:  # pytest's skip is none of Exception
        return "cpu", 0, {}, f": there is no simulated GPU ({str(error).strip()[-300:]})"


if __name__ == "__main__":
    _probe()
