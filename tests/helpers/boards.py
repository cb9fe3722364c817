"""Serve run folders with TensorBoard, and ask it for what it shows."""

import json
import re
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from commands import background, wait_for

PROGRAM = (sys.executable, "-m", "tensorboard.main", "--host", "127.0.0.1", "--port", "0")


@contextmanager
def served(logdir: Path, *, folder: Path, wanted: Mapping[str, set[str]]) -> Iterator[str]:
    """Serve a folder with TensorBoard's default loader; yield its address once all is read.

    Args:
        logdir: the folder with the runs.
        folder: where TensorBoard's output goes.
        wanted: the tags of each run's curves.
    """
    with background("--logdir", str(logdir), folder=folder, program=PROGRAM) as process:
        found = wait_for(lambda: re.search(r"http://\S+", (folder / "stderr").read_text()))
        url = found[0].rstrip("/")

        def has_read() -> bool:
            tags = answer(f"{url}/data/plugin/scalars/tags")
            return {run: set(of_run) for run, of_run in tags.items()} == wanted

        wait_for(has_read)
        yield url
        process.terminate()
        process.wait()


def answer(url: str, question: Any = None) -> Any:
    """Return a server's answer; a question is sent as JSON."""
    data = None if question is None else json.dumps(question).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as response:
        return json.load(response)
