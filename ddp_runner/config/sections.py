"""The keys of tasks, launches and sweeps: a part of the schema. Torch-free."""

import re
from dataclasses import dataclass
from typing import Any

from ddp_runner.config.fields import key
from ddp_runner.errors import UserError

# The tasks that take a run's model and train nothing.
SAMPLE = "sample"
INFERENCE = ("evaluate", "predict", "export", SAMPLE)
WITHOUT_MODEL = (*INFERENCE, "collectives", "check")  # tasks that leave no model of their own
WITHOUT_METRICS = ("check", "predict", "export", SAMPLE)
WITHOUT_STEPS = (*WITHOUT_METRICS, "collectives")
TASKS = ("train", *WITHOUT_MODEL)  # of this package
SAMPLE_KEYS = ("prompt", "num_tokens", "temperature", "top_k")  # only task=sample reads them
AUTO = "auto"  # of resume: this config's newest unfinished run; of a number: the runner finds it
Asked = str | int  # of weights: best, last, or the step of a checkpoint

OPS = (
    "broadcast", "scatter", "gather", "reduce", "all_reduce", "all_gather", "reduce_scatter",
    "all_to_all", "send_recv", "barrier",
)  # fmt: skip
REDUCE_OPS = ("sum", "mean", "max", "min", "product")
DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int8", "uint8")

YEAR_S = 31_536_000  # libraries overflow beyond it
ENDPOINT = re.compile(r"(?:\[([\da-fA-F:.]+(?:%\w+)?)\]|([^\s\[\]:/@]+))(?::(\d{1,5}))?")
DEFAULT_PORT = 29400  # torchrun's


def validate_weights(asked: object) -> None:
    """Reject a value of ``inference.weights`` that names no weights of a run."""
    is_step = isinstance(asked, int) and not isinstance(asked, bool) and asked >= 0
    if not (is_step or asked in ("best", "last")):
        raise UserError(
            f"inference.weights ({asked}) must be best, last, or the step of a checkpoint"
        )


@dataclass
class LaunchConfig:
    """How the ranks start. Under torchrun, which has its own flags, these keys are ignored."""

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
        check=lambda endpoint: meeting_place(LaunchConfig(rdzv_endpoint=endpoint)),
    )
    rdzv_id: str = key("ddp_runner", "the same on every machine of one run")
    join_timeout_s: float = key(
        600.0, "how long a machine waits for the others", unit="seconds", least=1, most=YEAR_S
    )
    max_restarts: int = key(0, "restarts of all ranks, each from the last checkpoint", least=0)
    init_method: str | None = key(
        None,
        "where the ranks meet: tcp://HOST:PORT or file:///PATH; file://NAME is in the run folder; "
        "null: at the rendezvous. A resumed run does not keep it",
    )
    shutdown_timeout_s: float = key(
        30.0,
        "from the first Ctrl-C or SIGTERM to SIGKILL; ten times that while a checkpoint is written",
        unit="seconds",
        above=0,
        most=YEAR_S,
    )


def meeting_place(launch: LaunchConfig) -> tuple[str, int]:
    """Return the host and the port of launch.rdzv_endpoint.

    Raises:
        UserError: it is neither HOST nor HOST:PORT.
    """
    found = ENDPOINT.fullmatch(launch.rdzv_endpoint or "")
    port = int(found[3] or DEFAULT_PORT) if found else 0
    if found is None or not 1 <= port <= 65535:
        raise UserError(
            f"launch.rdzv_endpoint ({launch.rdzv_endpoint}) must be HOST:PORT, with a port from 1 "
            "to 65535 and an IPv6 address in brackets; write n1:29400, or [fd00::1]:29400"
        )
    return found[1] or found[2], port


@dataclass
class BackendConfig:
    """Which library carries the collectives."""

    name: str = key("auto", "auto, gloo, mpi, or the one of the GPUs: nccl, xccl, ...")
    timeout_s: float = key(  # less is too short for ranks that share a core
        300.0, "how long a collective may take", unit="seconds", least=1, most=YEAR_S
    )
    device: str = key(
        "auto", "where ranks compute: auto, cpu, or GPUs by kind: cuda, xpu, mps, ..."
    )


@dataclass
class SweepConfig:
    """How a sweep (-m) runs its jobs. These keys do not change what a job computes."""

    retry: str | None = key(None, "run the failed jobs again", choices=(None, "failed"))
    fail_fast: bool = key(False, "stop at the first failure")
    max_failures: int | None = key(None, "stop at this many; null: run every job", above=0)
    skip_invalid: bool = key(False, "skip jobs with an invalid config instead of failing them")
    dry_run: bool = key(False, "list the jobs and what is wrong with them; start none")
    parallel_jobs: int = key(1, "jobs side by side, each on its own cores and GPUs", above=0)
    calibrate: bool = key(False, "first measure all_reduce for each world size and backend")
    report: bool = key(False, "at the end compare the runs, on screen and in the folder report")
    objective: str | None = key(None, "the metric that a search (Optuna) optimizes")


@dataclass
class InferenceConfig:
    """What task=evaluate, predict, export and sample do with the model of the run of resume."""

    run: str | None = key(None, "the folder of that run, filled in from resume")
    weights: Any = key(
        "best",
        "best: model.safetensors, or while the run has none its best checkpoint; last: the newest "
        "checkpoint; or the step of a checkpoint, such as 600",
        kind="whole number or a word",
        check=validate_weights,
    )
    split: str = key("eval", "of the dataset; all: of both", choices=("eval", "train", "all"))
    format: str = key(
        "csv",
        "of the predictions; parquet needs pyarrow",
        choices=("csv", "parquet"),
        packages={"parquet": "pyarrow"},
    )
    prompt: str = key("", "of sample: the text to continue; empty: a line end")
    num_tokens: int = key(200, "of sample: how many to write; seed=1 gives another text", above=0)
    temperature: float = key(1.0, "of sample: below 1 is more conservative, 0 greedy", least=0)
    top_k: int | None = key(None, "of sample: choose among the most likely k; null: all", above=0)


@dataclass
class CollectivesConfig:
    """What task=collectives measures."""

    ops: list[str] | None = key(None, "null: all of them", choices=OPS)
    reduce_ops: list[str] | None = key(
        None, "null: sum, mean and max, where the backend has them", choices=REDUCE_OPS
    )
    dtypes: list[str] = key(["float32"], "of the messages", choices=DTYPES)
    min_bytes: int = key(1024, "of the smallest message, over all ranks", unit="bytes", above=0)
    max_bytes: int = key(64 * 2**20, "of the largest one, always measured", unit="bytes", above=0)
    size_factor: int = key(16, "from each size to the next", least=2)
    warmup_steps: int = key(2, "calls of each size that are not timed", least=0)
    steps: int = key(10, "timed calls of each size", above=0)
