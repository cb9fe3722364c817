"""The part of the schema for tasks, launches and sweeps. Torch-free."""

import re
from dataclasses import dataclass
from typing import Any

from ddp_runner.config.fields import key
from ddp_runner.errors import UserError

SAMPLE, PLAN = "sample", "plan"
INFERENCE = ("evaluate", "predict", "export", SAMPLE)  # tasks that take the model of a run
WITHOUT_MODEL = (*INFERENCE, "collectives", "check", PLAN)  # tasks that write no model
WITHOUT_METRICS = ("check", "predict", "export", SAMPLE)
WITHOUT_STEPS = (*WITHOUT_METRICS, "collectives", PLAN)
TASKS = ("train", *WITHOUT_MODEL)
AUTO = "auto"  # resume: the newest unfinished run of this config; numbers: the runner decides
Asked = str | int  # inference.weights: best, last, or the step of a checkpoint

OPS = (
    "broadcast", "scatter", "gather", "reduce", "all_reduce", "all_gather", "reduce_scatter",
    "all_to_all", "send_recv", "barrier",
)  # fmt: skip
REDUCE_OPS = ("sum", "mean", "max", "min", "product")
DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int8", "uint8")

YEAR_S = 31_536_000  # libraries overflow beyond it
ENDPOINT = re.compile(r"(?:\[([\da-fA-F:.]+(?:%\w+)?)\]|([^\s\[\]:/@]+))(?::(\d{1,5}))?")


def validate_weights(weights: object) -> None:
    """Reject a value of ``inference.weights`` that is not best, last or a step."""
    is_step = isinstance(weights, int) and not isinstance(weights, bool) and weights >= 0
    if not (is_step or weights in ("best", "last")):
        raise UserError(
            f"inference.weights ({weights}) must be best, last, or the step of a checkpoint"
        )


@dataclass
class LaunchConfig:
    """How the ranks start. Ignored under torchrun, which has its own flags."""

    nnodes: int = key(1, "number of machines", above=0)
    nproc_per_node: int | None = key(None, "ranks per machine; null: world_size / nnodes", above=0)
    node_rank: int | None = key(
        None,
        "this machine's number, which orders the ranks; 0 hosts the rendezvous; null: HOST does",
        least=0,
    )
    rdzv_endpoint: str | None = key(
        None,
        "HOST:PORT where the machines meet; needed when nnodes > 1",
        validate=lambda endpoint: meeting_place(LaunchConfig(rdzv_endpoint=endpoint)),
    )
    rdzv_id: str = key("ddp_runner", "the same on every machine of one run")
    join_timeout_s: float = key(
        600.0, "how long a machine waits for the others", unit="seconds", least=1, most=YEAR_S
    )
    max_restarts: int = key(0, "restarts of all ranks, each from the last checkpoint", least=0)
    init_method: str | None = key(
        None,
        "where the ranks meet: tcp://HOST:PORT or file:///PATH; file://NAME is in a temporary "
        "folder of the launcher; null: at the rendezvous; a resumed run does not keep it",
    )
    shutdown_timeout_s: float = key(
        30.0,
        "from the first Ctrl-C or SIGTERM to SIGKILL; ten times as long during a checkpoint",
        unit="seconds",
        above=0,
        most=YEAR_S,
    )


def meeting_place(launch: LaunchConfig) -> tuple[str, int]:
    """Return the host and the port of launch.rdzv_endpoint.

    Raises:
        UserError: it is neither HOST nor HOST:PORT.
    """
    match = ENDPOINT.fullmatch(launch.rdzv_endpoint or "")
    port = int(match[3] or 29400) if match else 0  # torchrun's default
    if match is None or not 1 <= port <= 65535:
        raise UserError(
            f"launch.rdzv_endpoint ({launch.rdzv_endpoint}) must be HOST:PORT, with a port from 1 "
            "to 65535 and an IPv6 address in brackets",
            "write n1:29400, or [fd00::1]:29400",
        )
    return match[1] or match[2], port


@dataclass
class BackendConfig:
    """Which library carries the collectives."""

    name: str = key("auto", "auto, gloo, mpi, or the GPUs' own backend: nccl, xccl, ...")
    timeout_s: float = key(  # a shorter time fails when ranks share a core
        300.0, "how long a collective may take", unit="seconds", least=1, most=YEAR_S
    )
    device: str = key("auto", "where the ranks compute: auto, cpu, cuda, xpu, mps, ...")


@dataclass
class SweepConfig:
    """How a sweep (-m) runs its jobs. These keys do not change a job's results."""

    retry: str | None = key(None, "run the failed jobs again", choices=(None, "failed"))
    fail_fast: bool = key(False, "stop at the first failure")
    max_failures: int | None = key(
        None, "stop after this many failures; null: run every job", above=0
    )
    skip_invalid: bool = key(False, "skip jobs with an invalid config instead of failing them")
    dry_run: bool = key(False, "list the jobs and their mistakes; start none")
    parallel_jobs: int = key(1, "jobs at the same time, each on its own cores and GPUs", above=0)
    calibrate: bool = key(False, "first measure all_reduce for each world size and backend")
    report: bool = key(False, "at the end compare the runs, on screen and in the folder report")
    objective: str | None = key(None, "the metric that a search (Optuna) optimizes")


@dataclass
class InferenceConfig:
    """How task=evaluate, predict, export and sample use the model of the run in resume."""

    run: str | None = key(None, "the run's folder; the runner fills it in from resume")
    weights: Any = key(
        "best",
        "best: model.safetensors, or the best checkpoint of an unfinished run; last: the newest "
        "checkpoint; or the step of a checkpoint, such as 600",
        kind="whole number or a word",
        validate=validate_weights,
    )
    split: str = key("eval", "split of the dataset; all: both", choices=("eval", "train", "all"))
    format: str = key(
        "csv",
        "file format of the predictions; parquet needs pyarrow",
        choices=("csv", "parquet"),
        packages={"parquet": "pyarrow"},
    )
    prompt: str = key("", "task=sample: the text to continue; empty: a line end")
    num_tokens: int = key(
        200, "task=sample: length of the text; seed=1 gives another text", above=0
    )
    temperature: float = key(1.0, "task=sample: below 1 is more conservative, 0 is greedy", least=0)
    top_k: int | None = key(
        None, "task=sample: choose among the k most likely tokens; null: all", above=0
    )


@dataclass
class CollectivesConfig:
    """The measurements of task=collectives."""

    ops: list[str] | None = key(None, "collectives to measure; null: all", choices=OPS)
    reduce_ops: list[str] | None = key(
        None, "reductions; null: sum, mean and max, if the backend has them", choices=REDUCE_OPS
    )
    dtypes: list[str] = key(["float32"], "dtypes of the messages", choices=DTYPES)
    min_bytes: int = key(1024, "smallest message, over all ranks", unit="bytes", above=0)
    max_bytes: int = key(64 * 2**20, "largest message, always measured", unit="bytes", above=0)
    size_factor: int = key(16, "factor from each size to the next", least=2)
    warmup_steps: int = key(2, "untimed calls of each size", least=0)
    steps: int = key(10, "timed calls of each size", above=0)
