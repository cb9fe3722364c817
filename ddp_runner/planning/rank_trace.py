"""Traces two optimizer steps of one rank, built and taken as a training does, without numbers."""

import gc
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from ddp_runner.config.schema import RunConfig
from ddp_runner.data.dataset import Dataset
from ddp_runner.data.load_dataset import build_dataset, build_source
from ddp_runner.data.sources.text import Text
from ddp_runner.data.splits import MicroPlan, NumberedSplit
from ddp_runner.data.stream import StreamSplit
from ddp_runner.data.text_tokenizer import NUM_BYTES, load_text_tokenizer
from ddp_runner.dist_env import DistEnv
from ddp_runner.errors import UserError
from ddp_runner.parallelism.stages import whole_parameters
from ddp_runner.planning.fake_ranks import NumberlessTensors, fake_ranks, optimizers_as_on_gpus
from ddp_runner.planning.planned_mode import PlannedMode
from ddp_runner.planning.step_tracker import Collective, StepTracker, num_bytes, tensors_of
from ddp_runner.rank.session import make_mode
from ddp_runner.train.build_state import build_state, build_work
from ddp_runner.train.loop import build_engine, take_step
from ddp_runner.train.state import TrainState, Work

CPU = torch.device("cpu")
NUM_STEPS = 2  # the first makes the optimizer's state, the second repeats itself


@dataclass(frozen=True)
class RankTrace:
    """What a rank holds, computes and sends in a step, in bytes and FLOP."""

    num_parameters: int  # of the whole model
    parameters: int  # with buffers, and the averaged weights of ema.decay
    gradients: int
    optimizer: int
    peak: int
    flops: float
    calls: Mapping[Collective, int]
    sent: Mapping[Collective, int]  # whole messages


@dataclass(frozen=True)
class RepeatedSplit(NumberedSplit):
    """A sample, as often as the steps need it."""

    sample: Any  # a tree of tensors (1, ...)
    count: int

    def __len__(self) -> int:
        return self.count

    def load(self, plans: Iterable[MicroPlan], *, seed: int = 0) -> Iterator[Any]:
        """Yield the batch of each plan."""
        for plan in plans:
            rows = torch.zeros(len(plan.indices), dtype=torch.int64)
            yield tree_map(partial(torch.index_select, dim=0, index=rows), self.sample)


def trace_rank(config: RunConfig, *, rank: int, log: Callable[[str], None]) -> RankTrace:
    """Trace a rank of a run of any world size, in this process alone.

    Raises:
        UserError: the dataset is a stream, or the shapes of a step depend on numbers.
    """
    train = replace(config.train, max_steps=10**9, compile=False)  # so that every schedule fits
    config = replace(config, train=train)
    mode = make_mode(config)
    dataset, size = planned_dataset(config, log=log), config.world_size
    env = DistEnv(rank, local_rank=0, world_size=size, local_world_size=1)
    with fake_ranks(size, rank=rank), warnings.catch_warnings(action="ignore"):  # of CPU kernels
        work = build_work(config, env, PlannedMode(mode), devices=(CPU,), dataset=dataset)
        try:
            return traced(work, tensors=NumberlessTensors())
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise UserError(
                f"model={config.model.get('name')} cannot be planned: its step reads numbers of "
                f"tensors ({error.func})",
                "compute without them, or measure a run of a few steps",
            ) from error


def traced(work: Work, *, tensors: AbstractContextManager[Any]) -> RankTrace:
    """Build a rank's state and take steps; `tensors` decides what tensors are.

    Collective: every rank must call.
    """
    gc.disable()  # frees cycles before a step only: when Python does it is chance, and takes time
    try:
        with optimizers_as_on_gpus(), tensors, StepTracker() as tracker:
            state = build_state(work)
            state.engine = build_engine(state)
            state.model.train()
            steps = iter(state.batches)
            for _ in range(NUM_STEPS):
                with _disable_current_modes():
                    batch = next(steps)
                gc.collect()
                tracker.begin()
                take_step(state, batch)
            return _summary(state, tracker)
    finally:
        gc.enable()


def _summary(state: TrainState, tracker: StepTracker) -> RankTrace:
    parameters = [*state.module.parameters()]
    modules = [state.module] if state.ema is None else [state.module, state.ema.module]
    held = [value for module in modules for value in (*module.parameters(), *module.buffers())]
    return RankTrace(
        num_parameters=sum(value.numel() for value in {*whole_parameters(state.module).values()}),
        parameters=num_bytes(held),
        gradients=num_bytes(value.grad for value in parameters if value.grad is not None),
        optimizer=num_bytes(tensors_of([*state.optimizer.state.values()])),
        peak=tracker.peak,
        flops=tracker.flops,
        calls=dict(tracker.calls),
        sent=dict(tracker.sent),
    )


def planned_dataset(config: RunConfig, *, log: Callable[[str], None]) -> Dataset:
    """Return a dataset of equal samples. Only the sizes of a text follow from its keys alone.

    Raises:
        UserError: the dataset is a stream.
    """
    source, count = build_source(config), NUM_STEPS * config.batch.global_size
    if isinstance(source, Text):
        tokens = torch.zeros(1, source.sequence_length, dtype=torch.int64)
        split = RepeatedSplit((tokens, tokens.clone()), count)
        vocab_size = source.vocab_size if source.vocabulary == "bpe" else NUM_BYTES
        if source.tokenizer is not None:
            vocab_size = load_text_tokenizer(Path(source.tokenizer)).vocab_size
        return Dataset(
            source.name, split, split, num_classes=None, mean=None, vocab_size=vocab_size
        )
    dataset = build_dataset(config, log=log)
    if isinstance(dataset.train, StreamSplit):
        raise UserError(
            f"dataset={dataset.name} cannot be planned: it is a stream, which has no number of "
            "samples",
            "write a dataset with __len__, such as dataset=text",
        )
    split = RepeatedSplit(dataset.train.first([0]).data, count)
    return replace(dataset, train=split, eval=split, group_by_length=False)
