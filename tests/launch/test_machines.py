"""The order of the machines, and what they tell each other when ranks have failed."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import pytest
import torch.distributed as dist
from commands import wait_for
from tiers import first_of
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from ddp_runner import __version__
from ddp_runner.config.sections import LaunchConfig
from ddp_runner.errors import UserError
from ddp_runner.job import Failure
from ddp_runner.launch import reports
from ddp_runner.launch.machine import Machine, rank_order, validate_equal
from ddp_runner.launch.reports import MOST_TRACEBACK, Reports

STORES: Any = dist


def machine(host: str, **facts: Any) -> Machine:
    """Return a machine with two ranks."""
    known = {"address": host, "num_ranks": 2, "number": None, "serves": False, "sees_run": False}
    known["version"] = __version__
    return Machine(host=host, **(known | facts))


def failure(kind: str, *, rank: int, at: int, sentence: str = "rank failed") -> Failure:
    """Return how a rank failed at a time."""
    return Failure(rank=rank, kind=kind, sentence=sentence, time_ns=at)


class Store:
    """A store of torch in this process, whose methods a test can replace."""

    def __init__(self) -> None:
        store = STORES.HashStore()
        self.set, self.get, self.check, self.add = store.set, store.get, store.check, store.add


@contextmanager
def round_of(*hosts: str, own: int = 0, serves: bool = False) -> Iterator[tuple[Reports, Any]]:
    """Give the reports of a round, seen by the machine at a place, and its store."""
    store = Store()
    launch = LaunchConfig(nnodes=len(hosts), rdzv_endpoint="a:1")
    found = Reports(
        [machine(host, serves=serves) for host in hosts],
        own,
        store=store,
        launch=launch,
    )
    try:
        yield found, store
    finally:
        found.close()


@pytest.mark.parametrize(
    ("machines", "first"),
    [
        pytest.param([machine("a"), machine("b", serves=True)], "b", id="that of the endpoint"),
        pytest.param(
            [machine("a", sees_run=True), machine("b", serves=True)], "a", id="that with the run"
        ),
        pytest.param(
            [machine("a", number=1, sees_run=True), machine("b", number=0)], "b", id="number 0"
        ),
        pytest.param([machine("a"), machine("b", number=7)], "b", id="a number, before none"),
    ],
)
def test_the_first_machine_has_rank_0(machines: list[Machine], first: str) -> None:
    """The first reason that applies: its number, the run's folder, the endpoint."""
    order = rank_order(machines)
    assert sorted(order) == list(range(len(machines)))
    assert machines[order[0]].host == first


def test_machines_that_do_not_fit_together_are_named() -> None:
    """Both, and what each says."""
    with pytest.raises(UserError, match=r"a and b both have launch\.node_rank=1; give each"):
        rank_order([machine("a", number=1), machine("b", number=1)])
    with pytest.raises(UserError, match=r"a starts 2 ranks and b 1; give each machine the same"):
        validate_equal([machine("a"), machine("b", num_ranks=1)])


def test_the_failure_that_came_first_is_named_with_its_machine() -> None:
    """Not the rank of this machine that only lost its peer."""
    with round_of("a", "b") as (seen, store):
        other = failure("signal", rank=3, at=5, sentence="rank 3 on b was killed")
        store.set("failure/1", json.dumps(asdict(other)))
        own = failure("peer", rank=0, at=4, sentence="rank 0 raised RuntimeError")
        assert seen.first_failure(own) == other
        told = json.loads(store.get("failure/0"))
        assert told["sentence"] == "rank 0 on a raised RuntimeError"


def test_a_failure_of_no_rank_is_named_with_its_machine() -> None:
    """As where the process was killed from which the ranks are forked."""
    with round_of("a", "b", own=1) as (seen, store):
        own = failure("signal", rank=2, at=1, sentence="the process was killed")
        store.set("failure/0", json.dumps(asdict(failure("peer", rank=0, at=2))))
        assert seen.first_failure(own).sentence == "on b: the process was killed"


def test_what_the_user_can_mend_is_said_with_its_machine() -> None:
    """Where every rank says the same, no machine is named."""
    own = failure("user", rank=0, at=9, sentence="seed differs on rank 2")
    for sentence, expected in [
        (own.sentence, own.sentence),
        ("there is no data", "on b: there is no data"),
    ]:
        with round_of("a", "b") as (seen, store):
            other = failure("user", rank=2, at=5, sentence=sentence)
            store.set("failure/1", json.dumps(asdict(other)))
            assert seen.first_failure(own).sentence == expected
            assert json.loads(store.get("failure/0"))["sentence"] == own.sentence


def test_a_long_traceback_is_shortened_for_the_others() -> None:
    """Its end says what happened."""
    with round_of("a") as (seen, store):
        text = "begin" + "x" * MOST_TRACEBACK + "end"
        seen.first_failure(Failure(rank=0, kind="crash", sentence="rank 0", traceback=text))
        told = json.loads(store.get("failure/0"))["traceback"]
        assert (len(told), told[-3:]) == (MOST_TRACEBACK, "end")


def test_a_machine_that_reports_nothing_was_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """If ranks of this machine lost their peers only; else they are the reason."""
    monkeypatch.setattr(reports, "SILENT_S", 0.2)
    with round_of("a", "b") as (seen, _):
        found = seen.first_failure(failure("peer", rank=0, at=1))
        assert (found.rank, found.kind) == (2, "machine")
        assert found.sentence.startswith("b (ranks 2, 3) was lost: it was switched off, its")
    with round_of("a", "b") as (seen, _):
        own = failure("crash", rank=1, at=1, sentence="rank 1 raised")
        assert seen.first_failure(own).sentence == "rank 1 on a raised"


@pytest.mark.full
def test_a_machine_that_still_ends_its_ranks_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its report says which rank was late; it takes seconds."""
    monkeypatch.setattr(reports, "SILENT_S", 0.0)
    monkeypatch.setattr(reports, "REPORT_S", 2.0)
    monkeypatch.setattr(reports, "PAUSE_S", 0.5)
    late = failure("late", rank=2, at=9)
    with round_of("a", "b") as (seen, store):
        store.add("alive/1", 1)
        check, asked = store.check, []

        def check_later(keys: list[str]) -> bool:
            asked.extend(keys)
            store.add("alive/1", 1)  # again and again, for a long save takes minutes
            if asked.count("failure/1") == 10:
                store.set("failure/1", json.dumps(asdict(late)))
            return bool(check(keys))

        store.check = check_later
        assert seen.first_failure(failure("peer", rank=0, at=1)) == late


def test_a_store_that_is_gone_is_named() -> None:
    """With rank -1: there is nowhere to meet again."""
    with round_of("a", "b") as (seen, store):

        def fail(*_: object) -> None:
            raise dist.DistNetworkError("Connection reset")

        store.set = fail
        found = seen.first_failure(failure("peer", rank=0, at=1))
        assert (found.rank, found.kind) == (-1, "machine")
        assert found.sentence.startswith("a:1, where the machines meet, is lost")


def test_the_watch_notices_a_failure_elsewhere_and_shows_that_this_machine_lives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that the others wait for its report."""
    monkeypatch.setattr(reports, "WATCH_S", 0.02)
    with round_of("a", "b") as (seen, store):
        timed_out = failure("peer", rank=2, at=1, sentence="Timed out waiting")
        store.set("failure/1", json.dumps(asdict(timed_out)))
        deadline = time.monotonic() + 60
        while not store.check(["alive/0"]) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert seen.have_come
        assert seen.are_of_late_peers


def test_torch_has_the_private_names_that_say_who_is_there() -> None:
    """A torch that renames one fails here, not in a run."""
    names = dynamic_rendezvous.DynamicRendezvousHandler.__init__.__code__.co_names
    assert {"_this_node", "_state_holder"} <= set(names)


@pytest.mark.full
def test_a_machine_says_that_its_ranks_have_ended_before_it_leaves() -> None:
    """Else the others, which ended before, would wait for it in vain."""
    with round_of("a", "b", own=0) as (found, store):
        store.set("ended/1", "")
        wait_for(lambda: found.ranks_have_ended)
        wait_for(lambda: found.all_ended(limit_s=1000.0))
        assert store.check(["ended/0"])


@pytest.mark.full
def test_no_machine_leaves_before_the_ranks_of_all_have_ended() -> None:
    """A restart needs all of them; a limit lets them leave, and so does the end of rank 0."""
    with round_of("a", "b", own=1) as (found, store):
        assert not found.ranks_have_ended
        assert found.all_ended(limit_s=1000.0) is None
        wait_for(lambda: store.check(["ended/1"]))
        assert found.all_ended(limit_s=1000.0) is None
        store.set("ended/0", "")
        wait_for(lambda: found.all_ended(limit_s=1000.0))
        assert found.ranks_have_ended
    with round_of("a", "b", own=1) as (found, _):
        assert found.all_ended(limit_s=0.0)


@pytest.mark.full
@pytest.mark.parametrize("own", first_of([0, 1]))
def test_without_the_store_a_run_is_complete_once_rank_0_has_ended(own: int) -> None:
    """Rank 0 writes the result, so its machine may leave; the others cannot know."""

    def lost(*_: object) -> None:
        raise dist.DistNetworkError("Connection reset by peer")

    with round_of("a", "b", own=own) as (found, store):
        store.check = lost
        assert wait_for(lambda: [found.all_ended(limit_s=1000.0)] != [None])
        assert found.all_ended(limit_s=1000.0) is (own == 0)


def test_the_machine_with_the_store_waits_until_the_others_have_read_the_reports() -> None:
    """Its end closes the store, and they would report that it is lost."""
    readers = ["read/0", "read/1"]
    with round_of("a", "b", serves=True) as (found, store):
        check, asked = store.check, list[bool]()

        def look(keys: list[str]) -> bool:
            if keys == readers:
                asked.append(bool(check(keys)))
                store.set("read/1", "")  # after the first look
                return asked[-1]
            return bool(check(keys))

        store.set("failure/1", json.dumps(asdict(failure("peer", rank=2, at=2))))
        store.check = look
        found.first_failure(failure("crash", rank=0, at=1))
    assert asked == [False, True]
