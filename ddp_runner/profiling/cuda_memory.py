"""The history of a GPU's memory, for https://pytorch.org/memory_viz.

Source: https://docs.pytorch.org/docs/stable/torch_cuda_memory.html, which documents these functions
of torch in spite of their names.
"""

from pathlib import Path

import torch

MOST_ENTRIES = 100_000  # allocations that are kept, with their stacks


def record_history() -> None:
    """Keep each allocation on a GPU from now on, with the Python stack that asked for it."""
    torch.cuda.memory._record_memory_history(max_entries=MOST_ENTRIES, stacks="python")


def dump_history(path: Path) -> None:
    """Write what was kept, and keep nothing more."""
    torch.cuda.memory._dump_snapshot(str(path))
    torch.cuda.memory._record_memory_history(enabled=None)
