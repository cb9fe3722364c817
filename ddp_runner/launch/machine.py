"""One of the machines of a run, and the order of their ranks. Torch-free."""

from collections.abc import Sequence
from dataclasses import dataclass

from ddp_runner.errors import UserError, counted

NO_NUMBER = 2**31  # sorts after every launch.node_rank


@dataclass(frozen=True)
class Machine:
    """What a machine tells the others when they meet."""

    host: str
    address: str  # at which the others reach it
    num_ranks: int | None  # None: as many as the first machine
    number: int | None  # its launch.node_rank
    serves: bool  # it holds the store
    sees_run: bool  # it has the folder of the run that goes on
    version: str  # of this package


def rank_order(machines: Sequence[Machine]) -> list[int]:
    """Return the places that torch gave the machines, in the order of their ranks.

    Raises:
        UserError: two have one number.
    """
    by_number: dict[int, str] = {}
    for one in machines:
        if one.number in by_number:
            raise UserError(
                f"{by_number[one.number]} and {one.host} both have launch.node_rank={one.number}; "
                "give each machine a number of its own, or none"
            )
        if one.number is not None:
            by_number[one.number] = one.host

    def key(place: int) -> tuple[int, bool, bool, int]:
        one = machines[place]
        number = NO_NUMBER if one.number is None else one.number
        return number, not one.sees_run, not one.serves, place

    return sorted(range(len(machines)), key=key)


def validate_equal(machines: Sequence[Machine]) -> None:
    """Reject machines that do not start equally many ranks.

    Raises:
        UserError: naming two of them.
    """
    first = machines[0]
    for one in machines:
        if one.num_ranks != first.num_ranks:
            raise UserError(
                f"{first.host} starts {counted(first.num_ranks or 0, 'rank')} and {one.host} "
                f"{one.num_ranks}; give each machine the same launch.nproc_per_node"
            )
