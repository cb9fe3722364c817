"""Killed, full, damaged and hostile: whatever happens to one checkpoint, another still loads."""

import errno
import hashlib
import json
import os
import resource
import shutil
import signal
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import kill_at_call, latest_checkpoint, run_until_killed
from rights import unreadable
from tiers import only

from ddp_runner.checkpoint.manifest import MANIFEST, STATE, read_manifest
from ddp_runner.checkpoint.state_parts import reject_sharded
from ddp_runner.checkpoint.store import (
    best_checkpoints,
    first_undamaged,
    load_checkpoint,
    save_checkpoint,
)
from ddp_runner.config.training import CheckpointConfig
from ddp_runner.errors import UserError

ALL, ONE = CheckpointConfig(keep=9), CheckpointConfig(keep=1)


def state_of(step: int, *, run: int = 0) -> dict[str, Any]:
    """Return a small model's state that has its step and run."""
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)  # backward is not to be used in a forked child
    optimizer.step()
    return {
        "step": step,
        "run": run,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2).state_dict(),
        "rng": torch.get_rng_state(),
        "name": "toy",
        "losses": [0.5, None, True],
    }


def save(
    folder: Path,
    step: int,
    *,
    run: int = 0,
    metrics: Mapping[str, float] | None = None,
    config: CheckpointConfig = ALL,
    log: Callable[[str], None] = pytest.fail,
    **more_state: Any,
) -> Path:
    """Save a small state; a logged sentence fails the test unless `log` takes it."""
    return save_checkpoint(
        folder,
        state_of(step, run=run) | more_state,
        step=step,
        metrics=metrics or {},
        config=config,
        log=log,
    )


def load_latest(folder: Path) -> dict[str, Any]:
    """Load the newest checkpoint; fail if anything is logged."""
    path = latest_checkpoint(folder, log=pytest.fail)
    assert path is not None
    return load_checkpoint(path)


def names(folder: Path) -> list[str]:
    """Return the names in a folder."""
    return sorted(path.name for path in folder.iterdir())


def rewrite_manifest(checkpoint: Path, **changed: Any) -> None:
    """Change fields of a manifest, and its checksum."""
    path = checkpoint / MANIFEST
    fields = json.loads(path.read_text()) | changed
    del fields["sha256"]
    checksum = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(fields | {"sha256": checksum}))


def replace_state(checkpoint: Path, content: bytes) -> None:
    """Replace the state's bytes, and their checksum in the manifest."""
    (checkpoint / STATE).write_bytes(content)
    sha256 = hashlib.sha256(content).hexdigest()
    rewrite_manifest(checkpoint, files={STATE: {"size": len(content), "sha256": sha256}})


def test_a_loaded_state_equals_the_saved_one(tmp_path: Path) -> None:
    """Every tensor, number and list of model, optimizer, scheduler and RNG comes back."""
    torch.manual_seed(0)
    path = save(tmp_path, 600, metrics={"eval/loss": 0.25, "eval/f1": float("nan")})
    torch.manual_seed(0)
    expected = state_of(600)
    loaded = load_checkpoint(path)
    assert path.name == "step-00000600"
    assert names(path) == [MANIFEST, STATE]
    torch.testing.assert_close(loaded["optimizer"]["state"], expected["optimizer"]["state"])
    torch.testing.assert_close(dict(loaded["model"]), dict(expected["model"]))
    assert loaded["scheduler"] == expected["scheduler"]
    assert (loaded["losses"], loaded["name"]) == (expected["losses"], "toy")
    assert read_manifest(path).step == 600
    assert read_manifest(path).metrics == {"eval/loss": 0.25, "eval/f1": None}


def test_a_folder_without_checkpoints_has_no_latest(tmp_path: Path) -> None:
    """Neither a missing folder nor foreign files are an error."""
    assert latest_checkpoint(tmp_path / "none", log=pytest.fail) is None
    (tmp_path / "step-notes.txt").touch()
    assert latest_checkpoint(tmp_path, log=pytest.fail) is None


@pytest.mark.parametrize("step", only("next_step", {"same_step": 600, "next_step": 700}))
def test_killed_between_any_two_calls_a_whole_checkpoint_is_left(tmp_path: Path, step: int) -> None:
    """The latest is the old or the new one, undamaged; the next save removes the rest."""
    for number in range(100):
        folder = tmp_path / str(number)
        save(folder, 500)
        save(folder, 600)
        killed = run_until_killed(
            partial(kill_at_call, number), partial(save, folder, step, run=1, config=ONE)
        )
        state = load_latest(folder)
        assert (state["step"], state["run"]) in [(600, 0), (step, 1)]
        for path in folder.glob("step-*"):
            load_checkpoint(path)  # none is half-deleted either
        save(folder, 800)
        assert all(name in {f"step-00000{n}00" for n in (5, 6, 7, 8)} for name in names(folder))
        assert "step-00000600" in names(folder) or state["step"] == 700
        if not killed:
            assert number > 8
            break
    else:
        pytest.fail("the save never ran to its end")


def test_once_the_new_checkpoint_has_its_name_the_replaced_one_counts_no_more(
    tmp_path: Path,
) -> None:
    """A kill may leave both; the new one is loaded once it has its name."""
    path = save(tmp_path, 600)
    new = save(tmp_path / "elsewhere", 600, run=1)
    path.rename(tmp_path / "step-00000600.replaced")
    assert load_latest(tmp_path)["run"] == 0
    new.rename(path)
    assert load_latest(tmp_path)["run"] == 1


def test_all_is_on_the_disk_before_a_checkpoint_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """State, manifest and their names are flushed first, then the folder's own name."""
    synced: list[tuple[int, bool]] = []
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        fsync(descriptor)
        synced.append((os.fstat(descriptor).st_ino, (tmp_path / "step-00000600").exists()))

    monkeypatch.setattr(os, "fsync", noted)
    path = save(tmp_path, 600)
    inodes = [one.stat().st_ino for one in (path / STATE, path / MANIFEST, path, tmp_path)]
    assert synced == list(zip(inodes, (False, False, False, True), strict=True))


def kill_at_byte(num_bytes: int) -> None:
    """Make the kernel kill this process when a file grows beyond a size."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))


def test_killed_at_any_byte_the_previous_checkpoint_loads(tmp_path: Path) -> None:
    """A partial state is never used as a checkpoint."""
    size = read_manifest(save(tmp_path, 600)).files[STATE].size
    for num_bytes in (0, 1, size // 3, size // 2, size - 1):
        assert run_until_killed(partial(kill_at_byte, num_bytes), partial(save, tmp_path, 700))
        assert names(tmp_path) == [".tmp-step-00000700", "step-00000600"]
        assert (tmp_path / ".tmp-step-00000700" / STATE).stat().st_size <= num_bytes
        assert load_latest(tmp_path)["step"] == 600
    save(tmp_path, 800)
    assert names(tmp_path) == ["step-00000600", "step-00000800"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EDQUOT])
@pytest.mark.parametrize("call", ["mkdir", "fsync", "rename", "replace"])
def test_a_save_that_fails_names_path_and_reason_and_leaves_the_previous(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    """Full and read-only disks may fail any call of a save."""
    save(tmp_path, 600)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(UserError) as caught:
            save(tmp_path, 700)
    assert str(tmp_path / "step-00000700") in str(caught.value)
    assert os.strerror(number) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert names(tmp_path) == ["step-00000600"]
    assert load_latest(tmp_path)["step"] == 600


def test_a_disk_that_fills_amid_the_state_is_named(tmp_path: Path) -> None:
    """The reason is the system's, which torch hides in its own error."""
    save(tmp_path, 600)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, limits[1]))
    try:
        with pytest.raises(UserError, match=os.strerror(errno.EFBIG)):
            save(tmp_path, 700, weights=torch.zeros(300_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert names(tmp_path) == ["step-00000600"]


def truncate(checkpoint: Path) -> str:
    """Remove the last byte of the state; return the expected message."""
    size = (checkpoint / STATE).stat().st_size
    os.truncate(checkpoint / STATE, size - 1)
    return f"{size} bytes.*found {size - 1} bytes"


def flip_bit(checkpoint: Path) -> str:
    """Flip a bit in the middle of the state."""
    content = bytearray((checkpoint / STATE).read_bytes())
    content[len(content) // 2] ^= 1
    (checkpoint / STATE).write_bytes(content)
    return f"SHA-256 {read_manifest(checkpoint).files[STATE].sha256[:8]}…, found "


def change_checksum(checkpoint: Path) -> str:
    """Put another checksum into the manifest."""
    size = read_manifest(checkpoint).files[STATE].size
    rewrite_manifest(checkpoint, files={STATE: {"size": size, "sha256": "0" * 64}})
    return f"SHA-256 {'0' * 8}…, found {size} bytes with [1-9a-f]"


def drop_manifest(checkpoint: Path) -> str:
    """Delete the manifest."""
    (checkpoint / MANIFEST).unlink()
    return r"manifest\.json \(FileNotFoundError"


def break_manifest(checkpoint: Path) -> str:
    """Truncate the manifest."""
    os.truncate(checkpoint / MANIFEST, 40)
    return r"manifest\.json \(JSONDecodeError"


def drop_state(checkpoint: Path) -> str:
    """Delete the state."""
    (checkpoint / STATE).unlink()
    return rf"{STATE} \(No such file"


def change_format(checkpoint: Path) -> str:
    """Give the manifest a future format."""
    rewrite_manifest(checkpoint, format_version=99)
    return "format version 99, this program reads 3"


def change_step(checkpoint: Path) -> str:
    """Change a digit of the manifest, which the state's checksum does not cover."""
    text = (checkpoint / MANIFEST).read_text()
    (checkpoint / MANIFEST).write_text(text.replace('"step": 600', '"step": 608'))
    return "fields that do not match their checksum"


def nest_manifest(checkpoint: Path) -> str:
    """Nest the manifest deeper than Python can read."""
    (checkpoint / MANIFEST).write_text("[" * 100_000)
    return r"manifest\.json \(RecursionError"


@pytest.mark.parametrize(
    "damage",
    [
        truncate,
        flip_bit,
        change_checksum,
        drop_manifest,
        break_manifest,
        drop_state,
        change_format,
        change_step,
        nest_manifest,
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_previous_one_used(
    tmp_path: Path, damage: Callable[[Path], str]
) -> None:
    """Two lines are logged, with the expected and the found value; loading it fails."""
    previous, newest = save(tmp_path, 500), save(tmp_path, 600)
    fault = f"{newest}.*{damage(newest)}"
    logged: list[str] = []
    assert latest_checkpoint(tmp_path, log=logged.append) == previous
    assert len(logged) == 2
    with pytest.raises(UserError, match=fault):
        load_checkpoint(newest)
    assert logged[0].startswith(f"checkpoint {newest}")
    assert logged[1] == f"{previous} is used in its place"


@pytest.mark.parametrize(
    "changed",
    [
        {"step": float("inf")},
        {"step": -1},
        {"step": "abc"},
        {"step": True},
        {"step": [1]},
        {"metrics": {"eval/f1": "good"}},
        {"metrics": [1, 2]},
        {"metrics": None},
        {"files": []},
        {"files": {STATE: {"size": 0.5, "sha256": ""}}},
        {"format_version": "1"},
        {"format_version": None},
    ],
)
def test_a_manifest_with_odd_fields_is_damaged(tmp_path: Path, changed: dict[str, Any]) -> None:
    """Whatever their types and sizes: one line, and the previous checkpoint is used."""
    previous, newest = save(tmp_path, 500), save(tmp_path, 600)
    rewrite_manifest(newest, **changed)
    with pytest.raises(UserError, match=r"is damaged: manifest\.json \(") as caught:
        read_manifest(newest)
    assert "checksum" not in str(caught.value)
    assert "\n" not in str(caught.value)
    assert latest_checkpoint(tmp_path, log=lambda _: None) == previous
    assert best_checkpoints(tmp_path, monitor="eval/f1", mode="max") == []


def test_a_manifest_that_has_lost_its_checksum_is_damaged(tmp_path: Path) -> None:
    """A flipped bit in its name looks the same."""
    path = save(tmp_path, 600)
    fields = json.loads((path / MANIFEST).read_text())
    del fields["sha256"]
    (path / MANIFEST).write_text(json.dumps(fields))
    with pytest.raises(UserError, match="do not match their checksum"):
        load_checkpoint(path)


def test_a_score_that_is_not_finite_is_none(tmp_path: Path) -> None:
    """Python's JSON reads NaN, which has no order, and infinity, which would be the best."""
    for step, score in {100: 0.5, 200: float("nan"), 300: float("inf")}.items():
        rewrite_manifest(save(tmp_path, step), metrics={"eval/f1": score})
    (best,) = best_checkpoints(tmp_path, monitor="eval/f1", mode="max")
    assert best == tmp_path / "step-00000100"


def test_of_equal_scores_the_first_is_the_best_and_is_kept(tmp_path: Path) -> None:
    """As in other trainers: nothing was gained by training on."""
    settings = CheckpointConfig(keep=1, monitor="eval/f1", mode="max")
    for step, score in {100: 0.5, 200: 0.9, 300: 0.9, 400: 0.7, 500: 0.9}.items():
        save(tmp_path, step, metrics={"eval/f1": score}, config=settings)
    ranking = best_checkpoints(tmp_path, monitor="eval/f1", mode="max")
    assert [path.name[-3:] for path in ranking] == ["200", "500"]


def test_where_all_checkpoints_are_damaged_nothing_is_resumed(tmp_path: Path) -> None:
    """Each is named, and the error says that none is left: a run must not restart unasked."""
    for step in (500, 600):
        truncate(save(tmp_path, step))
    logged: list[str] = []
    with pytest.raises(UserError, match="nothing is left to resume from") as caught:
        latest_checkpoint(tmp_path, log=logged.append)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(logged) == 2


def test_a_folder_that_cannot_be_read_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    """A run would begin anew, over what it has logged."""
    save(tmp_path / "private", 1)
    (tmp_path / "file").touch()
    (tmp_path / "unmounted").symlink_to(tmp_path / "disk")
    with unreadable(tmp_path / "private"):
        for name, reason in (
            ("private", "Permission denied"),
            ("file", "Not a directory"),
            ("unmounted", "No such file or directory"),
        ):
            with pytest.raises(UserError, match=rf"{name} cannot be read \({reason}\); make it"):
                latest_checkpoint(tmp_path / name, log=pytest.fail)
    assert latest_checkpoint(tmp_path / "private", log=pytest.fail) is not None


def test_the_best_that_is_whole_is_found(tmp_path: Path) -> None:
    """A damaged one is logged and skipped."""
    for step, score in {100: 0.5, 200: 0.9, 300: 0.7}.items():
        save(tmp_path, step, metrics={"eval/f1": score})
    flip_bit(tmp_path / "step-00000200")
    ranking = best_checkpoints(tmp_path, monitor="eval/f1", mode="max")
    assert [path.name[-3:] for path in ranking] == ["200", "300", "100"]
    logged: list[str] = []
    assert first_undamaged(ranking, log=logged.append) == tmp_path / "step-00000300"
    assert len(logged) == 2


@pytest.mark.parametrize("content", [b"", b"abc", b"PK\x03\x04 cut short", b"\x80\x02}."])
def test_a_forged_state_is_rejected(tmp_path: Path, content: bytes) -> None:
    """Its checksum is right, but its bytes are not a state: one line with the folder."""
    path = save(tmp_path, 600)
    replace_state(path, content)
    with pytest.raises(UserError, match=str(path)) as caught:
        load_checkpoint(path)
    assert "\n" not in str(caught.value)


class Hostile:
    """Pickles as a call that leaves a file behind."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.target),)


def test_a_hostile_checkpoint_is_rejected_and_its_code_does_not_run(tmp_path: Path) -> None:
    """Its checksum is right, because the attacker also wrote the manifest."""
    path, proof = save(tmp_path, 600), tmp_path / "the code ran"
    torch.save({"model": Hostile(proof)}, path / STATE)
    replace_state(path, (path / STATE).read_bytes())
    with pytest.raises(
        UserError, match=r"rejected: it names posix\.mkdir, .*none was run"
    ) as caught:
        load_checkpoint(path)
    assert "\n" not in str(caught.value)
    assert not proof.exists()
    torch.load(path / STATE, weights_only=False)
    assert proof.exists(), "the test's pickle is harmless: it proves nothing"


def test_a_state_that_could_not_be_loaded_again_is_not_saved(tmp_path: Path) -> None:
    """It fails at the first save and not at the resume."""
    with pytest.raises(TypeError, match="PosixPath"):
        save_checkpoint(
            tmp_path,
            {"path": tmp_path},
            step=1,
            metrics={},
            config=CheckpointConfig(),
            log=pytest.fail,
        )
    assert latest_checkpoint(tmp_path, log=pytest.fail) is None


class Part(torch.Tensor):
    """A sharded tensor, judging by the module of its class."""

    __module__ = "torch.distributed.tensor"


def test_a_sharded_state_is_rejected() -> None:
    """Otherwise one rank's part would be saved as the whole."""
    with pytest.raises(UserError, match=r"^the state\['parts'\]\[1\]\[0\] is a Part, "):
        reject_sharded({"parts": [1.0, (torch.zeros(2).as_subclass(Part),)]})


@pytest.mark.parametrize(("mode", "best"), [("max", 200), ("min", 300)])
def test_the_newest_and_the_best_are_kept(tmp_path: Path, mode: str, best: int) -> None:
    """Checkpoints that do not have the monitored metric, or have NaN, are never the best."""
    scores = {100: 0.5, 200: 0.9, 300: 0.1, 400: 0.9, 500: float("nan"), 600: 0.3}
    config = CheckpointConfig(keep=2, monitor="eval/f1", mode=mode)
    for step, score in scores.items():
        save(tmp_path, step, metrics={"eval/f1": score}, config=config)
    save(tmp_path, 700, config=config)
    expected = tmp_path / f"step-00000{best}"
    assert names(tmp_path) == [expected.name, "step-00000600", "step-00000700"]
    assert best_checkpoints(tmp_path, monitor="eval/f1", mode=mode)[0] == expected
    assert best_checkpoints(tmp_path, monitor="eval/missing", mode=mode) == []


def test_an_old_checkpoint_that_cannot_be_deleted_is_reported_and_the_run_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next save deletes it."""
    save(tmp_path, 100)

    def fail(path: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    logged: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", fail)
        save(tmp_path, 200, config=ONE, log=logged.append)
    assert len(logged) == 1
    assert str(tmp_path / "step-00000100") in logged[0]
    assert os.strerror(errno.EBUSY) in logged[0]
    assert load_latest(tmp_path)["step"] == 200
    save(tmp_path, 300, config=ONE)
    assert names(tmp_path) == ["step-00000300"]


def test_saving_an_earlier_step_again_leaves_later_ones_alone(tmp_path: Path) -> None:
    """A run that resumed from before a damaged checkpoint must not lose what it saves."""
    save(tmp_path, 100)
    save(tmp_path, 600)
    save(tmp_path, 500, config=ONE)
    assert names(tmp_path) == ["step-00000500", "step-00000600"]
