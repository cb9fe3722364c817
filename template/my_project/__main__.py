"""``python -m my_project``: the command ``python -m ddp_runner`` with this project's options."""

import sys
from pathlib import Path

from ddp_runner.cli.app import main

CONF = Path(__file__).resolve().parents[1] / "conf"

if __name__ == "__main__":
    main(["--config-dir", str(CONF), "allowed_targets=[my_project]", *sys.argv[1:]])
