"""Where ddp-runner comes from, for each way to install it."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from ddp_runner.new import origin as module
from ddp_runner.new.origin import Origin, origin, source_of

GIT = {"vcs": "git", "requested_revision": "main", "commit_id": "4cf8f1d"}


@pytest.mark.parametrize(
    ("recorded", "source"),
    [
        (  # pip install -e FOLDER
            {"url": "file:///src/ddp%20runner", "dir_info": {"editable": True}},
            {"path": "/src/ddp runner", "editable": True},
        ),
        ({"url": "file:///src/ddp_runner", "dir_info": {}}, {"path": "/src/ddp_runner"}),
        ({"url": "file:///one.whl", "archive_info": {}}, {"path": "/one.whl"}),
        (
            {"url": "https://host/one.tar.gz", "archive_info": {"hash": "sha256=2dc"}},
            {"url": "https://host/one.tar.gz"},
        ),
        (
            {"url": "https://host/a.git", "vcs_info": GIT, "subdirectory": "runner"},
            {"git": "https://host/a.git", "rev": "4cf8f1d", "subdirectory": "runner"},
        ),
        ({"url": "file:///a.git", "vcs_info": GIT}, {"git": "file:///a.git", "rev": "4cf8f1d"}),
        ({"url": "https://host/a", "vcs_info": {"vcs": "hg", "commit_id": "1"}}, {}),
    ],
)
def test_each_record_of_an_installer_is_a_source_of_uv(
    recorded: dict[str, Any], source: dict[str, Any]
) -> None:
    """And pyproject.toml reads it back."""
    assert source_of(recorded) == source
    lines = tomllib.loads(Origin(source).lines())
    assert lines == ({"tool": {"uv": {"sources": {"ddp-runner": source}}}} if source else {})


def test_without_a_checkout_the_record_of_the_installer_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """From an index there is none, and the requirement alone is enough."""

    class Distribution:
        text: str | None = None

        def read_text(self, name: str) -> str | None:
            assert name == "direct_url.json"
            return self.text

    monkeypatch.setattr(module, "CHECKOUT", tmp_path)
    monkeypatch.setattr(module.metadata, "distribution", lambda name: Distribution())
    assert origin() == Origin({})
    gone = tmp_path / "gone.whl"
    monkeypatch.setattr(Distribution, "text", f'{{"url": "{gone.as_uri()}", "archive_info": {{}}}}')
    assert origin() == Origin({"path": str(gone)})
    assert origin().missing == gone
    gone.touch()
    assert origin().missing is None
