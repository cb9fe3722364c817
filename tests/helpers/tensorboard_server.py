"""Serve run folders with TensorBoard, and query the server."""

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
def serve_tensorboard(
    logdir: Path, *, folder: Path, wanted: Mapping[str, set[str]]
) -> Iterator[str]:
    """Serve a folder with TensorBoard's default loader; yield its address once all is loaded.

    Args:
        logdir: the folder with the runs.
        folder: for TensorBoard's output.
        wanted: the tags of each run's curves; the server is ready when it has exactly these.
    """
    with background("--logdir", str(logdir), folder=folder, program=PROGRAM) as process:
        address = wait_for(lambda: re.search(r"http://\S+", (folder / "stderr").read_text()))
        url = address[0].rstrip("/")

        def is_loaded() -> bool:
            tags = get_json(f"{url}/data/plugin/scalars/tags")
            return {run: set(of_run) for run, of_run in tags.items()} == wanted

        wait_for(is_loaded)
        yield url
        process.terminate()
        process.wait()


def get_json(url: str, question: Any = None) -> Any:
    """Return a server's JSON answer; `question`, if any, is posted as JSON."""
    data = None if question is None else json.dumps(question).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as response:
        return json.load(response)
