"""In one process, machines of a run meet, form attempts and name the first failure."""

import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from commands import free_port, wait_for
from configs import resolved
from tiers import first_of, only

from ddp_runner.config.sections import LaunchConfig
from ddp_runner.errors import UserError
from ddp_runner.host.network import Link
from ddp_runner.job import Failure, Job
from ddp_runner.launch import hub, machines
from ddp_runner.launch.group import Group
from ddp_runner.launch.hub import Machine, run_failure
from ddp_runner.launch.machines import Machines

Start = Callable[..., tuple[Machines, Future[Group | None]]]
CONFIG, _ = resolved("model=toy", "world_size=2")


def failure(kind: str, *, rank: int, at: int = 1, sentence: str = "rank failed") -> Failure:
    """Return a rank's failure at a time."""
    return Failure(rank=rank, kind=kind, sentence=sentence, time_ns=at)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start machines in threads of this process, so that all have one host name."""
    port, made, over = free_port(), list[Machines](), list[bool]()
    (tmp_path / "run.json").touch()

    def begin(
        node_rank: int | None = None,
        *,
        nnodes: int = 2,
        num_ranks: int | None = 1,
        has_run: bool = False,
        serves: bool = False,
        endpoint: str = "",
        rdzv_id: str = "run",
        join_timeout_s: float = 60.0,
    ) -> tuple[Machines, Future[Group | None]]:
        launch = LaunchConfig(
            nnodes=nnodes,
            node_rank=node_rank,
            rdzv_id=rdzv_id,
            rdzv_endpoint=endpoint or f"127.0.0.1:{port}",
            join_timeout_s=join_timeout_s,
        )
        config = replace(CONFIG, launch=launch, world_size=(num_ranks or 1) * nnodes)
        job = Job(
            config, 0.0, {}, run_dir=tmp_path if has_run else None, lacks_run=num_ranks is None
        )
        machine = Machines(job)
        made.append(machine)
        future = pool.submit(machine.join, lambda: bool(over))
        wait_for(lambda: machine._hub if serves else machine._link or future.done())
        return machine, future

    with ThreadPoolExecutor() as pool:
        yield begin
        over.append(True)
    with ThreadPoolExecutor() as pool:
        for one in made:
            pool.submit(one.close)


@pytest.fixture
def pair(start: Start) -> list[Machines]:
    """Return two machines of two ranks each, once they have met; the first serves the hub."""
    started = [start(0, num_ranks=2, serves=True), start(1, num_ranks=2)]
    for index, (_, future) in enumerate(started):
        group = future.result()
        assert group is not None
        assert group.index == index
    return [machine for machine, _ in started]


def verdicts(pair: Sequence[Machines], failures: Sequence[Failure]) -> list[Failure]:
    """Let both machines tell how they failed; return what each names."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(Machines.agree_on_failure, pair, failures))


PLACES = {
    "that with the hub": ([{"serves": True}, {}], 0),
    "that with the run": ([{"serves": True}, {"has_run": True}], 1),
    "number 0": ([{"node_rank": 0, "serves": True}, {"node_rank": 1, "has_run": True}], 0),
    "a number, before none": ([{"serves": True}, {"node_rank": 7}], 1),
}


@pytest.mark.parametrize("places", only("that with the hub", PLACES))
def test_the_first_reason_that_applies_gives_a_machine_rank_0(
    start: Start, places: tuple[Sequence[Mapping[str, Any]], int]
) -> None:
    """The reasons are its number, the run's folder and the hub; both learn rank 0's address."""
    facts, first = places
    groups = [future.result() for _, future in [start(**one) for one in facts]]
    assert [group.index for group in groups if group] == [first, 1 - first]
    ((address, port),) = {(group.address, group.port) for group in groups if group}
    assert address == "127.0.0.1"
    assert port > 0


def test_a_machine_says_how_many_are_missing_and_a_spare_one_that_the_run_is_over(
    start: Start,
) -> None:
    """A spare machine waits for a lost machine's place."""
    first, met = start(serves=True)
    wait_for(lambda: first._awaited().startswith("1 of 2 machines at 127.0.0.1:"))
    second, _ = start()
    assert met.result() is not None
    spare, rejected = start()
    wait_for(lambda: spare._awaited().startswith("a place at 127.0.0.1:"))
    assert first.all_ended() is None
    wait_for(second.all_ended)
    wait_for(first.all_ended)
    with pytest.raises(UserError, match=r"the run that meets at .* has ended; start the same"):
        rejected.result()


def test_a_place_that_is_left_is_taken_by_the_next(start: Start) -> None:
    """A machine that ends while it waits no longer counts."""
    first, met = start(serves=True, nnodes=3)
    left, _ = start(nnodes=3)
    wait_for(lambda: first._missing == 1)
    assert left._link is not None
    left._link.socket.shutdown(socket.SHUT_RDWR)
    wait_for(lambda: first._missing == 2)
    assert not met.done()


MISFITS = {
    " starts 2 ranks and .* 1; give each machine the same launch.nproc_per_node": [
        *({"serves": True, "num_ranks": 2}, {})
    ],
    "both have launch.node_rank=1; give each machine its own number": [
        *({"serves": True, "nnodes": 3}, {"node_rank": 1, "nnodes": 3}),
        {"node_rank": 1, "nnodes": 3},
    ],
    "launch.nnodes is 3 here and 2 where the machines meet; start the same": [
        *({"serves": True}, {"nnodes": 3})
    ],
    "launch.rdzv_id differs from the id where the machines meet; start the same": [
        *({"serves": True}, {"rdzv_id": "other"})
    ],
}


@pytest.mark.parametrize(("sentence", "facts"), first_of(list(MISFITS.items())))
def test_machines_that_do_not_fit_together_are_named(
    start: Start, sentence: str, facts: Sequence[Mapping[str, int]]
) -> None:
    """The message names both, and the setting of each."""
    *_, (_, rejected) = [start(**one) for one in facts]
    with pytest.raises(UserError, match=sentence):
        rejected.result()


def test_a_machine_without_the_run_starts_as_many_ranks_as_the_others(start: Start) -> None:
    """It does not know the config yet, which rank 0 sends it."""
    futures = [start(serves=True, num_ranks=3)[1], start(num_ranks=None)[1]]
    assert [group.num_ranks for one in futures if (group := one.result())] == [3, 3]


def test_the_hub_is_not_opened_to_the_network(start: Start) -> None:
    """It listens on the address that the user names, and on no other."""
    first, _ = start(serves=True)
    assert first._hub is not None
    port = first._hub._listener.getsockname()[1]
    links = psutil.Process().net_connections("inet")
    listening = {link.laddr.ip for link in links if link.laddr.port == port and not link.raddr}
    assert listening == {"127.0.0.1"}


def test_the_machine_with_the_number_0_must_have_the_port(start: Start) -> None:
    """It cannot join another hub: the others look for this machine."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        _, rejected = start(0, endpoint=f"127.0.0.1:{port}")
        with pytest.raises(UserError, match=f"port {port} of this machine is in use and its"):
            rejected.result()


@pytest.mark.parametrize(
    ("host", "reason"),
    [
        pytest.param("127.0.0.1", "Connection refused", id="a number that does not serve"),
        pytest.param("no-such-host.invalid", "not known|resolution", marks=pytest.mark.full),
    ],
)
def test_a_machine_that_cannot_reach_the_hub_says_why_and_gives_up_in_time(
    start: Start, host: str, reason: str
) -> None:
    """It tries again and again until then."""
    port = free_port()
    _, rejected = start(1, endpoint=f"{host}:{port}", join_timeout_s=1.0)
    sentence = f"waited 1 s .* for {host}:{port}, where the 2 machines of the run meet .*({reason})"
    with pytest.raises(UserError, match=sentence):
        rejected.result()


@pytest.mark.parametrize("greeting", [b"SSH-2.0-OpenSSH\r\n", b""], ids=["ssh", "silent"])
def test_another_server_at_the_port_is_named(
    start: Start, monkeypatch: pytest.MonkeyPatch, greeting: bytes
) -> None:
    """It may send a greeting, or wait for one."""
    monkeypatch.setattr(machines, "ANSWER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor() as pool:
        kept = pool.submit(server.accept)
        endpoint = f"127.0.0.1:{server.getsockname()[1]}"
        machine, _ = start(1, endpoint=endpoint)
        with kept.result()[0] as accepted:
            accepted.send(greeting)
            wait_for(lambda: "(something else listens there, or it is" in machine._awaited())


def test_the_failure_that_came_first_is_named_with_its_machine(pair: list[Machines]) -> None:
    """Both machines name it, and not the rank that only lost its peer."""
    killed = failure("signal", rank=3, at=5, sentence="rank 3 was killed")
    peer = failure("peer", rank=0, at=4, sentence="rank 0 raised RuntimeError")
    named = verdicts(pair, [peer, killed])
    assert named[0] == named[1]
    assert named[0].sentence == f"rank 3 on {socket.gethostname()} was killed"
    assert all(one.must_end for one in pair)


def test_machines_meet_again_after_a_failure(pair: list[Machines]) -> None:
    """They restart, and the ranks get another port."""
    ports = {one._joined.port for one in pair if one._joined}
    verdicts(pair, [failure("peer", rank=0), failure("crash", rank=2)])
    with ThreadPoolExecutor() as pool:
        groups = [pool.submit(one.join, lambda: False) for one in pair]
        met = [future.result() for future in groups]
    assert [one.index for one in met if one] == [0, 1]
    assert {one.port for one in met if one}.isdisjoint(ports)
    assert not any(one.must_end for one in pair)


def seen_by_hub(*states: tuple[str, Failure | None]) -> list[Machine]:
    """Return what the hub knows of two machines."""
    with socket.socket() as connection:
        link = Link(connection)
    return [Machine(link, "", {}, state, failed) for state, failed in states]


GROUP = Group(["a", "b"], 0, 2)


def test_what_the_user_can_fix_is_reported_with_its_machine() -> None:
    """If every rank reports the same mistake, the message names no machine."""
    ours = failure("user", rank=0, at=9, sentence="seed differs on rank 2")
    for sentence, expected in [
        (ours.sentence, ours.sentence),
        ("there is no data", "on b: there is no data"),
    ]:
        other = failure("user", rank=2, at=5, sentence=sentence)
        joined = seen_by_hub(("failed", ours), ("failed", other))
        assert run_failure(GROUP, joined).sentence == expected


def test_a_failure_of_no_rank_is_named_with_its_machine() -> None:
    """The fork server may have been killed, for example."""
    assert GROUP.with_host("the process was killed", 2) == "on b: the process was killed"
    assert GROUP.with_host("rank 2 raised", 2) == "rank 2 on b raised"


@pytest.mark.parametrize("state", ["gone", "running"])
def test_a_machine_that_reports_nothing_was_lost(state: str) -> None:
    """It is lost only if the others merely lost their peers; otherwise they are the reason."""
    named = run_failure(GROUP, seen_by_hub(("failed", failure("peer", rank=0)), (state, None)))
    assert (named.rank, named.kind) == (2, "machine")
    assert named.sentence.startswith("b (ranks 2, 3) was lost: it was switched off, its")
    ours = failure("crash", rank=1, sentence="rank 1 on a raised")
    assert run_failure(GROUP, seen_by_hub(("failed", ours), (state, None))) == ours


def test_a_machine_that_still_ends_its_ranks_is_waited_for(
    pair: list[Machines], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its report takes seconds, and says which rank was late."""
    monkeypatch.setattr(hub, "SILENT_S", 0.0)
    late = failure("late", rank=2, at=9, sentence="rank 2 was late")
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(pair[0].agree_on_failure, failure("peer", rank=0))
        wait_for(lambda: pair[1].must_end)
        time.sleep(0.5)
        assert not answer.done()
        assert pair[1].agree_on_failure(late).kind == "late"
        assert answer.result().kind == "late"


def test_a_timeout_elsewhere_says_that_ranks_waited_in_vain(pair: list[Machines]) -> None:
    """Then the other machine can name its late rank."""
    timed_out = failure("peer", rank=2, sentence="Timed out waiting")
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(pair[1].agree_on_failure, timed_out)
        wait_for(lambda: pair[0].must_end)
        assert pair[0].timed_out
        pair[0].agree_on_failure(failure("late", rank=0))
        assert answer.result().kind == "late"


def test_a_machine_that_is_lost_ends_the_others_at_once(pair: list[Machines]) -> None:
    """Its launcher was killed: the kernel closes its connection."""
    assert pair[1]._link is not None
    pair[1]._link.socket.shutdown(socket.SHUT_RDWR)
    wait_for(lambda: pair[0].must_end)
    named = pair[0].agree_on_failure(failure("peer", rank=0))
    assert (named.rank, named.kind) == (2, "machine")
    assert "(ranks 2, 3) was lost" in named.sentence


@pytest.mark.parametrize("index", [0, 1])
def test_a_hub_that_is_gone_is_named(pair: list[Machines], index: int) -> None:
    """No rank is named, as no machine can meet again. Rank 0's machine may have completed."""
    assert pair[0]._hub is not None
    pair[0]._hub.close(within_s=0.0)
    wait_for(lambda: pair[index]._link is None)
    assert pair[index].must_end
    assert pair[index].all_ended() is (index == 0)
    named = pair[index].agree_on_failure(failure("peer", rank=2 * index))
    assert (named.rank, named.kind) == (None, "machine")
    assert ", where the machines meet, is lost: its machine was" in named.sentence
    ours = failure("crash", rank=2 * index, sentence=f"rank {2 * index} raised")
    assert pair[index].agree_on_failure(ours).kind == "crash"


def test_no_machine_leaves_before_the_ranks_of_all_have_ended(
    pair: list[Machines], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restart needs all of them; a limit lets them leave."""
    first, second = pair
    assert second.all_ended() is None
    wait_for(lambda: first.has_ended)
    assert second.all_ended() is None
    with monkeypatch.context() as patched:
        patched.setattr(machines, "ENDING_S", -1e6)
        assert second.all_ended()
    wait_for(first.all_ended)
    wait_for(second.all_ended)


def test_the_hub_stays_until_the_others_know_the_end(pair: list[Machines]) -> None:
    """If it closed before they read the last message, they would report that it is lost."""
    verdicts(pair, [failure("crash", rank=0), failure("peer", rank=2)])
    with ThreadPoolExecutor() as pool:
        closing = pool.submit(pair[0].close)
        time.sleep(0.5)
        assert not closing.done()
        pair[1].close()
        closing.result()


JOIN = b'["join", {"nnodes": 2, "rdzv_id": "run"}]\n'
STRANGE = {
    "nested too deeply": b"[" * 200_000 + b"\n",
    "a join without facts": JOIN,
    "a join with wrong types": JOIN.replace(b"}", b', "number": "x", "port": 1}'),
    "no JSON": b"GET / HTTP/1.0\r\n\r\n",
    "no message": b'5\n"ab"\n[{}, {}]\n',
    "an end of no machine": b'["failed", {"rank": 0}]\n["ended", null]\n',
    "a line without an end": b"x" * 3_000_000,
}


@pytest.mark.parametrize("text", first_of(list(STRANGE.values()), num_quick=2))
def test_what_strangers_send_does_not_disturb_the_hub(start: Start, text: bytes) -> None:
    """Nobody is authenticated, so a port scanner may come before the other machines."""
    first, met = start(0, serves=True)
    assert first._hub is not None
    with socket.create_connection(first._hub._listener.getsockname()) as stranger:
        with suppress(OSError):  # the hub may close it first
            stranger.sendall(text)
        _, met_too = start(1)
        assert met.result() is not None
        assert met_too.result() is not None


def test_connections_that_do_not_join_are_closed(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes a descriptor of the launcher."""
    monkeypatch.setattr(hub, "SILENT_S", 0.1)
    first, _ = start(0, serves=True)
    assert first._hub is not None
    address = first._hub._listener.getsockname()
    with socket.create_connection(address, timeout=10.0) as stranger:
        assert stranger.recv(1) == b""


def test_a_hub_that_vanishes_while_machines_are_awaited_is_named(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its machine was switched off: nothing ends the connection, and no beat comes any more."""
    monkeypatch.setattr(machines, "LOST_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor() as pool:
        kept = pool.submit(server.accept)
        _, met = start(1, endpoint=f"127.0.0.1:{server.getsockname()[1]}")
        with kept.result()[0] as accepted:
            accepted.send(b'["beat", 1]\n')
            with pytest.raises(UserError, match=", where the machines meet, is lost: its machine"):
                met.result()


def test_another_server_before_the_hub_ends_no_ranks(start: Start) -> None:
    """A proxy may accept and close connections before the hub is there."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        second, met = start(1, endpoint=f"127.0.0.1:{port}")
        server.accept()[0].close()
        wait_for(lambda: second._reason == machines.OTHER_SERVER)
    start(0, endpoint=f"127.0.0.1:{port}", serves=True)
    assert met.result() is not None
    assert not second.must_end


def test_the_end_of_the_hub_ends_no_run_that_is_over(pair: list[Machines]) -> None:
    """A launcher that was suspended reads both at once."""
    first, second = pair
    assert second.all_ended() is None
    wait_for(first.all_ended)
    first.close()
    wait_for(lambda: second._link is None)
    assert not second.must_end
    assert second.all_ended()


def test_spare_machines_do_not_begin_anew_while_the_others_restart(
    pair: list[Machines], start: Start
) -> None:
    """They would begin another run: only the others know its folder."""
    spares = [start(num_ranks=2)[0] for _ in pair]
    wait_for(lambda: all(one._awaited().startswith("a place") for one in spares))
    verdicts(pair, [failure("peer", rank=0), failure("crash", rank=2)])
    time.sleep(0.5)
    assert not any(one._joined for one in spares)
    with ThreadPoolExecutor() as pool:
        assert all(pool.map(lambda one: one.join(lambda: False), pair))


def test_a_failure_is_known_of_a_machine_that_has_joined_again(
    pair: list[Machines], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lost the hub for a while, and then names its own failure."""
    first, second = pair
    monkeypatch.setattr(machines, "ANSWER_S", 0.0)
    ours = failure("crash", rank=2, sentence="rank 2 raised", at=1)
    assert second.agree_on_failure(ours).kind == "crash"
    monkeypatch.undo()
    with ThreadPoolExecutor() as pool:
        again = pool.submit(second.join, lambda: False)
        assert first.agree_on_failure(failure("peer", rank=0)).rank == 2
        assert pool.submit(first.join, lambda: False).result() is not None
        assert again.result() is not None
    assert not second.must_end
