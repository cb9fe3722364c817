"""What must hold between the keys of checkpoints and of the weights a run starts from.

Called by ``rules``, hence torch-free.
"""

import difflib
from collections.abc import Collection
from pathlib import Path

from ddp_runner.checkpoint.manifest import MANIFEST
from ddp_runner.config.schema import Config
from ddp_runner.dist_env import DistEnv
from ddp_runner.errors import UserError

WEIGHT_FILES = (".safetensors", ".pt", ".pth")
CLASS_METRICS = ("eval/accuracy", "eval/precision", "eval/recall", "eval/f1")
LOWER_IS_BETTER = ("eval/loss", "train/loss", "perf/step_time_ms")
MONITORS = (*CLASS_METRICS, *LOWER_IS_BETTER, "train/lr", "perf/samples_per_s")


def check_checkpoints(config: Config, *, env: DistEnv | None, chosen: Collection[str]) -> None:
    """Refuse a metric that no checkpoint will have, and starting weights that are not there.

    Args:
        config: as composed.
        env: this rank's facts where the ranks run already.
        chosen: the keys given on the command line.

    Raises:
        UserError: a rule is broken.
    """
    for name in ("every_epochs", "every_steps", "keep"):
        value = getattr(config.checkpoint, name)
        if value is not None and not value > 0:
            raise UserError(f"checkpoint.{name} ({value}) must be greater than 0")
    _check_monitor(config)
    weights = config.model.get("weights")
    if weights is None:
        return
    if config.resume is not None:
        if "model.weights" in chosen:
            raise UserError(
                f"resume={config.resume} goes on with that run's own weights; leave model.weights "
                "out, or start a run of its own without resume"
            )
        return  # the run has read them, and they may be gone
    # Rank 0 alone reads them, and of several machines this may not be its own.
    if (env.num_nodes if env else config.launch.nnodes) == 1:
        _check_weights(Path(str(weights)))


def _check_monitor(config: Config) -> None:
    checkpoint = config.checkpoint
    monitor = checkpoint.monitor
    if checkpoint.mode not in ("max", "min"):
        raise UserError(f"checkpoint.mode ({checkpoint.mode}) must be one of max, min")
    if monitor is None:
        if checkpoint.load_best:
            raise UserError(
                "checkpoint.load_best=true needs checkpoint.monitor, the metric that tells which "
                "is best; write checkpoint.monitor=eval/accuracy"
            )
        return
    if monitor not in MONITORS:
        matches = difflib.get_close_matches(monitor, MONITORS, n=1)
        hint = f"; did you mean {matches[0]}?" if matches else ""
        raise UserError(
            f"checkpoint.monitor ({monitor}) must be one of {', '.join(MONITORS)}{hint}"
        )
    if monitor in LOWER_IS_BETTER and checkpoint.mode == "max":
        raise UserError(
            f"checkpoint.monitor={monitor} with checkpoint.mode=max would keep the worst; write "
            "checkpoint.mode=min"
        )
    if monitor.startswith("eval/") and not config.train.eval_every_epochs:
        raise UserError(
            f"checkpoint.monitor={monitor} needs evaluations and train.eval_every_epochs is 0; "
            "write train.eval_every_epochs=1"
        )


def _check_weights(path: Path) -> None:
    if not path.exists():
        raise UserError(f"model.weights ({path}) does not exist; {_kinds()}")
    is_checkpoint = (path / MANIFEST).exists() or (path / "checkpoints").is_dir()
    if not (is_checkpoint or path.suffix in WEIGHT_FILES):
        raise UserError(f"model.weights ({path}) is no weights; {_kinds()}")


def _kinds() -> str:
    return (
        "give a run folder, its checkpoints/step-XXXXXXXX, or a file that ends in "
        f"{', '.join(WEIGHT_FILES)}"
    )
