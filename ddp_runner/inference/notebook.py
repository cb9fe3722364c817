"""Functions for notebooks: load the models, tokenizers and records of runs."""

import os
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd
    import torch
    from torch import nn

    from ddp_runner.compare.recorded_run import RecordedRun
    from ddp_runner.data.text_tokenizer import TextTokenizer

AnyPath = str | os.PathLike[str]


def load(
    run: AnyPath,
    *,
    weights: str | int = "best",
    device: "str | torch.device" = "cpu",
    allowed_targets: Sequence[str] = (),
) -> "nn.Module":
    """Return the model of a run with its best weights, in evaluation mode.

    It is the bare model, as the run evaluates it: with the averaged weights of ``ema`` if the run
    has them. Prepare its inputs as in training: images in float32, divided by 255 and normalised by
    ``dataset.mean`` and ``dataset.std``. Loading opens no process group and restores the state of
    the random number generators.

    Args:
        run: the folder of a run of ``task=train``.
        weights: best (``model.safetensors``, or the best checkpoint until the run writes it), last
            (the newest checkpoint), or the step of a checkpoint.
        device: for the whole model, also if it has several stages.
        allowed_targets: your own packages that the run's config may name. The run's own list does
            not count: it could allow any code.

    Raises:
        UserError: the folder is not a run of ``task=train``, its config names a target that is not
            allowed, or the weights are missing, damaged or of another model.
    """
    from ddp_runner.seeds import GENERATORS, generator_states

    packages = [allowed_targets] if isinstance(allowed_targets, str) else allowed_targets
    states = generator_states()
    try:
        from ddp_runner.inference.model import load_model  # importing some libraries draws numbers

        return load_model(Path(run), weights=weights, device=device, allowed_targets=packages)[0]
    finally:
        for name, state in states.items():
            GENERATORS[name].restore(state)


def load_tokenizer(run: AnyPath) -> "TextTokenizer":
    """Return the tokenizer of a run of texts: ``encode(text)`` and ``decode(tokens)``.

    Raises:
        UserError: the run has no tokenizer, it is damaged, or its library is not installed.
    """
    from ddp_runner.inference.model import kept_tokenizer
    from ddp_runner.tracking.run_dir import RunDir

    return kept_tokenizer(RunDir(Path(run)))


def read_runs(paths: AnyPath | Iterable[AnyPath]) -> "pd.DataFrame":
    """Return a row for each run in and below folders, failed runs included.

    The index is the run's folder. The columns are ``status``, the fields of run.json
    (``world_size``, ``started_at``, ``wall_s``, ...), every key of the config (``optimizer.lr``),
    the last value of each metric (``eval/accuracy``), and ``reason``, why a run cannot be compared.

    Raises:
        UserError: a path contains no run, or pandas is not installed.
    """
    from ddp_runner.compare.run_reader import read_runs as read
    from ddp_runner.errors import UserError

    if find_spec("pandas") is None:
        raise UserError("read_runs returns a pandas data frame", "write pip install pandas")
    import pandas

    runs = read([*map(Path, [paths] if isinstance(paths, str | os.PathLike) else paths)])
    index = pandas.Index([str(run.folder) for run in runs], name="run")
    return pandas.DataFrame(map(_row, runs), index=index).convert_dtypes()


def _row(run: "RecordedRun") -> dict[str, Any]:
    plain = {
        name: value
        for name, value in run.record.items()
        if value is None or isinstance(value, str | int | float)
    }
    metrics = run.record.get("metrics")
    results = metrics if isinstance(metrics, dict) else {}
    return {"status": None, **plain, **run.config, **results, "reason": run.reason}
