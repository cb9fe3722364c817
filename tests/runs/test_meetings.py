"""What meets at the edges: each source under each mode with each variant equals one process.

Float64 shows that only rounding differs. What is refused is refused in one line before the first
step. A new mode is in the table by itself.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from meetings import Cell, Found, run_cells
from modes import MODES, is_cut, smallest_world
from own_meetings import NUM_EVAL, rows
from ranks import run_ranks
from tiers import selected
from train_states import build, compose_config, flat_weights

GLOBAL_SIZE, NUM_SAMPLES, UNEVEN = 24, 48, 53  # 24 can be cut in 2, 3, 4, 6, 8 and 12
COMMON = (
    f"batch.global_size={GLOBAL_SIZE}",
    "train.epochs=2",
    "train.log_every_steps=1",
    "optimizer.lr=0.05",
    "allowed_targets=[own_meetings]",
    "+model.blocks=[net1,net2]",
    "model._target_=own_meetings.Net",
)
MOMENTUM = "optimizer.momentum=0.9"
OWN = "train.step=own_meetings."
TOKENS = (f"{OWN}weighed", "batch.count=tokens")
SPARSE = ("+model.kind=sparse", "optimizer.momentum=0.0")
TWICE, THRICE = "train.grad_accum_steps=2", "train.grad_accum_steps=3"
CLIP_NORM, CLIP_VALUE = "train.clip_norm=0.05", "train.clip_value=0.003"


def of_dataset(kind: str, *keys: str) -> tuple[str, ...]:
    """Return the keys of a dataset of the tests' own; the size is that of the training samples."""
    parts = {"train": 0, "eval": 1}
    return (
        "dataset=torch_dataset",
        *(
            f"dataset.{name}={{_target_:own_meetings.{kind},size:SIZE,split:{split}}}"
            for name, split in parts.items()
        ),
        *keys,
    )


SOURCES = {
    "memory": ("dataset=random", "dataset.num_samples=SIZE", f"dataset.eval_samples={NUM_EVAL}"),
    "workers": of_dataset("Numbered", "dataset.num_workers=2"),
    "stream": of_dataset("Stream"),
    "stream of a length": of_dataset("StreamOfLength"),
    "stream by a worker": of_dataset("Stream", "dataset.num_workers=1"),
}
VARIANTS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "in two": (TWICE,),
    "in three": (THRICE,),
    "uneven": (),
    "uneven in three": (THRICE,),
    "tokens": TOKENS,
    "tokens, uneven in two, clipped": (*TOKENS, TWICE, CLIP_NORM),
    "clipped by norm": (CLIP_NORM,),
    "clipped by value": (CLIP_VALUE,),
    "clipped by value in two": (CLIP_VALUE, TWICE),
    "own step": (f"{OWN}counted",),
    "own step, uneven in three": (f"{OWN}counted", THRICE),
    "scalars named by data": (f"{OWN}named_by_data",),
    "average": ("ema.decay=0.9",),
    "bf16": ("train.precision=bf16",),
    "evaluated each step": ("train.eval_every_steps=1",),
    "computed twice": ("train.activation_checkpointing=true", TWICE),
    "frozen": ("params.freeze=[net1.*,*.bias]",),
    "sparse": SPARSE,
    "sparse, clipped by norm": (*SPARSE, CLIP_NORM),
    "sparse, clipped by value": (*SPARSE, CLIP_VALUE),
    "without dimensions": ("+model.kind=scalar",),
    "tied": ("+model.kind=tied",),
    "rare": ("+model.kind=rare",),
}
WAYS = {**{mode: mode for mode in MODES}, "ps async": "ps"}  # each way's mode


@dataclass(frozen=True)
class Meeting:
    """A source under a mode with a variant."""

    source: str
    way: str
    variant: str

    def __str__(self) -> str:
        return f"{self.source}-{self.way}-{self.variant}"


def cell_of(meeting: Meeting) -> Cell:
    """Return the training of a meeting."""
    source, way, variant = meeting.source, meeting.way, meeting.variant
    mode = WAYS[way]
    size = str(UNEVEN if "uneven" in variant else NUM_SAMPLES)
    keys = [
        *(f"model=toy{'_mp' if is_cut(mode) else ''}", f"parallelism={mode}", *COMMON, MOMENTUM),
        *(key.replace("SIZE", size) for key in SOURCES[source]),
        *VARIANTS[variant],
    ]
    if way == "ps async":
        keys.append("parallelism.mode=async")
    if variant == "rare" and "find_unused_parameters" in MODES[mode]:
        keys.append("parallelism.find_unused_parameters=true")
    world_size = 2 if way == "ps async" else smallest_world(mode)
    dtype = torch.float32 if variant == "bf16" else torch.float64
    return Cell(str(meeting), world_size, tuple(keys), dtype)


# What the order and the number of samples matter to; the others see batches from memory alone.
OF_SAMPLES = (
    *("plain", "in two", "in three", "uneven", "uneven in three", "clipped by norm"),
    *("tokens", "tokens, uneven in two, clipped", "own step", "own step, uneven in three"),
    *("evaluated each step", "average"),
)
OF_SOURCE = {"memory": (*VARIANTS,), "stream of a length": ("plain", "own step, uneven in three")}
MEETINGS = [
    Meeting(source, way, variant)
    for source in SOURCES
    for way in WAYS
    for variant in OF_SOURCE.get(source, OF_SAMPLES)
]


class Table:
    """The meetings that pytest is going to run, computed by world sizes when one is asked for."""

    def __init__(self, meetings: list[Meeting], folder: Path) -> None:
        self._wanted, self._folder = meetings, folder
        self._found = dict[Meeting, list[Found]]()

    def of(self, meeting: Meeting) -> list[Found]:
        """Return what each rank of a meeting came to."""
        if meeting not in self._found:
            wanted = {one: cell_of(one) for one in self._wanted if one.way == meeting.way}
            wanted[meeting] = cell_of(meeting)
            found = run_cells(list(wanted.values()), self._folder)
            self._found |= {one: found[cell] for one, cell in wanted.items()}
        return self._found[meeting]


@pytest.fixture(scope="module")
def table(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Table:
    """What the selected meetings, and those of one process beside them, come to."""
    wanted = selected(request, "meeting")
    alone = [Meeting(one.source, "single", one.variant) for one in wanted]
    return Table(list(dict.fromkeys([*wanted, *alone])), tmp_path_factory.mktemp("meetings"))


def differences(line: dict[str, float], expected: dict[str, float], *, rel: float) -> list[str]:
    """Return what a line of metrics has besides, lacks, or has otherwise."""
    return [
        f"{key}: {line.get(key)}, not {expected.get(key)}"
        for key in sorted(line.keys() | expected.keys())
        if line.get(key) != pytest.approx(expected.get(key), rel=rel, abs=1e-11)
    ]


@pytest.mark.parametrize("meeting", MEETINGS, ids=str)
def test_a_meeting_equals_one_process(meeting: Meeting, table: Table) -> None:
    found = table.of(meeting)
    (alone,) = table.of(Meeting(meeting.source, "single", meeting.variant))
    first = found[0]
    assert not first.failed, first.failed
    assert not first.refused, first.refused
    assert first.counts == alone.counts
    close = {"rtol": 2e-2, "atol": 2e-3} if meeting.variant == "bf16" else {"rtol": 1e-9, "atol": 1e-11}
    assert len(first.lines) == len(alone.lines)
    for line, expected in zip(first.lines, alone.lines, strict=True):
        if found_ones := differences(line, expected, rel=close["rtol"]):
            pytest.fail(f"step {line['step']}: {'; '.join(found_ones)}", pytrace=False)
    for one in found[:1] if WAYS[meeting.way] == "ps" else found:
        torch.testing.assert_close(one.weights, alone.weights, **close)
        torch.testing.assert_close(one.average, alone.average, **close)
