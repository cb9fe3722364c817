"""Shows runs in Weights & Biases, by its client. Torch-free."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ddp_runner.job import Status
from ddp_runner.tracking.trackers.tracker import MetricLine, TrackedRun

STEP = "step"  # the horizontal axis: W&B's own step never goes back, and counts calls


class WandB:
    """A run of W&B for each run, with config, metrics, tags, notes and files.

    Args:
        project: that gets the run; None: the variable WANDB_PROJECT, else W&B's default.
        entity: the user or team; None: W&B's default.
        mode: online, or offline: into a folder, for `wandb sync`.
        dir: where its own files go; None: the variable WANDB_DIR, else the folder wandb here.
        timeout_s: seconds within which the server must answer at the start.
    """

    def __init__(
        self,
        *,
        project: str | None = None,
        entity: str | None = None,
        mode: str | None = None,
        dir: str | None = None,
        timeout_s: float = 10.0,
    ) -> None:
        import wandb  # takes a second

        self._wandb: Any = wandb
        self._place = {"project": project, "entity": entity, "mode": mode, "dir": dir}
        self._timeout_s = timeout_s
        self._run: Any = None

    def begin(self, run: TrackedRun) -> str:
        """Begin the run, or go on with the earlier one."""
        settings = self._wandb.Settings(
            init_timeout=self._timeout_s, login_timeout=self._timeout_s, console="off", silent=True
        )
        self._run = self._wandb.init(
            **self._place,
            id=run.earlier_id,
            # Offline it would only warn: by the id, a sync puts the parts together.
            resume="allow" if run.earlier_id and not self._is_offline else None,
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
        """Log each line as a row with its step."""
        for line in lines:
            facts = {STEP: line.step, "epoch": line.epoch, "_timestamp": line.time}
            self._run.log({**line.metrics, **facts})

    def end(
        self, status: str, *, metrics: Mapping[str, float | None], files: Sequence[Path]
    ) -> None:
        """Upload the files as an artifact, wait until all is sent, and end W&B's service."""
        name = re.sub(r"[^\w.-]", "_", f"run-{self._run.id}")
        artifact = self._wandb.Artifact(name, type="model" if status == Status.COMPLETED else "run")
        for path in files:
            artifact.add_file(str(path), name=path.name if path.suffix != ".png" else None)
        self._run.log_artifact(artifact)
        if status == Status.PREEMPTED:
            self._run.mark_preempting()
        self._run.finish(exit_code=0 if status == Status.COMPLETED else 1)
        self._wandb.teardown()

    @property
    def _is_offline(self) -> bool:
        return self._wandb.setup().settings.mode == "offline" or self._place["mode"] == "offline"
