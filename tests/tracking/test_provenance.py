"""What made a run: the commit, and the versions."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ddp_runner.tracking import provenance
from ddp_runner.tracking.provenance import git_revision, versions


def test_git_revision_tells_commit_and_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None outside a repository, the full hash in a clean tree, +dirty after an edit."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert git_revision() is None

    def git(*arguments: str) -> str:
        command = ["git", "-c", "user.name=test", "-c", "user.email=test@localhost", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init")
    (tmp_path / "file").write_text("old")
    git("add", "file")
    git("commit", "-m", "first")
    git("tag", "v1")
    assert git_revision() == git("rev-parse", "HEAD")
    (tmp_path / "file").write_text("edited")
    assert git_revision() == git("rev-parse", "HEAD") + "+dirty"


def no_git(folder: Path) -> None:
    """A PATH without git."""


def slow_git(folder: Path) -> None:
    """A git that hangs, as on a stuck network disk."""
    (folder / "git").write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    (folder / "git").chmod(0o755)


@pytest.mark.parametrize("prepare", [no_git, slow_git])
def test_git_revision_never_fails_or_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prepare: Callable[[Path], None]
) -> None:
    """A run does not depend on git."""
    prepare(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(provenance, "GIT_TIMEOUT_S", 0.2)
    assert git_revision() is None


def test_versions_name_each_package() -> None:
    """Those of the packages that decide about results."""
    found = versions()
    assert str(torch.__version__).startswith(str(found["torch"]))
    assert found["python"]
    assert set(found) == {"python", "ddp_runner", *provenance.PACKAGES}
