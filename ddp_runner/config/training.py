"""The part of the schema for training: batch, loop, parameters and checkpoints. Torch-free."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ddp_runner.config.fields import key
from ddp_runner.errors import UserError

WARMUP_STEPS = 5  # before a trace: memory, compilation and buckets change in the first steps
MOST_TRACED = 100  # steps: a longer trace fills the memory, and no viewer opens it
EXPORTS = ("onnx", "torch_export")  # in addition to safetensors


def traced_steps(profile: Any, *, done: int = 0) -> range:
    """Return the steps that a value of ``train.profile`` names, counted from 1.

    It is FIRST-LAST, both included, or a number of steps after those that the run has `done` when
    it starts or resumes.

    Raises:
        UserError: the value is neither, or names too many steps.
    """
    if isinstance(profile, int) and not isinstance(profile, bool) and profile > 0:
        first = done + WARMUP_STEPS + 1
        steps = range(first, first + profile)
    else:
        match = re.fullmatch(r"([1-9]\d{0,17})-([1-9]\d{0,17})", str(profile))
        first, last = map(int, match.groups()) if match else (1, 0)
        steps = range(first, last + 1)
    if not steps:
        raise UserError(
            f"train.profile ({profile}) must be a number of steps, or FIRST-LAST",
            "write train.profile=5, or train.profile=20-25",
        )
    if len(steps) > MOST_TRACED:
        raise UserError(
            f"train.profile={profile} traces {len(steps)} steps, and a trace holds {MOST_TRACED} "
            "at most",
            "a few steps show the pattern: write train.profile=5",
        )
    return steps


def _validate_step(step: object) -> None:
    if not isinstance(step.get("_target_") if isinstance(step, Mapping) else step, str):
        raise UserError(
            f"train.step ({step}) must be a dotted name, or a mapping with _target_",
            "write train.step=my_package.step",
        )


def _validate_virtual_ranks(count: int) -> None:
    if count < 1 or count & (count - 1):
        raise UserError(
            f"batch.virtual_ranks ({count}) must be a power of two", "write batch.virtual_ranks=8"
        )


@dataclass
class BatchConfig:
    """Set either global_size or per_rank; the other follows from it."""

    global_size: int | None = key(None, "samples per step over all ranks: strong scaling", above=0)
    per_rank: int | None = key(100, "samples per micro-step on each rank: weak scaling", above=0)
    virtual_ranks: int | None = key(
        None,
        "split every global batch into this many parts, a power of two, so that every world size "
        "computes the same bytes; per_rank is then the size of a part",
        validate=_validate_virtual_ranks,
    )
    eval_per_rank: int | None = key(
        None, "samples per evaluation step on each rank; null: per_rank", above=0
    )
    count: str = key(
        "samples",
        "unit by which the loss is averaged; the training step counts the tokens",
        choices=("samples", "tokens"),
    )


@dataclass
class ResolvedBatch(BatchConfig):
    """The batch of a resolved config: both sizes are set."""

    global_size: int
    per_rank: int

    @property
    def eval_size(self) -> int:
        """Samples per evaluation step on each rank."""
        return self.eval_per_rank or self.per_rank


@dataclass
class TrainConfig:
    """The training loop."""

    step: Any = key(
        "ddp_runner.train.step.supervised",
        "the training step, (model, batch) -> StepOutput: a dotted name, or a mapping with _target_"
        " and keys. The default takes batches of inputs and targets, and model.loss",
        kind="text or mapping",
        validate=_validate_step,
    )
    epochs: int = key(10, "passes over the training set", above=0)
    max_steps: int | None = key(None, "steps of the whole run; null: by train.epochs", above=0)
    log_every_steps: int = key(10, "optimizer steps between lines of metrics", above=0)
    eval_every_epochs: int = key(
        1, "epochs between evaluations; the last is at the end; 0: never", least=0
    )
    eval_every_steps: int | None = key(None, "steps between additional evaluations", above=0)
    precision: str = key(
        "fp32",
        "tf32: fp32 with 10-bit mantissas in products, CUDA only; bf16: autocast; fp16: autocast "
        "with a scaled loss, GPUs only",
        choices=("fp32", "tf32", "bf16", "fp16"),
    )
    grad_accum_steps: int = key(1, "micro-steps per optimizer step", above=0)
    clip_norm: float | None = key(
        None, "largest L2 norm of the gradient; null: no clipping", above=0
    )
    clip_value: float | None = key(None, "largest value of a gradient; null: no clipping", above=0)
    compile: bool = key(False, "torch.compile the model, inside its parallel wrapper")
    activation_checkpointing: bool = key(
        False, "store only the inputs of each of model.blocks and recompute the rest in backward"
    )
    deterministic: bool = key(False, "fail on operations without a deterministic implementation")
    profile: Any | None = key(
        None,
        "trace optimizer steps into profile/: a number of steps, after 5 steps of warm-up, or "
        "FIRST-LAST, as in 20-25; null: none",
        kind="whole number or a word",
        validate=traced_steps,
    )
    num_threads: int | None = key(  # libraries overflow with more
        None, "intra-op CPU threads per rank; null: cores // local ranks", above=0, most=4096
    )


@dataclass
class CheckpointConfig:
    """When checkpoints are written and which are kept."""

    every_epochs: int | None = key(
        1, "epochs between checkpoints; null: every_steps alone decides", above=0
    )
    every_steps: int | None = key(
        None,
        "optimizer steps between checkpoints, beside those of every_epochs; null: none",
        above=0,
    )
    keep: int = key(3, "how many of the newest checkpoints stay on disk", above=0)
    format: str = key(
        "file",
        "file: rank 0 writes everything; sharded: each rank writes its part of the model and the "
        "optimizer, into a folder that all machines share",
        choices=("file", "sharded"),
    )
    monitor: str | None = key(None, "a metric, as eval/accuracy: its best checkpoint stays too")
    mode: str = key("max", "which value of that metric is best", choices=("max", "min"))
    load_best: bool = key(False, "at the end load the best checkpoint and evaluate it again")
    export: list[str] = key(
        [],
        "more formats of the best model, as [onnx]: model.onnx, model.pt2; model.safetensors is "
        "always written",
        choices=EXPORTS,
        packages={"onnx": "onnxscript"},
    )


@dataclass
class ParamsConfig:
    """Parameters by name. Patterns are shell patterns over dotted names: head.*, *.bias."""

    freeze: list[str] = key([], "patterns of parameters that are not trained")
    no_decay: bool = key(False, "no weight decay for biases and the 1-d parameters of norms")
    groups: list[dict[str, Any]] = key(
        [],
        "mappings with `match`, a pattern, and the optimizer's keys for the matching parameters; "
        "the first match counts",
    )


@dataclass
class EmaConfig:
    """An exponential moving average of the trained weights."""

    decay: float | None = key(
        None, "part of the average that a step keeps, such as 0.999; null: off", least=0, below=1
    )
    evaluate: bool = key(True, "evaluate and export the average instead of the trained weights")

    @property
    def is_evaluated(self) -> bool:
        """Whether evaluations and the exported model use the average."""
        return self.decay is not None and self.evaluate


@dataclass
class EarlyStopConfig:
    """Ends a run when its evaluations stop improving."""

    monitor: str | None = key(None, "a metric of evaluations, as eval/loss; null: never stop")
    patience: int = key(3, "evaluations in a row without improvement that end the run", above=0)
    min_delta: float = key(0.0, "least change of the metric that is an improvement", least=0)
    mode: str | None = key(
        None, "which value is best; null: the metric's own", choices=(None, "max", "min")
    )
