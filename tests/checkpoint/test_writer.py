"""The loop waits only for a copy; the copies are written one at a time, each to its end."""

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ddp_runner.checkpoint import writer as checkpoint_writer
from ddp_runner.checkpoint.store import load_checkpoint, save_checkpoint
from ddp_runner.checkpoint.writer import CheckpointWriter, Stager
from ddp_runner.config.training import CheckpointConfig
from ddp_runner.errors import UserError
from ddp_runner.host.wire import Wire

NO_SPACE = OSError(28, "No space left on device")


class Gate:
    """Holds each save until it is opened."""

    def __init__(self) -> None:
        self.reached, self.open, self.order = threading.Event(), threading.Event(), list[str]()

    def save(self, *args: Any, **keys: Any) -> Path:
        """Save, once the gate is open."""
        self.order.append(f"begins {keys['step']}")
        self.reached.set()
        self.open.wait()
        path = save_checkpoint(*args, **keys)
        self.order.append(f"ends {keys['step']}")
        return path


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Give a gate in front of each save."""
    gate = Gate()
    monkeypatch.setattr(checkpoint_writer, "save_checkpoint", gate.save)
    yield gate
    gate.open.set()


class Mark(Wire):
    """A wire that notes whether a checkpoint is being written."""

    is_set = False

    def __init__(self) -> None:
        pass

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Set the mark while the block lasts."""
        self.is_set = True
        yield
        self.is_set = False


MARK = Mark()


@contextmanager
def writer(
    folder: Path, logged: list[str] | None = None, **config: Any
) -> Iterator[CheckpointWriter]:
    """Open a writer of a run's checkpoints."""
    with CheckpointWriter(
        folder / "checkpoints",
        CheckpointConfig(**config),
        wire=MARK,
        log=(logged if logged is not None else []).append,
    ) as opened:
        yield opened


def loaded(folder: Path, step: int) -> dict[str, Any]:
    """Return the state of a step's checkpoint."""
    return load_checkpoint(folder / "checkpoints" / f"step-{step:08d}")


def test_what_is_written_is_the_state_of_the_call(tmp_path: Path, gate: Gate) -> None:
    """Steps meanwhile change the same tensors, and nested numbers as well."""
    model = nn.Linear(3, 2)
    model.register_buffer("tied", model.weight.detach()[0])  # a view of what is trained
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    position, metrics = {"step": 1, "seen": [1]}, {"train/loss": 1.0}
    rng = torch.get_rng_state()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "position": position,
        "rng": [{"cpu": rng}],
    }
    before = {name: one.clone() for name, one in model.state_dict().items()}
    moments = [one["exp_avg"].clone() for one in optimizer.state.values()]
    steps = [one["step"].clone() for one in optimizer.state.values()]
    with writer(tmp_path) as opened:
        opened.save(state, step=1, metrics=metrics)
        assert gate.reached.wait(60)
        optimizer.step()
        position["step"], metrics["train/loss"] = 2, 2.0
        position["seen"].append(2)
        rng.zero_()
        gate.open.set()
    found = loaded(tmp_path, 1)
    for name, tensor in before.items():
        assert torch.equal(found["model"][name], tensor)
        assert not torch.equal(found["model"][name], model.state_dict()[name])
    assert [one["exp_avg"].tolist() for one in found["optimizer"]["state"].values()] == [
        one.tolist() for one in moments
    ]
    assert [one["step"] for one in found["optimizer"]["state"].values()] == steps
    assert found["position"] == {"step": 1, "seen": [1]}
    assert found["rng"][0]["cpu"].any()
    shared = [found["model"][name].untyped_storage().data_ptr() for name in ("weight", "tied")]
    assert shared[0] == shared[1]  # still one tensor, and written once
    manifest = (tmp_path / "checkpoints" / "step-00000001" / "manifest.json").read_text()
    assert '"train/loss": 1.0' in manifest


def test_one_save_at_a_time_in_the_order_of_the_calls(tmp_path: Path, gate: Gate) -> None:
    """The second waits for the first, whose copy it would overwrite."""
    weights = torch.zeros(4)
    with writer(tmp_path) as opened:
        opened.save({"model": weights}, step=1, metrics={})
        weights += 1
        second = threading.Thread(
            target=opened.save, args=({"model": weights},), kwargs={"step": 2, "metrics": {}}
        )
        second.start()
        assert gate.reached.wait(60)
        assert second.is_alive()
        gate.open.set()
        second.join()
    assert gate.order == ["begins 1", "ends 1", "begins 2", "ends 2"]
    assert loaded(tmp_path, 1)["model"].tolist() == [0.0] * 4
    assert loaded(tmp_path, 2)["model"].tolist() == [1.0] * 4


def test_the_end_of_the_block_waits_and_the_mark_lasts_as_long(tmp_path: Path, gate: Gate) -> None:
    """The mark that makes a launcher wait exists from the save's first byte to its last."""
    mark = MARK
    with writer(tmp_path) as opened:
        opened.save({"model": torch.zeros(1)}, step=1, metrics={})
        assert gate.reached.wait(60)
        was_marked = mark.is_set  # asserted once the gate is open: the block's end waits for it
        threading.Timer(0.1, gate.open.set).start()
    assert was_marked
    assert gate.order == ["begins 1", "ends 1"]
    assert not mark.is_set
    assert loaded(tmp_path, 1)["model"].tolist() == [0.0]


def test_an_end_that_is_interrupted_waits_all_the_same(
    tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After Ctrl-C during the last wait, nothing is written once the block has ended."""

    def interrupted(_: CheckpointWriter) -> None:
        threading.Timer(0.1, gate.open.set).start()
        raise KeyboardInterrupt

    def save() -> None:
        with writer(tmp_path) as opened:
            opened.save({"model": torch.zeros(1)}, step=1, metrics={})
            assert gate.reached.wait(60)
            monkeypatch.setattr(CheckpointWriter, "wait", interrupted)

    with pytest.raises(KeyboardInterrupt):
        save()
    assert gate.order == ["begins 1", "ends 1"]


def disk_full_from(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the saves from a step on fail."""

    def save(*args: Any, **keys: Any) -> Path:
        with pytest.MonkeyPatch.context() as inner:
            if keys["step"] >= step:

                def fsync(descriptor: int) -> None:
                    raise NO_SPACE

                inner.setattr(os, "fsync", fsync)
            return save_checkpoint(*args, **keys)

    monkeypatch.setattr(checkpoint_writer, "save_checkpoint", save)


def test_a_failed_save_is_reported_by_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error has its step; the checkpoint before it is intact, and nothing else is left."""
    disk_full_from(2, monkeypatch)
    with writer(tmp_path) as opened:
        opened.save({"model": torch.zeros(1)}, step=1, metrics={})
        opened.save({"model": torch.ones(1)}, step=2, metrics={})
        with pytest.raises(UserError, match=r"step-00000002 could not be saved \(No space left"):
            opened.save({"model": torch.ones(1)}, step=3, metrics={})
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]
    assert loaded(tmp_path, 1)["model"].tolist() == [0.0]


def test_a_failed_save_is_reported_at_the_end_if_there_is_no_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error of the last save is raised at the end of the block."""
    disk_full_from(1, monkeypatch)
    cannot = pytest.raises(UserError, match="step-00000001 could not be saved")
    with cannot, writer(tmp_path) as opened:
        opened.save({"model": torch.zeros(1)}, step=1, metrics={})


def test_what_ends_a_run_comes_before_a_failed_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop's error is raised, and the save's error is logged."""
    disk_full_from(1, monkeypatch)
    logged: list[str] = []

    def fail() -> None:
        with writer(tmp_path, logged) as opened:
            opened.save({"model": torch.zeros(1)}, step=1, metrics={})
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert [line for line in logged if "in addition, " in line and "could not be saved" in line]


def test_what_ends_a_run_comes_before_what_cannot_be_saved_safely(tmp_path: Path) -> None:
    """The loop's error is raised, and the state's error is logged."""
    logged: list[str] = []

    def fail() -> None:
        with writer(tmp_path, logged) as opened:
            opened.save({"model": Path("an object")}, step=1, metrics={})
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert [one for one in logged if "in addition, " in one and "cannot be loaded safely" in one]


def test_an_error_of_any_kind_reaches_the_loop(tmp_path: Path) -> None:
    """A state that a weights-only load would reject is not saved."""
    with pytest.raises(TypeError, match="cannot be loaded safely"), writer(tmp_path) as opened:
        opened.save({"model": Path("an object")}, step=1, metrics={})


def test_a_resume_deletes_what_a_kill_kept_a_save_from_deleting(tmp_path: Path) -> None:
    """It deletes half a save and one too many, and leaves a later, damaged one alone."""
    folder = tmp_path / "checkpoints"
    with writer(tmp_path) as opened:
        for step in (1, 2, 3):
            opened.save({"model": torch.zeros(1)}, step=step, metrics={})
    for step in (4, 5):
        shutil.copytree(folder / "step-00000003", folder / f"step-{step:08d}")
    (folder / ".tmp-step-00000004").mkdir()
    with writer(tmp_path) as opened:
        opened.retain(step=4)
    assert sorted(path.name for path in folder.iterdir()) == [
        f"step-{step:08d}" for step in (2, 3, 4, 5)
    ]


def test_a_copy_equals_its_state_and_shares_no_memory_with_it() -> None:
    """Strides, offsets, an empty tensor, nested lists, and the metadata of state_dict()."""
    whole = torch.arange(12.0).reshape(3, 4)
    model = nn.BatchNorm1d(3)
    state = {
        "cut": [whole.t(), whole[1:, 2]],
        "empty": torch.empty(0, 3, dtype=torch.int64),
        "small": (torch.tensor(7, dtype=torch.int16), torch.ones(2, dtype=torch.bfloat16)),
        "sparse": torch.eye(3).to_sparse(),  # as the momentum of an embedding
        "model": model.state_dict(),
        "plain": {"rate": 0.5, "names": ["a", None, True]},
    }
    copied = Stager().stage(state)
    given = [*state["cut"], state["empty"], *state["small"], *state["model"].values()]
    found = [*copied["cut"], copied["empty"], *copied["small"], *copied["model"].values()]
    for one, other in zip(given, found, strict=True):
        assert torch.equal(one, other)
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        if one.numel():
            assert one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr()
    state["sparse"] *= 2
    assert torch.equal(copied["sparse"].to_dense(), torch.eye(3))
    assert copied["plain"] == state["plain"]
    assert copied["plain"]["names"] is not state["plain"]["names"]
    assert copied["model"]._metadata == state["model"]._metadata
    assert type(copied["small"]) is tuple
    storages = {one.untyped_storage().data_ptr() for one in copied["cut"]}
    assert len(storages) == 1  # two views of one tensor, as before


def test_the_next_copy_takes_the_memory_of_the_one_before() -> None:
    """Allocation takes most of the first copy's time. Memory of dropped tensors is released."""
    weights, once = torch.zeros(1000), torch.zeros(10)
    stager = Stager()
    first = stager.stage({"weights": weights, "once": once})
    weights += 1
    second = stager.stage({"weights": weights})
    assert first["weights"].data_ptr() == second["weights"].data_ptr()
    assert second["weights"].tolist() == [1.0] * 1000
    assert len(stager._memory) == 1


def test_what_is_a_copy_already_is_not_copied_again() -> None:
    """Rank 0 puts the whole of a split state together; a second one beside it would not fit."""
    gathered, weights = torch.arange(6.0), torch.zeros(3)
    state = {"gathered": gathered, "view": gathered[2:4], "weights": weights}
    copied = Stager().stage(state, {gathered.untyped_storage().data_ptr()})
    assert copied["gathered"].data_ptr() == gathered.data_ptr()
    assert copied["view"].tolist() == [2.0, 3.0]
    assert copied["weights"].data_ptr() != weights.data_ptr()
