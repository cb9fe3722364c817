"""W&B's client gets the id of a run: one for all attempts, another one in another project."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddp_runner.errors import UserError
from ddp_runner.tracking.trackers.tracker import TrackedRun
from ddp_runner.tracking.trackers.wandb import WandB


class Client:
    """Stands for the module wandb: keeps the keywords of each init, and fails if it is mute."""

    Settings = dict

    def __init__(self, **environ: str) -> None:
        known = {"project": None, "entity": None, "mode": "online", "root_dir": "."} | environ
        self.settings, self.is_mute = SimpleNamespace(**known), False
        self.given, self.in_use = list[dict[str, Any]](), set[str]()

    def teardown(self) -> None:
        """End the service, which takes no id twice."""
        self.in_use.clear()

    def setup(self) -> "Client":
        """Return what has the settings of the environment."""
        return self

    def init(self, **keys: Any) -> Any:
        """Return a run with the id."""
        assert keys["id"] not in self.in_use
        self.in_use.add(keys["id"])
        self.given.append(keys)
        if self.is_mute:
            raise TimeoutError
        return SimpleNamespace(id=keys["id"], define_metric=lambda *names, **keys: None)


def begin(client: Client, *, earlier_id: str | None = None, **keys: Any) -> str:
    """Return the id that a session's tracker returns."""
    tracker = WandB(**keys)
    tracker._wandb = client
    return tracker.begin(run(earlier_id))


def run(earlier_id: str | None) -> TrackedRun:
    """Return a run."""
    return TrackedRun(Path("run"), "x", None, {}, (), None, {}, None, 1.0, earlier_id)


def test_a_run_goes_on_in_its_project_alone() -> None:
    """Whether the key or the environment names it. Another project gets a run of its own."""
    first = begin(Client(), project="one")
    assert begin(Client(project="one"), earlier_id=first) == first
    assert begin(Client(project="two"), earlier_id=first, project="one") == first
    assert begin(Client(project="two"), earlier_id=first) != first
    assert begin(Client(), earlier_id=first, project="one", entity="we") != first
    assert begin(Client(), project="one") != first


def test_attempts_have_one_id() -> None:
    """Each leaves a folder of that id; the client's service would not take it twice."""
    client, tracker = Client(), WandB()
    client.is_mute, tracker._wandb = True, client
    for _ in range(2):
        with pytest.raises(TimeoutError):
            tracker.begin(run(None))
    client.is_mute = False
    number = tracker.begin(run(None))
    assert [one["id"] for one in client.given] == [number] * 3
    assert {one["resume"] for one in client.given} == {"allow"}


@pytest.mark.parametrize(
    ("environ", "keys"), [({"mode": "offline"}, {}), ({}, {"mode": "offline"})]
)
def test_nothing_is_resumed_offline(environ: dict[str, str], keys: dict[str, Any]) -> None:
    """The client would warn that it cannot."""
    client = Client(**environ)
    begin(client, earlier_id="x", **keys)
    assert client.given[0]["resume"] is None


@pytest.mark.parametrize("by_key", [True, False])
def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path, by_key: bool) -> None:
    """W&B alone would write to /tmp and say nothing: offline, that is the only copy there is."""
    (tmp_path / "file").touch()
    folder, client = tmp_path / "file" / "wandb", Client(root_dir=str(tmp_path))
    keys = {"dir": str(folder)} if by_key else {}
    if not by_key:
        client.settings.root_dir = str(folder)
    with pytest.raises(UserError, match=r"trackers\.wandb\.dir \(.*\) cannot be created \(Not a"):
        begin(client, **keys)
    assert client.given == []
    begin(client, dir=str(tmp_path / "new" / "folder"))
    assert (tmp_path / "new" / "folder").is_dir()
