"""The rendezvous of several machines: their places, and the sentence if they do not meet."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
import torch.distributed as dist
from commands import wait_for
from tiers import first_of, only

from ddp_runner.config.sections import LaunchConfig
from ddp_runner.errors import UserError
from ddp_runner.launch import rendezvous
from ddp_runner.launch.rendezvous import Group, Meeting

STORES: Any = dist


@dataclass(frozen=True)
class Machine:
    """A machine that comes to the rendezvous."""

    node_rank: int | None = None
    serves: bool = False
    sees_run: bool = False
    num_ranks: int | None = 1
    nnodes: int = 2


Start = Callable[[Machine], tuple[Meeting, Future[Group]]]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Start machines in threads of this process, so all have one host name and process id."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # a meeting sets it, too
    numbers = count()  # of themselves, the first machine would have rank 0
    in_turn = SimpleNamespace(uuid4=lambda: UUID(int=next(numbers)))
    monkeypatch.setattr(rendezvous, "uuid", in_turn)
    store, over = STORES.HashStore(), list[bool]()
    meetings: list[Meeting] = []

    def begin(one: Machine) -> tuple[Meeting, Future[Group]]:
        launch = LaunchConfig(
            nnodes=one.nnodes, rdzv_endpoint="n1:1", node_rank=one.node_rank, join_timeout_s=60.0
        )
        meetings.append(Meeting(launch, num_ranks=one.num_ranks, sees_run=one.sees_run))
        meeting = meetings[-1]
        with monkeypatch.context() as patched:
            patched.setattr(rendezvous, "open_store", lambda *_, **__: (store, one.serves))
            future = pool.submit(meeting.join, lambda: bool(over))
            wait_for(lambda: meeting._name or future.done())
        return meeting, future

    with ThreadPoolExecutor() as pool:
        yield begin
        over.append(True)
    for meeting in meetings:
        meeting.close()


PLACES = {
    "that of the endpoint": [Machine(), Machine(serves=True)],
    "that with the run": [Machine(serves=True), Machine(sees_run=True)],
    "number 0": [Machine(1, serves=True, sees_run=True), Machine(0)],
    "a number, before none": [Machine(serves=True), Machine(7)],
}


@pytest.mark.parametrize("machines", only("that of the endpoint", PLACES))
def test_the_second_machine_to_come_has_rank_0(start: Start, machines: Sequence[Machine]) -> None:
    """The first reason that applies: its number, the run's folder, the endpoint; also again."""
    started = [start(one) for one in machines]
    groups = [future.result() for _, future in started]
    assert [group.place for group in groups] == [1, 0]
    assert [len(group.hosts) for group in groups] == [2, 2]
    groups[0].store.set("key", "value")
    assert groups[1].store.get("key") == b"value"


def test_a_machine_says_how_many_are_missing_and_a_spare_one_that_the_run_is_over(
    start: Start,
) -> None:
    """It waits for a place, which a machine that is lost may leave."""
    meeting, first = start(Machine())
    wait_for(lambda: meeting._backend and meeting._backend.here)
    assert meeting._waiting().startswith("waiting for 1 of 2 machines at n1:1, up to 60 s; start")
    _, second = start(Machine())
    assert {first.result().place, second.result().place} == {0, 1}
    assert meeting._waiting() == ""
    spare, third = start(Machine())
    wait_for(lambda: spare._waiting().startswith("waiting for a place at n1:1, where a run has"))
    meeting.close()
    with pytest.raises(UserError, match="the run that meets at n1:1 has ended; start the same"):
        third.result()


MISFITS = {
    "b 1; give each machine the same launch.nproc_per_node": [Machine(num_ranks=2), Machine()],
    "launch.node_rank=1; give each machine its own number": [Machine(1), Machine(1)],
    "launch.nnodes is 3 here and 2 on the machines that came": [Machine(), Machine(nnodes=3)],
}


@pytest.mark.parametrize(("sentence", "machines"), first_of(list(MISFITS.items())))
def test_machines_that_do_not_fit_together_are_named(
    start: Start, sentence: str, machines: Sequence[Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both, and what each says."""
    names = iter("ab")
    monkeypatch.setattr(rendezvous.socket, "gethostname", lambda: next(names, "b"))
    futures = [start(one)[1] for one in machines]
    with pytest.raises(UserError) as error:
        futures[-1].result()
    assert sentence in str(error.value)


def test_a_machine_without_the_run_starts_as_many_ranks_as_the_others(start: Start) -> None:
    """It does not know the config yet, which rank 0 sends it."""
    futures = [start(Machine(num_ranks=number))[1] for number in (3, None)]
    assert [future.result().num_ranks for future in futures] == [3, 3]
