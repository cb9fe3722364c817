"""MLflow gets a run, with names that it accepts. The server is its own store in a folder."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ddp_runner.tracking.trackers.mlflow import HTTP, MLflow
from ddp_runner.tracking.trackers.tracker import MetricLine, TrackedRun

MOST = 250  # characters of a name


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the address of an empty store; forget the variables that the tracker sets."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    for name in (*HTTP, "MLFLOW_HTTP_REQUEST_TIMEOUT"):
        monkeypatch.setenv(name, "0")
    return (tmp_path / "store").as_uri()


def tracked(tmp_path: Path, *, earlier_id: str | None = None, **fields: Any) -> TrackedRun:
    """Return a run in a folder that exists."""
    folder = tmp_path / "run"
    folder.mkdir(exist_ok=True)
    known: dict[str, Any] = {"config": {}, "tags": (), "notes": None} | fields
    return TrackedRun(
        folder=folder,
        name="toy/run",
        sweep=None,
        versions={"python": "3.11"},
        git_revision=None,
        started_at=1000.0,
        earlier_id=earlier_id,
        **known,
    )


def line(metrics: Mapping[str, float], *, step: int = 1) -> MetricLine:
    """Return the metrics of a step."""
    return MetricLine(step=step, epoch=1, time=1000.0 + step, metrics=metrics)


def shown(tracker: MLflow) -> list[Any]:
    """Return the runs of the experiment as MLflow has them."""
    client = tracker._client
    experiment = client.get_experiment_by_name("ddp_runner").experiment_id
    return list(client.search_runs([experiment]))


def files(tracker: MLflow, folder: str | None = None) -> set[str]:
    """Return the paths of the only run's files."""
    (run,) = shown(tracker)
    found = tracker._client.list_artifacts(run.info.run_id, folder)
    inner = [files(tracker, one.path) for one in found if one.is_dir]
    return {one.path for one in found if not one.is_dir}.union(*inner)


@pytest.mark.full
def test_pictures_keep_their_names(store: str, tmp_path: Path) -> None:
    """Those of several names have the same steps."""
    run, tracker = tracked(tmp_path), MLflow(tracking_uri=store)
    paths = ["run.json", ".hydra/config.yaml"]
    paths += [f"images/{name}/step-00000001.png" for name in ("a", "b", "b/c")]
    for path in paths:
        (run.folder / path).parent.mkdir(parents=True, exist_ok=True)
        (run.folder / path).write_text(path)
    tracker.begin(run)
    tracker.end("completed", metrics={}, files=[run.folder / path for path in paths])
    assert files(tracker) == {"run.json", "config.yaml", *paths[2:]}


@pytest.mark.full
def test_a_name_that_mlflow_rejects_gets_another(store: str, tmp_path: Path) -> None:
    """Rejecting one, MLflow takes none of a call. Different names stay different."""
    plain = ["train/loss", "a b:c-d.e"]
    odd = ["a//b", "eval/", "../x", "x", "", ".", "/x", "a/x+y", "a/x*y", "é+", "eval"]
    odd += ["n" * MOST + "1", "n" * MOST + "2"]
    tracker = MLflow(tracking_uri=store)
    tracker.begin(tracked(tmp_path, config=dict.fromkeys(odd, 1)))
    tracker.log([line({name: float(i) for i, name in enumerate(plain + odd)})])
    (run,) = shown(tracker)
    assert sorted(run.data.metrics.values()) == list(range(len(plain + odd)))
    assert {*plain, "x", "eval"} <= run.data.metrics.keys()
    assert len(run.data.params) == len(odd)
    assert max(map(len, run.data.metrics)) == MOST


@pytest.mark.full
def test_an_attempt_without_an_answer_leaves_no_second_run(store: str, tmp_path: Path) -> None:
    """The server has made the run, or the run without its tags, when the answer gets lost."""

    class LostError(Exception):
        """The answer does not come."""

    run, names = tracked(tmp_path, config={"a": 1}), ["create_run", "update_run", "log_batch"]
    for name in names:
        tracker = MLflow(tracking_uri=store)
        call = getattr(tracker._client, name)

        def losing(*arguments: Any, call: Any = call, **named: Any) -> None:
            call(*arguments, **named)
            raise LostError

        setattr(tracker._client, name, losing)
        with pytest.raises(LostError):
            tracker.begin(run)
    tracker = MLflow(tracking_uri=store)
    number = tracker.begin(run)
    (one,) = shown(tracker)
    assert (one.info.run_id, one.data.params) == (number, {"a": "1"})


@pytest.mark.full
def test_a_resumed_run_is_the_same_run(store: str, tmp_path: Path) -> None:
    """With the tags of all its commands, and what the last one has changed."""
    tracker = MLflow(tracking_uri=store)
    config = {"optimizer": {"lr": 0.1}, "tags": ["a", "b"], "resume": None}
    first = tracker.begin(tracked(tmp_path, config=config, tags=["a", "b"]))
    config = {"optimizer": {"lr": 0.2}, "tags": ["b", "c"], "resume": "run"}  # two do not count
    resumed = MLflow(tracking_uri=store)
    again = tracked(tmp_path, config=config, tags=["b", "c"], earlier_id=first)
    assert resumed.begin(again) == first
    (one,) = shown(resumed)
    assert {key for key, value in one.data.tags.items() if value == "true"} == {"a", "b", "c"}
    assert one.data.tags["ddp_runner.changed"] == "optimizer.lr=0.2"
    back = tracked(tmp_path, config={"optimizer": {"lr": 0.1}}, earlier_id=first)
    MLflow(tracking_uri=store).begin(back)
    (one,) = shown(resumed)
    assert "ddp_runner.changed" not in one.data.tags


@pytest.mark.parametrize("place", ["server", "experiment", "deleted"])
def test_a_run_that_is_not_there_begins_anew(store: str, tmp_path: Path, place: str) -> None:
    """On another server, in another experiment, or after somebody has deleted it."""
    earlier = MLflow(tracking_uri=store)
    first = earlier.begin(tracked(tmp_path))
    if place == "deleted":
        earlier._client.delete_run(first)
    uri = (tmp_path / "another").as_uri() if place == "server" else store
    name = "another" if place == "experiment" else "ddp_runner"
    tracker = MLflow(tracking_uri=uri, experiment_name=name)
    second = tracker.begin(tracked(tmp_path, earlier_id=first))
    assert second != first
    assert tracker._client.get_run(second).info.status == "RUNNING"
    assert MLflow(tracking_uri=uri, experiment_name=name).begin(tracked(tmp_path)) == second
