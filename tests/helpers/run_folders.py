"""Read what a run has left in its folder, and compare two runs."""

import json
import os
from pathlib import Path
from typing import Any

Scalars = dict[tuple[int, str], float]  # by step and name


def run_dirs(folder: Path) -> list[Path]:
    """Return every run folder below a folder, by name."""
    # rglob would fail if a folder disappears meanwhile, as a checkpoint's temporary folder does.
    return sorted(Path(name) for name, _, files in os.walk(folder) if "run.json" in files)


def record(run_dir: Path) -> dict[str, Any]:
    """Return a run's run.json."""
    fields: dict[str, Any] = json.loads((run_dir / "run.json").read_text())
    return fields


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a run's metrics.jsonl; none while there is no file."""
    path = run_dir / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def reproducible_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl without what depends on the clock."""
    return [
        {key: value for key, value in line.items() if key != "time_s" and "perf/" not in key}
        for line in metrics(run_dir)
    ]


def scalars(run_dir: Path) -> Scalars:
    """Return the numbers of metrics.jsonl."""
    return {
        (line["step"], key): line[key] for line in metrics(run_dir) for key in line if "/" in key
    }


def tensorboard_scalars(run_dir: Path) -> Scalars:
    """Return the numbers of a run's event files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir), size_guidance={"scalars": 0}).Reload()  # 0: all
    return {
        (event.step, name): event.value
        for name in events.Tags()["scalars"]
        for event in events.Scalars(name)
    }


def last_step(folder: Path) -> int:
    """Return the highest step that a run below a folder has logged; 0 without one."""
    return max((line["step"] for run in run_dirs(folder) for line in metrics(run)), default=0)


def rank_log(run_dir: Path, rank: int = 0) -> str:
    """Return the text of a rank's log."""
    return (run_dir / "logs" / f"rank-{rank}.log").read_text()


def checkpoint_steps(run_dir: Path) -> list[int]:
    """Return the steps of a run's checkpoints."""
    folders = (run_dir / "checkpoints").glob("step-*")
    return sorted(int(path.name.removeprefix("step-")) for path in folders)


def checkpoint_dir(run_dir: Path, step: int) -> Path:
    """Return the folder of a step's checkpoint."""
    return run_dir / "checkpoints" / f"step-{step:08d}"


def assert_same_state(run_dir: Path, other: Path) -> None:
    """Compare the last checkpoints of two runs, bit for bit."""
    import torch

    step = checkpoint_steps(other)[-1]
    states = [
        torch.load(checkpoint_dir(run, step) / "state.pt", weights_only=True)
        for run in (run_dir, other)
    ]
    for part in ("progress", "batches"):
        assert states[0]["objects"][part] == states[1]["objects"][part]
    for part in ("model", "optimizer"):
        tensors = [dict(tensors_in(state["objects"][part])) for state in states]
        assert tensors[0].keys() == tensors[1].keys()
        assert all(torch.equal(tensors[0][key], tensors[1][key]) for key in tensors[0])


def tensors_in(tree: Any, prefix: str = "") -> list[tuple[str, Any]]:
    """Return the tensors of a nested mapping with their dotted keys."""
    if hasattr(tree, "untyped_storage"):
        return [(prefix, tree)]
    items = tree.items() if isinstance(tree, dict) else ()
    return [tensor for key, value in items for tensor in tensors_in(value, f"{prefix}.{key}")]
