"""A rank's part of a sharded checkpoint: its file, and the note by which rank 0 knows of it.

All ranks write into one temporary folder, which only rank 0 renames. The notes are files, not
messages: a thread that sent messages would meet the collectives of the training loop.
"""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddp_runner.checkpoint.manifest import FileFacts
from ddp_runner.checkpoint.tensor_files import write_parts
from ddp_runner.errors import UserError
from ddp_runner.files import replace_file
from ddp_runner.host.wire import Wire
from ddp_runner.parallelism.shards import Part

NOTE = "rank-{:05d}.json"
POLL_S = 0.01
IDLE_S = 30.0  # of a run that ends: a rank that has written nothing for so long is gone


class Shards:
    """This rank among those that write a checkpoint together."""

    def __init__(self, rank: int, num_ranks: int, wire: Wire | None = None) -> None:
        self.rank, self._num_ranks = rank, num_ranks
        self._wire = wire
        self.has_failed = False  # if so, a rank that writes nothing may be gone

    def write(self, folder: Path, *, parts: Mapping[str, Part]) -> dict[str, FileFacts]:
        """Write this rank's file and its note; on rank 0, wait for the files of all ranks.

        Returns:
            The facts of all files by name; {} on other ranks.

        Raises:
            UserError: on rank 0, if another rank is gone.
            OSError: on rank 0, if a rank could not write its file.
        """
        name = f"shard-{self.rank + 1:05d}-of-{self._num_ranks:05d}.safetensors"
        if self.rank > 0:
            try:
                note: dict[str, Any] = {name: write_parts(folder / name, parts)}
            except Exception as error:  # rank 0 raises it, for all
                (folder / name).unlink(missing_ok=True)  # a full disk then has room for the note
                reason = error.strerror if isinstance(error, OSError) else None
                note = {"error": f"rank {self.rank}: {reason or error}"}
            replace_file(folder / NOTE.format(self.rank), json.dumps(note))
            return {}
        files = {name: write_parts(folder / name, parts)}
        # All of them before an error: then no rank still writes into the folder.
        notes = [self._note(folder, rank) for rank in range(1, self._num_ranks)]
        if errors := [note["error"] for note in notes if "error" in note]:
            raise OSError(errors[0])
        for note in notes:
            files |= {name: facts and FileFacts(*facts) for name, facts in note.items()}
        return {name: facts for name, facts in files.items() if facts is not None}

    def _note(self, folder: Path, rank: int) -> dict[str, Any]:
        """Wait for the note of a rank, and return it."""
        path, size, deadline = folder / NOTE.format(rank), -1, 0.0
        while not path.exists():
            time.sleep(POLL_S)
            is_asked = self._wire is not None and (self._wire.stop or self._wire.has_signal)
            if not (is_asked or self.has_failed):
                continue
            written = sum(file.stat().st_size for file in folder.glob("shard-*"))
            if written != size:
                size, deadline = written, time.monotonic() + IDLE_S
            elif time.monotonic() > deadline:
                raise UserError(
                    f"checkpoint {folder} is incomplete: rank {rank} did not write its part"
                )
        note: dict[str, Any] = json.loads(path.read_bytes())
        path.unlink()
        return note
