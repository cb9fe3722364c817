"""The table at the end of a sweep; used by ``__main__``."""

from collections.abc import Sequence

from ddp_runner.job import Outcome
from ddp_runner.record import HEADLINES, RUN_RECORD, read_run_record

COLUMNS = ("job", "status", "first step", "wall", "metrics")


def sweep_table(outcomes: Sequence[Outcome]) -> str:
    """Return a line for each job of a sweep, and a sentence for each that failed."""
    rows, failures = [COLUMNS], []
    for outcome in outcomes:
        assert outcome.run_dir is not None
        name = outcome.run_dir.name
        was_started = (outcome.run_dir / RUN_RECORD).exists()
        record = read_run_record(outcome.run_dir) if was_started else {}
        metrics = "  ".join(
            f"{key} {value:.4f}"
            for key, value in record.get("metrics", {}).items()
            if value is not None and key in HEADLINES
        )
        startup, wall = _seconds(record.get("startup_s")), _seconds(record.get("wall_s"))
        rows.append((name, outcome.status, startup, wall, metrics))
        if outcome.failure is not None:
            failures.append(f"{name}: {outcome.failure.sentence}")
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS) - 1)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]])
        for row in rows
    ]
    first = outcomes[0].run_dir if outcomes else None
    tail = [f"tensorboard --logdir {first.parent}"] if first else []
    return "\n".join(["", *(line.rstrip() for line in lines), *failures, *tail])


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"
