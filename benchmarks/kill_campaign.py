"""Kill runs at random points, resume them, and compare each with an uninterrupted run.

python benchmarks/kill_campaign.py --kills 1000 --out report.md

A chain is a training that is killed several times, resumed each time by the same command, and then
runs to its end. A kill hits a step of a rank, a file system call while a checkpoint is saved (also
in the middle of a write), or any instant after the command's start. SIGKILL goes to a rank, to the
launcher or to the whole process tree. The same seed gives the same points, except the instants.

Exit code 0: every checkpoint loads, every chain ends as the uninterrupted run, nothing is left.
"""

import argparse
import os
import platform
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "helpers"))
from commands import background, session_pids, wait_for
from injection import At, Call, Fault, append_byte, inject, kill_tree, send_launcher, send_signal
from run_folders import checkpoint_steps, record
from undisturbed import WrongError, assert_equal, assert_whole, rank_pids
from warm import start_server

from ddp_runner.tracking.run_record import versions

NUM_STEPS = 18  # six epochs of three
RUN = "run"  # a chain's folder
COMMON = (
    "batch.global_size=8", "scheduler=cosine", "train.log_every_steps=1", "train.num_threads=1",
    "checkpoint.every_steps=2", "checkpoint.keep=2", "checkpoint.monitor=eval/loss",
    "checkpoint.mode=min", "backend.device=cpu",
)  # fmt: skip
FOLDER = (f"hydra.run.dir={RUN}", "resume=auto")
DIGITS = (
    "dataset=fake_images", "dataset.num_samples=24", "train.epochs=6", "optimizer=momentum",
)  # fmt: skip
TEXT = (
    "model=gpt", "dataset=text", "dataset.sequence_length=16", "dataset.eval_fraction=0.0005",
    "model.num_layers=2", "model.width=16", "model.num_heads=2", "model.dropout=0.1",
    f"train.max_steps={NUM_STEPS}", "train.eval_every_steps=3",
)  # fmt: skip
SHARDED = ("checkpoint.format=sharded",)
MODES = {
    "single": ("model=mnist_net", *DIGITS, "parallelism=single", "world_size=1"),
    "ddp": ("model=mnist_net", *DIGITS, "parallelism=ddp", "world_size=2"),
    "ddp_mp": ("model=mnist_net_mp", *DIGITS, "parallelism=ddp_mp", "world_size=2"),
    "ps": ("model=mnist_net", *DIGITS, "parallelism=ps", "parallelism.mode=sync", "world_size=3"),
    "fsdp": (*TEXT, "train.grad_accum_steps=2", "parallelism=fsdp", "world_size=2"),
    "hsdp": (*TEXT, "optimizer=momentum", "parallelism=hsdp", "world_size=4"),
    "tp": (*TEXT, "parallelism=tp", "world_size=2"),
    "other ranks": (*TEXT, "batch.virtual_ranks=8", "parallelism=ddp", "world_size=4"),
    "sharded": (*TEXT, *SHARDED, "parallelism=fsdp", "world_size=2"),
    "sharded and others": (
        *(*TEXT, *SHARDED, "model.dropout=0", "train.grad_accum_steps=2"),
        *("parallelism=fsdp", "world_size=2"),
    ),
}
RESUMED_AS: dict[str, list[tuple[str, ...]]] = {  # after a kill, one of these
    "other ranks": [("parallelism=fsdp", "world_size=2")],
    "sharded and others": [
        ("parallelism=pp", "world_size=2"),
        ("parallelism=tp", "world_size=2"),
        ("parallelism=single", "world_size=1"),
        ("parallelism=fsdp", "world_size=2"),
    ],
}
# Modes whose runs equal the uninterrupted run up to rounding only.
TOLERANCES = {"sharded and others": 1e-4}
VICTIMS = ("rank", "launcher", "tree")
PLACES = ("training", "saving", "any instant")
MOST_KILLS = 8  # of a chain
LONGEST_S = 600.0  # limit of every wait, far above the usual


@dataclass
class Result:
    """What some kills showed."""

    kills: Counter[tuple[str, str, str]] = field(default_factory=Counter)  # mode, victim, place
    failures: list[str] = field(default_factory=list)
    restarts: int = 0  # kills after which the launcher itself restarted the ranks
    chains: int = 0

    def add(self, other: "Result") -> None:
        """Add another result."""
        self.kills += other.kills
        self.failures += other.failures
        self.restarts += other.restarts
        self.chains += other.chains


@dataclass(frozen=True)
class Uninterrupted:
    """A mode's uninterrupted run."""

    run_dir: Path
    seconds: float  # of the whole command
    calls: int  # file system calls of all its saves


def main() -> None:
    """Run the campaign and write its report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="chains side by side")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--out", type=Path, help="a Markdown file")
    args = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kills-", dir="/tmp") as base:
        result = campaign(
            Path(base),
            kills=args.kills,
            seed=args.seed,
            jobs=args.jobs,
            modes=args.modes.split(","),
            log=partial(print, flush=True),
        )
    text = report(result, seed=args.seed, seconds=time.monotonic() - started)
    print(text)
    if args.out is not None:
        args.out.write_text(text, encoding="utf-8")
    sys.exit(bool(result.failures))


def campaign(
    base: Path,
    *,
    kills: int,
    seed: int,
    jobs: int,
    modes: Sequence[str],
    log: Callable[[str], None],
) -> Result:
    """Run chains until `kills` kills have happened; return what they showed.

    Args:
        base: an empty folder; its path is short, because sockets lie below it.
        kills: the minimum number of kills.
        seed: of the points.
        jobs: the number of parallel chains.
        modes: names from MODES; the chains take turns.
        log: takes a line now and then.
    """
    start_server()
    shared_before = set(_shared_memory())
    expected = {mode: uninterrupted(mode, base / mode) for mode in modes}
    result, number = Result(), 0
    with ThreadPoolExecutor(jobs) as pool:
        while sum(result.kills.values()) < kills and len(result.failures) < MOST_KILLS:
            chains = []
            for _ in range(max(2 * jobs, len(modes))):
                mode = modes[number % len(modes)]
                chains.append(
                    pool.submit(
                        chain,
                        base / f"chain-{number}",
                        mode,
                        expected[mode],
                        random.Random(f"{seed} {number}"),
                        kills=min(MOST_KILLS, -(-kills // len(modes))),
                    )
                )
                number += 1
            for future in chains:
                result.add(future.result())
            log(f"{sum(result.kills.values())} of {kills} kills, {len(result.failures)} failures")
    # The next start removes what the last kill left.
    temp = base / "temp"
    _run(modes[0], base / "last", environ={"TMPDIR": str(temp)})
    if left := sorted(path.name for path in temp.iterdir()):
        result.failures.append(f"temporary files are left: {left}")
    if left := sorted(set(_shared_memory()) - shared_before):
        result.failures.append(f"shared memory is left: {left}")
    return result


def uninterrupted(mode: str, folder: Path) -> Uninterrupted:
    """Run a mode without a kill."""
    calls = folder / "calls"
    started = time.monotonic()
    if _run(mode, folder, Fault(partial(append_byte, str(calls)), Call(None))) != 0:
        raise WrongError(f"the uninterrupted run failed: {_stderr(folder)}")
    return Uninterrupted(folder / RUN, time.monotonic() - started, calls.stat().st_size)


def chain(
    folder: Path, mode: str, expected: Uninterrupted, chance: random.Random, *, kills: int
) -> Result:
    """Kill and resume a training until it ends; compare its end with the expected run."""
    result = Result(chains=1)
    temp = folder.parent / "temp"
    temp.mkdir(exist_ok=True)
    try:
        while sum(result.kills.values()) < kills:
            if not _kill_once(folder, mode, expected, chance, result, temp=temp):
                break
            assert_whole(folder / RUN)
        end = _run(mode, folder, environ={"TMPDIR": str(temp)})
        if end != 0:
            raise WrongError(f"the resume ended with exit code {end}: {_stderr(folder)}")
        tolerance = TOLERANCES.get(mode, 0.0)
        assert_equal(folder / RUN, expected.run_dir, num_steps=NUM_STEPS, tolerance=tolerance)
    except (WrongError, AssertionError) as wrong:
        result.failures.append(f"{mode}, {folder.name}: {wrong} (after {dict(result.kills)})")
        return result
    shutil.rmtree(folder)
    return result


def command_of(mode: str, folder: Path, chance: random.Random) -> tuple[str, ...]:
    """Return the command that starts a training, or continues it."""
    if mode in RESUMED_AS and (folder / RUN / ".hydra" / "config.yaml").exists():
        # A run without steps left takes no other mode.
        is_done = max(checkpoint_steps(folder / RUN), default=0) == NUM_STEPS
        way = () if is_done else chance.choice(RESUMED_AS[mode])
        return (*COMMON, f"resume={RUN}", *way)
    return (*MODES[mode], *COMMON, *FOLDER)


def _kill_once(
    folder: Path,
    mode: str,
    expected: Uninterrupted,
    chance: random.Random,
    result: Result,
    *,
    temp: Path,
) -> bool:
    """Continue a training until a kill; return False if it ended before the kill."""
    victim, place = chance.choice(VICTIMS), chance.choice(PLACES)
    restarts = chance.choice((0, 2)) if victim == "rank" else 0
    command = command_of(mode, folder, chance)
    sizes = [key for key in (*MODES[mode], *command) if key.startswith("world_size=")]
    world_size = min(int(key.partition("=")[2]) for key in sizes)
    left = NUM_STEPS - max(checkpoint_steps(folder / RUN), default=0)
    what = {
        "rank": partial(send_signal, signal.SIGKILL),
        "launcher": partial(send_launcher, signal.SIGKILL),
        "tree": kill_tree,
    }[victim]
    faults = []
    if place == "training":
        at = At(chance.randrange(world_size), chance.randint(1, max(1, left)))
        faults = [Fault(what, at)]
    elif place == "saving":
        calls = max(1, expected.calls * left // NUM_STEPS)
        at_call = Call(chance.randint(1, calls), half=chance.random() < 0.5)
        faults = [Fault(what, at_call)]
    with background(
        *command,
        f"launch.max_restarts={restarts}",
        folder=folder,
        environ={"TMPDIR": str(temp)},
        prepare=inject(*faults),
    ) as process:
        killed = False
        if place == "any instant":
            killed = _kill_at(chance.uniform(0, expected.seconds), process, victim, chance)
        code = process.wait(LONGEST_S)
        wait_for(lambda: not session_pids(process.pid), timeout_s=LONGEST_S)
    if code == 0:
        fields = record(folder / RUN)
        if fields.get("restarts"):
            result.kills[mode, victim, place] += 1
            result.restarts += 1
        elif killed and place == "any instant":  # the rank had finished its work already
            result.kills[mode, victim, place] += 1
        return False
    only_a_rank = victim == "rank" and not (killed and code == -signal.SIGKILL)
    if code != (1 if only_a_rank else -signal.SIGKILL):
        raise WrongError(f"{victim} killed: exit code {code}: {_stderr(folder)}")
    result.kills[mode, victim, place] += 1
    return True


def _kill_at(seconds: float, process: Any, victim: str, chance: random.Random) -> bool:
    """Kill the victim after `seconds`; return whether the process was still alive."""
    with suppress(Exception):
        process.wait(seconds)
    if process.poll() is not None:
        return False
    if victim == "tree":
        os.killpg(process.pid, signal.SIGKILL)
        return True
    ranks = list(rank_pids(process.pid)) if victim == "rank" else []
    with suppress(ProcessLookupError):
        os.kill(chance.choice(ranks) if ranks else process.pid, signal.SIGKILL)
    return True


def _run(mode: str, folder: Path, *faults: Fault, environ: Any = None) -> int:
    command = command_of(mode, folder, random.Random(folder.name))
    with background(*command, folder=folder, prepare=inject(*faults), environ=environ) as run:
        return run.wait(LONGEST_S)


def _stderr(folder: Path) -> str:
    return " | ".join((folder / "stderr").read_text().strip().splitlines()[:3])


def _shared_memory() -> list[str]:
    folder = Path("/dev/shm")
    return [path.name for path in folder.iterdir()] if folder.is_dir() else []


def report(result: Result, *, seed: int, seconds: float) -> str:
    """Return the report of a campaign as Markdown."""
    total = sum(result.kills.values())
    modes = list(dict.fromkeys(mode for mode, _, _ in result.kills))
    lines = [
        f"# {total} kills",
        "",
        f"{len(result.failures)} failures. {result.chains} trainings were killed and resumed until "
        f"they ended, {result.restarts} times by the launcher itself. "
        f"Seed {seed}, {seconds / 60:.0f} minutes, {os.cpu_count()} cores, "
        f"Python {platform.python_version()}, torch {versions()['torch']}.",
        "",
        "| mode | " + " | ".join(f"{victim} killed" for victim in VICTIMS) + " | "
        "in training | while saving | at any instant |",
        "| --- |" + " ---: |" * (len(VICTIMS) + len(PLACES)),
    ]
    for mode in sorted(modes):
        by_victim = [_sum(result, mode, victim=victim) for victim in VICTIMS]
        by_place = [_sum(result, mode, place=place) for place in PLACES]
        lines.append(f"| {mode} | " + " | ".join(map(str, [*by_victim, *by_place])) + " |")
    lines += ["", "Failures:" if result.failures else "No failure."]
    lines += [f"- {sentence}" for sentence in result.failures]
    return "\n".join(lines) + "\n"


def _sum(result: Result, mode: str, *, victim: str = "", place: str = "") -> int:
    return sum(
        count
        for (its_mode, its_victim, its_place), count in result.kills.items()
        if its_mode == mode and victim in ("", its_victim) and place in ("", its_place)
    )


if __name__ == "__main__":
    main()
