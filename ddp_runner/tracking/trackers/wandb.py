"""Shows runs in Weights & Biases, by its client. Torch-free."""

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

WRITABLE = (
    "name a folder that can be written: W&B would silently take the system's temporary folder"
)
STEP = "step"  # the horizontal axis: W&B's own step never goes back, and counts calls


class WandB:
    """A run of W&B for each run, with config, metrics, tags, notes and files.

    Args:
        project: that gets the run; None: the variable WANDB_PROJECT, else W&B's default.
        entity: the user or team; None: W&B's default.
        mode: online, or offline: into a folder, for `wandb sync`; None: the variable WANDB_MODE.
        dir: where its own files go; None: the variable WANDB_DIR, else the folder wandb here.
        timeout_s: seconds within which the server must answer at the start.
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
        self._place = {"project": project, "entity": entity, "mode": mode, "dir": dir}
        self._timeout_s, self._new_id = timeout_s, secrets.token_hex(4)
        self._tracked: TrackedRun | None = None
        self._run: Any = None  # W&B's

    def begin(self, run: TrackedRun) -> str:
        """Begin the run, or go on with the earlier one, if that is in the same project.

        The id ends with a hash of the project. All attempts have one id: W&B's client makes a
        folder for each, and its service, while it lives, takes no id twice.
        """
        try:
            return self._begin(run)
        except Exception:
            self._wandb.teardown()
            raise

    def _begin(self, run: TrackedRun) -> str:
        self._tracked, known = run, self._wandb.setup().settings
        place = {one: self._place[one] or getattr(known, one) for one in ("entity", "project")}
        ending, number = digest(place)[:8], run.earlier_id
        if number is None or not number.endswith(ending):
            number = f"{self._new_id}-{ending}"
        folder = Path(self._place["dir"] or known.root_dir)
        named = f"trackers.wandb.dir ({folder})"
        with os_errors(f"{named} cannot be made", fix=WRITABLE):
            folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.R_OK | os.W_OK):
            raise UserError(f"{named} cannot be read and written; {WRITABLE}")
        is_offline = (self._place["mode"] or known.mode) == "offline"
        settings = self._wandb.Settings(
            init_timeout=self._timeout_s, login_timeout=self._timeout_s, console="off", silent=True
        )
        self._run = self._wandb.init(
            **self._place,
            id=number,
            # Offline it would only warn: by the id, a sync puts the parts together.
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
        """Log each line as a row with its step."""
        for line in lines:
            facts = {STEP: line.step, "epoch": line.epoch, "_timestamp": line.time}
            self._run.log({**line.metrics, **facts})

    def end(
        self, status: str, *, metrics: Mapping[str, float | None], files: Sequence[Path]
    ) -> None:
        """Upload the files as an artifact, wait until all is sent, and end W&B's service."""
        assert self._tracked is not None
        name = re.sub(r"[^\w.-]", "_", f"run-{self._run.id}")
        artifact = self._wandb.Artifact(name, type="model" if status == Status.COMPLETED else "run")
        for path in files:
            artifact.add_file(str(path), name=self._tracked.place_of(path))
        self._run.log_artifact(artifact)
        if status == Status.PREEMPTED:
            self._run.mark_preempting()
        self._run.finish(exit_code=0 if status == Status.COMPLETED else 1)
        self._wandb.teardown()
