"""Inject faults into trainings on several hosts, resume them, and compare each with its twin.

python benchmarks/cluster_campaign.py --faults 100 --seed 1 --out report.md

A fault kills, suspends or breaks a rank, kills a launcher or a host, cuts a link, sends a signal,
or lets a host come late or come back, during start-up, waiting, training, saving or ending. Then
every command must end in time, with one plain sentence and without a process left; run.json must be
true, in one folder only; and the run, resumed on all hosts, must end as the undisturbed one. It
needs root on Linux, for hosts of network namespaces. The same seed gives the same faults.

Exit code 0: all of that is so.
"""

import argparse
import os
import platform
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "helpers"))
from cluster_checks import Seen, disturbed
from cluster_faults import KINDS, Draw
from cluster_training import SETTINGS, undisturbed
from warm import start_server

from ddp_runner.tracking.run_record import versions

Result = list[tuple[Draw, Seen]]


def main() -> None:
    """Run the campaign and write its report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2, help="trainings side by side")
    parser.add_argument("--only", default="", help="faults whose description contains this")
    parser.add_argument("--out", type=Path, help="a Markdown file")
    args = parser.parse_args()
    faults = [one for one in draws(args.faults, seed=args.seed) if args.only in str(one)]
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="faults-", dir="/tmp") as base:
        result = campaign(Path(base), faults, jobs=args.jobs, log=partial(print, flush=True))
    text = report(result, seed=args.seed, seconds=time.monotonic() - started)
    print(text)
    if args.out is not None:
        args.out.write_text(text, encoding="utf-8")
    sys.exit(any(seen.wrong for _, seen in result))


def draws(count: int, *, seed: int) -> list[Draw]:
    """Return random faults. All kinds, phases and settings are in turn."""
    chance = random.Random(seed)
    places = [(kind, phase) for kind, phases in KINDS.items() for phase in phases]
    found: list[Draw] = []
    waiting: list[tuple[str, str]] = []
    settings: list[str] = []
    while len(found) < count:
        waiting = waiting or chance.sample(places, len(places))
        settings = settings or chance.sample(list(SETTINGS), len(SETTINGS))
        kind, phase = waiting.pop()
        found.append(Draw(kind, phase, settings.pop(), seed=f"{seed} {len(found)}"))
    return found


def campaign(
    base: Path, faults: Sequence[Draw], *, jobs: int, log: Callable[[str], None]
) -> Result:
    """Inject the faults, each into a training of its own; return what they led to.

    Args:
        base: an empty folder; its path is short, because sockets lie below it.
        faults: see ``draws``.
        jobs: the number of trainings side by side.
        log: takes a line for each fault.
    """
    with patch.dict(os.environ, TORCH_CPP_LOG_LEVEL="ERROR"):  # as a command on several hosts does
        start_server()
    kinds = {SETTINGS[one.setting].num_hosts: SETTINGS[one.setting] for one in faults}
    expected = {
        number: undisturbed(base / f"hosts-{number}", SETTINGS[f"{number} hosts, restarts"])
        for number in kinds
    }

    def one(number: int) -> Seen:
        draw, folder = faults[number], base / f"fault-{number}"
        run, calls = expected[SETTINGS[draw.setting].num_hosts]
        try:
            seen = disturbed(folder, draw, run, num_calls=calls)
        except Exception as error:  # of the campaign itself: the others go on
            seen = Seen(wrong=[f"{type(error).__name__}: {error}"])
        end = "; ".join(seen.wrong) or ("ok" if seen.was_reached else "ok, not reached")
        log(f"{number + 1}. {draw}: {seen.seconds:.0f} s, {end}")
        if not seen.wrong:
            shutil.rmtree(folder)
            for disk in base.glob(f"{folder.name}*"):
                shutil.rmtree(disk, ignore_errors=True)
        return seen

    with ThreadPoolExecutor(jobs) as pool:
        return list(zip(faults, pool.map(one, range(len(faults))), strict=True))


def report(result: Result, *, seed: int, seconds: float) -> str:
    """Return the report of a campaign as Markdown."""
    wrong = [(draw, seen) for draw, seen in result if seen.wrong]
    lines = [
        f"# {len(result)} faults over two and three hosts",
        "",
        f"{len(wrong)} of them broke a guarantee. "
        f"{sum(not seen.was_reached for _, seen in result)} came after the end of their run. "
        f"Seed {seed}, {seconds / 60:.0f} minutes, {os.cpu_count()} cores, "
        f"Python {platform.python_version()}, torch {versions()['torch']}.",
        "",
        "| fault | phase | how many | hangs | lost steps | doubled folders | wrong sentences "
        "| other | longest end (s) |",
        "| --- | --- |" + " ---: |" * 7,
    ]
    for kind, phases in KINDS.items():
        for phase in phases:
            seen = [one for draw, one in result if (draw.kind, draw.phase) == (kind, phase)]
            if seen:
                counts = [
                    len(seen),
                    sum(one.hangs for one in seen),
                    sum(one.lost_steps for one in seen),
                    sum(one.doubled_folders for one in seen),
                    sum(one.wrong_sentences for one in seen),
                    sum(bool(one.wrong) for one in seen),
                    round(max(one.seconds for one in seen)),
                ]
                lines.append(f"| {kind} | {phase} | " + " | ".join(map(str, counts)) + " |")
    lines += ["", "What went wrong:" if wrong else "Nothing went wrong."]
    lines += [f"- {draw}: {'; '.join(seen.wrong)}" for draw, seen in wrong]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
