"""The keys of a training: its loop, parameters, checkpoints, and when it stops early.

They are a part of the schema. Torch-free.
"""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class TrainConfig:
    """The training loop."""

    # The training step, (model, batch) -> Step: a dotted name, or a mapping with _target_ and keys.
    # The default takes batches of inputs and targets, and model.loss.
    step: Any = "ddp_runner.train.step.supervised"
    epochs: int = 10  # passes over the training set
    max_steps: int | None = None  # optimizer steps of the whole run; null: train.epochs decides
    log_every_steps: int = 10  # optimizer steps between two lines of metrics
    eval_every_epochs: int = 1  # epochs between two evaluations, and one at the end; 0: never
    eval_every_steps: int | None = None  # optimizer steps between two more evaluations
    # fp32, tf32 (fp32 whose products have 10 bits, CUDA only), bf16 (autocast), or fp16 (autocast
    # with a scaled loss, GPUs only)
    precision: str = "fp32"
    grad_accum_steps: int = 1  # micro-steps of one optimizer step
    clip_norm: float | None = None  # largest L2 norm of the whole gradient; null: no clipping
    clip_value: float | None = None  # largest absolute value of a gradient; null: no clipping
    compile: bool = False  # torch.compile the model, inside its parallel wrapper
    # keep only the inputs of each of model.blocks, and compute its activations again for backward
    activation_checkpointing: bool = False
    deterministic: bool = False  # fail on operations that have no deterministic form
    # Trace these optimizer steps into profile/: a number of them, after 5 steps of warm-up, or the
    # first and the last, as in 20-25; null: none
    profile: Any | None = None
    num_threads: int | None = None  # intra-op CPU threads of a rank; null: cores // local ranks


@dataclass
class CheckpointConfig:
    """When checkpoints are written and which are kept."""

    every_epochs: int | None = 1  # null: not by epochs
    every_steps: int | None = None  # optimizer steps; null: not by steps
    keep: int = 3  # how many of the newest checkpoints stay on disk
    # a metric, such as eval/accuracy, whose best checkpoint stays as well
    monitor: str | None = None
    mode: str = "max"  # which value of the monitored metric is best: max or min
    # after the last step load the best checkpoint and evaluate it once more
    load_best: bool = False
    # at the end write the best model for other programs, too: onnx (model.onnx), torch_export
    # (model.pt2), as in [onnx]
    export: list[str] = field(default_factory=list)


@dataclass
class ParamsConfig:
    """Parameters by name. A pattern is the shell's, over the dotted names: head.*, *.bias."""

    freeze: list[str] = field(default_factory=list)  # patterns of parameters that are not trained
    no_decay: bool = False  # no weight decay for biases and for parameters of one dim, as in norms
    # mappings with `match`, a pattern, and keys of the optimizer that differ for the parameters
    # that it matches; the first match counts, and the rest has the optimizer's own keys
    groups: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class EmaConfig:
    """A moving average of the weights, beside those that are trained."""

    # part of the average that a step keeps, such as 0.999; null: no average
    decay: float | None = None
    evaluate: bool = True  # evaluate and export the average in place of the trained weights

    @property
    def is_evaluated(self) -> bool:
        """Whether evaluations and the exported model have the average."""
        return self.decay is not None and self.evaluate


@dataclass
class EarlyStopConfig:
    """Ends a run whose evaluations no longer improve."""

    monitor: str | None = None  # a metric of the evaluation, such as eval/loss; null: never stop
    patience: int = 3  # evaluations in a row without an improvement, after which the run ends
    min_delta: float = 0.0  # least change of the metric that counts as an improvement
    mode: str | None = None  # which value is best: max or min; null: as is known of the metric
