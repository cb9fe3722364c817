"""The worker processes that load for a rank: how they start, end and report failures."""

import io
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from ddp_runner.errors import UserError, typed
from ddp_runner.host.processes import die_with_parent, ignore_stop_signals

CALM_S = 0.02  # wait between the last collective and the start of workers


@dataclass(frozen=True)
class LoadFailure:
    """The reason why a batch could not be loaded, with the traceback as text: it is pickled."""

    sentence: str
    trace: str


def load_failure(error: Exception, sentence: str) -> LoadFailure:
    """Return the failure; a UserError, from a dataset of ours, brings its own sentence."""
    sentence = str(error) if isinstance(error, UserError) else sentence
    return LoadFailure(sentence, "".join(traceback.format_exception(error)))


def start_loading(loader: "DataLoader[Any]", *, name: str) -> Iterator[Any]:
    """Return the loader's batches; its workers start now, unless they have been kept.

    Python 3.11 hangs in a fork if a thread of torch calls Python for the first time at that moment,
    as happens right after a collective: it takes the lock of all thread states without the GIL,
    and the child waits for that lock before it makes a new lock. Python 3.12 fixed this.

    Raises:
        UserError: on a batch: a sample cannot be loaded, or a worker has died.
    """
    is_kept = loader.persistent_workers and loader._iterator is not None
    if loader.num_workers > 0 and not is_kept and sys.version_info < (3, 12):
        time.sleep(CALM_S)
    return _checked(iter(loader), name=name, num_workers=loader.num_workers)


def _checked(batches: Iterator[Any], *, name: str, num_workers: int) -> Iterator[Any]:
    try:
        for batch in batches:
            if isinstance(batch, LoadFailure):
                raise UserError(batch.sentence) from RuntimeError(batch.trace)
            yield batch
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise UserError(
            f"a process that loads the {name} samples has died ({typed(error)}), often for lack of "
            "memory",
            f"use a smaller dataset.num_workers ({num_workers}) or batch.per_rank",
        ) from error


def loader_options(split: Any) -> dict[str, Any]:
    """Return the keywords of a DataLoader that gets whole batches from its dataset."""
    has_workers = split.num_workers > 0
    return {
        "collate_fn": _identity,
        "num_workers": split.num_workers,
        "prefetch_factor": split.prefetch_factor if has_workers else None,
        "pin_memory": bool(split.pin_memory),
        "worker_init_fn": start_worker if has_workers else None,
        # Forked workers need not pickle the dataset. They must not touch CUDA, and do not.
        "multiprocessing_context": "fork" if has_workers and sys.platform == "linux" else None,
        "generator": torch.Generator(),  # workers begin with the same seeds in each run
    }


def _identity(batch: Any) -> Any:
    return batch


def start_worker(worker: int) -> None:
    """Prepare a worker process: it ends when its rank ends it, or with the rank.

    A stop signal may reach every process at once. Only the rank's own SIGTERM counts, by which a
    DataLoader ends its workers.
    """
    ignore_stop_signals()
    die_with_parent()
    if sys.platform != "linux":
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        return
    rank = os.getppid()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])

    def end_with_rank() -> None:
        while signal.sigwaitinfo([signal.SIGTERM]).si_pid != rank:
            continue
        os._exit(0)  # torch reports any other code in the rank

    threading.Thread(target=end_with_rank, name="sigterm-watch", daemon=True).start()


def sendable(batch: Any, *, name: str) -> Any:
    """Return the batch, or a failure if it cannot be pickled: a DataLoader would hang."""
    try:
        _WithoutTensors(io.BytesIO()).dump(batch)
    except Exception as error:  # the user's classes raise any kind
        return load_failure(
            error,
            f"a batch of the {name} samples cannot be sent to the rank ({typed(error)}); return "
            "tensors, numbers and texts from the dataset's collate_fn, or write "
            "dataset.num_workers=0",
        )
    return batch


class _WithoutTensors(pickle.Pickler):
    def persistent_id(self, obj: Any) -> str | None:
        return "tensor" if isinstance(obj, torch.Tensor) else None
