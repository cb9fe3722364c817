"""How fast a run goes, from the last lines of its metrics.jsonl. Torch-free."""

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_runner.errors import os_errors
from ddp_runner.files import open_file

TAIL_BYTES = 2**14  # the last twenty lines or more
MOST_LINES = 20


@dataclass(frozen=True)
class Pace:
    """What the last lines of a run say; None: they do not."""

    step: int | None = None
    epoch: int | None = None
    samples_per_s: float | None = None
    steps_per_s: float | None = None  # over the last lines, with evaluations and checkpoints


def read_pace(path: Path) -> Pace:
    """Return the pace of a run; empty if it has no lines yet.

    Raises:
        UserError: the file is there and cannot be read.
    """
    lines = list(_last_lines(path))[-MOST_LINES:]
    if not lines:
        return Pace()
    first, last = lines[0], lines[-1]
    elapsed_s, num_steps = last["time_s"] - first["time_s"], last["step"] - first["step"]
    speeds = [line["perf/samples_per_s"] for line in lines if line.get("perf/samples_per_s")]
    return Pace(
        step=last["step"],
        epoch=last.get("epoch"),
        samples_per_s=speeds[-1] if speeds else None,
        steps_per_s=num_steps / elapsed_s if elapsed_s > 0 and num_steps > 0 else None,
    )


def _last_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the last whole, undamaged lines."""
    with os_errors(f"{path} cannot be read", fix="make it readable"):
        try:
            with open_file(path) as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
                text = file.read()
        except FileNotFoundError:
            return
    for part in text.splitlines():
        with suppress(ValueError, KeyError, TypeError):  # cut off, or damaged
            line = json.loads(part)
            if all(isinstance(line[name], int | float) for name in ("step", "time_s")):
                yield line
