"""What must hold for a task that takes the model of a run. Torch-free."""

from collections.abc import Collection
from dataclasses import replace

import yaml

from ddp_runner.config.inference import EXPORTS, INFERENCE, SAMPLE, SAMPLE_KEYS, InferenceConfig
from ddp_runner.config.schema import AUTO, CONFIG_DIR, Config, mode_needs
from ddp_runner.errors import UserError, counted
from ddp_runner.host.hardware import Hardware


def validate_inference(config: Config, *, chosen: Collection[str]) -> None:
    """Reject keys that do not fit the task.

    Raises:
        UserError: a rule is broken.
    """
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
    validate_weights(own.weights)
    formats = config.checkpoint.export
    for name in formats:
        if name not in EXPORTS:
            raise UserError(
                f"checkpoint.export ({name}) must be among {', '.join(EXPORTS)}; safetensors is "
                "always written"
            )
    if task == "export" and not formats:
        raise UserError(
            "task=export writes what checkpoint.export names; write "
            f"checkpoint.export=[{EXPORTS[0]}]"
        )


def validate_weights(asked: object) -> None:
    """Reject what names no weights of a run.

    Raises:
        UserError: it is neither best, nor last, nor a step.
    """
    is_step = isinstance(asked, int) and not isinstance(asked, bool) and asked >= 0
    if not (is_step or asked in ("best", "last")):
        raise UserError(
            f"inference.weights ({asked}) must be best, last, or the step of a checkpoint"
        )


def fitted(
    config: Config, hardware: Hardware, *, chosen: Collection[str]
) -> tuple[Config, list[str]]:
    """Return the config for this machine, and what to say if it lacks the GPUs of the run.

    A run's model must be usable where the run could not have been trained. Keys that the command
    line chose stay. A text is sampled by one rank, however many have trained the model.
    """
    if config.task == SAMPLE and "parallelism" not in chosen:
        single = (CONFIG_DIR / "parallelism" / "single.yaml").read_text(encoding="utf-8")
        config = replace(config, parallelism=yaml.safe_load(single), world_size=1)
    backend, ranks = config.backend, config.world_size
    gpus = 0 if hardware.unusable else hardware.num_gpus
    per_rank = mode_needs(config.parallelism).devices_per_rank
    needed = per_rank * (ranks if isinstance(ranks, int) else 1)
    fits = backend.device in ("auto", "cpu") or (backend.device == hardware.kind and needed <= gpus)
    if config.task not in INFERENCE or fits or {"backend", "backend.device"} & set(chosen):
        return config, []
    here = f"{gpus} ({hardware.kind})" if gpus else "none"
    note = f"the run had {counted(needed, 'GPU')} ({backend.device}) and this machine shows {here}"
    found = replace(config, backend=replace(backend, name=AUTO, device=AUTO))
    if "world_size" not in chosen and config.task != SAMPLE:
        found = replace(found, world_size=AUTO)
    return found, [f"{note}; give world_size and backend to choose"]
