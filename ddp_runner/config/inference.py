"""The keys of evaluate, predict and export: a part of the schema. Torch-free."""

from dataclasses import dataclass
from typing import Any

INFERENCE = ("evaluate", "predict", "export")  # tasks that take a run's model and train nothing
EXPORTS = ("onnx", "torch_export")  # beside safetensors
Asked = str | int  # of weights: best, last, or the step of a checkpoint
SPLITS, FORMATS = ("eval", "train", "all"), ("csv", "parquet")


@dataclass
class InferenceConfig:
    """What task=evaluate, predict and export do with the model of the run that resume names."""

    run: str | None = None  # the folder of that run, filled in from resume
    # best: model.safetensors, or while the run has none its best checkpoint; last: the newest
    # checkpoint; or the step of a checkpoint, such as 600
    weights: Any = "best"
    split: str = "eval"  # of the dataset: eval, train, or all of both
    format: str = "csv"  # of the predictions: csv, or parquet, which needs pyarrow
