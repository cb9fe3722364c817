"""The code of a run: its commits in run.json, and a file with the changes that no commit has."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import run_command
from generated_runs import write_run
from run_folders import record

from ddp_runner.compare.analysis import compare
from ddp_runner.compare.formats import as_text
from ddp_runner.compare.run_reader import read_runs
from ddp_runner.config.identity import digest
from ddp_runner.tracking import git as code
from ddp_runner.tracking.git import git_revisions, uncommitted_changes

RUN = ("model=toy", "train.num_threads=1", "hydra.run.dir=run")
TOKEN = "token-of-a-server"


def git(*arguments: str) -> str:
    """Run git in the current folder."""
    command = ["git", "-c", "user.name=test", "-c", "user.email=test@localhost", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one commit, which is the current folder; no checkout of ddp_runner."""
    folder = tmp_path / "repository"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(code, "PACKAGE", tmp_path / "site-packages" / "ddp_runner")
    monkeypatch.setitem(code.FOLDERS, "runner_revision", code.PACKAGE)
    git("init")
    (folder / "model.py").write_text("width = 1\n")
    git("add", "model.py")
    git("commit", "-m", "first")
    git("tag", "v1")
    return folder


def test_a_revision_tells_commit_and_changes(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The full hash in a clean tree, +dirty after an edit; None outside a repository."""
    commit = git("rev-parse", "HEAD")
    assert git_revisions() == {"git_revision": commit, "runner_revision": None}
    assert uncommitted_changes(git_revisions()) == ""
    (repository / "model.py").write_text("width = 2\n")
    assert git_revisions()["git_revision"] == f"{commit}+dirty"
    monkeypatch.chdir(repository.parent)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(repository.parents[1]))
    assert git_revisions()["git_revision"] is None


def test_a_checkout_of_ddp_runner_elsewhere_is_recorded_too(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its own changes; from a folder inside of it there is one repository."""
    git("worktree", "add", "../checkout")
    checkout = repository.parent / "checkout"
    monkeypatch.setattr(code, "PACKAGE", checkout / "ddp_runner")
    code.PACKAGE.mkdir()
    monkeypatch.setitem(code.FOLDERS, "runner_revision", code.PACKAGE)
    (repository / "model.py").write_text("width = 2\n")
    (checkout / "model.py").write_text("width = 3\n")
    dirty = git("rev-parse", "HEAD") + "+dirty"
    assert git_revisions() == {"git_revision": dirty, "runner_revision": dirty}
    changes = uncommitted_changes(git_revisions())
    assert changes.index("+width = 2") < changes.index("# Changes since runner_revision")
    assert changes.endswith("+width = 3\n")
    (repository / "model.py").write_text("width = 1\n")
    assert "+width = 2" not in uncommitted_changes(git_revisions())
    monkeypatch.chdir(code.PACKAGE)
    assert git_revisions() == {"git_revision": dirty, "runner_revision": None}


def no_git(folder: Path) -> None:
    """A PATH without git."""


def slow_git(folder: Path) -> None:
    """A git that hangs, as on a stuck network disk."""
    (folder / "git").write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    (folder / "git").chmod(0o755)


@pytest.mark.parametrize("prepare", [no_git, slow_git])
def test_git_never_fails_or_delays_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prepare: Callable[[Path], None]
) -> None:
    """A run does not depend on git."""
    prepare(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(code, "GIT_TIMEOUT_S", 0.2)
    assert set(git_revisions().values()) == {None}
    assert uncommitted_changes({"git_revision": "0+dirty"}) == ""


def test_changes_are_bounded(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To whole lines; the last one tells changes apart that differ only in what is left out."""
    monkeypatch.setattr(code, "MOST_BYTES", 1000)

    (repository / "other.py").touch()
    git("add", "other.py")

    def changes(last: str) -> list[str]:
        (repository / "model.py").write_text("width = 2\n" * 500)
        (repository / "other.py").write_text(last)
        return uncommitted_changes(git_revisions()).splitlines()

    first, second = changes("a"), changes("b")
    assert len("\n".join(first)) < 1200
    assert first[:-1] == second[:-1]
    assert first[-2] == "+width = 2"
    assert "bytes are left out" in first[-1]
    assert first[-1] != second[-1]


def test_a_repository_names_no_command_to_run(repository: Path) -> None:
    """Its config may name programs that show or find changes; git starts none of them."""
    marker = repository / "it-ran"
    script = repository / "program"
    script.write_text(f"#!/bin/sh\ntouch {marker}\ncat /dev/null\n")
    script.chmod(0o755)
    (repository / ".gitattributes").write_text("model.py diff=own\n")
    for key in ("core.fsmonitor", "diff.external", "diff.own.command", "diff.own.textconv"):
        git("config", key, str(script))
    (repository / "model.py").write_text("width = 2\n")
    assert "+width = 2" in uncommitted_changes(git_revisions())
    assert not marker.exists()
    git("diff")
    assert marker.exists(), "the config above is not the one that git reads"


def without_checkout() -> None:
    """Let ddp_runner be an installed package, not a checkout whose changes are kept, too."""
    from ddp_runner.tracking import git

    git.PACKAGE = Path("/site-packages/ddp_runner")


def test_a_run_keeps_the_code_of_each_session(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In files named by their content, without secrets; a clean tree has none."""
    monkeypatch.setenv("MY_TOKEN", TOKEN)
    (repository / "model.py").write_bytes(f"token = '{TOKEN}' # \xe9\n".encode("latin-1"))
    kept = []
    for keys in ((*RUN, "train.max_steps=2"), ("resume=run", "train.max_steps=4")):
        secret = "++notes='${oc.env:MY_TOKEN}'"
        result = run_command(*keys, secret, folder=repository, prepare=without_checkout)
        assert result.exit_code == 0, result.stderr
        fields = record(repository / "run")
        kept.append(fields["code_diff"])
        git("checkout", "model.py")
    (file,) = (repository / "run").glob("*.diff")
    content = file.read_bytes()
    assert kept == [file.name, None]
    assert file.name == f"code-{digest(content.decode(errors='surrogateescape'))}.diff"
    assert b"+token = '${oc.env:MY_TOKEN}' # \xe9\n" in content
    git("apply", "--check", str(file))
    commit = git("rev-parse", "HEAD")[:12]
    change = f"code={commit} (was {commit}+dirty with {file.name}) at step 2"
    assert change in fields["changes"]


def test_a_comparison_tells_changes_of_the_same_commit_apart(tmp_path: Path) -> None:
    """Runs of one clean commit say nothing."""
    for name, diff in (("a", "code-1.diff"), ("b", "code-2.diff")):
        write_run(tmp_path / name, record={"git_revision": "0+dirty", "code_diff": diff})
    comparison = compare(read_runs([tmp_path]))
    sentence = "the runs used 2 versions of the code (0+dirty with code-1.diff, 0+dirty with code-"
    assert sentence in " ".join(as_text(comparison).split())  # lines are as wide as the terminal
    for name in ("a", "b"):
        write_run(tmp_path / "clean" / name, record={"git_revision": "0", "code_diff": None})
    assert compare(read_runs([tmp_path / "clean"])).warnings == ()
