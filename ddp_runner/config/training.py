"""The keys of a training: its batch, loop, parameters and checkpoints, and when it stops early.

They are a part of the schema. Torch-free.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ddp_runner.config.fields import key
from ddp_runner.errors import UserError

WARMUP_STEPS = 5  # before a trace, after each start: memory, compilation and buckets settle in them
MOST_TRACED = 100  # steps: more fill the memory, and no page opens such a trace
EXPORTS = ("onnx", "torch_export")  # beside safetensors


def traced_steps(asked: Any, *, done: int = 0) -> range:
    """Return the steps that a value of ``train.profile`` names, counted from 1.

    Args:
        asked: a number of steps, or FIRST-LAST, which both count.
        done: the steps that the run has taken when it starts or resumes; a number counts from
            there.

    Raises:
        UserError: it is neither, or it names too many steps.
    """
    if isinstance(asked, int) and not isinstance(asked, bool) and asked > 0:
        first = done + WARMUP_STEPS + 1
        steps = range(first, first + asked)
    else:
        found = re.fullmatch(r"([1-9]\d{0,17})-([1-9]\d{0,17})", str(asked))
        first, last = map(int, found.groups()) if found else (1, 0)
        steps = range(first, last + 1)
    if not steps:
        raise UserError(
            f"train.profile ({asked}) must be a number of steps, or the first and the last one; "
            "write train.profile=5, or train.profile=20-25"
        )
    if len(steps) > MOST_TRACED:
        raise UserError(
            f"train.profile={asked} traces {len(steps)} steps, and {MOST_TRACED} are the most that "
            "a trace can hold; a handful shows what a step does: write train.profile=5"
        )
    return steps


def _validate_step(step: object) -> None:
    if not isinstance(step.get("_target_") if isinstance(step, Mapping) else step, str):
        raise UserError(
            f"train.step ({step}) must be a dotted name, or a mapping with _target_; write "
            "train.step=my_package.step"
        )


def _validate_decay(decay: float) -> None:
    if not 0 <= decay < 1:
        raise UserError(f"ema.decay ({decay:g}) must be 0 or greater and less than 1; write 0.999")


@dataclass
class BatchConfig:
    """Set one of global_size and per_rank; the other follows from it."""

    global_size: int | None = key(None, "samples of a step over all ranks: strong scaling", above=0)
    per_rank: int | None = key(100, "samples of one micro-step of one rank: weak scaling", above=0)
    eval_per_rank: int | None = key(
        None, "samples of one evaluation step of one rank; null: per_rank", above=0
    )
    count: str = key(
        "samples",
        "what the loss is divided by; the training step counts tokens",
        choices=("samples", "tokens"),
    )


@dataclass
class ResolvedBatch(BatchConfig):
    """The batch sizes of a resolved config: both are known."""

    global_size: int
    per_rank: int

    @property
    def eval_size(self) -> int:
        """Samples of one evaluation step of one rank."""
        return self.eval_per_rank or self.per_rank


@dataclass
class TrainConfig:
    """The training loop."""

    step: Any = key(
        "ddp_runner.train.step.supervised",
        "the training step, (model, batch) -> StepOutput: a dotted name, or a mapping with _target_"
        " and keys. The default takes batches of inputs and targets, and model.loss",
        kind="text or mapping",
        check=_validate_step,
    )
    epochs: int = key(10, "passes over the training set", above=0)
    max_steps: int | None = key(None, "steps of the whole run; null: by train.epochs", above=0)
    log_every_steps: int = key(10, "optimizer steps between two lines of metrics", above=0)
    eval_every_epochs: int = key(
        1, "epochs between two evaluations; one at the end; 0: never", least=0
    )
    eval_every_steps: int | None = key(None, "steps between two more evaluations", above=0)
    precision: str = key(
        "fp32",
        "tf32: fp32 with products of 10 bits, CUDA only; bf16: autocast; fp16: autocast with a "
        "scaled loss, GPUs only",
        choices=("fp32", "tf32", "bf16", "fp16"),
    )
    grad_accum_steps: int = key(1, "micro-steps of one optimizer step", above=0)
    clip_norm: float | None = key(
        None, "largest L2 norm of the gradient; null: no clipping", above=0
    )
    clip_value: float | None = key(None, "largest value of a gradient; null: no clipping", above=0)
    compile: bool = key(False, "torch.compile the model, inside its parallel wrapper")
    activation_checkpointing: bool = key(
        False, "keep only the inputs of each of model.blocks; the backward computes the rest again"
    )
    deterministic: bool = key(False, "fail on operations that have no deterministic form")
    profile: Any | None = key(
        None,
        "trace these optimizer steps into profile/: a number of them, after 5 steps of warm-up, or "
        "the first and the last, as in 20-25; null: none",
        kind="whole number or a word",
        check=traced_steps,
    )
    num_threads: int | None = key(  # libraries overflow beyond the most
        None, "intra-op CPU threads of a rank; null: cores // local ranks", above=0, most=4096
    )


@dataclass
class CheckpointConfig:
    """When checkpoints are written and which are kept."""

    every_epochs: int | None = key(1, "null: not by epochs", above=0)
    every_steps: int | None = key(None, "optimizer steps; null: not by steps", above=0)
    keep: int = key(3, "how many of the newest checkpoints stay on disk", above=0)
    monitor: str | None = key(None, "a metric, as eval/accuracy, whose best checkpoint stays, too")
    mode: str = key("max", "which value of that metric is best", choices=("max", "min"))
    load_best: bool = key(False, "at the end load the best checkpoint and evaluate it once more")
    export: list[str] = key(
        [],
        "at the end write the best model for other programs, too, as [onnx]: to model.onnx, "
        "model.pt2; model.safetensors is always written",
        choices=EXPORTS,
        packages={"onnx": "onnxscript"},
    )


@dataclass
class ParamsConfig:
    """Parameters by name. A pattern is the shell's, over the dotted names: head.*, *.bias."""

    freeze: list[str] = key([], "patterns of parameters that are not trained")
    no_decay: bool = key(False, "no weight decay for biases and for norms' parameters of one dim")
    groups: list[dict[str, Any]] = key(
        [],
        "mappings with `match`, a pattern, and keys of the optimizer that differ for what it "
        "matches; the first match counts, and the rest has the optimizer's own keys",
    )


@dataclass
class EmaConfig:
    """A moving average of the weights, beside those that are trained."""

    decay: float | None = key(
        None, "part of it that a step keeps, such as 0.999; null: none", check=_validate_decay
    )
    evaluate: bool = key(True, "evaluate and export the average in place of the trained weights")

    @property
    def is_evaluated(self) -> bool:
        """Whether evaluations and the exported model have the average."""
        return self.decay is not None and self.evaluate


@dataclass
class EarlyStopConfig:
    """Ends a run whose evaluations no longer improve."""

    monitor: str | None = key(None, "a metric of evaluations, as eval/loss; null: never stop")
    patience: int = key(3, "evaluations in a row without an improvement that end it", above=0)
    min_delta: float = key(0.0, "least change of the metric that is an improvement", least=0)
    mode: str | None = key(
        None, "which value is best; null: as is known of the metric", choices=(None, "max", "min")
    )
