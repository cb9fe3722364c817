"""Right steps of many kinds: how far each is from one process's, as parts of the bounds."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from step_faults import WORLD
from train_states import build, compose_config

from ddp_runner.check.step_check import StepCheck
from ddp_runner.dist_env import DistEnv

DATA = ("dataset=fake_images", "dataset.num_samples=40")
GPT = (
    "model=gpt", "dataset=text", "dataset.sequence_length=32", "dataset.eval_fraction=0.0005",
    "model.num_layers=2", "model.width=64", "model.num_heads=4",
)  # fmt: skip
MODELS = {
    "toy": ("model=toy", "dataset.num_samples=40"),
    "convnet": ("model=convnet", *DATA),
    "mnist_net": ("model=mnist_net", *DATA),
    "resnet18": ("model=resnet18", "dataset=fake_images", "dataset.num_samples=12"),
    "gpt": GPT,
    "gpt, dropout": (*GPT, "model.dropout=0.1"),
    "gpt, 6 layers": (*GPT, "model.num_layers=6", "model.width=32"),
    "bert": (
        "model=bert", "dataset.path=own.csv", "dataset.max_length=24", "model.width=32",
        "model.feedforward=64",
    ),
    "two stages": ("model=toy_mp", "dataset.num_samples=40"),
}  # fmt: skip
OPTIMIZERS = ("sgd", "momentum", "adamw", "rmsprop", "adagrad", "nadam", "adamax")
IN_PARTS = {"gpt", "gpt, dropout", "gpt, 6 layers", "toy"}  # models with a plan for tensor parallel


@dataclass(frozen=True)
class RightStep:
    """A command line without a fault."""

    model: str
    mode: str
    keys: tuple[str, ...]


def right_steps(seed: int, *, models: Sequence[str] = tuple(MODELS)) -> Iterator[RightStep]:
    """Yield random combinations of model, mode, precision and batch, without an end."""
    draws = Random(seed)
    while True:
        model = draws.choice(models)
        modes = ["ddp_mp"] if model == "two stages" else ["single", "ddp", "fsdp", "hsdp"]
        modes += ["tp", "tp", "fsdp_tp"] if model in IN_PARTS else []
        mode, accumulated = draws.choice(modes), draws.choice((1, 1, 2, 4))
        size = draws.choice((2, 3, 4)) * 4 * accumulated
        optimizer = draws.choice(OPTIMIZERS) if mode in ("single", "ddp") else "adamw"
        yield RightStep(
            model,
            mode,
            (
                *MODELS[model],
                f"parallelism={mode}",
                f"seed={draws.randrange(10**6)}",
                f"train.precision={draws.choice(('fp32', 'fp32', 'bf16'))}",
                f"train.grad_accum_steps={accumulated}",
                f"batch.global_size={size}",
                f"optimizer={optimizer}",
                f"train.clip_norm={draws.choice(('null', '1.0', '0.1'))}",
                *(["parallelism.comm_hook=bf16"] if mode == "ddp" and draws.random() < 0.2 else []),
            ),
        )


def parts_of_bounds(
    env: DistEnv, steps: Sequence[RightStep]
) -> list[tuple[str, dict[str, list[float]]]]:
    """Return for each step what the verdict says is wrong, and parts of the bounds by stage."""
    results = []
    for step in steps:
        state = build(env, compose_config(*step.keys, world_size=env.world_size))
        check, parts = StepCheck(state), dict[str, list[float]]()
        for (stage, _), distance in check.distances.items():
            if distance.bound:
                parts.setdefault(stage, []).append(distance.apart / distance.bound)
        verdict = check.verdict()
        results.append(("" if verdict.ok else verdict.detail, parts))
    return results


def world_of(step: RightStep) -> int:
    """Return the number of ranks of a step."""
    return WORLD[step.mode]
