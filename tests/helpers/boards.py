"""TensorBoard as a program of its own, and what it answers; a helper of the tests, not a test."""

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
    """Serve a folder with TensorBoard's default loader; give its address once it has read it.

    Args:
        logdir: with runs.
        folder: for its output.
        wanted: the tags of the curves of each run.
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
    """Return what a server says, to a question in JSON if there is one."""
    data = None if question is None else json.dumps(question).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as response:
        return json.load(response)
