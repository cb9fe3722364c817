"""The keys of evaluate, predict, export and sample: a part of the schema. Torch-free."""

from dataclasses import dataclass
from typing import Any

SAMPLE = "sample"
# Tasks that take a run's model and train nothing.
INFERENCE = ("evaluate", "predict", "export", SAMPLE)
EXPORTS = ("onnx", "torch_export")  # beside safetensors
Asked = str | int  # of weights: best, last, or the step of a checkpoint
SPLITS, FORMATS = ("eval", "train", "all"), ("csv", "parquet")


@dataclass
class InferenceConfig:
    """What task=evaluate, predict, export and sample do with the model of the run of resume."""

    run: str | None = None  # the folder of that run, filled in from resume
    # best: model.safetensors, or while the run has none its best checkpoint; last: the newest
    # checkpoint; or the step of a checkpoint, such as 600
    weights: Any = "best"
    split: str = "eval"  # of the dataset: eval, train, or all of both
    format: str = "csv"  # of the predictions: csv, or parquet, which needs pyarrow
    prompt: str = ""  # of sample: the text to go on from; empty: a line end
    num_tokens: int = 200  # of sample: how many to write; seed=1, 2, ... gives other texts
    # of sample: below 1 it keeps to what is likely; 0: always the most likely token
    temperature: float = 1.0
    top_k: int | None = None  # of sample: choose among so many most likely tokens; null: all


# The keys that only task=sample reads.
SAMPLE_KEYS = ("prompt", "num_tokens", "temperature", "top_k")
