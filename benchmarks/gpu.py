"""Measure and test on this machine's GPUs; write one table in Markdown, and the same as JSON.

benchmarks/gpu.sh gpu-results.md                      # all, in under 25 minutes
benchmarks/gpu.sh gpu-results.md --parts speed,memory # these only
benchmarks/gpu.sh rehearsal.md --rehearse             # tiny sizes; also what it does without a GPU

Without a GPU the same programs run in tiny sizes on the simulated GPU of tests/simgpu, or on the
CPU: that shows that they work, and its figures mean nothing. Each part is a process with a time
limit of its own, and the files hold what has been measured so far. Exit code 1: a row has failed.
"""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gpu_parts
import gpu_peers
import gpu_tests
from gpu_commands import Rows
from gpu_setup import BENCHMARKS, TEXT_FILE, TEXT_TOKENS, Row, Setup, missing, probe

Part = Callable[[Setup], Rows]
# By name, with the most seconds that it may take; what matters most comes first.
PARTS: dict[str, tuple[Part, int]] = {
    "one_gpu": (gpu_tests.one_gpu, 300),
    "overhead": (gpu_parts.overhead, 150),
    "speed": (gpu_parts.speed, 720),
    "memory": (gpu_parts.memory, 120),
    "tutorial": (gpu_peers.tutorial, 150),
    "peers": (gpu_peers.peers, 240),
    "two_gpus": (gpu_tests.two_gpus, 420),
    "table": (gpu_tests.table, 420),
    "hardware": (gpu_tests.hardware, 120),
}
GRACE_S = 20.0  # between SIGTERM and SIGKILL
OPTIONAL = ("pytest", "psutil", "tensorboard", "sklearn", "torchvision", "rich", "matplotlib",
            "PIL", "safetensors", "accelerate", "lightning")  # fmt: skip
COLUMNS = ("part", "what", "outcome", "value", "unit", "against", "its value", "ratio", "note")


def main() -> None:
    """Run the parts, each in a process, and write their rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", nargs="?", type=Path, default=Path("gpu-results.md"))
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes, on a GPU as well")
    parser.add_argument("--parts", default=",".join(PARTS), help="names, separated by commas")
    parser.add_argument("--limit-s", type=float, default=1440, help="of the whole script")
    parser.add_argument("--part", nargs=2, metavar=("NAME", "SETUP"),
                        help=argparse.SUPPRESS)  # fmt: skip
    args = parser.parse_args()
    if args.part:
        measure(*args.part)
        return
    chosen = args.parts.split(",")
    if unknown := [name for name in chosen if name not in PARTS]:
        parser.error(f"--parts: {', '.join(unknown)}: choose from {', '.join(PARTS)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu-", ignore_cleanup_errors=True) as scratch:
        setup = probe(rehearses=args.rehearse, scratch=Path(scratch))
        write_text(setup.data_root / TEXT_FILE)
        results = Results(args.out, setup)
        for name in chosen:
            left_s = args.limit_s - (time.monotonic() - started)
            limit_s = min(PARTS[name][1], left_s - GRACE_S)
            if limit_s < GRACE_S:
                results.add(name, [Row(name, name, "skipped", note="the time is over")])
                continue
            print(f"{name}: at most {limit_s:.0f} s ...", flush=True)
            began = time.monotonic()
            results.add(name, run_part(name, setup, limit_s=limit_s))
            results.took(name, time.monotonic() - began)
    print(f"written: {args.out} and {args.out.with_suffix('.json')}")
    sys.exit(any(row["outcome"] == "FAILED" for row in results.rows))


def write_text(path: Path) -> None:
    """Write the text of the language models: Python's language reference, cut to full batches."""
    from pydoc_data.topics import topics

    text = "\n\n".join(topics.values()).encode("ascii", "replace").decode()
    half = TEXT_TOKENS + 1
    path.parent.mkdir()
    path.write_text((text * (2 * half // len(text) + 1))[: 2 * half])


def run_part(name: str, setup: Setup, *, limit_s: float) -> list[dict[str, Any] | Row]:
    """Run a part in a process of its own; return its rows, also those of a part that was ended."""
    before = len(setup.measured())
    words = [sys.executable, __file__, "--part", name, json.dumps(asdict(setup))]
    with subprocess.Popen(words, start_new_session=True, stdin=subprocess.DEVNULL) as process:
        try:
            code = process.wait(limit_s)
            fault = f"the part ended with exit code {code}" if code else None
        except subprocess.TimeoutExpired:
            fault = f"the part was ended after {limit_s:.0f} s; other rows are missing"
            end(process)
        except BaseException:  # this script is being ended
            end(process)
            raise
    found: list[dict[str, Any] | Row] = list(setup.measured()[before:])
    return [*found, *([Row(name, name, "FAILED", note=fault)] if fault else [])]


def end(process: "subprocess.Popen[bytes]") -> None:
    """End a part and what it has started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
        if number == signal.SIGTERM:
            time.sleep(3)  # torchrun and launchers end their ranks


def measure(name: str, setup_json: str) -> None:
    """Run a part in this process; append its rows as they come."""
    setup = Setup(**json.loads(setup_json))
    os.environ["DDP_RUNNER_CACHE"] = str(setup.folder / "cache")
    if setup.rehearses:
        os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    with setup.rows.open("a") as file:
        for row in PARTS[name][0](setup):
            file.write(json.dumps(row.facts()) + "\n")
            file.flush()
            print(f"  {' '.join(cell for cell in cells(row.facts())[1:8] if cell)}", flush=True)


class Results:
    """All rows, and the two files that have them."""

    def __init__(self, out: Path, setup: Setup) -> None:
        """Begin without rows."""
        self.out, self.rows, self.seconds = out, list[dict[str, Any]](), dict[str, float]()
        revision = _first_line(["git", "-C", str(BENCHMARKS), "rev-parse", "--short", "HEAD"])
        smi = _first_line(["nvidia-smi", "--query-gpu=name,driver_version,memory.total",
                           "--format=csv,noheader"])  # fmt: skip
        date = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
        lacking = ", ".join(missing(*OPTIONAL)) or "none"
        self.head = [f"{date}, commit {revision}, {platform.node()}", *setup.seen, smi,
                     f"missing modules: {lacking}"]  # fmt: skip
        self.setup = setup

    def add(self, part: str, rows: Iterable[Mapping[str, Any] | Row]) -> None:
        """Add the rows of a part, and write the files."""
        found = [row.facts() if isinstance(row, Row) else dict(row) for row in rows]
        for row in found:
            if row["outcome"] != "measured":
                print(f"  {row['what']}: {row['outcome']}: {cells(row)[-1]}", flush=True)
        self.rows += found
        self.write()

    def took(self, part: str, seconds: float) -> None:
        """Note how long a part took."""
        self.seconds[part] = seconds
        self.write()

    def write(self) -> None:
        """Write the Markdown file and the JSON file."""
        facts = {"head": self.head, "rehearsal": self.setup.rehearses, "device": self.setup.kind,
                 "seconds": self.seconds, "rows": self.rows}  # fmt: skip
        self.out.with_suffix(".json").write_text(json.dumps(facts, indent=1) + "\n")
        title = "A rehearsal: its figures mean nothing" if self.setup.rehearses else "GPU results"
        lines = [f"# {title}", "", *(f"- {line}" for line in self.head if line)]
        took = ", ".join(f"{name} {seconds:.0f}" for name, seconds in self.seconds.items())
        lines += [f"- seconds: {took}", "", markdown(COLUMNS), markdown(["---"] * len(COLUMNS))]
        lines += [markdown(cells(row)) for row in self.rows]
        for row in self.rows:
            if row["outcome"] == "FAILED":
                lines += ["", f"## {row['what']}", "", "```", row["note"], "```"]
        self.out.write_text("\n".join(lines) + "\n")


def _first_line(words: Sequence[str]) -> str:
    """Return what a command prints, in a line; empty if it fails or does not exist."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "; ".join(done.stdout.splitlines()) if done.returncode == 0 else ""


def cells(row: Mapping[str, Any]) -> list[str]:
    """Return a row of the table."""
    numbers = [_number(row[key]) for key in ("value", "its_value", "ratio")]
    lines = [line.strip() for line in row["note"].splitlines() if line.strip()] or [""]
    note = f"{lines[0]} … {lines[-1]}" if len(lines) > 1 else lines[0]
    return [row["part"], row["what"], row["outcome"], numbers[0], row["unit"], row["against"],
            numbers[1], numbers[2], note[:300]]  # fmt: skip


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def markdown(row: Sequence[str]) -> str:
    """Return a line of a Markdown table."""
    return f"| {' | '.join(cell.replace('|', '/') for cell in row)} |"


if __name__ == "__main__":
    main()
