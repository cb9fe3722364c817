"""What a completed run leaves besides its checkpoints: its best model, evaluated and exported.

Called by ``worker``.
"""

from collections.abc import Callable
from pathlib import Path

from ddp_runner.checkpoint import best_checkpoint, load_checkpoint
from ddp_runner.checkpoint_rules import CLASS_METRICS
from ddp_runner.config import Config
from ddp_runner.data.source import Dataset
from ddp_runner.distributed import gather_objects
from ddp_runner.errors import UserError
from ddp_runner.manifest import read_manifest
from ddp_runner.step import Trainee
from ddp_runner.train import Position, Reporter, evaluate
from ddp_runner.weights import EXPORT, export_weights


def check_monitor(config: Config, dataset: Dataset) -> None:
    """Refuse to train for a metric that this dataset will not have.

    Raises:
        UserError: the metric needs classes.
    """
    monitor = config.checkpoint.monitor
    if monitor in CLASS_METRICS and dataset.num_classes is None:
        raise UserError(
            f"checkpoint.monitor={monitor} needs classes and dataset={dataset.name} has none; "
            "write checkpoint.monitor=eval/loss checkpoint.mode=min"
        )


def deliver(
    trainee: Trainee,
    position: Position,
    config: Config,
    run_dir: Path,
    *,
    reporter: Reporter,
    say: Callable[[str], None],
) -> None:
    """Export the best model, without a monitor the last; with load_best evaluate it once more.

    Collective: every rank of the loop must call.

    Raises:
        UserError: the best checkpoint is damaged, or the model could not be written.
    """
    folder, settings, is_rank_zero = (
        run_dir / "checkpoints",
        config.checkpoint,
        trainee.env.rank == 0,
    )
    delivered = folder / f"step-{position.step:08d}"
    if settings.monitor is not None:
        found = None
        if is_rank_zero:
            found = best_checkpoint(folder, monitor=settings.monitor, mode=settings.mode)
        best = gather_objects(found, group=trainee.group)[0]
        if best is None:
            say(f"no checkpoint has a finite {settings.monitor}: the last model is the best")
        delivered = best or delivered
    is_last = delivered.name == f"step-{position.step:08d}"
    state = trainee.module.state_dict()
    if not is_last and (is_rank_zero or settings.load_best):
        state = load_checkpoint(delivered, map_location=trainee.devices[0])["model"]
    if settings.load_best:
        trainee.module.load_state_dict(state)  # on every rank, onto its own devices
        results, _ = evaluate(trainee)
        reporter.log(
            {name.replace("eval/", "best/"): value for name, value in results.items()},
            step=position.step,
            epoch=position.epoch,
        )
    if is_rank_zero:
        manifest = read_manifest(delivered)
        export_weights(run_dir / EXPORT, state, step=manifest.step, metrics=manifest.metrics)
        if settings.monitor is not None:
            score = manifest.metrics.get(settings.monitor)
            told = "not finite" if score is None else f"{score:.4f}"
            say(f"best by {settings.monitor}: {told} at step {manifest.step}, in {EXPORT}")
