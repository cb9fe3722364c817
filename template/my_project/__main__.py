"""``python -m my_project``: the command ``python -m ddp_runner`` with this project's options."""

import sys
from pathlib import Path

from ddp_runner.cli.app import main

HERE = Path(__file__).resolve().parent
# An installed package holds its own copy of conf/; see pyproject.toml.
CONF = HERE / "conf" if (HERE / "conf").is_dir() else HERE.parent / "conf"

MODEL = "model=small_net"  # for a command that names no model, experiment or run

if __name__ == "__main__":
    words = sys.argv[1:]
    named = [word for word in words if word.startswith(("model=", "experiment=", "resume="))]
    if not set(named) - {"resume=auto"}:
        words = [MODEL, *words]
    main(["--config-dir", str(CONF), "allowed_targets=[my_project]", *words])
