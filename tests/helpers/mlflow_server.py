"""A real MLflow server on loopback, and what it has of runs.

It runs in an environment of its own, which uv makes: it needs SQLAlchemy 2, and Optuna's search an
older one.
"""

import os
import shutil
import signal
import sys
import urllib.error
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from commands import background, free_port, wait_for
from tensorboard_server import get_json

API = "/api/2.0/mlflow"
# Else it starts seven more processes, some time after it answers first, and again when they end: a
# test during which that happens would be said to leave them behind.
NO_JOBS = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}


class MlflowServer:
    """A server that can be killed, and started again at the same address with the same runs."""

    def __init__(self, folder: Path) -> None:
        uv = shutil.which("uv")
        if uv is None:
            pytest.skip("needs uv, which makes an environment for MLflow's server")
        self.folder, self.port = folder, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        tool = (uv, "tool", "run", "--quiet", "--python", sys.executable, "--from", "mlflow")
        self._program = (*tool, "mlflow", "server")
        self._arguments = (
            *("--backend-store-uri", f"sqlite:///{folder}/runs.db"),
            *("--artifacts-destination", str(folder / "artifacts")),
            *("--host", "127.0.0.1", "--port", str(self.port), "--workers", "1"),
        )
        self.pid = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Start it, and end it."""
        with background(
            *self._arguments, folder=self.folder, program=self._program, environ=NO_JOBS
        ) as process:
            self.pid = process.pid
            wait_for(self._answers, every_s=0.2)
            yield

    def kill(self) -> None:
        """Kill all its processes."""
        os.killpg(self.pid, signal.SIGKILL)
        wait_for(lambda: not self._answers())

    def runs(self, experiment: str) -> list[Any]:
        """Return the runs of an experiment, the latest first."""
        path = f"{self.url}{API}/experiments/get-by-name?experiment_name={experiment}"
        number = get_json(path)["experiment"]["experiment_id"]
        answer = get_json(f"{self.url}{API}/runs/search", {"experiment_ids": [number]})
        return list(answer.get("runs", []))

    def history(self, run: Any, metric: str) -> list[tuple[int, float]]:
        """Return each (step, value) of a metric."""
        number = run["info"]["run_id"]
        path = f"{self.url}{API}/metrics/get-history?run_id={number}&metric_key={metric}"
        return [(int(one["step"]), one["value"]) for one in get_json(path).get("metrics", [])]

    def files(self, run: Any) -> dict[str, bytes]:
        """Return the files of a run, without those in folders, by name."""
        folder = self.folder / "artifacts" / run["info"]["experiment_id"] / run["info"]["run_id"]
        found = (folder / "artifacts").iterdir()
        return {path.name: path.read_bytes() for path in found if path.is_file()}

    def _answers(self) -> bool:
        try:
            get_json(f"{self.url}{API}/experiments/get?experiment_id=0")
        except (urllib.error.URLError, OSError):
            return False
        return True


def fields(run: Any, kind: str) -> dict[str, Any]:
    """Return the params, metrics or tags of a run."""
    return {one["key"]: one["value"] for one in run["data"].get(kind, [])}
