"""The programs of a model: each is written once, and nothing of a killed export stays."""

import errno
from pathlib import Path
from unittest.mock import MagicMock, Mock

import pytest

from ddp_runner import files
from ddp_runner.errors import UserError
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.train import best_model


@pytest.fixture
def export(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Mock:
    """Return what exports to a folder with formats; its model and torch's exporter are fake."""
    monkeypatch.setattr(best_model, "_model_arguments", Mock(return_value=((), {})))
    monkeypatch.setattr(best_model, "_save", lambda _, path: path.write_text("program"))
    monkeypatch.setattr("torch.export.export", MagicMock())
    for name in ("place_alone", "build_step", "load_tensors"):
        monkeypatch.setattr(best_model, name, MagicMock())
    monkeypatch.setattr(best_model, "read_export", Mock(return_value=({}, {})))

    def run(*formats: str) -> list[str]:
        work = MagicMock()
        work.config.checkpoint.export = list(formats)
        run_dir = RunDir(tmp_path)
        found = best_model.export_programs(work, run_dir, arguments={}, samples=MagicMock())
        return [path.name for path in found]

    return Mock(side_effect=run)


def test_what_killed_exports_have_left_is_removed(export: Mock, tmp_path: Path) -> None:
    """Such a folder is as large as the model."""
    (tmp_path / ".export-old").mkdir()
    (tmp_path / ".export-old" / "model.pt2").write_text("half")
    assert export("torch_export") == ["model.pt2"]
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt2"]


def test_a_format_that_is_named_twice_is_written_once(export: Mock) -> None:
    """In the order of the first names."""
    assert export("onnx", "torch_export", "onnx") == ["model.onnx", "model.pt2"]


def test_a_disk_without_room_for_a_folder_is_named(
    export: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training that is complete goes on after a UserError, and after no other one."""
    full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr(files, "TemporaryDirectory", full)
    with pytest.raises(UserError, match=r"model\.pt2 cannot be written \(No space left"):
        export("torch_export")
