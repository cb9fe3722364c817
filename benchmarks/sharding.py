"""What the modes that split a model cost: memory of a rank, bytes of a step, and throughput.

python benchmarks/sharding.py memory
python benchmarks/sharding.py bytes
python benchmarks/sharding.py throughput

All train GPTs on the CPU. `throughput` compares with a plain script, Accelerate and Lightning
Fabric (sharding_programs.py), which train in turns of a few steps. Read the ratios.
"""

import argparse
import errno
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parent
MIB = 2**20
VOCABULARY = 256  # bytes
BYTES_PER_PARAMETER = 16  # float32: weight, gradient, and two moments of AdamW


@dataclass(frozen=True)
class Size:
    """A GPT, and what it is trained on."""

    num_layers: int
    width: int
    num_heads: int
    length: int  # tokens of a sample
    batch: int  # samples of a rank

    @property
    def block(self) -> int:
        """Parameters of a block."""
        feedforward = -(-8 * self.width // 3 // 64) * 64
        return 4 * self.width**2 + 3 * self.width * feedforward + 2 * self.width

    @property
    def rest(self) -> int:
        """Parameters outside of the blocks: the embedding and the last norm."""
        return VOCABULARY * self.width + self.width

    @property
    def parameters(self) -> int:
        """All parameters."""
        return self.num_layers * self.block + self.rest

    def keys(self) -> list[str]:
        """Return the command line of the runner."""
        return [
            "model=gpt", f"model.num_layers={self.num_layers}", f"model.width={self.width}",
            f"model.num_heads={self.num_heads}", f"dataset.sequence_length={self.length}",
            f"batch.per_rank={self.batch}", "train.eval_every_epochs=0", "train.num_threads=1",
            "scheduler=constant", "allowed_targets=[sharding_step]",
        ]  # fmt: skip


LARGE = Size(num_layers=16, width=512, num_heads=8, length=16, batch=1)
TINY = Size(num_layers=1, width=16, num_heads=2, length=16, batch=1)
MEDIUM = Size(num_layers=6, width=384, num_heads=6, length=128, batch=2)  # model=gpt_10m
RANKS, PEERS = 2, ("ddp_runner", "accelerate", "fabric")  # of throughput
WHOLE = ("single", "ddp")  # modes whose ranks hold the whole model
MEASURED = (
    ("single", 1), ("ddp", 2), ("fsdp", 1), ("fsdp", 2), ("fsdp", 4), ("hsdp", 4), ("tp", 2),
    ("fsdp_tp", 4),
)  # fmt: skip


def main() -> None:
    """Run one of the measurements."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["memory", "bytes", "throughput"])
    parser.add_argument("--modes", nargs="+", help="such as fsdp:4; default: all")
    parser.add_argument("--layers", type=int, default=LARGE.num_layers)
    parser.add_argument("--keys", nargs="*", default=[], help="more keys of the runner")
    parser.add_argument("--turns", type=int, default=20, help="of each program; throughput")
    parser.add_argument("--steps", type=int, default=3, help="of a turn; throughput")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    args = parser.parse_args()
    modes = [
        (mode, int(ranks)) for mode, _, ranks in (one.partition(":") for one in args.modes or [])
    ]
    measure = {"memory": memory, "bytes": sent_bytes, "throughput": throughput}[args.what]
    measure(args, modes or MEASURED)


def memory(args: argparse.Namespace, modes: Sequence[tuple[str, int]]) -> None:
    """Print the peak memory of a rank by mode, beside what a formula says."""
    size = Size(args.layers, LARGE.width, LARGE.num_heads, LARGE.length, LARGE.batch)
    print(
        f"{size.parameters / 1e6:.1f} M parameters, of which a block has {size.block / 1e6:.2f} M"
    )
    print(
        "mode     ranks  returned  process  build  trial  train  model alone  formula  ratio  "
        "save 0  save 1"
    )
    found = []
    constant = max(one["train"] for one in run_memory(TINY, "fsdp", 2, args.keys))
    both = [
        (mode, ranks, is_returned)
        for mode, ranks in modes
        for is_returned in (False, True)
        if mode not in WHOLE or not is_returned
    ]
    for mode, ranks, is_returned in both:
        keys = [] if mode in WHOLE else [f"parallelism.return_memory={is_returned}".lower()]
        peaks = run_memory(size, mode, ranks, [*keys, *args.keys])
        train = max(one["train"] for one in peaks)
        alone, expected = train - constant, formula(size, mode, ranks)
        row = {
            "mode": mode, "ranks": ranks, "returned": is_returned, "process": constant,
            "train": train, "formula": expected,
            "build": max(one["build"] - one["start"] for one in peaks),
            "trial": max(one["trial"] for one in peaks),
            "after": max(one["after train"] for one in peaks),
            "save 0": peaks[0]["save"], "save 1": max([one["save"] for one in peaks[1:]] or [0]),
        }  # fmt: skip
        found.append(row)
        print(
            f"{mode:8} {ranks:5}  {is_returned!s:8}  {constant / MIB:7.0f}  "
            f"{row['build'] / MIB:5.0f}  {row['trial'] / MIB:5.0f}  {train / MIB:5.0f}  "
            f"{alone / MIB:11.0f}  {expected / MIB:7.0f}  {alone / expected:5.2f}  "
            f"{row['save 0'] / MIB:6.0f}  {row['save 1'] / MIB:6.0f}",
            flush=True,
        )
    if args.json:
        args.json.write_text(json.dumps({"parameters": size.parameters, "rows": found}, indent=1))


def formula(size: Size, mode: str, ranks: int) -> float:
    """Return the bytes that a rank holds for its model and optimizer, without activations."""
    whole = BYTES_PER_PARAMETER * size.parameters
    if mode in WHOLE:
        return whole
    parts = {"hsdp": ranks / 2}.get(mode, ranks)
    tensor = {"tp": ranks, "fsdp_tp": 2}.get(mode, 1)
    split = size.num_layers * size.block  # norms are whole under tp, which is little
    if mode == "tp":
        return BYTES_PER_PARAMETER * (split / ranks + size.rest)
    shards = parts / tensor
    held = BYTES_PER_PARAMETER * (split / tensor + size.rest) / shards
    if ranks == 1:
        return held
    return held + 8 * (size.block / tensor + size.rest)  # one block and the rest, with gradients


def run_memory(size: Size, mode: str, ranks: int, keys: Sequence[str]) -> list[dict[str, int]]:
    """Return each rank's peaks."""
    step = "train.step={_target_:sharding_step.MemoryStep}"
    return run(size, mode, ranks, [step, "train.max_steps=3", "train.log_every_steps=1", *keys],
               result="memory")  # fmt: skip


def run(
    size: Size, mode: str, ranks: int, keys: Sequence[str], *, result: str
) -> list[dict[str, int]]:
    """Run a training; return what its step wrote for each rank."""
    with tempfile.TemporaryDirectory() as folder:
        words = [f"parallelism={mode}", f"world_size={ranks}", *size.keys(), *keys]
        done = subprocess.run(
            [sys.executable, "-m", "ddp_runner", *words, f"hydra.run.dir={folder}/run"],
            cwd=folder, env=environment(Path(folder)), check=False, capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(f"{mode} on {ranks}: {done.stderr or done.stdout}")
        paths = [Path(folder) / f"{result}-{rank}.json" for rank in range(ranks)]
        return [json.loads(path.read_text()) for path in paths]


def environment(folder: Path) -> dict[str, str]:
    """Return the variables of a program; the steps of this folder can be imported."""
    path = os.pathsep.join(filter(None, [str(BENCHMARKS), os.environ.get("PYTHONPATH")]))
    return os.environ | {"PYTHONPATH": path, "SHARDING_FOLDER": str(folder)}


def sent_bytes(args: argparse.Namespace, modes: Sequence[tuple[str, int]]) -> None:
    """Print the collectives of one step of a rank, and the bytes of their whole tensors."""
    size = Size(4, 256, 4, 128, 4)
    print(f"{size.parameters} parameters, {size.block} in each of {size.num_layers} blocks")
    step = "train.step={_target_:sharding_step.BytesStep}"
    for mode, ranks in modes:
        found, *_ = run(size, mode, ranks, [step, "train.max_steps=5", *args.keys], result="bytes")
        for name, sizes in found.items():
            large = [one for one in sizes if one > 4096]
            print(
                f"{mode:8} {ranks}  {name:45} {len(sizes):4} calls  {sum(sizes):10} bytes, "
                f"{len(large)} above 4 KiB: {sum(large)}",
                flush=True,
            )


def throughput(args: argparse.Namespace, modes: Sequence[tuple[str, int]]) -> None:
    """Print how fast each program is, relative to the loop by hand, for DDP and for FSDP2.

    A busy machine changes the time by the clock from turn to turn. What a step takes of the
    processors does not depend on it, and where they are the limit it is what counts.
    """
    chosen = [mode for mode, _ in modes if mode in ("ddp", "fsdp")]
    for mode in dict.fromkeys(chosen):
        with ExitStack() as stack:
            programs = [
                stack.enter_context(started(name, mode, args)) for name in ("by_hand", *PEERS)
            ]
            for program in programs:
                program.warm_up(turns=2)
            times = dict[str, list[tuple[float, float]]]()
            for turn in range(args.turns):
                first = turn % len(programs)
                for program in programs[first:] + programs[:first]:
                    times.setdefault(program.name, []).append(program.turn())
        for name, found in times.items():
            print(f"{mode:5} {name:10}", end="")
            for kind, place in (("clock", 0), ("processor", 1)):
                seconds = [one[place] for one in found]
                ratios = [
                    theirs[place] / own
                    for theirs, own in zip(times["by_hand"], seconds, strict=True)
                ]
                step_ms = 1000 * statistics.median(seconds) / args.steps
                print(f"  {kind} {step_ms:5.0f} ms a step, speed {spread(ratios)}", end="")
            print(flush=True)


class Program:
    """A training program of several ranks, which takes turns with others."""

    def __init__(self, name: str, words: list[str], folder: Path, *, steps: int) -> None:
        """Start it, and wait until its ranks have built their models."""
        self.name, self.folder = name, folder
        for rank in range(RANKS):
            os.mkfifo(folder / f"go-{rank}")
            os.mkfifo(folder / f"done-{rank}")
        environ = environment(folder) | {"SHARDING_STEPS": str(steps), "OMP_NUM_THREADS": "1"}
        log = (folder / "log").open("w")
        self.process = subprocess.Popen(
            [sys.executable, "-m", *words], cwd=folder, env=environ, stdout=log, stderr=log
        )
        try:
            self.go = [self._open(f"go-{rank}", os.O_WRONLY) for rank in range(RANKS)]
            self.done = [self._open(f"done-{rank}", os.O_RDONLY) for rank in range(RANKS)]
            for pipe in self.done:
                self._line(pipe)
        except BaseException:
            self.close()
            raise

    def _open(self, name: str, flags: int) -> int:
        """Open an end of a pipe once the rank has opened the other."""
        while True:
            if self.process.poll() is not None:
                raise SystemExit((self.folder / "log").read_text())
            try:
                descriptor = os.open(self.folder / name, flags | os.O_NONBLOCK)
            except OSError as error:
                if error.errno != errno.ENXIO:
                    raise
                time.sleep(0.1)
                continue
            os.set_blocking(descriptor, True)
            return descriptor

    def _line(self, pipe: int) -> list[float]:
        text = b""
        while not text.endswith(b"\n"):
            read = os.read(pipe, 64)
            if not read:
                if self.process.poll() is not None:
                    raise SystemExit((self.folder / "log").read_text())
                time.sleep(0.05)  # the rank has not opened its end yet
            text += read
        return [*map(float, text.split())]

    def turn(self) -> tuple[float, float]:
        """Let it take its steps; return the seconds of its slowest rank, and of all processors."""
        for pipe in self.go:
            os.write(pipe, b"g")
        clock, cpu = zip(*[self._line(pipe) for pipe in self.done], strict=True)
        return max(clock), sum(cpu)

    def warm_up(self, *, turns: int) -> None:
        """Take turns that do not count."""
        for _ in range(turns):
            self.turn()

    def close(self) -> None:
        """End its processes: a rank whose pipe is closed ends."""
        for descriptor in (*getattr(self, "go", []), *getattr(self, "done", [])):
            os.close(descriptor)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        self.process.terminate()
        self.process.wait()


@contextmanager
def started(name: str, mode: str, args: argparse.Namespace) -> Iterator[Program]:
    """Start a program in a folder of its own; end it at the end of the block."""
    size = MEDIUM
    with tempfile.TemporaryDirectory() as folder:
        if name == "ddp_runner":
            words = [
                "ddp_runner", f"parallelism={mode}", f"world_size={RANKS}", *size.keys(),
                "train.step=sharding_step.in_turns", "train.epochs=1000", *args.keys,
                f"hydra.run.dir={folder}/run",
            ]  # fmt: skip
        else:
            words = [
                "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}",
                str(BENCHMARKS / "sharding_programs.py"), name, mode,
                "--layers", str(size.num_layers), "--width", str(size.width),
                "--heads", str(size.num_heads), "--length", str(size.length),
                "--batch", str(size.batch),
            ]  # fmt: skip
        program = Program(name, words, Path(folder), steps=args.steps)
        try:
            yield program
        finally:
            program.close()


def spread(values: list[float]) -> str:
    """Return median, minimum and maximum as text."""
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


if __name__ == "__main__":
    main()
