"""What each task needs of a config, and which keys it does not read. Torch-free.

Each function that validates raises a UserError for the first rule that is broken.
"""

from collections.abc import Collection, Iterable, Mapping

from ddp_runner.config.identity import is_inside
from ddp_runner.config.schema import Config, RunConfig, has_own_loop, mode_needs
from ddp_runner.config.sections import (
    AUTO,
    DTYPES,
    INFERENCE,
    OPS,
    REDUCE_OPS,
    SAMPLE,
    SAMPLE_KEYS,
    InferenceConfig,
)
from ddp_runner.config.training import EXPORTS, traced_steps
from ddp_runner.errors import UserError, listed
from ddp_runner.metric_names import is_lower_better

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


def validate_task(config: Config, *, chosen: Collection[str]) -> None:
    """Reject keys that do not fit the task."""
    _validate_collectives(config)
    _validate_own_loop(config)
    _validate_inference(config, chosen=chosen)


def _validate_collectives(config: Config) -> None:
    asked = config.collectives
    if asked.min_bytes > asked.max_bytes:
        raise UserError(
            f"collectives.min_bytes ({asked.min_bytes}) is greater than collectives.max_bytes "
            f"({asked.max_bytes}); give both, the smaller as min_bytes"
        )
    for key, known in (("ops", OPS), ("dtypes", DTYPES), ("reduce_ops", REDUCE_OPS)):
        names = getattr(asked, key)
        if names is not None and (not names or len(set(names)) < len(names)):
            raise UserError(
                f"collectives.{key} ([{', '.join(names)}]) must name at least one, and none "
                f"twice; choose from {', '.join(known)}"
            )


def _validate_own_loop(config: Config) -> None:
    """Reject keys that do not fit the user's own loop, and arguments for it without such a task."""
    task, checkpoint = config.task, config.checkpoint
    if not has_own_loop(task):
        if config.loop:
            raise UserError(
                f"loop.{next(iter(config.loop))} is an argument of a function of your own and task "
                f"is {task}; write task=PACKAGE.MODULE.FUNCTION, or leave it out"
            )
        return
    wrong = [str(key) for key in config.loop if not str(key).isidentifier()]
    if wrong:
        raise UserError(
            f"loop ({listed(wrong)}) holds the arguments of {task}, whose names are Python's; "
            "write loop.NAME=VALUE"
        )
    if mode_needs(config.parallelism).num_servers:
        raise UserError(
            f"task={task} runs one loop on equal ranks, and parallelism="
            f"{config.parallelism.get('name')} has a server; write parallelism=ddp"
        )
    if mode_needs(config.parallelism).model_ranks != 1:
        raise UserError(
            f"task={task} takes samples of its own on each rank, and under parallelism="
            f"{config.parallelism.get('name')} several ranks compute the same ones; write "
            "parallelism=fsdp"
        )
    if checkpoint.load_best:
        raise UserError(
            f"checkpoint.load_best=true evaluates the model of task=train, and task is {task}; "
            "leave it out: your function loads and evaluates what it wants"
        )
    if checkpoint.export:
        raise UserError(
            f"checkpoint.export writes the model of task=train, and task is {task}; leave it out: "
            "your function exports what it wants"
        )
    monitor = checkpoint.monitor
    if monitor is not None and is_lower_better(monitor) and checkpoint.mode == "max":
        raise UserError(
            f"checkpoint.monitor={monitor} with checkpoint.mode=max would keep the worst; write "
            "checkpoint.mode=min"
        )


def _validate_inference(config: Config, *, chosen: Collection[str]) -> None:
    """Reject keys that do not fit the task."""
    task, own = config.task, config.inference
    if task in INFERENCE and own.run is None and config.resume in (None, AUTO):
        raise UserError(f"task={task} takes the model of a run; write resume=RUN, or resume=last")
    if "inference.run" in chosen:
        raise UserError("inference.run is filled in by the runner; write resume=RUN")
    if task not in INFERENCE and own != InferenceConfig(run=own.run):
        raise UserError(
            f"the keys of inference are for task={', '.join(INFERENCE)}, and task is {task}; leave "
            "them out"
        )
    defaults = InferenceConfig()
    for key in SAMPLE_KEYS:
        if task != SAMPLE and getattr(own, key) != getattr(defaults, key):
            raise UserError(
                f"inference.{key} is for task={SAMPLE}, and task is {task}; leave it out"
            )
    if task == SAMPLE and "world_size" in chosen and config.world_size not in (1, AUTO):
        raise UserError(
            f"task={SAMPLE} computes on one rank, world_size is {config.world_size}; leave "
            "world_size out"
        )
    if task == "export" and not config.checkpoint.export:
        raise UserError(
            "task=export writes what checkpoint.export names; write "
            f"checkpoint.export=[{EXPORTS[0]}]"
        )


def validate_profile(config: RunConfig, *, num_steps: int | None, chosen: Collection[str]) -> None:
    """Reject a profile that would never happen.

    Args:
        config: resolved.
        num_steps: optimizer steps of the run; None if they are not known.
        chosen: the keys given on the command line. Other tasks may bring the key from a run.
    """
    asked, task = config.train.profile, config.task
    if asked is None:
        return
    steps = traced_steps(asked)
    if task != "train" and (task not in INFERENCE or "train.profile" in chosen):
        raise UserError(
            f"train.profile={asked} traces the steps of task=train, and task is {task}; leave it "
            "out: a function of your own can use torch.profiler itself"
        )
    if task != "train":
        return
    if mode_needs(config.parallelism).num_servers:
        raise UserError(
            f"train.profile={asked} traces ranks that all run the loop, and the trainers of "
            f"parallelism={config.parallelism.get('name')} do not; write parallelism=ddp"
        )
    if num_steps is not None and steps[-1] > num_steps:
        raise UserError(
            f"train.profile={asked} traces the steps {steps[0]} to {steps[-1]}, and the run has "
            f"{num_steps}; train longer, or name earlier steps: train.profile=FIRST-LAST"
        )


def unused_note(task: str, given: Iterable[str]) -> list[str]:
    """Return a line that names those of the given keys that have no effect; else nothing.

    Args:
        task: of the config.
        given: dotted keys that the command gives, and in an own loop those of the YAMLs that it
            chooses, too.
    """
    if has_own_loop(task):
        applied = [one for one in given if is_inside(one, _TRAIN_IN_OWN_LOOP)]
        keys = [one for one in given if is_inside(one, _UNUSED_IN_OWN_LOOP) and one not in applied]
        note = f"task={task}: your function may read run.config, and the runner does not apply"
    else:
        keys = [one for one in given if is_inside(one, _UNUSED.get(task, ()))]
        note = f"task={task} makes no use of"
    named = {one for one in keys if not any(one.startswith(f"{other}.") for other in keys)}
    return [f"{note} {listed(sorted(named))}"] if keys else []
