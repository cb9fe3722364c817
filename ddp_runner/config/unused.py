"""Which keys of a command have no effect in its task. Torch-free."""

from collections.abc import Iterable, Mapping

from ddp_runner.config.inference import SAMPLE
from ddp_runner.config.own_loop import has_own_loop
from ddp_runner.errors import listed

# Keys, or groups of keys, of the training loop; a task that has none of it reads none of them.
_LOOP = (
    *("train.epochs", "train.max_steps", "train.log_every_steps", "train.eval_every_epochs"),
    *("train.eval_every_steps", "train.clip_norm", "train.clip_value", "train.profile"),
    *("early_stop", "scheduler", "checkpoint.every_epochs", "checkpoint.every_steps"),
    *("checkpoint.keep", "checkpoint.load_best"),
)
_STEP = (
    *("train.grad_accum_steps", "train.compile", "train.activation_checkpointing"),
    *("optimizer", "params"),
)
_BATCHES = ("train.step", "batch", "metrics")
_UNUSED: Mapping[str, tuple[str, ...]] = {
    "train": ("collectives",),
    "check": (*_LOOP, "ema", "checkpoint", "collectives"),
    "evaluate": (*_LOOP, *_STEP, "checkpoint.export", "collectives"),
    "predict": (*_LOOP, *_STEP, "checkpoint.export", "metrics", "collectives"),
    "export": (*_LOOP, *_STEP, "metrics", "collectives"),
    SAMPLE: (*_LOOP, *_STEP, *_BATCHES, "checkpoint.export", "collectives"),
    "collectives": (
        *(*_LOOP, *_STEP, *_BATCHES, "train.precision", "model", "dataset", "ema", "checkpoint"),
    ),
}
# Of the user's own loop, where they can read any key themselves.
_UNUSED_IN_OWN_LOOP = (
    *("train", "params", "ema", "early_stop", "scheduler", "metrics", "collectives"),
    *("batch.count", "batch.eval_per_rank", "checkpoint.every_epochs"),
)
_TRAIN_IN_OWN_LOOP = ("train.deterministic", "train.num_threads")  # all that the runner applies


def unused_note(task: str, given: Iterable[str]) -> list[str]:
    """Return a line that names those of the given keys that have no effect; else nothing.

    Args:
        task: of the config.
        given: dotted keys that the command gives, and in an own loop those of the YAMLs that it
            chooses, too.
    """
    if has_own_loop(task):
        applied = [one for one in given if _is_in(one, _TRAIN_IN_OWN_LOOP)]
        keys = [one for one in given if _is_in(one, _UNUSED_IN_OWN_LOOP) and one not in applied]
        note = f"task={task}: your function may read run.config, and the runner does not apply"
    else:
        keys = [one for one in given if _is_in(one, _UNUSED.get(task, ()))]
        note = f"task={task} makes no use of"
    named = {one for one in keys if not any(one.startswith(f"{other}.") for other in keys)}
    return [f"{note} {listed(sorted(named))}"] if keys else []


def _is_in(key: str, groups: Iterable[str]) -> bool:
    return any(key == one or key.startswith(f"{one}.") for one in groups)
