"""Saves checkpoints during training: the loop waits for a copy, and a thread writes it.

In a sharded checkpoint each rank's thread writes its pieces and then a note of them. Rank 0 waits
for all notes. No thread takes part in a collective, so a save cannot stop the training.
"""

import copy
from collections.abc import Callable, Container, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddp_runner.checkpoint.shard_notes import Shards
from ddp_runner.checkpoint.store import begin_checkpoint, being_saved, retain, save_checkpoint
from ddp_runner.config.training import CheckpointConfig
from ddp_runner.device import has_streams, synchronize
from ddp_runner.host.wire import Wire
from ddp_runner.parallelism.shards import map_leaves

Source = tuple[torch.device, int, int]  # of a copied storage: its device, address and bytes


class CheckpointWriter:
    """Writes one checkpoint at a time, in the order of the calls; on rank 0, or on every rank.

    The end of the `with` block waits for the last save, also after an error.
    """

    def __init__(
        self,
        folder: Path,
        config: CheckpointConfig,  # decides which checkpoints to keep
        *,
        wire: Wire | None,  # lets our launcher wait for a save; None: another launcher
        log: Callable[[str], None],  # also called in the thread
        shards: Shards | None = None,  # this rank's part; None: rank 0 writes all
    ) -> None:
        self._folder, self._wire, self._log, self._shards = folder, wire, log, shards
        self._save = partial(save_checkpoint, folder, config=config, log=log)
        self.retain = partial(retain, folder, config, log=log)
        self._stager = Stager()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None

    def begin(self, step: int) -> None:
        """Make the folder of a sharded checkpoint, before a collective that lets the others write.

        Raises:
            UserError: the folder cannot be made.
        """
        if self._shards is not None and self._shards.rank == 0:
            begin_checkpoint(self._folder, step, log=self._log)

    def save(
        self,
        state: dict[str, Any],
        *,
        step: int,
        metrics: Mapping[str, float],
        copies: Container[int] = (),
    ) -> None:
        """Wait for the previous save, copy the state, and start writing the copy.

        The state may have tensors on any device and is not read after this call; see
        ``save_checkpoint``. If checkpoints are sharded, it has this rank's ``parts`` too. Memory at
        the addresses in `copies` belongs to this state alone, so it is not copied.

        Raises:
            UserError: the previous save failed; earlier checkpoints are intact.
            TypeError: the previous state held an object that a weights-only load would reject.
        """
        self.wait()
        copied = self._stager.stage(state, copies)
        self._pending = self._thread.submit(self._write, copied, step, dict(metrics))

    def wait(self) -> None:
        """Wait for the save in progress, if any; raise its errors as ``save`` does."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def __enter__(self) -> "CheckpointWriter":
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            if error is None:
                self.wait()
                return
            if self._shards is not None:
                self._shards.has_failed = True
            if self._pending is not None and (failure := self._pending.exception()) is not None:
                self._log(f"in addition, {failure}")  # the error that ended the run is raised
        finally:
            self._thread.shutdown()

    def _write(self, state: dict[str, Any], step: int, metrics: Mapping[str, float]) -> None:
        with self._wire.saving() if self._wire else nullcontext():
            if self._shards is None:
                self._save(state, step=step, metrics=metrics)
                return
            write = partial(self._shards.write, parts=state.pop("parts"))
            if self._shards.rank == 0:
                self._save(state, step=step, metrics=metrics, more_files=write)
                return
            with being_saved(self._folder, step) as (_, temp):
                write(temp)


class Stager:
    """Copies a state to the CPU, into memory that the next copy reuses.

    Allocation makes the first copy slower. The memory for GPU tensors is pinned, so that all copies
    run at the same time. torch 2.11's DefaultStager works only once: it clears its table of types.
    """

    def __init__(self) -> None:
        self._memory: dict[Source, Tensor] = {}

    def stage(self, state: dict[str, Any], copies: Container[int] = ()) -> dict[str, Any]:
        """Return a copy that shares no memory with the state, and overwrite the previous copy.

        Tensors that share memory also share it in the copy. Memory at an address in `copies` is not
        copied.
        """
        before, self._memory = self._memory, {}

        def copied(_: str, value: Any) -> Any:
            if not isinstance(value, Tensor):
                return copy.deepcopy(value)
            if value.is_sparse:  # momentum of a sparse gradient has several storages
                return value.detach().to("cpu", copy=True)
            has_own = value.is_meta or value.untyped_storage().data_ptr() in copies
            return value if has_own else self._copy_tensor(value, before)

        staged: dict[str, Any] = map_leaves(copied, state)
        synchronize(device for device, _, _ in self._memory)  # the next step changes the sources
        return staged

    @torch.no_grad()
    def _copy_tensor(self, tensor: Tensor, before: dict[Source, Tensor]) -> Tensor:
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
