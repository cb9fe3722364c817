"""A grid: every combination of the values that a command gives. Torch-free."""

from collections.abc import Iterator, Sequence
from itertools import count, product

from hydra.core.override_parser.types import Override

from ddp_runner.errors import UserError


class Grid:
    """Gives the words of all jobs as one batch; the results of its jobs change nothing.

    Raises:
        UserError: there is no job.
    """

    def __init__(self, overrides: Sequence[Override]) -> None:
        self._left = [list(expand(overrides))]
        self.numbers = count()  # of the jobs of the batch
        if not self._left[0]:
            raise UserError("the sweep has no job: a range is empty; write range(3) or 1,2")

    def ask(self) -> list[list[str]]:
        """Return the words of each job of the next batch; none is left if there are no more."""
        return self._left.pop() if self._left else []

    def tell(self, results: Sequence[float | str | None]) -> None:
        """Take the results of the last batch."""

    def finish(self) -> str | None:
        """Return None: no job is the best one."""
        return None


def expand(overrides: Sequence[Override]) -> Iterator[list[str]]:
    """Yield the overrides of each job; the last key varies first. A key given twice counts once."""
    axes = dict[str, list[str]]()
    for one in overrides:
        if one.is_hydra_override():
            continue
        key = one.get_key_element()
        axes[key] = [str(one.input_line)]
        if one.is_sweep_override():
            axes[key] = [f"{key}={value}" for value in one.sweep_string_iterator()]
    yield from map(list, product(*axes.values()))
