"""The loop by hand of gpu.py: DDP on models and tensors of the runner, and nothing else.

python benchmarks/gpu_programs.py toy --rehearse --kind cpu --data-root . --json out.json fp32 bf16

It takes the runner's batches in the runner's order. The tensors are on the device, the loss is read
as often as a run logs. With `+compiled` behind a precision the model goes through torch.compile.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpu_setup import TEXT_FILE, TEXT_TOKENS, Workload, workload
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.parallel import DistributedDataParallel

from ddp_runner.data.sources.offline import FakeImages, RandomRegression
from ddp_runner.models.convnet import ConvNet
from ddp_runner.models.gpt import GPT
from ddp_runner.models.torchvision_models import classifier
from ddp_runner.models.toy import ToyModel
from ddp_runner.seeds import derive, seed_all

CLIP_NORM = 1.0  # of models that the runner clips by default
Batches = Callable[[Tensor], tuple[Tensor, Tensor]]  # numbers of samples -> inputs and targets


def main() -> None:
    """Train by hand in each variant; rank 0 writes what it measured, or the error."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workload")
    parser.add_argument("variants", nargs="+", help="fp32, tf32, bf16, bf16+compiled")
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--kind", required=True, help="cuda, simgpu or cpu")
    parser.add_argument("--data-root", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    device = join(args.kind)
    work, found = workload(args.workload, rehearses=args.rehearse), dict[str, Any]()
    data = batches_of(work, device, args.data_root)
    for variant in args.variants:
        try:
            found[variant] = train(work, variant, device, data)
        except Exception as error:  # such as a GPU that is too small; the others go on
            found[variant] = {"error": f"{type(error).__name__}: {error}"[:600]}
        if device.type != "cpu":
            torch.get_device_module(device).empty_cache()
    if dist.get_rank() == 0:
        args.json.write_text(json.dumps(found))
    dist.destroy_process_group()


def join(kind: str) -> torch.device:
    """Return this rank's device, and join torchrun's process group, or one of this process."""
    device = torch.device(kind)
    if kind != "cpu":
        device = torch.device(kind, int(os.environ.get("LOCAL_RANK", "0")))
        torch.accelerator.set_device_index(device)
    backend = dist.get_default_backend_for_device(device)
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, init_method="tcp://localhost:0", rank=0, world_size=1)
    return device


def batches_of(work: Workload, device: torch.device, data_root: Path) -> Batches:
    """Return what makes a batch of the runner's tensors, which move to the device as a whole."""
    if work.is_text:
        text = bytearray((data_root / TEXT_FILE).read_bytes()[: TEXT_TOKENS + 1])
        tokens = torch.frombuffer(text, dtype=torch.uint8).to(device)
        windows = tokens.unfold(0, work.size + 1, work.size)

        def of_text(rows: Tensor) -> tuple[Tensor, Tensor]:
            chosen = windows.index_select(0, rows).long()
            return chosen[:, :-1], chosen[:, 1:]

        return of_text
    size: dict[str, Any] = {"num_samples": work.num_samples(dist.get_world_size()), "seed": 0}
    source: Any
    if work.model == "toy":
        source = RandomRegression("random", eval_samples=40, input_size=10, target_size=5, **size)
        shift, factor = 0.0, 1.0
    else:
        shape: dict[str, Any] = {"channels": work.channels, "height": work.size, "width": work.size}
        source = FakeImages("fake", eval_samples=200, num_classes=10, **shape, **size)
        shift, factor = 255 * source.mean, 1 / (255 * source.std)
    tensors = source.build(data_root)
    inputs, targets = (tensors[f"train_{part}"].to(device) for part in ("inputs", "targets"))

    def of_samples(rows: Tensor) -> tuple[Tensor, Tensor]:
        chosen = inputs.index_select(0, rows)
        if chosen.dtype == torch.uint8:
            chosen = chosen.float().sub_(shift).mul_(factor)
        return chosen, targets.index_select(0, rows)

    return of_samples


def model_of(work: Workload) -> nn.Module:
    """Return the model as the runner's YAML builds it."""
    seed_all(0)
    if work.model == "toy":
        return ToyModel()
    if work.model == "convnet":
        return ConvNet(num_classes=10, in_channels=work.channels)
    if work.model == "resnet18":
        return classifier(
            architecture="resnet18", num_classes=10, in_channels=work.channels, small_images=True
        )
    sizes = {
        "gpt_10m": {"num_layers": 6, "width": 384, "num_heads": 6},
        "gpt_124m": {"num_layers": 12, "width": 768, "num_heads": 12, "min_vocab_size": 50304},
    }
    fewer = {} if work.layers is None else {"num_layers": work.layers}
    return GPT(vocab_size=256, **sizes[work.model] | fewer)


def optimizer_of(work: Workload, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of the model's YAML."""
    if work.is_text:
        rate = 6e-4 if work.model == "gpt_124m" else 1e-3
        return torch.optim.AdamW(model.parameters(), lr=rate)
    if work.model == "toy":
        return torch.optim.SGD(model.parameters(), lr=0.001)
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def loss_of(work: Workload, outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss of a sample or a token."""
    if work.model == "toy":
        return mse_loss(outputs, targets)
    return cross_entropy(outputs.flatten(0, -2), targets.flatten())


def train(work: Workload, variant: str, device: torch.device, data: Batches) -> dict[str, Any]:
    """Train by hand. Collective: every rank must call.

    Returns:
        ``samples_per_s`` over all ranks and ``losses`` of this rank, both of each `every` steps,
        and ``peak_gib``, the most memory of the device that was allocated.
    """
    precision, _, compiled = variant.partition("+")
    on_gpu, rank, ranks = device.type != "cpu", dist.get_rank(), dist.get_world_size()
    if precision == "tf32" and device.type != "cuda":
        raise ValueError("tf32 needs a CUDA device")
    if on_gpu:
        backends: Any = torch.backends
        backends.fp32_precision = "tf32" if precision == "tf32" else "ieee"
        torch.accelerator.reset_peak_memory_stats(device)
    module = model_of(work).to(device)
    if not work.is_text and work.model != "toy":
        module = module.to(memory_format=torch.channels_last)
    if compiled:
        torch.compiler.reset()
    model = DistributedDataParallel(
        torch.compile(module) if compiled else module,
        device_ids=[device] if on_gpu else None,
        gradient_as_bucket_view=True,
    )
    optimizer, num_samples = optimizer_of(work, model), work.num_samples(ranks)
    batch, clips = work.batch * ranks, work.is_text or work.model == "convnet"
    per_epoch = num_samples // batch
    speeds, losses, started = list[float](), list[float](), time.perf_counter()
    order = torch.zeros(0)
    for step in range(work.steps):
        epoch, index = divmod(step, per_epoch)
        if index == 0:
            generator = torch.Generator().manual_seed(derive(0, "order", epoch))
            order = torch.randperm(num_samples, generator=generator).to(device)
        inputs, targets = data(order[index * batch : (index + 1) * batch][rank::ranks])
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
            loss = loss_of(work, model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        if (step + 1) % work.every == 0:
            losses.append(loss.item())
            now = time.perf_counter()
            speeds.append(work.every * batch / (now - started))
            started = now
    peak = torch.accelerator.max_memory_allocated(device) / 2**30 if on_gpu else None
    return {"samples_per_s": speeds, "losses": losses, "peak_gib": peak}


if __name__ == "__main__":
    main()
