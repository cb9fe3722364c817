"""A user's Dataset in the runner and in four other loops, in turns: samples per second.

uv sync --all-extras --group benchmarks
python benchmarks/loader.py --data-root data
python benchmarks/loader.py --data-root data --dataset mnist --ranks 2 --workers 0 --samples 60000

All train the same ConvNet on the same MNIST, decoded and transformed sample by sample, with plain
SGD, 100 samples per rank and as many threads and loading workers. What is timed are whole epochs
from the second on, from end to end, without start-up, evaluation and checkpoints. The programs take
turns, and the first changes, so that a drifting machine speed affects all alike. Read the ratios.

With `--dataset mnist` the runner trains on its own MNIST, which it keeps in memory, the others as
before. Then the seconds of the whole commands count as well: give `--epochs 2`. With `--dataset
pictures` all train ResNet-18 on random pictures of 32x32 pixels in memory.
"""

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path

from loop import spread, timed

PROGRAMS = Path(__file__).with_name("loader_programs.py")
OPPONENTS = ("plain", "accelerate", "fabric", "trainer")
BATCH_SIZE = 100  # samples per rank


def main() -> None:
    """Measure; print each turn's samples per second, and the medians of the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-root", required=True, help="folder that holds MNIST/raw")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--threads", type=int, help="per rank; default: cores / ranks")
    parser.add_argument("--against", nargs="+", default=OPPONENTS, choices=OPPONENTS)
    parser.add_argument("--samples", type=int, default=12000, help="a multiple of 100 * ranks")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--dataset", default="own", choices=["own", "mnist", "pictures"])
    args = parser.parse_args()
    names = ["runner", *args.against]
    print("ranks  workers  run  " + "  ".join(f"{name:>10}" for name in names) + "  (samples/s)")
    for num_ranks in args.ranks:
        for num_workers in args.workers:
            ratios: dict[str, list[float]] = {name: [] for name in args.against}
            whole: dict[str, list[float]] = {name: [] for name in args.against}
            for turn in range(args.repeats):
                first = turn % len(names)
                found = {
                    name: measure(name, args, num_ranks=num_ranks, num_workers=num_workers)
                    for name in names[first:] + names[:first]
                }
                for name in args.against:
                    ratios[name].append(found["runner"][0] / found[name][0])
                    whole[name].append(found[name][1] / found["runner"][1])
                shown = "  ".join(f"{found[name][0]:10.0f}" for name in names)
                print(f"{num_ranks:5}  {num_workers:7}  {turn + 1:3}  {shown}", flush=True)
            for what, by_name in (("samples/s", ratios), ("whole commands", whole)):
                medians = ", ".join(f"{name} {spread(found)}" for name, found in by_name.items())
                print(
                    f"{num_ranks} rank(s), {num_workers} worker(s), {what}: runner over {medians}",
                    flush=True,
                )


def measure(
    name: str, args: argparse.Namespace, *, num_ranks: int, num_workers: int
) -> tuple[float, float]:
    """Run a program; return its samples per second over all ranks, and the command's seconds."""
    data_root = str(Path(args.data_root).resolve())
    threads = args.threads or max(1, (os.cpu_count() or 1) // num_ranks)
    model = "resnet18" if args.dataset == "pictures" else "convnet"
    with tempfile.TemporaryDirectory() as folder:
        if name == "runner":
            own = (
                "dataset=torch_dataset", "allowed_targets=[loader_programs]",
                "dataset.num_classes=10", "dataset.channels=1",
                f"dataset.num_workers={num_workers}",
                *(
                    f"dataset.{split}={{_target_:loader_programs.mnist,data_root:{data_root!r},"
                    f"num_samples:{args.samples if split == 'train' else 100}}}"
                    for split in ("train", "eval")
                ),
            )  # fmt: skip
            pictures = (
                "dataset=fake_images", "dataset.channels=3", "dataset.height=32",
                "dataset.width=32", f"dataset.num_samples={args.samples}",
            )  # fmt: skip
            in_memory = ("dataset=mnist", f"data_root={data_root}")
            dataset = {"own": own, "mnist": in_memory, "pictures": pictures}[args.dataset]
            wall_s = timed(
                "ddp_runner", f"model={model}", *dataset, f"world_size={num_ranks}",
                "optimizer=sgd", "train.clip_norm=null", f"batch.per_rank={BATCH_SIZE}",
                f"train.epochs={args.epochs}", f"train.num_threads={threads}", "optimizer.lr=1e-3",
                f"train.log_every_steps={args.samples // (BATCH_SIZE * num_ranks)}",
                "train.eval_every_epochs=0", "checkpoint.every_epochs=null",
                "hydra.run.dir=run", cwd=Path(folder),
                environ={"PYTHONPATH": str(PROGRAMS.parent)},
            )  # fmt: skip
            text = (Path(folder) / "run" / "metrics.jsonl").read_text()
            lines = [line for line in map(json.loads, text.splitlines()) if "train/loss" in line]
            assert len(lines) == args.epochs
            speeds = [line["perf/samples_per_s"] for line in lines[1:]]
            return statistics.harmonic_mean(speeds), wall_s
        result = Path(folder) / "result.json"
        wall_s = timed(
            "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}", str(PROGRAMS),
            name, "--data-root", data_root, "--samples", str(args.samples), "--model", model,
            "--epochs", str(args.epochs), "--num-workers", str(num_workers),
            "--num-threads", str(threads), "--json", str(result), cwd=Path(folder),
            environ={"OMP_NUM_THREADS": str(threads)},
        )  # fmt: skip
        found = json.loads(result.read_text())
    assert (found["threads"], len(found["epoch_s"])) == (threads, args.epochs - 1)
    return args.samples / statistics.mean(found["epoch_s"]), wall_s


if __name__ == "__main__":
    main()
