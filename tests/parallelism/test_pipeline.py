"""A pipeline trains as one process does: losses, norms, weights and evaluations, in float64."""

import shutil
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import staged_models
import torch
from ranks import run_ranks
from tiers import first_of
from torch import Tensor
from train_states import build, compose_config, evaluated, run_loop

from ddp_runner.config.schema import Config
from ddp_runner.dist_env import DistEnv
from ddp_runner.parallelism.stages import whole_parameters
from ddp_runner.train.first_batch import try_run
from ddp_runner.train.loop import build_engine, take_step
from ddp_runner.train.step_metrics import global_loss

LETTERS = "".join(chr(97 + place * place % 26) for place in range(277))  # 31 samples to train on
GPT = (
    *("model=gpt", "dataset.sequence_length=8", "model.num_layers=4", "model.width=16"),
    *("model.num_heads=2", "batch.global_size=12", "train.grad_accum_steps=4"),
    *("optimizer=adamw", "optimizer.lr=0.01", "train.clip_norm=1.0"),
)
CLOSE = {"rtol": 1e-12, "atol": 1e-12}
# A step has four micro-batches of three samples; an epoch's last one has 3, 2 and 2, so two are
# filled, and the fourth is a placeholder.
NUM_STEPS = 6
TWICE_AS_LARGE = "batch.global_size=24"  # so that each of two replicas has the same


@dataclass
class Steps:
    """What a rank computed: losses, norms, metrics after steps 2 and 6, and its parameters."""

    losses: list[float]
    norms: list[float]
    metrics: list[dict[str, float]]
    parameters: dict[str, Tensor]
    sizes: list[tuple[int, bool]]  # of the whole model's parameters, and whether they are trained
    average: dict[str, Tensor]


def steps_of(env: DistEnv, config: Config, dtype: torch.dtype = torch.float64) -> Steps:
    """Take steps, with an evaluation between them and one after them."""
    torch.set_default_dtype(dtype)
    state = build(env, config)
    try_run(state)
    steps = (one for group in state.optimizer.param_groups for one in group["params"])
    assert {*steps} <= {*state.module.parameters()}
    state.engine = build_engine(state)
    whole = {*whole_parameters(state.module).values()}
    sizes = sorted((parameter.numel(), parameter.requires_grad) for parameter in whole)
    found = Steps([], [], [], {}, sizes, {})
    for number, batch in enumerate(islice(state.batches, NUM_STEPS), start=1):
        state.model.train()
        sums = take_step(state, batch)
        found.losses.append(global_loss(state, sums))
        found.norms.append(float(sums.grad_norm) if sums.grad_norm is not None else 0.0)
        if number in (2, NUM_STEPS):
            found.metrics.append(evaluated(state)[0])
    found.parameters = {name: value.detach() for name, value in state.module.named_parameters()}
    if state.ema is not None:
        found.average = dict(state.ema.module.named_parameters())
    return found


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the key of a text of 31 sequences."""
    path: Path = tmp_path_factory.mktemp("text") / "letters.txt"
    path.write_text(LETTERS)
    return f"dataset.path={path}"


def compared(world_size: int, letters: str, *keys: str, of_mode: tuple[str, ...]) -> list[Steps]:
    """Return the ranks' steps, after a comparison with those of one process."""
    of_batch = [key for key in of_mode if key.startswith("batch.")]
    single = compose_config(*GPT, letters, *keys, *of_batch, "parallelism=single")
    (alone,) = run_ranks(steps_of, 1, single)
    config = compose_config(*GPT, letters, *keys, *of_mode, world_size=world_size)
    ranks: list[Steps] = run_ranks(steps_of, world_size, config)
    assert alone.losses[-1] < alone.losses[0]
    for rank in ranks:
        assert rank.sizes == alone.sizes
        for name in ("losses", "norms"):
            torch.testing.assert_close(getattr(rank, name), getattr(alone, name), **CLOSE)
        for metrics, expected in zip(rank.metrics, alone.metrics, strict=True):
            assert metrics == pytest.approx(expected, rel=1e-12)
        for name in ("parameters", "average"):
            whole, own = getattr(alone, name), getattr(rank, name)
            for key, value in own.items():
                torch.testing.assert_close(value, whole[key], **CLOSE)
    together = set[str]().union(*(rank.parameters for rank in ranks))
    assert together == alone.parameters.keys()
    return ranks


INTERLEAVED = ("parallelism.schedule=interleaved", "parallelism.stages_per_rank=2")
WAYS: dict[str, Any] = {
    "1f1b": (2, ("parallelism=pp",)),
    "interleaved": (2, ("parallelism=pp", *INTERLEAVED)),
    "replicas": (4, ("parallelism=ddp_pp", TWICE_AS_LARGE)),
    "gpipe": (2, ("parallelism=pp", "parallelism.schedule=gpipe")),
    "four stages": (4, ("parallelism=pp",)),
    "replicas, interleaved": (4, ("parallelism=ddp_pp", TWICE_AS_LARGE, *INTERLEAVED)),
    "replicas, gpipe": (4, ("parallelism=ddp_pp", TWICE_AS_LARGE, "parallelism.schedule=gpipe")),
}


@pytest.mark.parametrize("way", first_of(WAYS, num_quick=1))
def test_a_pipeline_takes_the_steps_of_one_process(way: str, letters: str) -> None:
    """With a clipped norm over all stages, a tied embedding, and uneven micro-batches."""
    world_size, keys = WAYS[way]
    ranks = compared(world_size, letters, "ema.decay=0.9", of_mode=keys)
    assert not ranks[0].parameters.keys() & ranks[1].parameters.keys() - {"tokens.weight"}


PP, OWN = ("parallelism=pp",), "allowed_targets=[staged_models]"
UNCUT = (OWN, "model._target_=staged_models.Plain", "model.meta_init=false", "~model.pipeline")
TIED = (*UNCUT[:3], "model.pipeline={embed:[tokens],head:[output]}")  # each end has its own name
VARIANTS: dict[str, tuple[str, ...]] = {
    "groups": (
        "params.no_decay=true",
        "params.groups=[{match:blocks.3.*,lr:0.02},{match:tokens.*,weight_decay:0.5}]",
    ),
    "first stage frozen": ("params.freeze=[tokens.*,blocks.0.*,blocks.1.*]",),
    "last block frozen": ("params.freeze=[blocks.3.*,norm.*]",),
    "computed twice": ("train.activation_checkpointing=true",),
    "without clipping": ("train.clip_norm=null",),
    "clipped by value": ("train.clip_norm=null", "train.clip_value=0.01"),
    "built whole": ("model.meta_init=false",),
    "all ends on all ranks": ("~model.pipeline",),
    "a model of the user's": UNCUT,
    "strided": tuple(key.replace("Plain", "Strided") for key in UNCUT),
    "tied ends": TIED,
    "switched modes": (
        *(key.replace("Plain", "Doubling") for key in UNCUT),
        "train.step=staged_models.switching",
    ),
    "own step": (OWN, "train.step=staged_models.noisy"),
    "scalars": (OWN, "train.step=staged_models.counted"),
}


@pytest.mark.parametrize("variant", first_of(VARIANTS))
def test_variants_take_the_steps_of_one_process(variant: str, letters: str) -> None:
    """Patterns may match on other ranks only; unused and frozen parts need no gradient."""
    compared(2, letters, *VARIANTS[variant], of_mode=PP)


@pytest.mark.full
@pytest.mark.parametrize("variant", ["groups", "first stage frozen", "a model of the user's"])
def test_variants_of_replicas(variant: str, letters: str) -> None:
    """Gradients are added over replicas where the stages have some."""
    compared(4, letters, *VARIANTS[variant], of_mode=("parallelism=ddp_pp", TWICE_AS_LARGE))


@pytest.mark.full
def test_all_replicas_and_all_ends_stay_equal(letters: str) -> None:
    """With three replicas the order of a sum counts; the weights follow from no seed."""
    own = (key.replace("Plain", "Unseeded") for key in TIED)
    size = ("model.num_layers=5", "model.width=32", "model.min_vocab_size=2000")
    config = compose_config(*GPT, letters, *own, *size, "parallelism=ddp_pp", world_size=6)
    first, second, *others = run_ranks(steps_of, 6, config, torch.float32)
    whole = {**second.parameters, **first.parameters}
    for rank in (second, *others):
        assert "tokens.weight" in rank.parameters
        assert [name for name, one in rank.parameters.items() if not one.equal(whole[name])] == []


def losses_of(env: DistEnv, config: Config, max_steps: int, folder: Path) -> list[float]:
    """Continue from what the folder holds, and return the losses."""
    return run_loop(env, config, max_steps=max_steps, folder=folder).losses


def test_stages_resume_a_parameter_with_two_names(letters: str, tmp_path: Path) -> None:
    """Each end finds the optimizer's state, which is under the first name."""
    keys = (*GPT, letters, *TIED, "train.log_every_steps=1")
    single = compose_config(*keys, "parallelism=single")
    (begun,) = run_ranks(losses_of, 1, single, 3, tmp_path / "single")
    shutil.copytree(tmp_path / "single", tmp_path / "pp")
    (expected,) = run_ranks(losses_of, 1, single, 6, tmp_path / "single")
    config = compose_config(*keys, *PP, world_size=2)
    found, _ = run_ranks(losses_of, 2, config, 6, tmp_path / "pp")
    assert len(begun) == len(expected) == 3
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0.0)


def random_steps(env: DistEnv, config: Config) -> tuple[list[float], list[float], int]:
    """Return the losses of two equal steps, what the training step drew, and the masks' seeds."""
    losses = []
    for _ in range(2):
        state = build(env, config)
        state.engine = build_engine(state)
        state.model.train()
        losses.append(global_loss(state, take_step(state, next(iter(state.batches)))))
    return losses, staged_models.DRAWN, state.work.layout.share


@pytest.mark.full
def test_random_numbers_repeat_and_are_those_of_the_recorded_inputs(letters: str) -> None:
    """The training step runs once for the inputs and once for the loss, with the same numbers."""
    keys = (OWN, "train.step=staged_models.drawing", "model.dropout=0.5", "train.clip_norm=null")
    config = compose_config(*GPT, letters, *keys, *PP, world_size=2)
    (first, recorded, _), (last, drawn, _) = run_ranks(random_steps, 2, config)
    assert first == last
    assert first[0] == first[1]
    assert len(set(recorded[:4])) == 4
    assert drawn[:4] == drawn[4:8] == recorded[:4]


@pytest.mark.full
def test_bf16_rounds_as_in_one_process(letters: str) -> None:
    """The stages compute in the autocast of the training step's call."""
    keys = (*GPT, letters, "train.precision=bf16")
    (alone,) = run_ranks(steps_of, 1, compose_config(*keys, "parallelism=single"), torch.float32)
    config = compose_config(*keys, *PP, world_size=2)
    for rank in run_ranks(steps_of, 2, config, torch.float32):
        torch.testing.assert_close(rank.losses, alone.losses, rtol=1e-5, atol=0.0)
        torch.testing.assert_close(rank.norms, alone.norms, rtol=1e-4, atol=0.0)
