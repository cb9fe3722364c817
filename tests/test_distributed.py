"""Ranks reduce, agree, stop together and meet; only this machine can reach their group."""

import os
import signal
import socket
import time
from dataclasses import replace
from datetime import timedelta
from functools import partial
from operator import le, lt
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import psutil
import pytest
import torch
import torch.distributed as dist
from ranks import GLOO, RankFailedError, run_ranks
from torch import nn

from ddp_runner import distributed
from ddp_runner.dist_env import DistEnv
from ddp_runner.distributed import (
    MOST_STEPS,
    StopVote,
    broadcast_tensors,
    ensure_agreement,
    ensure_own_devices,
    from_rank_zero,
    gather_objects,
    sum_over_ranks,
)
from ddp_runner.errors import UserError
from ddp_runner.parallelism.shards import send_module
from ddp_runner.rank.process_group import (
    HOST,
    _open_store,
    fresh_store,
    loopback_store,
    process_group,
    store_of_rank_zero,
)


def reductions(env: DistEnv) -> dict[str, Any]:
    """Call each collective with a value of this rank's own."""
    return {
        "sum": sum_over_ranks([env.rank + 0.5, 2**53 - env.rank]),
        "gather": gather_objects((env.rank, "ü" * env.rank)),
    }


def test_reductions_give_every_rank_the_same() -> None:
    """Sums are in float64, gathered values are in order of rank."""
    for result in run_ranks(reductions, 3):
        assert result["sum"] == [4.5, 3.0 * 2**53 - 3]
        assert result["gather"] == [(0, ""), (1, "ü"), (2, "üü")]


def agreement(env: DistEnv, facts: list[dict[str, object]]) -> str:
    """Compare this rank's facts with the others'."""
    try:
        ensure_agreement(facts[env.rank])
    except UserError as error:
        return str(error)
    return "agreed"


def test_disagreement_names_key_values_and_ranks() -> None:
    """Every rank gets the key that differs, from a value to a key that one rank lacks."""
    same = {"train.epochs": 3, "versions": {"torch": "2.15"}}
    assert run_ranks(agreement, 3, [same] * 3) == ["agreed"] * 3
    for other, parts in (
        (same | {"train.epochs": 4}, ("train.epochs is 3 on rank 0", "4 on rank 2")),
        ({"train.epochs": 3}, ("versions is {'torch': '2.15'} on rank 0", "None on rank 2")),
    ):
        first, *others = run_ranks(agreement, 3, [same, same, other])
        assert others == [first, first]
        assert all(part in first for part in parts)


def optional_agreement(env: DistEnv, revisions: list[str | None]) -> str:
    """Compare what a rank may not know."""
    try:
        ensure_agreement({"seed": 0}, optional={"git_revision": revisions[env.rank]})
    except UserError as error:
        return str(error)
    return "agreed"


def test_a_rank_whose_git_is_slow_agrees_with_any_revision() -> None:
    """Only revisions that are known can differ; the first rank may be the one that knows none."""
    assert run_ranks(optional_agreement, 3, ["a", None, "a"]) == ["agreed"] * 3
    assert run_ranks(optional_agreement, 2, [None, None]) == ["agreed"] * 2
    for error_message in run_ranks(optional_agreement, 3, [None, "a", "b"]):
        assert "git_revision is a on rank 1 and b on rank 2" in error_message


def from_first(env: DistEnv, fails: bool) -> str:
    """Ask rank 0 for a value, or for the reason why there is none."""

    def compute() -> str:
        if fails:
            raise UserError("no folder")
        return f"from {env.rank}"

    try:
        return from_rank_zero(compute)
    except UserError as error:
        return f"rejected: {error}"


def test_what_rank_zero_cannot_do_every_rank_is_reported() -> None:
    """All ranks get the value, or all raise the same sentence; none is left waiting."""
    assert run_ranks(from_first, 3, False) == ["from 0"] * 3
    assert run_ranks(from_first, 3, True) == ["rejected: no folder"] * 3


def agents_store(env: DistEnv, port: int) -> tuple[list[bytes], bool]:
    """Meet at an agent's store twice, as a group and the one that takes its place."""
    first = fresh_store(env, HOST, port, timeout=timedelta(seconds=30))
    first.set(f"address/{env.rank}", "of a rank that is gone")
    second = fresh_store(env, HOST, port, timeout=timedelta(seconds=30))
    is_clean = not second.check([f"address/{rank}" for rank in range(env.world_size)])
    second.set(f"hello/{env.rank}", str(env.rank))
    return [second.get(f"hello/{rank}") for rank in range(env.world_size)], is_clean


def test_a_restarted_group_reads_none_of_the_keys_of_the_one_before() -> None:
    """The store of torchrun outlives a worker group; its addresses would make the next one fail."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    read = run_ranks(agents_store, 3, server.port, backend=None)
    assert read == [([b"0", b"1", b"2"], True)] * 3


def test_a_rank_that_greeted_and_died_is_not_taken_for_the_one_that_comes() -> None:
    """Its greeting, even one that was answered, waits for nobody."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    stale = dist.PrefixStore("ddp_runner", server)
    stale.set("greeting/1", "dead")
    stale.set("answer/dead", "group-dead")
    read = run_ranks(agents_store, 2, server.port, backend=None)
    assert read == [([b"0", b"1"], True)] * 2


def own_devices(env: DistEnv, gpus: list[str], backend: str) -> str:
    """Compare the ranks' GPUs, as if each had the one that is named."""
    properties = SimpleNamespace(uuid=gpus[env.rank])
    try:
        with patch.object(torch.cuda, "get_device_properties", return_value=properties):
            ensure_own_devices([torch.device("cuda", 0)], backend=backend)
    except UserError as error:
        return str(error)
    return "agreed"


def test_ranks_that_share_a_gpu_are_named_under_nccl() -> None:
    """It would end in an error of NCCL's own; gloo lets them share."""
    for answer in run_ranks(own_devices, 3, ["a", "b", "a"], "nccl"):
        assert answer.startswith(
            "ranks 0 and 2 both have GPU a, which backend=nccl does not support"
        )
    assert run_ranks(own_devices, 3, ["a", "b", "c"], "nccl") == ["agreed"] * 3
    assert run_ranks(own_devices, 3, ["a", "b", "a"], "gloo") == ["agreed"] * 3


def stop_steps(
    env: DistEnv, wishes: dict[int, int], *, num_steps: int = 10, vote_s: float = 0.0
) -> int:
    """Return the step at which this rank stops; wishes holds each rank's first step of wanting."""
    distributed.VOTE_S = vote_s
    vote = StopVote()
    for step in range(1, num_steps + 1):
        time.sleep(0.005 * env.rank)  # ranks do not run in step
        dist.all_reduce(torch.ones(3))  # as a backward would, beside the vote
        if vote.agreed(partial(le, wishes.get(env.rank, num_steps + 1), step)):
            return step
    vote.settle()
    return 0


@pytest.mark.parametrize(
    ("wishes", "latest"), [({}, 0), ({0: 4}, 5), ({2: 4}, 5), ({1: 7, 2: 3}, 4), ({2: 10}, 0)]
)
def test_one_rank_that_wants_to_stop_stops_all_at_one_step(
    wishes: dict[int, int], latest: int
) -> None:
    """Whoever asks first, every rank stops within the next step, and none without being asked."""
    first, *others = run_ranks(stop_steps, 3, wishes)
    assert others == [first, first]
    assert (first > 0) == (latest > 0)
    assert first <= latest


def test_short_steps_share_a_vote() -> None:
    """Of steps of 5 ms, about eight in 40 ms; a wish is heard by the end of the next vote."""
    num_steps = 200
    quiet = run_ranks(votes_of, 2, num_steps, 0.04)
    assert num_steps / MOST_STEPS <= quiet[0] == quiet[1] <= num_steps / 2
    first, second = run_ranks(partial(stop_steps, num_steps=num_steps, vote_s=0.04), 2, {1: 50})
    assert 50 <= first == second <= 50 + MOST_STEPS + 1


def test_steps_that_get_slow_wait_for_few_votes() -> None:
    """A stop is heard within two rounds of votes, however long the steps have become."""
    assert run_ranks(slowing_steps, 2) == [True, True]


def slowing_steps(env: DistEnv) -> bool:
    """Return whether a wish is heard within two rounds after 200 steps of almost no time."""
    distributed.VOTE_S = 0.25
    vote, asked = StopVote(), 200
    for step in range(1, 3 * asked):
        time.sleep(0.02 if step > asked else 0.0)
        dist.all_reduce(torch.ones(3))
        if vote.agreed(partial(lt, asked, step)):
            return step - asked <= 2 * MOST_STEPS + 1
    raise AssertionError("the wish was not heard")


def votes_of(env: DistEnv, num_steps: int, vote_s: float) -> int:
    """Return how many votes begin in steps of about 5 ms."""
    with patch.object(dist, "all_reduce", wraps=dist.all_reduce) as spy:
        stop_steps(env, {}, num_steps=num_steps, vote_s=vote_s)
    return spy.call_count - num_steps


def test_a_single_rank_stops_at_once() -> None:
    """Nobody else must be asked."""
    assert run_ranks(stop_steps, 1, {0: 4}) == [4]


def buffers(env: DistEnv) -> list[float]:
    """Return the statistics of a BatchNorm that had a rank's own, after the broadcast."""
    norm = nn.BatchNorm1d(2)
    norm.running_mean.fill_(env.rank + 1)
    norm.num_batches_tracked.fill_(env.rank + 7)
    broadcast_tensors([*norm.buffers()])
    return [*norm.running_mean.tolist(), int(norm.num_batches_tracked)]


def test_buffers_become_those_of_rank_zero() -> None:
    """Both floating-point statistics and integer counts do."""
    assert run_ranks(buffers, 2) == [[1.0, 1.0, 7]] * 2


def channels_last_state(env: DistEnv) -> torch.Tensor:
    """Return a weight whose memory is in another order than its shape, after the broadcast."""
    module = nn.Conv2d(2, 3, kernel_size=2).to(memory_format=torch.channels_last)
    nn.init.constant_(module.weight, env.rank)
    send_module(module, module.state_dict() if env.is_rank_zero else None, group=None)
    assert module.weight.is_contiguous(memory_format=torch.channels_last)
    return module.weight.detach()


def test_a_channels_last_weight_becomes_that_of_rank_zero() -> None:
    """The collective takes contiguous tensors alone, and would fill a copy."""
    for weight in run_ranks(channels_last_state, 2):
        assert not weight.any()


def group_life(env: DistEnv, store: str, fails: bool) -> tuple[bool, bool]:
    """Return whether a group was there inside the block, and after it."""
    inside = False
    try:
        with process_group(env, backend=GLOO, init_method=store):
            inside = dist.is_initialized()
            sum_over_ranks([0.0])  # all are connected then, and none breaks its peers' connecting
            if fails:
                raise KeyError
    except KeyError:
        pass
    return inside, dist.is_initialized()


@pytest.mark.parametrize("fails", [False, True])
def test_group_is_destroyed_on_success_only(tmp_path: Any, fails: bool) -> None:
    """A failing rank must not wait for its peers in a last collective."""
    store = (tmp_path / "store").as_uri()
    assert run_ranks(group_life, 2, store, fails, backend=None) == [(True, fails)] * 2


def listening_hosts(env: DistEnv) -> list[str]:
    """Return the addresses that this rank listens on while its group is in use."""
    # Where the host's name stands for 127.0.0.1 gloo would choose it by itself.
    assert os.environ["GLOO_SOCKET_IFNAME"] in psutil.net_if_addrs()
    sum_over_ranks([1.0])
    sockets = psutil.Process().net_connections(kind="inet")
    hosts = [one.laddr.ip for one in sockets if one.status == psutil.CONN_LISTEN]
    sum_over_ranks([1.0])  # no rank ends while another looks
    return hosts


def test_single_machine_ranks_listen_on_loopback_only() -> None:
    """Nobody on the network can reach a rank of a run on one machine."""
    for hosts in run_ranks(listening_hosts, 2):
        assert hosts
        assert {host.removeprefix("::ffff:") for host in hosts} <= {"127.0.0.1", "::1"}


def meet(env: DistEnv, port: int) -> float:
    """Meet at a port; return how long this rank would wait for the others."""
    store = loopback_store(env, port, timeout=timedelta(seconds=77))
    store.set(f"rank-{env.rank}", "here")
    store.wait(["rank-0", "rank-1"])
    if env.rank == 0:  # it serves the store, and rank 1 may still wait
        store.wait(["rank-1 has met"])
    else:
        store.set("rank-1 has met", "")
    waits: timedelta = store.timeout
    return waits.total_seconds()


def test_ranks_meet_again_at_the_port_of_a_group_that_was_killed() -> None:
    """Its connections linger in the kernel; each rank waits for its timeout."""
    with socket.socket() as listener, socket.socket() as peer:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as that group had it
        listener.bind((HOST, 0))
        listener.listen()
        port = listener.getsockname()[1]
        peer.connect((HOST, port))
        accepted, _ = listener.accept()
        accepted.close()  # first, and so the port is the one that lingers
        assert peer.recv(1) == b""
    assert run_ranks(meet, 2, port, backend=None) == [77.0, 77.0]


@pytest.mark.parametrize(("init_method", "port"), [("env://", None), ("file:///store", "1")])
def test_where_no_port_is_named_torch_has_the_last_word(
    init_method: str, port: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says what is wrong with the address, or needs none."""
    monkeypatch.setenv("MASTER_ADDR", HOST)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    if port is not None:
        monkeypatch.setenv("MASTER_PORT", port)
    env = DistEnv(rank=0, local_rank=0, world_size=1, local_world_size=1)
    assert _open_store(env, init_method, timedelta(seconds=1), is_local=True) is None


PATIENT = replace(GLOO, timeout_s=36_000)  # longer than any test


def misbehave(env: DistEnv, how: str) -> None:
    """Fail on rank 1 while the others sit in a collective."""
    if env.rank == 1:
        if how == "raise":
            raise LookupError("rank one's own words")
        if how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(PATIENT.timeout_s)
    sum_over_ranks([1.0])


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise", "rank 1: .*rank one's own words"),
        ("die", "rank 1: ended with exit code -9|Connection closed by peer"),
        pytest.param("hang", r"no result from ranks \[0, 1, 2\] in time", marks=pytest.mark.full),
    ],
)
def test_failing_rank_fails_the_test_at_once(how: str, message: str) -> None:
    """run_ranks itself never waits for peers that are stuck, and leaves none behind."""
    with pytest.raises(RankFailedError, match=f"(?s){message}"):
        run_ranks(misbehave, 3, how, backend=PATIENT, timeout_s=2 if how == "hang" else 300)


def test_a_rank_waits_until_rank_0_answers_and_says_where() -> None:
    """It does not use torch's client, which prints C++ frames or waits for ever."""
    env = DistEnv(rank=1, local_rank=0, world_size=2, local_world_size=1, launcher="own")
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        port = listener.getsockname()[1]
        sentence = f"rank 0 does not answer at {HOST}:{port} .Connection refused"
        with pytest.raises(dist.DistNetworkError, match=sentence):
            store_of_rank_zero(env, HOST, port, timeout=timedelta(seconds=0.1))
        listener.listen()  # and no answer, as from a suspended rank
        with pytest.raises(dist.DistNetworkError, match="it may be suspended"):
            store_of_rank_zero(env, HOST, port, timeout=timedelta(seconds=0.5))


def meeting_place(env: DistEnv, port: int) -> str:
    """Meet at rank 0's store and tell the others something."""
    store = store_of_rank_zero(env, HOST, port, timeout=timedelta(seconds=600))
    store.set(f"rank {env.rank}", str(env.rank))
    told = [store.get(f"rank {rank}").decode() for rank in range(env.world_size)]
    store.set(f"done {env.rank}", "")
    if env.is_rank_zero:  # it serves the store
        store.wait([f"done {rank}" for rank in range(env.world_size)])
    return " ".join(told)


def test_the_ranks_of_several_machines_share_a_store() -> None:
    """It does not matter which rank comes first."""
    with socket.socket() as free:
        free.bind((HOST, 0))
        port = free.getsockname()[1]
    assert run_ranks(meeting_place, 2, port) == ["0 1", "0 1"]
