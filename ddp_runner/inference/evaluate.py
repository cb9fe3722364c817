"""``task=evaluate``: the metrics of a run's model on a split, equal to those of the run itself."""

import math
import time
from collections.abc import Callable, Mapping

import torch

from ddp_runner.inference.model import TrainedModel, open_model
from ddp_runner.inference.run_files import dataset_keys, logged_at
from ddp_runner.inference.start import open_logger
from ddp_runner.job import Status
from ddp_runner.rank.session import Session
from ddp_runner.tracking.heartbeat import EVALUATING
from ddp_runner.train.dry_run import tried_metrics
from ddp_runner.train.evaluation import evaluate


def run_evaluation(session: Session, stop_requested: Callable[[], bool]) -> Status:
    """Evaluate the model of a run on ``inference.split``, and log the metrics at its step.

    An evaluation is never stopped half-way: its metrics would be of some samples only. Collective:
    every rank must call.

    Raises:
        UserError: see ``open_model``, ``try_metrics`` and ``evaluate``.
    """
    model = open_model(session)
    if model is None:
        return Status.COMPLETED
    with torch.no_grad():
        tried_metrics(model.work, model.module, next(iter(model.splits.values())))
    with open_logger(session, model) as logger:
        session.heartbeat.note(EVALUATING)
        logger.step_done(step=0, epoch=0)  # the start-up ends here
        splits, began = model.splits, time.perf_counter()
        results, confusion = evaluate(model.work, model.module, *splits.values(), step=model.step)
        counts = [split.num_samples for split in splits.values()]
        if None not in counts:
            known = (count for count in counts if count is not None)
            results["perf/samples_per_s"] = sum(known) / (time.perf_counter() - began)
        logger.log(results, step=model.step, epoch=model.epoch, confusion=confusion)
        if session.env.is_rank_zero:
            session.log(own_evaluation(model, results, session))
        logger.finish(Status.COMPLETED, step=model.step, epoch=model.epoch)
    return Status.COMPLETED


def own_evaluation(model: TrainedModel, results: Mapping[str, float], session: Session) -> str:
    """Return how the run itself evaluated this step, as a sentence. Rank 0 only."""
    config = session.job.secrets.written(session.config)
    if config.inference.split != "eval" or config.dataset != dataset_keys(model.run_dir):
        return "the run itself has evaluated other samples"
    logged = logged_at(model.run_dir, model.step)
    own = {
        name: value
        for name, value in logged.items()
        if name in results and name.startswith("eval/") and isinstance(value, float)
    }
    if not own:
        return f"the run itself has not evaluated step {model.step}"
    gaps = {_difference(value, results[name]): name for name, value in own.items()}
    if not (gap := max(gaps)):
        return f"equal to the run's own evaluation at step {model.step}, to the last digit"
    return (
        f"the run's own evaluation at step {model.step}: {gaps[gap]} {own[gaps[gap]]:.6g}, here "
        f"{results[gaps[gap]]:.6g}, {gap:.0e} apart"
    )


def _difference(one: float, other: float) -> float:
    difference = abs(one - other) / max(abs(one), abs(other), 1e-300)
    return difference if math.isfinite(difference) else math.inf
