"""``task=export``: write a run's model as safetensors, and as ``checkpoint.export`` says."""

from collections.abc import Callable

from ddp_runner.inference.model import model_arguments, open_model
from ddp_runner.job import Status
from ddp_runner.parallelism.shards import whole_state, whole_tensors
from ddp_runner.rank.records import export_model
from ddp_runner.rank.session import Session
from ddp_runner.tracking.start_block import shown_path
from ddp_runner.train.best_model import export_programs


def run_export(session: Session, stop_requested: Callable[[], bool]) -> Status:
    """Write the model of a run into this run's folder, on rank 0.

    Collective: every rank must call.
    """
    model = open_model(session)
    if model is None:
        return Status.COMPLETED
    with model.open_logger(session) as logger:
        logger.step_done(step=0, epoch=0)  # ends the start-up time
        work, run_dir, weights = model.work, session.run_dir, model.weights
        export_model(
            run_dir,
            whole_state(model.module),
            whole_tensors(model.module),
            step=weights.step,
            metrics={name: value for name, value in model.logged.items() if "/" in name},
            is_average=weights.is_average,
        )
        if session.env.is_rank_zero:
            samples = next(iter(model.splits.values())).first(seed=work.config.seed).data
            arguments = model_arguments(model.run_dir)
            files = export_programs(work, run_dir, arguments=arguments, samples=samples)
            for path in (run_dir.export, *files):
                session.log(f"wrote {shown_path(path)}")
        logger.finish(Status.COMPLETED, step=weights.step, epoch=model.epoch)
    return Status.COMPLETED
