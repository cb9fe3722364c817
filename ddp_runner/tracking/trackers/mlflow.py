"""Sends runs to MLflow. Torch-free."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ddp_runner.config.identity import affects_results, digest
from ddp_runner.job import Status
from ddp_runner.tracking.trackers.tracker import MetricLine, TrackedRun

# Limits of MLflow's servers for parameters, tags and names.
CHARACTERS, TAG_CHARACTERS, KEY_CHARACTERS = 6000, 5000, 250
STATUSES = {Status.COMPLETED: "FINISHED", Status.PREEMPTED: "KILLED"}
IDENTITY, CHANGED = "ddp_runner.run", "ddp_runner.changed"  # tags
# By default MLflow tries a single call for four minutes if the server does not answer.
HTTP = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_ENABLE_ASYNC_LOGGING": "false"}


class MLflow:
    """One MLflow run per run, with parameters, metrics, tags, notes and files.

    Its YAML explains the keys. An experiment that does not exist is created.
    """

    def __init__(
        self,
        *,
        tracking_uri: str | None = None,
        experiment_name: str = "ddp_runner",
        timeout_s: int = 5,
    ) -> None:
        for name, value in {**HTTP, "MLFLOW_HTTP_REQUEST_TIMEOUT": str(timeout_s)}.items():
            os.environ.setdefault(name, value)
        from mlflow.tracking import MlflowClient  # takes three seconds

        self._client: Any = MlflowClient(tracking_uri)
        self._experiment_name, self._id = experiment_name, ""
        self._run: TrackedRun | None = None

    def begin(self, run: TrackedRun) -> str:
        """Create the run, or continue the earlier one, whose parameters cannot change."""
        from mlflow.entities import Param, RunTag

        client, experiment, tags = self._client, self._experiment(), self._tags(run)
        mlflow_run = self._earlier_run(run, experiment) or client.create_run(
            experiment,
            start_time=round(1000 * run.started_at),
            run_name=run.name,
            tags={IDENTITY: _identity(run)},
        )
        self._run, self._id = run, mlflow_run.info.run_id
        client.update_run(self._id, status="RUNNING", name=run.name)
        sent = mlflow_run.data.params
        current = {
            _key(key): (value if isinstance(value, str) else json.dumps(value))[:CHARACTERS]
            for key, value in run.parameters.items()
        }
        changed = [
            f"{key}={current[key]}"
            for key in sent
            if current.get(key, sent[key]) != sent[key] and affects_results(key)
        ]
        if changed:
            tags[CHANGED] = ", ".join(changed)
        elif CHANGED in mlflow_run.data.tags:
            client.delete_tag(self._id, CHANGED)
        params = [Param(key, value) for key, value in current.items() if key not in sent]
        run_tags = [RunTag(_key(key), value[:TAG_CHARACTERS]) for key, value in tags.items()]
        client.log_batch(self._id, params=params, tags=run_tags)
        return self._id

    def log(self, lines: Sequence[MetricLine]) -> None:
        """Send the metrics. MLflow drops duplicates."""
        from mlflow.entities import Metric

        points = [
            Metric(_key(name), value, round(1000 * line.time), line.step)
            for line in lines
            for name, value in line.metrics.items()
        ]
        self._client.log_batch(self._id, metrics=points)

    def end(
        self, status: str, *, metrics: Mapping[str, float | None], files: Sequence[Path]
    ) -> None:
        """Upload the files, and end the run."""
        assert self._run is not None
        for path in files:
            folder = self._run.artifact_name(path).rpartition("/")[0] or None
            self._client.log_artifact(self._id, str(path), folder)
        self._client.set_terminated(self._id, STATUSES.get(Status(status), "FAILED"))

    def _earlier_run(self, run: TrackedRun, experiment: str) -> Any:
        """Return the MLflow run of an earlier session or of an unanswered attempt, or None."""
        from mlflow.exceptions import MlflowException

        if run.earlier_id is not None:
            with suppress(MlflowException):  # deleted, or on another server
                earlier = self._client.get_run(run.earlier_id)
                info = earlier.info
                if (info.experiment_id, info.lifecycle_stage) == (experiment, "active"):
                    return earlier
        query = f"tags.`{IDENTITY}` = '{_identity(run)}'"
        return next(iter(self._client.search_runs([experiment], query, max_results=1)), None)

    def _experiment(self) -> str:
        """Return the id of the experiment; a parallel job may create it at the same time."""
        from mlflow.exceptions import MlflowException

        name = self._experiment_name
        if (experiment := self._client.get_experiment_by_name(name)) is None:
            try:
                return str(self._client.create_experiment(name))
            except MlflowException:
                if (experiment := self._client.get_experiment_by_name(name)) is None:
                    raise
        return str(experiment.experiment_id)

    def _tags(self, run: TrackedRun) -> dict[str, str]:
        tags = dict.fromkeys(run.tags, "true")
        tags |= {f"version.{name}": version for name, version in run.versions.items()}
        tags |= {"ddp_runner.folder": str(run.folder), "mlflow.source.name": "ddp_runner"}
        if run.sweep is not None:
            tags["ddp_runner.sweep"] = run.sweep
        if run.notes is not None:
            tags["mlflow.note.content"] = run.notes
        if run.git_revision is not None:
            tags["mlflow.source.git.commit"] = run.git_revision
        return tags


def _identity(run: TrackedRun) -> str:
    """Return an id that all sessions of a run share."""
    return digest([str(run.folder), run.started_at])


def _key(name: str) -> str:
    """Return a name that MLflow accepts: a normal path of allowed characters.

    A single bad name fails a whole request. A changed name ends with a hash to stay unique.
    """
    parts = re.sub(r"[^\w\-. :/]", "_", name).split("/")
    key = "/".join(part for part in parts if part not in ("", ".", ".."))
    if key == name and 0 < len(key) <= KEY_CHARACTERS:
        return name
    ending = f"_{digest(name)[:8]}"
    return key[: KEY_CHARACTERS - len(ending)] + ending
