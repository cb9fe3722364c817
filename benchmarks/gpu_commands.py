"""The commands of gpu.py: the runner and the loop by hand on a workload, and what they measured."""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu_setup import BENCHMARKS, NEEDED, Row, Setup, Workload, missing

LIMIT_S = 300.0  # of a command; a part has a limit of its own
TAIL = 4000  # characters of a failed command's output
Rows = Iterator[Row]


class MissingError(Exception):
    """What this machine or this interpreter lacks, in words: a reason to skip."""


def tried(part: str, what: str, function: Callable[[], Iterable[Row]]) -> Rows:
    """Yield the rows of a function; what it raises is a row, too."""
    try:
        yield from function()
    except MissingError as error:
        yield Row(part, what, "skipped", note=str(error))
    except Exception as error:  # whatever it is, the other rows matter as well
        yield Row(part, what, "FAILED", note=f"{type(error).__name__}: {error}")


def run(
    *words: str, setup: Setup, on_device: bool = True, environ: Mapping[str, str] | None = None
) -> str:
    """Run Python with these words to its end; return what it printed.

    Raises:
        RuntimeError: it failed or took too long; with the end of what it printed.
    """
    variables = os.environ | (setup.environ if on_device else {}) | (environ or {})
    with subprocess.Popen(
        [sys.executable, *words], cwd=setup.folder, env=variables, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        try:
            output, _ = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun and the runner end their ranks
            try:
                output, _ = process.communicate(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                output, _ = process.communicate()
            raise RuntimeError(f"stopped after {LIMIT_S:g} s\n{output[-TAIL:]}") from None
    if process.returncode:
        raise RuntimeError(f"exit code {process.returncode}\n{output[-TAIL:]}")
    return output


def need(*modules: str) -> None:
    """Raise ``MissingError`` if the interpreter lacks one of these modules."""
    if lacks := missing(*modules):
        raise MissingError(f"missing: {', '.join(NEEDED.get(name, name) for name in lacks)}")


def train(work: Workload, *keys: str, setup: Setup, ranks: int = 1) -> dict[str, Any]:
    """Train with the runner; return the figures of its run."""
    need(*NEEDED)
    folder = setup.folder / "run"
    words = *work.keys(ranks), *common(setup), *setup.on_device(), *keys
    run("-m", "ddp_runner", *words, f"hydra.run.dir={folder}", setup=setup)
    found = figures(folder)
    subprocess.run(["rm", "-r", str(folder)], check=True)
    return found


def train_each(work: Workload, keys: str, setup: Setup) -> dict[str, dict[str, Any]]:
    """Train with each value of a key, in a sweep; return each run's figures or its fault."""
    need(*NEEDED)
    folder, (key, _, values) = setup.folder / "sweep", keys.partition("=")
    words = *work.keys(1), *common(setup), *setup.on_device(), keys
    sweep = f"hydra.sweep.dir={folder}", "sweep.skip_invalid=true"
    try:
        run("-m", "ddp_runner", "-m", *words, *sweep, setup=setup)
    except RuntimeError as error:
        if not (folder / "sweep.json").exists():
            raise
        failed = str(error)
    else:
        failed = "no run"
    found = dict[str, dict[str, Any]]()
    for job in json.loads((folder / "sweep.json").read_text())["jobs"]:  # invalid jobs come last
        run_dir, value = folder / job["folder"], job["folder"].removeprefix(f"{key}=")
        if job["fault"] is not None:
            found[value] = {"skipped": job["fault"]}
        elif (run_dir / "metrics.jsonl").exists() and is_completed(run_dir):
            found[value] = figures(run_dir)
        else:
            found[value] = {"error": f"{key}={value}: {failed}"}
    assert set(found) == set(values.split(",")), found.keys()
    subprocess.run(["rm", "-r", str(folder)], check=True)
    return found


def common(setup: Setup) -> list[str]:
    """Return the keys of each run."""
    threads = ["train.num_threads=1"] if setup.rehearses else []
    return [f"data_root={setup.data_root}", *threads]


def is_completed(run_dir: Path) -> bool:
    """Return whether a run has come to its end."""
    return bool(json.loads((run_dir / "run.json").read_text())["status"] == "completed")


def figures(run_dir: Path) -> dict[str, Any]:
    """Return a run's figures by log line, in the form of the loop by hand."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "perf/samples_per_s" in line]
    record = json.loads((run_dir / "run.json").read_text())
    return {
        "samples_per_s": [line["perf/samples_per_s"] for line in lines],
        "losses": [line["train/loss"] for line in lines],
        "peak_gib": max((line["perf/peak_memory_gib"] for line in lines), default=None),
        "devices": record["devices"], "backend": record["backend"],
    }  # fmt: skip


def by_hand(work: Workload, variants: Sequence[str], setup: Setup, *, ranks: int = 1) -> Any:
    """Train with the loop by hand; return the figures of each variant."""
    path = setup.folder / "by_hand.json"
    words = [str(BENCHMARKS / "gpu_programs.py"), work.model, *variants, "--kind", setup.kind]
    words += ["--data-root", str(setup.data_root), "--json", str(path)]
    words += ["--rehearse"] if setup.rehearses else []
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    run(*(torchrun if ranks > 1 else []), *words, setup=setup)
    found = json.loads(path.read_text())
    path.unlink()
    return found


def steady(found: Mapping[str, Any]) -> float:
    """Return the median samples per second, without the first line.

    Raises:
        MissingError: the variant does not exist here.
        RuntimeError: the training failed.
    """
    if "skipped" in found:
        raise MissingError(found["skipped"])
    if "error" in found:
        raise RuntimeError(found["error"])
    return statistics.median(found["samples_per_s"][1:])
