"""The doctor on two hosts, one of which has another torch and a disk of its own."""

import json
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from unittest.mock import patch

from clusters import Host, needs, network
from commands import RUNNER, background, wait_for_end

from ddp_runner.tracking import provenance

pytestmark = needs()
DOCTOR = (*RUNNER[:-1], "ddp_runner.doctor")


def enter_with_torch(host: Host, version: str) -> None:
    """Move this process to a host on which torch has another version."""
    host.enter()
    versions = provenance.versions() | {"torch": version}
    # The command imports it by name, and reads it only then.
    patch.object(provenance, "versions", lambda: versions).start()


def test_two_hosts_are_examined_and_what_is_between_them(tmp_path: Path) -> None:
    """Rank 0 prints what differs; both end with exit code 1."""
    private = tmp_path / "private"
    with ExitStack() as stack:
        net = stack.enter_context(network(2, private=private))
        started = []
        for rank, host in enumerate(net.hosts):
            environ = {
                "RANK": str(rank),
                "GROUP_RANK": str(rank),
                "LOCAL_RANK": "0",
                "WORLD_SIZE": "2",
                "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": "n1",
                "MASTER_PORT": "29471",
            }
            folder = tmp_path / host.name
            process = background(
                "--json",
                f"--outputs={private / 'outputs'}",
                folder=folder,
                program=DOCTOR,
                environ=environ,
                prepare=partial(enter_with_torch, host, f"2.{rank}"),
            )
            started.append((stack.enter_context(process), folder))
        ends = [wait_for_end(*one) for one in started]
    assert [end.exit_code for end in ends] == [1, 1], ends[0].stderr
    assert ends[1].stdout == ""
    report = json.loads(ends[0].stdout)
    found = {one["name"]: one for one in report["between"]}
    assert found["software"]["value"] == "torch is 2.0 on n1 and 2.1 on n2"
    assert found["outputs"]["level"] == "warning"
    assert found["outputs"]["value"].startswith("n2 cannot see ")
    assert found["link"]["value"].startswith("n1 to n2: ")
    assert list(report["machines"]) == ["n1", "n2"]
    for number, findings in enumerate(report["machines"].values(), start=1):
        own = {one["name"]: one["value"] for one in findings}
        assert own["host name"] == f"n{number} is {net.hosts[number - 1].address} (eth0)"
        assert own["gloo takes"] == "eth0, by the host name"
