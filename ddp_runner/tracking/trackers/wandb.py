"""Sends runs to Weights & Biases. Torch-free."""

import os
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from ddp_runner.config.identity import digest
from ddp_runner.errors import UserError, os_errors
from ddp_runner.job import Status
from ddp_runner.tracking.trackers.tracker import MetricLine, TrackedRun

WRITABLE = "name a writable folder: W&B would silently use the system's temporary folder"
STEP = "step"  # the horizontal axis: W&B's own step counts calls and never goes back


class WandB:
    """One W&B run per run, with config, metrics, tags, notes and files.

    Its YAML explains the keys.
    """

    def __init__(
        self,
        *,
        project: str | None = None,
        entity: str | None = None,
        mode: Literal["online", "offline"] | None = None,
        dir: str | None = None,
        timeout_s: float = 10.0,
    ) -> None:
        import wandb  # takes a second

        self._wandb: Any = wandb
        self._options = {"project": project, "entity": entity, "mode": mode, "dir": dir}
        self._timeout_s, self._new_id = timeout_s, secrets.token_hex(4)
        self._tracked: TrackedRun | None = None
        self._run: Any = None  # W&B's

    def begin(self, run: TrackedRun) -> str:
        """Begin the run, or continue the earlier one if it is in the same project.

        The id ends with a hash of the project. All attempts use the same id, since W&B creates a
        folder per id. Its service rejects a second use, so end the service after an error.
        """
        try:
            return self._begin(run)
        except Exception:
            self._wandb.teardown()
            raise

    def _begin(self, run: TrackedRun) -> str:
        self._tracked, defaults = run, self._wandb.setup().settings
        entity = self._options["entity"] or defaults.entity
        project = self._options["project"] or defaults.project
        ending = digest({"entity": entity, "project": project})[:8]
        run_id = run.earlier_id
        if run_id is None or not run_id.endswith(ending):
            run_id = f"{self._new_id}-{ending}"
        folder = Path(self._options["dir"] or defaults.root_dir)
        named = f"trackers.wandb.dir ({folder})"
        with os_errors(f"{named} cannot be created", fix=WRITABLE):
            folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.R_OK | os.W_OK):
            raise UserError(f"{named} cannot be read and written", WRITABLE)
        is_offline = (self._options["mode"] or defaults.mode) == "offline"
        settings = self._wandb.Settings(
            init_timeout=self._timeout_s, login_timeout=self._timeout_s, console="off", silent=True
        )
        self._run = self._wandb.init(
            **self._options,
            id=run_id,
            # Offline, resume only prints a warning: a sync joins the parts by their id.
            resume=None if is_offline else "allow",
            name=run.name,
            group=run.sweep,
            tags=list(run.tags),
            notes=run.notes,
            config={**run.config, "versions": dict(run.versions)},
            allow_val_change=True,
            settings=settings,
        )
        self._run.define_metric(STEP, hidden=True)
        self._run.define_metric("*", step_metric=STEP)
        return str(self._run.id)

    def log(self, lines: Sequence[MetricLine]) -> None:
        """Log each line as a row."""
        for line in lines:
            facts = {STEP: line.step, "epoch": line.epoch, "_timestamp": line.time}
            self._run.log({**line.metrics, **facts})

    def end(
        self, status: str, *, metrics: Mapping[str, float | None], files: Sequence[Path]
    ) -> None:
        """Upload the files as an artifact, wait for the upload, and end W&B's service."""
        assert self._tracked is not None
        name = re.sub(r"[^\w.-]", "_", f"run-{self._run.id}")
        artifact = self._wandb.Artifact(name, type="model" if status == Status.COMPLETED else "run")
        for path in files:
            artifact.add_file(str(path), name=self._tracked.artifact_name(path))
        self._run.log_artifact(artifact)
        if status == Status.PREEMPTED:
            self._run.mark_preempting()
        self._run.finish(exit_code=0 if status == Status.COMPLETED else 1)
        self._wandb.teardown()
