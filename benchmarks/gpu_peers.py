"""The scripts and libraries that gpu.py compares the runner with, on MNIST.

Without MNIST's files it writes some of the same form: noise, which costs the same work.
"""

import os
import struct
import subprocess
from argparse import Namespace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from gpu_commands import Rows, need, tried
from gpu_setup import NEEDED, Row, Setup

SIDE = 28  # pixels
PEERS = {
    "plain": [],
    "accelerate": ["accelerate"],
    "fabric": ["lightning"],
    "trainer": ["lightning"],
}  # programs of loader_programs.py, and what they import


def write_mnist(setup: Setup) -> tuple[Path, str]:
    """Return a folder with MNIST's files, and in words where they come from."""
    own = os.environ.get("DDP_RUNNER_DATA_ROOT")
    if own and not setup.rehearses and (Path(own) / "MNIST" / "raw").is_dir():
        return Path(own).resolve(), "MNIST"
    raw, randoms = setup.data_root / "MNIST" / "raw", Random(0)
    raw.mkdir(parents=True, exist_ok=True)
    for name, count in (("train", 10000 if setup.rehearses else 60000), ("t10k", 1000)):
        pixels, labels = randoms.randbytes(count * SIDE**2), bytes(n % 10 for n in range(count))
        head = struct.pack(">4i", 0x803, count, SIDE, SIDE), struct.pack(">2i", 0x801, count)
        (raw / f"{name}-images-idx3-ubyte").write_bytes(head[0] + pixels)
        (raw / f"{name}-labels-idx1-ubyte").write_bytes(head[1] + labels)
    return setup.data_root, "noise in MNIST's files"


def tutorial(setup: Setup) -> Rows:
    """The tutorial's whole MNIST script, and the runner's command."""
    yield from tried("tutorial", "ConvNet, MNIST, an epoch", partial(_tutorial, setup))


def _tutorial(setup: Setup) -> Rows:
    need("torchvision", *NEEDED)
    from loop import run_runner, run_tutorial

    root, source = write_mnist(setup)
    named: dict[str, Any] = {"data_root": str(root), "folder": setup.folder}
    theirs, ours = run_tutorial(1, **named), run_runner(1, **named)
    subprocess.run(["rm", "-r", str(setup.folder / "run")], check=True)
    pairs = list(zip(theirs.losses, ours.losses, strict=True))
    worst = max((abs(own - other) / other for other, own in pairs), default=0.0)
    script, what = "the tutorial's script", "ConvNet, MNIST, an epoch"
    note = f"{source}; largest relative difference of a loss {worst:.1e}"
    speeds = ours.samples_per_s, "samples/s", script, theirs.samples_per_s
    yield Row("tutorial", what, "measured", *speeds, note)
    yield Row("tutorial", f"{what}, whole command", "measured", ours.wall_s, "s", script,
              theirs.wall_s)  # fmt: skip


def peers(setup: Setup) -> Rows:
    """A user's Dataset of MNIST in the runner and in each other loop that is installed."""
    yield from tried("peers", "a user's Dataset", partial(_peers, setup))


def _peers(setup: Setup) -> Rows:
    need("torchvision", *NEEDED)
    from loader import measure

    root, source = write_mnist(setup)
    samples, workers = (400, 0) if setup.rehearses else (12000, 2)
    args = Namespace(data_root=str(root), samples=samples, epochs=3, threads=2, dataset="own")

    def speed(program: str) -> float:
        return measure(program, args, num_ranks=1, num_workers=workers)[0]

    own = speed("runner")
    what = f"MNIST through a user's Dataset, {workers} workers"

    def beside(peer: str) -> Rows:
        need(*PEERS[peer])
        yield Row("peers", what, "measured", own, "samples/s", peer, speed(peer), source)

    for peer in PEERS:
        yield from tried("peers", f"{what}, {peer}", partial(beside, peer))
