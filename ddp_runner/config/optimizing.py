"""The keys that say which parameters are trained and how, averaged weights, and when to stop.

They are a part of the schema. Torch-free.
"""

from dataclasses import dataclass, field
from typing import Any


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


@dataclass
class EarlyStopConfig:
    """Ends a run whose evaluations no longer improve."""

    monitor: str | None = None  # a metric of the evaluation, such as eval/loss; null: never stop
    patience: int = 3  # evaluations in a row without an improvement, after which the run ends
    min_delta: float = 0.0  # least change of the metric that counts as an improvement
    mode: str | None = None  # which value is best: max or min; null: as is known of the metric
