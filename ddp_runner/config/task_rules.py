"""The keys that each task needs, and those that it does not read. Torch-free."""

from collections.abc import Collection, Iterable, Mapping

from ddp_runner.config.identity import is_inside
from ddp_runner.config.plan_rules import validate_plan
from ddp_runner.config.schema import Config, has_own_loop
from ddp_runner.config.sections import AUTO, INFERENCE, PLAN, SAMPLE
from ddp_runner.config.training import EXPORTS
from ddp_runner.errors import UserError, listed

_EPOCHS = (
    *("train.epochs", "train.max_steps", "train.log_every_steps", "train.eval_every_epochs"),
    *("train.eval_every_steps", "train.profile", "early_stop"),
)
# Keys and groups of the training loop; a task without the loop reads none of them.
_LOOP = (
    *(*_EPOCHS, "train.clip_norm", "train.clip_value", "scheduler", "checkpoint.every_epochs"),
    *("checkpoint.every_steps", "checkpoint.keep", "checkpoint.load_best"),
)
_STEP = (
    *("train.grad_accum_steps", "train.compile", "train.activation_checkpointing"),
    *("optimizer", "params"),
)
_BATCHES = ("train.step", "batch", "metrics")
_TEXT = tuple(f"inference.{key}" for key in ("prompt", "num_tokens", "temperature", "top_k"))
_OTHERS = ("loop", "collectives", "plan")
_UNUSED: Mapping[str, tuple[str, ...]] = {
    "train": ("inference", *_OTHERS),
    "check": (*_LOOP, "ema", "checkpoint", "inference", *_OTHERS),
    "evaluate": (*_LOOP, *_STEP, *_TEXT, "checkpoint.export", *_OTHERS),
    "predict": (*_LOOP, *_STEP, *_TEXT, "checkpoint.export", "metrics", *_OTHERS),
    "export": (*_LOOP, *_STEP, *_TEXT, "metrics", *_OTHERS),
    SAMPLE: (
        *(*_LOOP, *_STEP, *_BATCHES, "checkpoint.export", *_OTHERS, "world_size", "parallelism"),
        *("inference.split", "inference.format"),
    ),
    "collectives": (
        *(*_LOOP, *_STEP, *_BATCHES, "train.precision", "model", "dataset", "ema", "checkpoint"),
        *("inference", "loop", "plan"),
    ),
    PLAN: (
        *(*_EPOCHS, "train.compile", "checkpoint", "inference", "loop", "collectives", "metrics"),
        *("launch", "backend"),
    ),
}
# Keys that the runner does not apply in the user's own loop, which may read them itself.
_UNUSED_IN_OWN_LOOP = (
    *("train", "params", "ema", "early_stop", "scheduler", "metrics", "collectives", "inference"),
    "plan",
    *("batch.count", "batch.eval_per_rank", "checkpoint.every_epochs"),
    *("checkpoint.load_best", "checkpoint.export"),
)
_TRAIN_IN_OWN_LOOP = ("train.deterministic", "train.num_threads")  # the exceptions


def validate_task(config: Config, *, chosen: Collection[str]) -> None:
    """Reject keys that do not fit the task."""
    task, sizes = config.task, config.collectives
    if sizes.min_bytes > sizes.max_bytes:
        raise UserError(
            f"collectives.min_bytes ({sizes.min_bytes}) is greater than collectives.max_bytes "
            f"({sizes.max_bytes})",
            "give both, the smaller as min_bytes",
        )
    for key in ("ops", "dtypes", "reduce_ops"):
        names = getattr(sizes, key)
        if names is not None and (not names or len(set(names)) < len(names)):
            raise UserError(
                f"collectives.{key} ([{', '.join(names)}]) must name at least one, and none twice"
            )
    if task == PLAN:
        validate_plan(config)
    if task in INFERENCE and config.inference.run is None and config.resume in (None, AUTO):
        raise UserError(f"task={task} takes the model of a run", "write resume=RUN, or resume=last")
    if "inference.run" in chosen:
        raise UserError("inference.run is filled in by the runner", "write resume=RUN")
    if task == "export" and not config.checkpoint.export:
        raise UserError(
            "task=export writes the formats in checkpoint.export, which is empty",
            f"write checkpoint.export=[{EXPORTS[0]}]",
        )


def unused_note(task: str, given: Iterable[str]) -> list[str]:
    """Return a line that names the given keys without effect; an empty list if there are none.

    `given` are the command's keys and, for the user's own loop, the keys of the chosen YAMLs.
    """
    if has_own_loop(task):
        unused = [key for key in given if is_inside(key, _UNUSED_IN_OWN_LOOP)]
        keys = [key for key in unused if not is_inside(key, _TRAIN_IN_OWN_LOOP)]
        note = f"task={task}: your function may read run.config, and the runner does not apply"
    else:
        keys = [key for key in given if is_inside(key, _UNUSED.get(task, ()))]
        note = f"task={task} makes no use of"
    names = {key for key in keys if not any(key.startswith(f"{other}.") for other in keys)}
    return [f"{note} {listed(sorted(names))}"] if keys else []
