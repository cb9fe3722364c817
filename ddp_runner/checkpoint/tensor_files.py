"""Writes tensors in the safetensors format one by one, and reads parts of them.

A file of a sharded checkpoint has the offsets of its parts in the header, as the files of
torch.distributed.checkpoint do, so that its ``HuggingFaceStorageReader`` reads them.

Sources: https://huggingface.co/docs/safetensors and
https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
"""

import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from ddp_runner.checkpoint.manifest import FileFacts
from ddp_runner.errors import UserError
from ddp_runner.parallelism.shards import Part

OFFSETS = "DCP_SHARDING_INFO"  # torch's key of the parts' offsets in a file's metadata
DTYPES = {  # the format's names
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8"},
    **{torch.uint8: "U8", torch.bool: "BOOL", torch.complex64: "C64"},
    **{torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2"},
}


def raw_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor in the order of its elements."""
    dense = tensor.detach().to_dense().cpu().contiguous()
    data: memoryview = dense.reshape(-1).view(torch.uint8).numpy().data
    return data


def write_tensors(
    path: Path, specs: Mapping[str, Tensor], tensors: Iterable[Tensor], *, facts: Mapping[str, str]
) -> FileFacts:
    """Write a file with one tensor in memory at a time, flush it to disk, and return its facts.

    The specs, by name, have the dtypes and shapes to write. The tensors have the values in this
    order, on any device. `facts` become the file's metadata.

    Raises:
        UserError: the format lacks a dtype.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt", **facts}}
    end = 0
    for name, spec in specs.items():
        begin, end = end, end + spec.numel() * spec.element_size()
        if spec.dtype not in DTYPES:
            raise UserError(f"{name} is {spec.dtype}, which a safetensors file cannot hold")
        entry = {"dtype": DTYPES[spec.dtype], "shape": [*spec.shape], "data_offsets": [begin, end]}
        header[name] = entry
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # aligns the first tensor, so that all can be used in place
    digest, size = hashlib.sha256(), 0
    with path.open("wb") as file:
        start: list[bytes | memoryview] = [len(text).to_bytes(8, "little"), text]
        pairs = zip(specs.values(), tensors, strict=True)
        values = (raw_bytes(tensor.to(spec.dtype)) for spec, tensor in pairs)
        for part in chain(start, values):
            file.write(part)
            digest.update(part)
            size += len(part)
        file.flush()
        os.fsync(file.fileno())
    return FileFacts(size, digest.hexdigest())


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of a file, mapped, and its metadata; safetensors raises any error."""
    with safe_open(path, framework="pt") as file:
        facts = dict(file.metadata() or {})
    return load_file(path), facts


def parts_in(paths: Iterable[Path]) -> dict[str, list[Part]]:
    """Return the mapped parts of the tensors in files, by the tensors' names."""
    parts = defaultdict[str, list[Part]](list)
    for path in paths:
        tensors, facts = read_tensors(path)
        offsets = json.loads(facts[OFFSETS])
        for name, tensor in tensors.items():
            parts[name].append((offsets[name]["saved_offsets"], tensor))
    return parts


def write_parts(path: Path, parts: Mapping[str, Part]) -> FileFacts | None:
    """Write a rank's parts, and return the file's facts; None if it has no part."""
    if not parts:
        return None
    offsets = {name: {"saved_offsets": [*begin]} for name, (begin, _) in parts.items()}
    tensors = {name: tensor for name, (_, tensor) in parts.items()}
    return write_tensors(path, tensors, tensors.values(), facts={OFFSETS: json.dumps(offsets)})
