"""The pictures of docs/parallelism.md: what each rank holds, and its memory by the formula.

python benchmarks/sharding.py memory --json memory.json
python benchmarks/sharding_pictures.py memory.json --out docs/pictures
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

MIB = 2**20
NUM_RANKS = 4
FILLED, EMPTY = "#4477aa", "#e8e8e8"
# Of each mode, the part of a layer that a rank holds: rows from top to bottom, and columns.
HELD = {
    "ddp": lambda rank: (0, 4, 0, 1),
    "fsdp": lambda rank: (rank, rank + 1, 0, 1),
    "hsdp": lambda rank: (2 * (rank % 2), 2 * (rank % 2) + 2, 0, 1),
    "tp": lambda rank: (0, 4, rank / 4, (rank + 1) / 4),
    "fsdp_tp": lambda rank: (
        2 * (rank // 2),
        2 * (rank // 2) + 2,
        rank % 2 / 2,
        rank % 2 / 2 + 0.5,
    ),
}
BATCHES = {  # the part of the batch that a rank computes
    "ddp": "0123",
    "fsdp": "0123",
    "hsdp": "0123",
    "tp": "0000",
    "fsdp_tp": "0011",
}


def main() -> None:
    """Draw both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("memory", type=Path, help="what sharding.py memory --json wrote")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    draw_shards(args.out / "shards.png")
    draw_memory(args.memory, args.out / "shard_memory.png")


def draw_shards(path: Path) -> None:
    """Draw a layer's matrix for each mode and rank; the rank holds what is coloured."""
    figure, axes = plt.subplots(len(HELD), NUM_RANKS, figsize=(7, 7.5), layout="constrained")
    for row, (mode, held) in zip(axes, HELD.items(), strict=True):
        for rank, axis in enumerate(row):
            top, bottom, left, right = held(rank)
            axis.add_patch(plt.Rectangle((0, 0), 1, 4, color=EMPTY))
            axis.add_patch(plt.Rectangle((left, top), right - left, bottom - top, color=FILLED))
            axis.set(xlim=(-0.05, 1.05), ylim=(4.1, -0.1), xticks=[], yticks=[])
            axis.set_xlabel(f"samples: part {BATCHES[mode][rank]}", fontsize=8)
            axis.spines[:].set_visible(False)
            if row is axes[0]:
                axis.set_title(f"rank {rank}", fontsize=10)
        row[0].set_ylabel(mode, fontsize=11, rotation=0, ha="right", va="center")
    figure.suptitle("What each of four ranks holds of a layer", fontsize=12)
    figure.savefig(path, dpi=110)


def draw_memory(measured: Path, path: Path) -> None:
    """Draw the measured memory of a rank beside the formula."""
    rows: list[dict[str, Any]] = json.loads(measured.read_text())["rows"]
    found = dict[tuple[str, int], dict[str, float]]()
    for row in rows:
        name = "return_memory=true" if row["returned"] else "as it is"
        values = found.setdefault((row["mode"], row["ranks"]), {"formula": row["formula"]})
        values[name] = row["train"] - row["process"]
    labels = [f"{mode}\n{ranks} rank{'s' * (ranks > 1)}" for mode, ranks in found]
    figure, axis = plt.subplots(figsize=(7, 3.6), layout="constrained")
    colours = ("#222222", FILLED, "#ee8866")
    names = ("formula", "return_memory=true", "as it is")
    for place, (name, colour) in enumerate(zip(names, colours, strict=True)):
        places = [number + 0.27 * (place - 1) for number in range(len(labels))]
        heights = [values.get(name, 0) / MIB for values in found.values()]
        axis.bar(places, heights, 0.25, label=name, color=colour)
    axis.set_xticks(range(len(labels)), labels)
    axis.set(ylabel="MiB of a rank", title="51.5 M parameters, AdamW, without the process itself")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, loc="upper center", ncols=3, fontsize=8)
    axis.set_ylim(0, 1250)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
