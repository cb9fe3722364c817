"""A grid: every combination of the values on the command line. Torch-free."""

from collections.abc import Sequence
from itertools import count, product

from hydra.core.override_parser.types import Override

from ddp_runner.errors import UserError


class Grid:
    """Makes all jobs in one batch; the last key varies first.

    Raises:
        UserError: there are no jobs.
    """

    def __init__(self, overrides: Sequence[Override]) -> None:
        axes = dict[str, list[str]]()  # the last override of a repeated key wins
        for override in overrides:
            if override.is_hydra_override():
                continue
            key = override.get_key_element()
            axes[key] = [str(override.input_line)]
            if override.is_sweep_override():
                axes[key] = [f"{key}={value}" for value in override.sweep_string_iterator()]
        self._batches = [[list(words) for words in product(*axes.values())]]
        self.numbers = count()  # of the batch's jobs
        if not self._batches[0]:
            raise UserError("the sweep has no jobs: a range is empty", "write range(3) or 1,2")

    def ask(self) -> list[list[str]]:
        """Return the words of each job of the next batch; an empty list at the end."""
        return self._batches.pop() if self._batches else []

    def tell(self, results: Sequence[float | str | None]) -> None:
        """Ignore the results: they do not change a grid."""

    def finish(self) -> None:
        """Do nothing: a grid has no best job."""
