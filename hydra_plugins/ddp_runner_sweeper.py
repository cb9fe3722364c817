"""The sweeper of grids that the program runs in place of Hydra's own: each job is composed once."""

from collections.abc import Sequence

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper


class GridSweeper(BasicSweeper):
    """Hydra's sweeper of grids, for a launcher that composes all jobs before it starts the first.

    Hydra's own composes every job to validate it, before the launcher composes it once more.
    """

    def validate_batch_is_legal(self, batch: Sequence[Sequence[str]]) -> None:
        """Leave it to the launcher."""
