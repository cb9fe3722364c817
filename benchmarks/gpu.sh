#!/usr/bin/env bash
# Runs all that needs a GPU in under 20 minutes and writes the results to one Markdown file.
#
#   benchmarks/gpu.sh [gpu-results.md]
#
# It runs the tests marked gpu and multi_gpu, the table of tests/simgpu on CUDA in place of the
# simulated GPU, and the benchmarks that make sense there. For each part it reports success, failure
# (with the last lines) or why it was skipped.
# It needs no network, no uv and no installation: PYTHON names the interpreter, and
# DDP_RUNNER_DATA_ROOT the data's folder.
set -u
out=$(realpath -m "${1:-gpu-results.md}")
cd "$(dirname "$0")/.." || exit 1
python=${PYTHON:-python}
limit_s=${LIMIT_S:-1140}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
failed=0

# An interpreter that finds what PYTHON's finds, and this folder as if it were installed: the tests
# give each command a PYTHONPATH of its own.
"$python" - "$scratch/venv" "$PWD" <<'PYTHON' || exit 1
import sys, venv
from pathlib import Path
folder, here = sys.argv[1:]
venv.create(folder, symlinks=True)
(site,) = Path(folder).glob("lib/python*/site-packages")
found = [here, *(path for path in sys.path[1:] if Path(path).is_dir())]
(site / "found.pth").write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in found))
PYTHON
python=$scratch/venv/bin/python

line() { printf '%s\n' "$*" >>"$out"; }

has() { "$python" -c "import $1" >"$scratch/import" 2>&1; }

skip() { # name, reason
    echo "$1: skipped: $2"
    line "## $1" && line "" && line "Skipped: $2." && line ""
}

# name, seconds at most, command...
part() {
    local name=$1 most_s=$2 start=$SECONDS code verdict
    shift 2
    local left_s=$((limit_s - SECONDS))
    if [ "$left_s" -lt 20 ]; then
        skip "$name" "the script's time limit ($limit_s s) is over"
        return
    fi
    [ "$most_s" -lt "$left_s" ] || most_s=$left_s
    echo "$name: at most $most_s s ..."
    timeout --kill-after=10 "$most_s" "$@" >"$scratch/log" 2>&1 </dev/null
    code=$?
    case $code in
        0) verdict="Passed" ;;
        5) verdict="Skipped: no test was collected" ;;
        124 | 137) verdict="**FAILED**: stopped after $most_s s" ;;
        *) verdict="**FAILED** with exit code $code" ;;
    esac
    case $verdict in *FAILED*) failed=1 ;; esac
    if [ "$code" = 0 ] && tail -n 1 "$scratch/log" | grep -q skipped &&
        ! tail -n 1 "$scratch/log" | grep -q passed; then
        verdict="Skipped: every test was skipped, see the reasons"
    fi
    line "## $name" && line "" && line "$verdict; $((SECONDS - start)) s. \`${*//$python/python}\`" && line ""
    line '```'
    if [ "$code" = 0 ]; then tail -n 30 "$scratch/log" >>"$out"; else tail -n 80 "$scratch/log" >>"$out"; fi
    line '```' && line ""
    echo "$name: $verdict"
}

pytest=("$python" -m pytest -q -rs --tb=short --durations=5 -p no:cacheprovider)
pytest+=(-o addopts=--import-mode=importlib)
workers=$(($(nproc) / 2))
! has xdist || [ "$workers" -lt 2 ] || pytest+=(-n "$((workers < 8 ? workers : 8))" --dist load)
! has pytest_benchmark || pytest+=(-p no:benchmark) # it warns of xdist

: >"$out"
line "# GPU results of ${HOSTNAME:-this machine}" && line ""
line "$(date -u '+%Y-%m-%d %H:%M UTC'), commit $(git rev-parse --short HEAD 2>/dev/null || echo unknown)" && line ""
line '```'
if command -v nvidia-smi >/dev/null; then
    nvidia-smi --query-gpu=index,name,driver_version,memory.total,compute_cap --format=csv >>"$out" 2>&1
else
    line "no nvidia-smi"
fi
"$python" - >>"$out" 2>&1 <<'PYTHON'
import os, platform
import torch
print(f"Python {platform.python_version()}, torch {torch.__version__} for CUDA {torch.version.cuda}, {os.cpu_count()} cores")
count = torch.cuda.device_count()
print(f"{count} CUDA devices:", ", ".join(torch.cuda.get_device_name(i) for i in range(count)) or "none")
from ddp_runner.host.hardware import detect
print("the runner sees", detect())
PYTHON
line '```' && line ""
gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())' 2>"$scratch/import" || echo 0)
missing=""
for module in hydra omegaconf tensorboard sklearn torchvision rich matplotlib PIL safetensors; do
    has "$module" || missing="$missing $module"
done
[ -z "$missing" ] || line "Missing modules, whose tests fail or are skipped:$missing." ""

if has pytest && has psutil; then
    if [ "$gpus" -gt 0 ]; then
        part "Tests that need one GPU" 540 "${pytest[@]}" -m gpu tests/parallelism/test_gpu.py
    else
        skip "Tests that need one GPU" "torch sees no CUDA device"
    fi
    if [ "$gpus" -gt 1 ]; then
        part "Tests that need two GPUs" 420 \
            "${pytest[@]}" -m multi_gpu tests/parallelism/test_gpu.py tests/collectives/test_collectives.py
    else
        skip "Tests that need two GPUs" "this machine has $gpus"
    fi
    if [ "$gpus" -gt 0 ]; then
        part "The table of all modes, on CUDA beside the CPU" 420 env DDP_RUNNER_TEST_DEVICE=cuda \
            "${pytest[@]}" -m simgpu tests/simgpu/test_table.py
    else
        part "The table of all modes, on the simulated GPU beside the CPU" 420 \
            "${pytest[@]}" -m "simgpu and not slow" tests/simgpu/test_table.py
    fi
    part "Tests of hardware and its rules" 120 \
        "${pytest[@]}" tests/host/test_hardware.py tests/config/test_resolve.py
else
    skip "Tests" "pytest or psutil is missing"
fi

keys=(hydra.run.dir="$scratch/run" train.log_every_steps=20)
if [ "$gpus" -gt 0 ]; then
    for precision in fp32 bf16 fp16; do
        part "A loop on the GPU, $precision" 90 "$python" -m ddp_runner model=resnet18 \
            dataset=fake_images dataset.num_samples=8192 batch.global_size=256 world_size=1 \
            train.max_steps=60 train.precision="$precision" "${keys[@]}"
        rm -rf "$scratch/run"
    done
else
    skip "A loop on the GPU" "torch sees no CUDA device"
    part "A small loop on the CPU" 120 "$python" -m ddp_runner model=mnist_net dataset=fake_images \
        dataset.num_samples=512 world_size=1 train.max_steps=8 backend.device=cpu "${keys[@]}"
fi

data_root=${DDP_RUNNER_DATA_ROOT:-data}
if [ "$gpus" = 0 ]; then
    skip "The tutorial's loop and the runner's" "torch sees no CUDA device"
elif ! has torchvision; then
    skip "The tutorial's loop and the runner's" "torchvision is missing"
elif [ ! -d "$data_root/MNIST/raw" ]; then
    skip "The tutorial's loop and the runner's" "$data_root/MNIST/raw does not exist; see DDP_RUNNER_DATA_ROOT"
else
    ranks=(1)
    [ "$gpus" -lt 2 ] || ranks+=(2)
    part "The tutorial's loop and the runner's" 240 "$python" benchmarks/loop.py \
        --data-root "$data_root" --repeats 1 --ranks "${ranks[@]}"
fi
if [ "$gpus" -gt 1 ]; then
    part "All-reduce over nccl, the runner's timing and one by hand" 120 "$python" -m torch.distributed.run \
        --standalone --nproc-per-node=2 benchmarks/collectives.py --turns 5
else
    skip "All-reduce over nccl" "it needs two CUDA devices, this machine has $gpus"
fi
skip "benchmarks/sweep.py" "it measures how jobs start, on the CPU, and takes minutes"

line "Whole script: $SECONDS s."
echo "written: $out"
exit "$failed"
