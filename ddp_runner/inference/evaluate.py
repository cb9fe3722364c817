"""``task=evaluate``: evaluate a run's model on a split, exactly as the run itself does."""

import math
import time
from collections.abc import Callable, Mapping

import torch

from ddp_runner.config.schema import RunConfig
from ddp_runner.files import read_yaml
from ddp_runner.inference.model import TrainedModel, open_model
from ddp_runner.job import Status
from ddp_runner.rank.session import Session
from ddp_runner.train.evaluation import evaluate
from ddp_runner.train.first_batch import tried_metrics


def run_evaluation(session: Session, stop_requested: Callable[[], bool]) -> Status:
    """Evaluate the model of a run on ``inference.split``, and log the metrics at its step.

    A stop request does not interrupt it: metrics of some samples would be wrong. Collective: every
    rank must call.
    """
    model = open_model(session)
    if model is None:
        return Status.COMPLETED
    splits = list(model.splits.values())
    with torch.no_grad():
        tried_metrics(model.work, model.module, splits[0])
    with model.open_logger(session) as logger:
        logger.step_done(step=0, epoch=0)  # ends the start-up time
        logger.evaluating()
        began, step = time.perf_counter(), model.weights.step
        results, confusion = evaluate(model.work, model.module, *splits, step=step)
        counts = [split.num_samples for split in splits]
        if None not in counts:  # no stream
            num_samples = sum(filter(None, counts))
            results["perf/samples_per_s"] = num_samples / (time.perf_counter() - began)
        logger.log(results, step=step, epoch=model.epoch, confusion=confusion)
        if session.env.is_rank_zero:
            config = session.job.secrets.written(session.config)
            session.log(own_evaluation(model, results, config))
        logger.finish(Status.COMPLETED, step=step, epoch=model.epoch)
    return Status.COMPLETED


def own_evaluation(model: TrainedModel, results: Mapping[str, float], config: RunConfig) -> str:
    """Return a sentence that compares the results with the run's own. Rank 0 only."""
    run_dataset = read_yaml(model.run_dir.config)["dataset"]
    if config.inference.split != "eval" or config.dataset != run_dataset:
        return "the run itself has evaluated other samples"
    step, logged = model.weights.step, model.logged
    names = [name for name in results if name.startswith("eval/")]
    before = {name: logged[name] for name in names if isinstance(logged.get(name), float)}
    if not before:
        return f"the run itself has not evaluated step {step}"
    gap, name = max((_difference(value, results[name]), name) for name, value in before.items())
    if not gap:
        return f"equal to the run's own evaluation at step {step}, to the last digit"
    return (
        f"the run's own evaluation at step {step}: {name} {before[name]:.6g}, here "
        f"{results[name]:.6g}, {gap:.0e} apart"
    )


def _difference(first: float, second: float) -> float:
    """Return the relative difference; inf if a value is not finite."""
    difference = abs(first - second) / max(abs(first), abs(second), 1e-300)
    return difference if math.isfinite(difference) else math.inf
