"""What gpu.py measures of the runner itself: a step, throughput, memory.

Each part yields rows as it measures them. What is missing is a reason to skip; a command that fails
is a row, and the part goes on.
"""

import json
import statistics
import subprocess
from dataclasses import replace
from functools import partial
from typing import Any

from gpu_commands import MissingError, Rows, by_hand, need, run, steady, train, train_each, tried
from gpu_setup import NEEDED, Row, Setup, Workload, workload

EAGER = ("fp32", "tf32", "bf16")
COMPILED = "bf16+compiled"
BY_HAND = "DDP by hand"
MODELS = ("gpt_10m", "gpt_124m", "convnet", "resnet18")


def overhead(setup: Setup) -> Rows:
    """A step of the toy model: what the runner adds to a loop by hand."""
    yield from tried("overhead", "a step of the toy model", partial(_overhead, setup))


def _overhead(setup: Setup) -> Rows:
    work, ours, theirs = workload("toy", rehearses=setup.rehearses), [], []
    for _ in range(1 if setup.rehearses else 3):
        ours.append(train(work, setup=setup))
        theirs.append(by_hand(work, ["fp32"], setup)["fp32"])
    step_us, bare_us = (
        1e6 * work.batch / statistics.median(map(steady, found)) for found in (ours, theirs)
    )
    pairs = zip(ours[0]["losses"], theirs[0]["losses"], strict=True)
    worst = max(abs(own - other) / other for own, other in pairs)
    details = {"runner": ours, "by_hand": theirs}
    what = "a step of the toy model, 1 rank"
    yield Row("overhead", what, "measured", step_us, "us", BY_HAND, bare_us, details=details)
    outcome = "passed" if worst < 1e-4 else "FAILED"
    note = "largest relative difference of a loss: the same steps"
    yield Row("overhead", "the losses of both", outcome, worst, "", note=note)


def speed(setup: Setup) -> Rows:
    """Throughput of each model in each precision, and compiled, beside the loop by hand."""
    for name in MODELS:
        yield from tried("speed", name, partial(_speed_of, name, setup))
    note = "not offered: train.compile is true or false, and torch.compile's mode has no key"
    yield Row("speed", "CUDA graphs (mode reduce-overhead)", "skipped", note=note)


def _speed_of(name: str, setup: Setup) -> Rows:
    if name == "gpt_124m" and setup.rehearses:
        raise MissingError("for real GPUs only")
    need(*NEEDED, *(["torchvision"] if name == "resnet18" else []))
    work = workload(name, rehearses=setup.rehearses)
    theirs = by_hand(work, [*EAGER, *([COMPILED] if setup.kind == "cuda" else [])], setup)
    ours = train_each(work, f"train.precision={','.join(EAGER)}", setup)
    for variant in EAGER:
        row = partial(_speed_row, work, variant, ours[variant], theirs[variant])
        yield from tried("speed", f"{name} {variant}", row)
    yield from tried("speed", f"{name} bf16 compiled", partial(_compiled, work, theirs, setup))
    if setup.count > 1 and (setup.kind == "cuda" or name == "convnet"):
        what = f"{name} bf16 on {setup.count} devices"
        yield from tried("speed", what, partial(_several, work, what, setup))


def _speed_row(work: Workload, variant: str, ours: Any, theirs: Any) -> Rows:
    own, details = work.per_sample() * steady(ours), {"runner": ours, "by_hand": theirs}
    what = f"{work.model} {variant.replace('+', ' ')}"
    note = f"batch {work.batch} of {work.size} {'tokens' if work.is_text else 'pixels a side'}"
    if "error" in theirs:
        note, other = f"by hand it failed: {theirs['error']}", None
    else:
        other = work.per_sample() * steady(theirs)
    yield Row("speed", what, "measured", own, work.unit, BY_HAND, other, note, details)


def _compiled(work: Workload, theirs: Any, setup: Setup) -> Rows:
    if setup.kind != "cuda" and work.model != "convnet":
        raise MissingError("a rehearsal without CUDA compiles the ConvNet only")
    if setup.kind == "simgpu":  # which torch.compile does not know
        setup = replace(setup, kind="cpu", count=0, environ={})
    if setup.kind == "cpu":
        theirs = by_hand(work, [COMPILED], setup)
    ours = train(work, "train.precision=bf16", "train.compile=true", setup=setup)
    for row in _speed_row(work, COMPILED, ours, theirs[COMPILED]):
        yield replace(row, note=f"{row.note}{', on the CPU' * (setup.kind == 'cpu')}")


def _several(work: Workload, what: str, setup: Setup) -> Rows:
    """A run on all devices, beside the loop by hand on all of them."""
    ours = train(work, "train.precision=bf16", setup=setup, ranks=setup.count)
    theirs = by_hand(work, ["bf16"], setup, ranks=setup.count)["bf16"]
    for row in _speed_row(work, "bf16", ours, theirs):
        yield replace(row, what=what)


def memory(setup: Setup) -> Rows:
    """The plan's peak of a rank, beside what the device's allocator counted in the same run."""
    for name in MODELS:
        yield from tried("memory", name, partial(_memory_of, name, setup))


def _memory_of(name: str, setup: Setup) -> Rows:
    if setup.kind == "cpu":
        raise MissingError("on the CPU the peak is the whole process's")
    whats = {f"{name} {precision}": precision for precision in ("fp32", "bf16")}
    runs = {
        row["what"]: row["details"]
        for row in setup.measured()
        if row["part"] == "speed" and row["what"] in whats and row["outcome"] == "measured"
    }
    if not runs:
        raise MissingError("the part speed has no run of it")
    work = workload(name, rehearses=setup.rehearses)
    keys = [key for key in work.keys(1) if not key.startswith(("train.", "checkpoint."))]
    precisions, plans = ",".join(whats[what] for what in runs), setup.folder / "plans"
    words = "task=plan", *keys, f"data_root={setup.data_root}", f"train.precision={precisions}"
    sweep = "-m", *words, f"hydra.sweep.dir={plans}"
    run("-m", "ddp_runner", *sweep, setup=setup, on_device=False)
    for what, details in runs.items():
        plan = plans / f"train.precision={whats[what]}" / "metrics.jsonl"
        line = json.loads(plan.read_text().splitlines()[-1])
        peak, alone = details["runner"]["peak_gib"], details["by_hand"].get("peak_gib")
        note = "allocated, with the data on the device"
        if alone:
            note = f"{note}; by hand {alone:.4g} GiB"
        planned = line["plan/peak_gib"]
        yield Row("memory", what, "measured", planned, "GiB", "the run's peak", peak, note, line)
    subprocess.run(["rm", "-r", str(plans)], check=True)
