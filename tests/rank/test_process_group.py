"""The address where ranks meet is checked before any rank waits for another."""

import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from commands import error_line, run_command
from ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh

from ddp_runner.config.sections import BackendConfig
from ddp_runner.dist_env import DistEnv, dist_env
from ddp_runner.errors import UserError
from ddp_runner.rank import process_group as module
from ddp_runner.rank.process_group import process_group

BY_HAND = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "1"}


def env_of(environ: dict[str, str]) -> DistEnv:
    """Return the facts of a rank."""
    env = dist_env(environ)
    assert env is not None
    return env


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
@pytest.mark.parametrize("scheme", ["env", "tcp"])
def test_ranks_set_by_hand_on_several_machines_say_how_many_are_on_each(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], host: str, scheme: str
) -> None:
    """Otherwise they would wait on this machine in vain, without an error on rank 0."""
    for name, value in BY_HAND.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1" if scheme == "tcp" else host)
    place = f"tcp://{host}:1" if scheme == "tcp" else "env://"
    rule = f"{host}, where they meet, is another; .*set LOCAL_RANK and LOCAL_WORLD_SIZE too"
    env, backend = env_of({**BY_HAND, "MASTER_ADDR": host}), BackendConfig(name="gloo")
    with (
        pytest.raises(UserError, match=rule),
        process_group(env, backend=backend, init_method=place),
    ):
        pass
    assert re.search(f"^error: .*{rule}", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("more", "place"),
    [
        ({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}, "env://"),
        ({"TORCHELASTIC_RUN_ID": "x"}, "env://"),
        ({}, "tcp://localhost:1"),
        ({}, "file:///shared/place"),
    ],
)
def test_ranks_that_know_their_machines_meet_anywhere(
    monkeypatch: pytest.MonkeyPatch, more: dict[str, str], place: str
) -> None:
    """A launcher says it, or the variables do, or they need no other machine."""
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")
    module._validate_host(env_of({**BY_HAND, **more, "MASTER_ADDR": "192.0.2.1"}), place)


def timeouts(env: DistEnv) -> list[timedelta]:
    """Return the timeout of the first group, and of others that are made later."""
    mesh = init_device_mesh("cpu", (1, env.world_size), mesh_dim_names=("one", "all"))
    groups: list[Any] = [dist.group.WORLD, dist.new_group([0, 1]), mesh.get_group("one")]
    dist.barrier()  # a rank that ends would close connections that another still makes
    return [group._get_backend(torch.device("cpu")).options._timeout for group in groups]


def test_every_group_has_the_timeout_of_the_backend() -> None:
    """Torch's default is half an hour, in which a rank that hangs is not noticed."""
    for first, *others in run_ranks(timeouts, 2):
        assert others == [first, first]
        assert first < timedelta(minutes=30)


def test_an_interface_that_does_not_exist_is_one_line(tmp_path: Path) -> None:
    """A cluster's profile may export its name for all machines."""
    absent = {"GLOO_SOCKET_IFNAME": "eth9"}
    end = run_command("model=toy", "world_size=2", folder=tmp_path, environ=absent)
    sentence = error_line(end)
    assert "the network interface eth9 (GLOO_SOCKET_IFNAME) has no address; bring it up" in sentence
