"""Read the file that W&B's client leaves offline: LevelDB's log format, with protobuf records."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HEADER_BYTES, BLOCK_BYTES = 7, 2**15  # of the file, and of each record: both headers have 7
FULL, LAST = 1, 4  # kinds of a record's parts


def records(folder: Path) -> Iterator[Any]:
    """Yield the records of an offline folder of W&B."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = folder.glob("*.wandb")
    content, at, parts = path.read_bytes(), HEADER_BYTES, list[bytes]()
    while at + HEADER_BYTES <= len(content):
        left = BLOCK_BYTES - at % BLOCK_BYTES
        if left < HEADER_BYTES:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        at += HEADER_BYTES
        parts.append(content[at : at + length])
        at += length
        if kind in (FULL, LAST):
            record = Record()
            record.ParseFromString(b"".join(parts))
            parts.clear()
            yield record


def rows(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of the history, by their keys."""
    return [
        {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}
        for items in (one.history.item for one in records(folder) if one.HasField("history"))
    ]


def scalars(folder: Path) -> dict[tuple[int, str], float]:
    """Return the numbers of the history by step and name, as ``run_folders.scalars`` does."""
    return {
        (row["step"], name): value
        for row in rows(folder)
        for name, value in row.items()
        if "/" in name
    }
