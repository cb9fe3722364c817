"""Saves checkpoints while training goes on: the loop waits for a copy, and a thread writes it."""

import copy
from collections.abc import Callable, Container, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddp_runner.checkpoint.store import retain, save_checkpoint
from ddp_runner.config.training import CheckpointConfig
from ddp_runner.device import has_streams, synchronize
from ddp_runner.errors import UserError
from ddp_runner.host.wire import Wire


class CheckpointWriter:
    """Writes one checkpoint at a time, in the order of the calls. Rank 0 only.

    The end of the `with` block waits for the last save, also after an error.

    Args:
        folder: the run's checkpoints folder.
        config: which checkpoints are kept.
        wire: asks our launcher to let a save finish; None under another one.
        log: takes a sentence for the user, also from the thread.
    """

    def __init__(
        self,
        folder: Path,
        config: CheckpointConfig,
        *,
        wire: Wire | None,
        log: Callable[[str], None],
    ) -> None:
        self._wire, self._log = wire, log
        self._save = partial(save_checkpoint, folder, config=config, log=log)
        self.retain = partial(retain, folder, config, log=log)
        self._stager = Stager()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[Path] | None = None

    def save(
        self,
        state: dict[str, Any],
        *,
        step: int,
        metrics: Mapping[str, float],
        copies: Container[int] = (),
    ) -> None:
        """Wait for the previous save, copy the state, and start writing the copy.

        Args:
            state: tensors on any device, numbers, strings, and lists and dicts of them. It is not
                read after this call.
            step: optimizer steps taken.
            metrics: of this step.
            copies: addresses of the tensors' memory that nothing else uses; it is not copied again.

        Raises:
            UserError: the previous save failed; the checkpoints before it are intact.
            TypeError: the previous state held an object that a weights-only load would refuse.
        """
        self.wait()
        copied = self._stager.stage(state, copies)
        self._pending = self._thread.submit(self._write, copied, step, dict(metrics))

    def wait(self) -> None:
        """Wait for the save in progress, if there is one.

        Raises:
            UserError, TypeError: as ``save``.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def __enter__(self) -> "CheckpointWriter":
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            self.wait()
        except (UserError, TypeError) as failed:
            if error is None:
                raise
            self._log(f"besides, {failed}")  # what ended the run comes first
        finally:
            self._thread.shutdown()

    def _write(self, state: dict[str, Any], step: int, metrics: Mapping[str, float]) -> Path:
        with self._wire.saving() if self._wire else nullcontext():
            return self._save(state, step=step, metrics=metrics)


class Stager:
    """Copies a state to the CPU, into memory that the next copy uses again.

    It is pinned for a tensor of a GPU, which copies all of them beside its work. Allocation makes
    the first copy slower. torch's DefaultStager works only once in torch 2.11: it clears its own
    table of types after the first state.
    """

    def __init__(self) -> None:
        self._memory: dict[Any, Tensor] = {}

    def stage(self, state: dict[str, Any], copies: Container[int] = ()) -> dict[str, Any]:
        """Return a copy that shares no memory with the state; it overwrites the previous copy.

        Tensors that share memory also share it in the copy. Those whose memory begins at an
        address of `copies` are not copied.
        """
        before, self._memory = self._memory, {}

        def copied(value: Any) -> Any:
            if isinstance(value, Tensor):
                if value.is_sparse:  # momentum of a sparse gradient: it has several storages
                    return value.detach().to("cpu", copy=True)
                is_copy = value.untyped_storage().data_ptr() in copies
                return value if is_copy else self._copy_tensor(value, before)
            if isinstance(value, dict):
                result = copy.copy(value)  # keeps the _metadata that state_dict() attaches
                result.update({key: copied(item) for key, item in value.items()})
                return result
            if type(value) in (list, tuple):
                return type(value)(map(copied, value))
            return copy.deepcopy(value)

        staged: dict[str, Any] = copied(state)
        synchronize(device for device, _, _ in self._memory)  # the next step changes the sources
        return staged

    @torch.no_grad()
    def _copy_tensor(self, tensor: Tensor, before: dict[Any, Tensor]) -> Tensor:
        source = tensor.untyped_storage()
        key = (tensor.device, source.data_ptr(), source.nbytes())
        if key not in self._memory:
            memory = before.get(key)
            if memory is None:
                pinned = has_streams(tensor.device)
                memory = torch.empty(source.nbytes(), dtype=torch.uint8, pin_memory=pinned)
            memory.untyped_storage().copy_(source, non_blocking=True)
            self._memory[key] = memory
        target = self._memory[key].untyped_storage()
        return torch.empty(0, dtype=tensor.dtype).set_(
            target, tensor.storage_offset(), tensor.size(), tensor.stride()
        )
