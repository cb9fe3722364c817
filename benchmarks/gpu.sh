#!/usr/bin/env bash
# Runs all that needs a GPU in under 25 minutes; writes one table in Markdown, and the same as JSON.
#
#   benchmarks/gpu.sh [gpu-results.md] [--parts one_gpu,overhead,speed,...] [--rehearse]
#
# It needs no network, no uv and no installation: PYTHON names the interpreter. Without a GPU it
# rehearses in tiny sizes, on the simulated GPU or the CPU. The parts are in benchmarks/gpu.py.
set -u
root=$(cd "$(dirname "$0")/.." && pwd) || exit 1
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# An interpreter that finds what PYTHON's finds, and this folder as if it were installed: the tests
# give each command a PYTHONPATH of its own.
"${PYTHON:-python}" - "$scratch/venv" "$root" <<'PYTHON' || exit 1
import sys, venv
from pathlib import Path
folder, here = sys.argv[1:]
venv.create(folder, symlinks=True)
(site,) = Path(folder).glob("lib/python*/site-packages")
found = [here, *(path for path in sys.path[1:] if Path(path).is_dir())]
(site / "found.pth").write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in found))
PYTHON
"$scratch/venv/bin/python" "$root/benchmarks/gpu.py" "$@"
