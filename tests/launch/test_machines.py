"""What the machines of a run tell each other as their ranks end."""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import pytest
import torch.distributed as dist
from commands import wait_for
from tiers import first_of

from ddp_runner.config.sections import LaunchConfig
from ddp_runner.job import Failure
from ddp_runner.launch import machines
from ddp_runner.launch.machines import Peers
from ddp_runner.launch.rendezvous import Group

STORES: Any = dist
Making = Callable[..., tuple[Peers, Any]]


def failure(kind: str, *, rank: int, at: int, sentence: str = "rank failed") -> Failure:
    """Return how a rank failed at a time."""
    return Failure(rank=rank, kind=kind, sentence=sentence, time_ns=at)


class Store:
    """A store of torch in this process, whose methods a test can replace."""

    def __init__(self) -> None:
        store = STORES.HashStore()
        self.set, self.get, self.check = store.set, store.get, store.check


@pytest.fixture
def peers() -> Iterator[Making]:
    """Two machines of two ranks each, a and b."""
    made: list[Peers] = []

    def make(own: int = 0, *, serves: bool = False) -> tuple[Peers, Any]:
        store, launch = Store(), LaunchConfig(nnodes=2, rdzv_endpoint="a:1")
        made.append(Peers(Group(["a", "b"], own, 2, store, serves), launch))
        return made[-1], store

    yield make
    for one in made:
        one.leave()


def test_the_failure_that_came_first_is_named_with_its_machine(peers: Making) -> None:
    """Not the rank of this machine that only lost its peer."""
    seen, store = peers()
    other = failure("signal", rank=3, at=5, sentence="rank 3 on b was killed")
    store.set("failure/1", json.dumps(asdict(other)))
    own = failure("peer", rank=0, at=4, sentence="rank 0 raised RuntimeError")
    assert seen.first_failure(own) == other
    told = json.loads(store.get("failure/0"))
    assert told["sentence"] == "rank 0 on a raised RuntimeError"


def test_a_failure_of_no_rank_is_named_with_its_machine(peers: Making) -> None:
    """As where the process was killed from which the ranks are forked."""
    seen, store = peers(own=1)
    own = failure("signal", rank=2, at=1, sentence="the process was killed")
    store.set("failure/0", json.dumps(asdict(failure("peer", rank=0, at=2))))
    assert seen.first_failure(own).sentence == "on b: the process was killed"


def test_what_the_user_can_mend_is_said_with_its_machine(peers: Making) -> None:
    """Where every rank says the same, no machine is named."""
    own = failure("user", rank=0, at=9, sentence="seed differs on rank 2")
    for sentence, expected in [
        (own.sentence, own.sentence),
        ("there is no data", "on b: there is no data"),
    ]:
        seen, store = peers()
        other = failure("user", rank=2, at=5, sentence=sentence)
        store.set("failure/1", json.dumps(asdict(other)))
        assert seen.first_failure(own).sentence == expected
        assert json.loads(store.get("failure/0"))["sentence"] == own.sentence


def test_a_machine_that_reports_nothing_was_lost(
    peers: Making, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If ranks of this machine lost their peers only; else they are the reason."""
    monkeypatch.setattr(machines, "SILENT_S", 0.2)
    seen, _ = peers()
    found = seen.first_failure(failure("peer", rank=0, at=1))
    assert (found.rank, found.kind) == (2, "machine")
    assert found.sentence.startswith("b (ranks 2, 3) was lost: it was switched off, its")
    seen, _ = peers()
    own = failure("crash", rank=1, at=1, sentence="rank 1 raised")
    assert seen.first_failure(own).sentence == "rank 1 on a raised"


@pytest.mark.full
def test_a_machine_that_still_ends_its_ranks_is_waited_for(
    peers: Making, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its report says which rank was late; it takes seconds."""
    monkeypatch.setattr(machines, "SILENT_S", 0.0)
    late = failure("late", rank=2, at=9)
    seen, store = peers()
    store.set("ending/1", "")
    check, asked = store.check, list[str]()

    def check_later(keys: list[str]) -> bool:
        asked.extend(keys)
        if asked.count("failure/1") == 10:
            store.set("failure/1", json.dumps(asdict(late)))
        return bool(check(keys))

    store.check = check_later
    assert seen.first_failure(failure("peer", rank=0, at=1)) == late


def test_a_store_that_is_gone_is_named(peers: Making) -> None:
    """With rank -1: there is nowhere to meet again."""
    seen, store = peers()

    def fail(*_: object) -> None:
        raise dist.DistNetworkError("Connection reset")

    store.set = fail
    found = seen.first_failure(failure("peer", rank=0, at=1))
    assert (found.rank, found.kind) == (-1, "machine")
    assert found.sentence.startswith("a:1, where the machines meet, is lost")


def test_the_watch_notices_a_failure_elsewhere_and_shows_that_this_machine_lives(
    peers: Making, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the others wait for its report."""
    monkeypatch.setattr(machines, "WATCH_S", 0.02)
    seen, store = peers()
    timed_out = failure("peer", rank=2, at=1, sentence="Timed out waiting")
    store.set("failure/1", json.dumps(asdict(timed_out)))
    wait_for(lambda: store.check(["ending/0"]))
    assert seen.failures == {1: timed_out}


@pytest.mark.full
def test_a_machine_says_that_its_ranks_have_ended_before_it_leaves(peers: Making) -> None:
    """Else the others, which ended before, would wait for it in vain."""
    found, store = peers(own=0)
    store.set("ended/1", "")
    wait_for(lambda: found.ended)
    wait_for(lambda: found.all_ended(limit_s=1000.0))
    assert store.check(["ended/0"])


@pytest.mark.full
def test_no_machine_leaves_before_the_ranks_of_all_have_ended(peers: Making) -> None:
    """A restart needs all of them; a limit lets them leave, and so does the end of rank 0."""
    found, store = peers(own=1)
    assert not found.ended
    assert found.all_ended(limit_s=1000.0) is None
    wait_for(lambda: store.check(["ended/1"]))
    assert found.all_ended(limit_s=1000.0) is None
    store.set("ended/0", "")
    wait_for(lambda: found.all_ended(limit_s=1000.0))
    assert found.ended == {0, 1}
    found, _ = peers(own=1)
    assert found.all_ended(limit_s=0.0)


@pytest.mark.full
@pytest.mark.parametrize("own", first_of([0, 1]))
def test_without_the_store_a_run_is_complete_once_rank_0_has_ended(peers: Making, own: int) -> None:
    """Rank 0 writes the result, so its machine may leave; the others cannot know."""

    def lost(*_: object) -> None:
        raise dist.DistNetworkError("Connection reset by peer")

    found, store = peers(own=own)
    store.check = lost
    assert wait_for(lambda: [found.all_ended(limit_s=1000.0)] != [None])
    assert found.all_ended(limit_s=1000.0) is (own == 0)


def test_the_machine_with_the_store_waits_until_the_others_have_read_it(
    peers: Making,
) -> None:
    """Its end closes the store, and they would report that it is lost."""
    found, store = peers(serves=True)
    check, asked = store.check, list[bool]()

    def look(keys: list[str]) -> bool:
        if keys == ["left/1"]:
            asked.append(bool(check(keys)))
            store.set("left/1", "")  # after the first look
            return asked[-1]
        return bool(check(keys))

    store.set("failure/1", json.dumps(asdict(failure("peer", rank=2, at=2))))
    store.check = look
    found.first_failure(failure("crash", rank=0, at=1))
    assert asked == [False, True]
