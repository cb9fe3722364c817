"""Each source under each mode with each variant trains as one process does.

Float64 shows that only rounding differs. A combination that is not supported gets one line before
the first step. The table reads the modes from conf/, so a new mode is in it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from meetings import Cell, CellResult, run_cells
from modes import MESHES, MODES, OF_ANY_MODEL, TENSOR_PARALLEL, has_stages, needs, smallest_world
from own_meetings import NUM_EVAL
from tiers import selected

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
    "sparse in two": (*SPARSE, TWICE),
    "without dimensions": ("+model.kind=scalar",),
    "without dimensions, uneven in three": ("+model.kind=scalar", THRICE),
    "tied": ("+model.kind=tied",),
    "rare": ("+model.kind=rare",),
}
EXACT = {"rtol": 1e-9, "atol": 1e-11}  # float64: only rounding differs
BF16 = {"rtol": 2e-2, "atol": 2e-3}
WAYS = {**{mode: mode for mode in OF_ANY_MODEL}, "ps async": "ps"}  # each way's mode


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
    model = "toy_mp" if has_stages(mode) else "toy"
    keys = [
        *(f"model={model}", f"parallelism={mode}", *COMMON, MOMENTUM),
        *(key.replace("SIZE", size) for key in SOURCES[source]),
        *VARIANTS[variant],
    ]
    if way == "ps async":
        keys.append("parallelism.mode=async")
    if variant == "rare" and "find_unused_parameters" in MODES[mode]:
        keys.append("parallelism.find_unused_parameters=true")
    world_size = 2 if way == "ps async" else smallest_world(mode)
    dtype = torch.float32 if variant == "bf16" else torch.float64
    failing = rule_of(meeting, FAILING)
    hangs = failing is not None and failing.hangs
    return Cell(str(meeting), world_size, tuple(keys), dtype, hangs=hangs)


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


EVERY = frozenset(WAYS)
STREAMS = frozenset(source for source in SOURCES if "stream" in source)
SPARSE_ONES = frozenset(one for one in VARIANTS if "sparse" in one)
SERVED = frozenset(way for way, mode in WAYS.items() if "num_servers" in needs(mode))
TIED = frozenset({"tied"})
SHARDED = MESHES - {"tp"}


@dataclass(frozen=True)
class Rule:
    """What holds for the meetings of these ways, with one of these variants or sources."""

    text: str  # part of the rejection, or the reason why it fails
    ways: frozenset[str] | set[str]
    variants: frozenset[str] = frozenset()
    sources: frozenset[str] = frozenset()
    hangs: bool = False

    def holds(self, one: Meeting) -> bool:
        """Return whether the rule is about a meeting."""
        is_such = one.variant in self.variants or one.source in self.sources
        return one.way in self.ways and is_such


REJECTED = [
    Rule("is a stream without numbers; write parallelism=ddp", SERVED, sources=STREAMS),
    Rule("return the same names for each batch", EVERY, frozenset({"scalars named by data"})),
    Rule("some of which are sparse", SHARDED, SPARSE_ONES),
    Rule("cannot push sparse gradients", SERVED, SPARSE_ONES),
    Rule("which are one parameter, into different groups", SHARDED - {"fsdp_tp"}, TIED),
    Rule("and torch would make them two", TENSOR_PARALLEL, TIED),
]
# These meetings fail today. Whoever fixes one removes it from this list.
FAILING = [
    Rule(
        "all ranks must gather a layer, and a rank whose batch does not use it never calls; the "
        "trial's two samples do not reveal this",
        SHARDED,
        frozenset({"rare"}),
        hangs=True,
    )
]


def rule_of(meeting: Meeting, rules: list[Rule]) -> Rule | None:
    """Return the rule that holds for a meeting, if there is one."""
    return next((rule for rule in rules if rule.holds(meeting)), None)


QUICK = {
    Meeting("memory", "ddp", "uneven in three"),
    Meeting("memory", "ddp", "own step"),
    Meeting("memory", "ddp", "tokens, uneven in two, clipped"),
    Meeting("memory", "ddp", "average"),
    Meeting("memory", "ddp", "sparse"),
    Meeting("memory", "ps", "tokens, uneven in two, clipped"),
    Meeting("memory", "fsdp", "uneven in three"),
    Meeting("memory", "fsdp", "frozen"),
    Meeting("memory", "tp", "tokens, uneven in two, clipped"),
    Meeting("memory", "tp", "tied"),
    Meeting("workers", "ddp", "uneven in three"),
    Meeting("stream", "ddp", "own step, uneven in three"),
    Meeting("stream", "tp", "own step, uneven in three"),
    Meeting("stream", "ps", "plain"),
}


class Table:
    """The meetings that pytest is going to run, computed by world sizes when one is asked for."""

    def __init__(self, meetings: list[Meeting], folder: Path) -> None:
        self._wanted, self._folder = meetings, folder
        self._found = dict[Meeting, list[CellResult]]()

    def of(self, meeting: Meeting) -> list[CellResult]:
        """Return what each rank of a meeting came to."""
        if meeting not in self._found:
            wanted = {one: cell_of(one) for one in self._wanted if one.way == meeting.way}
            wanted[meeting] = cell_of(meeting)
            found = run_cells(list(wanted.values()), self._folder)
            self._found |= {one: found[cell] for one, cell in wanted.items()}
        return self._found[meeting]


@pytest.fixture(scope="module")
def table(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Table:
    """Return the results of the selected meetings and of their single-process references."""
    wanted = selected(request, "meeting")
    alone = [Meeting(one.source, "single", one.variant) for one in wanted]
    return Table(list(dict.fromkeys([*wanted, *alone])), tmp_path_factory.mktemp("meetings"))


def differences(
    line: dict[str, float], expected: dict[str, float], *, rtol: float, atol: float
) -> list[str]:
    """Return what a line of metrics has besides, lacks, or has otherwise."""
    return [
        f"{key}: {line.get(key)}, not {expected.get(key)}"
        for key in sorted(line.keys() | expected.keys())
        if line.get(key) != pytest.approx(expected.get(key), rel=rtol, abs=atol)
    ]


# These ways differ little from another: dp is one process on CPUs, ddp_mp cuts the model of ddp,
# ps async is ps with another order, and a mesh of four ranks is like a mesh of two. The others meet
# all variants; these meet the variants that the difference may affect, or that have their own rule.
LIKE_OTHERS = {
    *("dp", "ddp_mp", "ps async"),
    *(way for way, mode in WAYS.items() if smallest_world(mode) > 3),
}
FEW = {
    *("uneven in three", "tokens, uneven in two, clipped", "own step, uneven in three"),
    *("without dimensions, uneven in three", "clipped by value", "average"),
    *("frozen", "sparse", "tied"),
}
FEW_OF_FOUR_RANKS = {"uneven in three", "tokens, uneven in two, clipped", "average", "tied"}
FEW_OF_STREAMS = {"own step, uneven in three", "tokens, uneven in two, clipped"}


def is_slow(meeting: Meeting) -> bool:
    """Return whether a meeting waits for a release."""
    if meeting.way in LIKE_OTHERS:
        few = FEW_OF_FOUR_RANKS if smallest_world(WAYS[meeting.way]) > 3 else FEW
        if meeting.source != "memory":
            few = FEW_OF_STREAMS
        if meeting.variant not in few:
            return True
    return "worker" in meeting.source  # they fork in each cell


def cases() -> Iterator[Any]:
    """Yield the meetings: a few that catch a mistake each run by default."""
    for meeting in MEETINGS:
        marks = [] if meeting in QUICK else [pytest.mark.full]
        if meeting not in QUICK and is_slow(meeting):
            marks.append(pytest.mark.slow)
        if (rule := rule_of(meeting, FAILING)) is not None:
            marks.append(pytest.mark.xfail(strict=True, reason=rule.text))
        yield pytest.param(meeting, id=str(meeting), marks=marks)


@pytest.mark.parametrize("meeting", list(cases()))
def test_a_meeting_equals_one_process_or_is_rejected(meeting: Meeting, table: Table) -> None:
    """Samples, losses, own scalars, evaluations and the final weights; or one line beforehand."""
    found = table.of(meeting)
    first = found[0]
    assert not first.failed, first.failed
    if (rule := rule_of(meeting, REJECTED)) is not None:
        assert rule.text in first.rejected
        assert len(first.rejected.splitlines()) == 1
        return
    assert not first.rejected, first.rejected
    (alone,) = table.of(Meeting(meeting.source, "single", meeting.variant))
    close = BF16 if meeting.variant == "bf16" else EXACT
    assert first.counts == alone.counts
    assert len(first.lines) == len(alone.lines)
    differing = [
        f"step {line['step']}: {one}"
        for line, expected in zip(first.lines, alone.lines, strict=True)
        for one in differences(line, expected, **close)
    ]
    assert not differing, "; ".join(differing[:4])
    for one in found[:1] if meeting.way in SERVED else found:
        torch.testing.assert_close(one.weights, alone.weights, **close)
        torch.testing.assert_close(one.average, alone.average, **close)
