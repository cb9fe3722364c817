"""Where ddp-runner was installed from, as a new project's pyproject.toml must say it to uv."""

import json
import tomllib
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

DISTRIBUTION = "ddp-runner"
CHECKOUT = Path(__file__).resolve().parents[2]
COMMENT = "# Where ddp-runner comes from on this machine. Delete this if a package index has it."


@dataclass(frozen=True)
class Origin:
    """The value of ddp-runner in ``[tool.uv.sources]``; empty if a package index has it."""

    source: dict[str, str | bool]

    @property
    def missing(self) -> Path | None:
        """The file or folder that it names, if that does not exist."""
        path = Path(str(self.source["path"])) if "path" in self.source else None
        return path if path is not None and not path.exists() else None

    def lines(self) -> str:
        """Return the lines of pyproject.toml; none for a package index."""
        if not self.source:
            return ""
        # What JSON writes for texts and truth values is TOML as well.
        pairs = ", ".join(f"{key} = {json.dumps(value)}" for key, value in self.source.items())
        return f"\n{COMMENT}\n[tool.uv.sources]\n{DISTRIBUTION} = {{ {pairs} }}\n"


def origin() -> Origin:
    """Return where this program was installed from.

    A checkout is used as it lies there. Otherwise the installer has recorded a path or an address,
    and nothing for what came from an index:
    https://packaging.python.org/specifications/direct-url
    """
    if _is_checkout(CHECKOUT):
        return Origin({"path": str(CHECKOUT), "editable": True})
    try:
        recorded = metadata.distribution(DISTRIBUTION).read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        recorded = None
    return Origin(source_of(json.loads(recorded)) if recorded else {})


def source_of(recorded: dict[str, Any]) -> dict[str, str | bool]:
    """Return uv's source for the content of a direct_url.json; empty for what uv cannot install."""
    url = str(recorded["url"])
    address = urlsplit(url)
    source: dict[str, str | bool] = {}
    if "vcs_info" in recorded:
        if recorded["vcs_info"]["vcs"] == "git":
            source = {"git": url, "rev": str(recorded["vcs_info"]["commit_id"])}
    elif address.scheme == "file":
        source = {"path": unquote(address.path)}
        if recorded.get("dir_info", {}).get("editable"):
            source["editable"] = True
    else:
        source = {"url": url}
    if source and recorded.get("subdirectory"):
        source["subdirectory"] = str(recorded["subdirectory"])
    return source


def _is_checkout(folder: Path) -> bool:
    """Return whether a folder holds this project's source."""
    try:
        project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(project.get("project", {}).get("name") == DISTRIBUTION)
