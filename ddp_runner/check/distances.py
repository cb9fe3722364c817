"""How far a step's tensors are from one process's, and the sentence about the first fault."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import hypot, inf, sqrt

import torch
from torch import Tensor

from ddp_runner.device import sum_dtype

SAME = 1e-2  # relative difference of factors that count as one
MODEL, STEP = "the model", "the training step"  # beside the names of modules


class Stage(StrEnum):
    """What is compared, in the order of a step."""

    START = "starting parameter"
    INPUT = "input"
    OUTPUT = "output"
    GRADIENT = "gradient"
    SCALED = "scaled gradient"
    UPDATE = "update"
    BUFFER = "buffer"
    LOSS = "loss"


Key = tuple[Stage, str]  # and the name of a module, parameter or buffer
FORWARD = (Stage.INPUT, Stage.OUTPUT)
WHAT = {  # a parameter is named by the last part of its name
    Stage.START: "its {} at the start",
    Stage.OUTPUT: "its output",
    Stage.GRADIENT: "the gradient of its {}",
    Stage.SCALED: "right after the backward, the gradient of its {} as the optimizer gets it",
    Stage.UPDATE: "given its gradient, the update of its {}",
    Stage.BUFFER: "its buffer {}",
}


def norm(*tensors: Tensor) -> float:
    """Return the L2 norm of all elements."""
    dense = (one.detach().to_dense() for one in tensors)
    floats = (one if one.is_floating_point() else one.double() for one in dense)
    norms = (torch.linalg.vector_norm(one, dtype=sum_dtype(one.device)) for one in floats)
    return hypot(*map(float, norms))


def wide(tensor: Tensor) -> Tensor:
    """Return a dense tensor in the dtype of sums."""
    return tensor.detach().to_dense().to(sum_dtype(tensor.device))


@dataclass
class Distance:
    """How far a tensor of the step, over all calls of a module, is from one process's."""

    bound: float
    size: float = 0.0  # norm of one process's
    found: float = 0.0  # norm of the step's
    apart: float = 0.0  # norm of the difference
    product: float = 0.0  # of both
    num_calls: int = 0
    first: float = inf  # position in the step of the first call beyond the bound
    problem: str = ""  # what a number does not tell

    def add(
        self,
        found: Tensor | None,
        expected: Tensor,
        *,
        own: Tensor | None = None,
        position: int = 0,
        dtypes: tuple[torch.dtype, ...] = (),
    ) -> None:
        """Add a call's tensor.

        `found` is the step's, None if it is missing. `own` is a gradient of this rank's samples
        alone. `position` is that of the call in the step. The dtypes, if given, must be equal.
        """
        self.num_calls += 1
        right = wide(expected)
        got = torch.zeros_like(right) if found is None else wide(found).to(right.device)
        if got.shape != right.shape:
            self.problem = f"is {tuple(got.shape)}, and one process's is {tuple(right.shape)}"
        elif len(set(dtypes)) > 1:
            names = [str(dtype).removeprefix("torch.") for dtype in dtypes]
            self.problem = f"is {names[0]}, and one process's is {names[1]}"
        if self.problem:
            self.first = min(self.first, position)
            return
        apart = 0.0 if torch.equal(got, right) else norm(got - right)  # most are equal
        self.apart, self.size = hypot(self.apart, apart), hypot(self.size, norm(right))
        self.found = hypot(self.found, norm(got))
        self.product += float((got * right).sum())
        if not apart <= self.bound:
            self.first = min(self.first, position)
            if own is not None and norm(got - wide(own)) <= self.bound:
                self.problem = "is this rank's own: not synchronised?"

    @property
    def is_missing(self) -> bool:
        """Whether the step has nothing, or only zeros."""
        return not self.problem and self.found <= 1e-6 * self.size

    @property
    def is_right(self) -> bool:
        """Whether rounding explains the difference; not for NaN."""
        return not self.problem and self.apart <= self.bound

    @property
    def factor(self) -> float | None:
        """The number with which one process's tensor gives this one, within rounding."""
        ratio = self.product / (self.size**2 or 1.0)
        rest = sqrt(max(0.0, self.found**2 - ratio * self.product))
        return ratio if not self.problem and rest <= (1 + abs(ratio)) * self.bound else None

    def sentence(self, numbers: Collection[int] = ()) -> str:
        """Return what is wrong; of a gradient, what a factor of one of these numbers may mean."""
        if self.problem:
            return self.problem
        if self.is_missing:
            return f"is missing{': not reduced, or not computed?' if numbers else ''}"
        if (factor := self.factor) is None:
            times = f", {self.apart / self.bound:.2g} times its bound" if self.bound else ""
            return f"is off by {self.apart / (self.size or 1.0):.2g} of its size{times}"
        meaning = ""
        if any(abs(factor / number - 1) < SAME for number in numbers):
            meaning = " (a sum where a mean belongs?)"
        elif any(abs(factor * number - 1) < SAME for number in numbers):
            meaning = " (a mean where a sum belongs?)"
        return f"is {factor:.3g} times one process's{meaning}"


def call_of(name: str, *, caller: str | None) -> str:
    """Return the name of an input: who gives it, a module or the training step, to which module."""
    return f"{STEP if caller is None else caller or MODEL} -> {name or MODEL}"


def module_of(key: Key) -> str:
    """Return the module that an input, an output, a parameter or a buffer belongs to."""
    stage, name = key
    if stage == Stage.INPUT:
        return name.partition(" -> ")[2]
    return (name if stage == Stage.OUTPUT else name.rpartition(".")[0]) or MODEL


def _first_words(key: Key, where: str) -> str:
    """Return what is first wrong. A wrong input is its caller's: all that came before was right."""
    stage, name = key
    if stage == Stage.INPUT:
        caller, _, module = name.partition(" -> ")
        wrong = f"{caller} is wrong" if caller == STEP else f"the first wrong module is {caller}"
        return f"{wrong}{where}: what it gives {module}"
    what = WHAT[stage].format(name.rpartition(".")[2])
    return f"the first wrong module is {module_of(key)}{where}: {what}"


def first_fault(
    by_rank: Sequence[Mapping[Key, Distance]], order: Sequence[Key], *, numbers: Collection[int]
) -> tuple[Stage, str] | None:
    """Return the stage of what is first wrong, and a sentence about it; None if nothing is.

    `order` has all that was compared: in each stage modules in the order of the forward. Gradients
    are searched from the end, as the backward computes them. `numbers` are those of ranks, and of
    shares of the global batch, where there are several.
    """
    for stage in Stage:
        stages = FORWARD if stage == Stage.INPUT else (stage,)  # inputs and outputs come in turns
        keys = [key for key in order if key[0] in stages]
        if stage == Stage.GRADIENT:
            keys.reverse()
        wrong = {key: [found[key] for found in by_rank if key in found] for key in keys}
        wrong = {key: distances for key, distances in wrong.items() if distances}
        if not wrong:
            continue
        if stage in FORWARD:  # a module may be called again after the first that is wrong
            first = min(wrong, key=lambda key: min(one.first for one in wrong[key]))
        else:  # DDP reduces no gradient if one is missing
            first = next((key for key in wrong if wrong[key][0].is_missing), next(iter(wrong)))
        sentence = wrong[first][0].sentence(numbers if stage == Stage.GRADIENT else ())
        if stage == Stage.LOSS:
            return stage, f"the modules are right, and the loss {sentence}"
        ranks = [rank for rank, found in enumerate(by_rank) if first in found]
        where = f" on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
        where = where if len(ranks) < len(by_rank) else ""
        number, total = (len({*map(module_of, some)}) for some in (wrong, keys))
        factors = [distances[0].factor for distances in wrong.values()]
        known = [factor for factor in factors if factor is not None]
        many = f"{number} of {total}" if number < total or number == 1 else f"all {total}"
        how_many = f"{many} modules {'is' if number == 1 else 'are'} wrong"
        are_equal = bool(known) and max(known) - min(known) <= SAME * abs(known[0])
        if number == total > 1 and factors == known and are_equal:
            how_many = f"the same factor in all {total} modules"
        return stage, f"{_first_words(first, where)} {sentence}; {how_many}"
    return None
