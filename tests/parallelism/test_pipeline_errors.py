"""What a pipeline cannot compute is one plain line, and the cut is balanced."""

import pytest
import torch
from ranks import RankFailedError, run_ranks
from tiers import first_of
from torch import nn
from train_states import build, compose_config, rejection

from ddp_runner.config.schema import Config
from ddp_runner.dist_env import DistEnv
from ddp_runner.errors import UserError
from ddp_runner.models.gpt import GPT
from ddp_runner.parallelism.stages import plan_cut
from ddp_runner.train.first_batch import try_run
from ddp_runner.train.loop import build_engine, take_step

KEYS = (
    *("model=gpt", "dataset.sequence_length=8", "model.width=16", "batch.global_size=8"),
    *("train.grad_accum_steps=4", "parallelism=pp", "allowed_targets=[staged_models]"),
)
OWN = ("model.meta_init=false", "~model.pipeline")
REJECTED = {
    "BatchNorm": (
        (*OWN, "model._target_=staged_models.Normed"),
        "norm is a BatchNorm, which would count the samples that fill a micro-batch; write "
        "parallelism=ddp",
    ),
    "shared blocks": (
        (*OWN, "model._target_=staged_models.Shared"),
        "blocks.4 is a block twice, and a pipeline calls each once; write parallelism=fsdp",
    ),
    "no head": (
        (*OWN, "model._target_=staged_models.Headless"),
        "Headless has no stages: a pipeline needs its methods embed and head, and it lacks head; "
        "write parallelism=fsdp",
    ),
    "a name of nothing": (
        ("model.pipeline.head=[nrom]",),
        "model.pipeline.head (nrom) matches no parameter of the model; name a module or a "
        "parameter outside the blocks",
    ),
    "a third end": (
        ("+model.pipeline.tail=[norm]",),
        "model.pipeline (tail) must be embed or head",
    ),
    "two patterns": (("model.blocks=[blocks.0,blocks.1]",), "must be one pattern for a pipeline; "),
    "other groups on each rank": (
        ("optimizer._target_=staged_models.one_by_one", "parallelism.split=[1]"),
        "(staged_models.one_by_one) makes 10 groups of parameters on a rank of a pipeline and 29 "
        "on another, and a checkpoint has the groups of the whole model; make as many groups on "
        "every rank, or write parallelism=fsdp",
    ),
    "a split beyond": (
        ("parallelism.split=[4]",),
        "parallelism.split ([4]) must have the first block of each stage after the first: 1 "
        "ascending numbers from 1 to 3",
    ),
}


@pytest.fixture
def letters(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the key of a small text."""
    path = tmp_path_factory.mktemp("text") / "letters.txt"
    path.write_text("abcdefgh" * 30)
    return f"dataset.path={path}"


@pytest.mark.parametrize("case", first_of(REJECTED))
def test_a_model_that_cannot_be_cut_is_one_line(case: str, letters: str) -> None:
    """Every rank says so."""
    keys, sentence = REJECTED[case]
    config = compose_config(*KEYS, letters, *keys, world_size=2)
    for answer in run_ranks(rejection, 2, config):
        assert sentence in answer


def one_step(env: DistEnv, config: Config) -> None:
    """Take a step."""
    state = build(env, config)
    state.engine = build_engine(state)
    take_step(state, next(iter(state.batches)))


STEPS = {
    "twice": "the training step calls the model 2 times, and a pipeline computes it once; write a "
    "step that calls it once, or parallelism=fsdp",
    "decaying": "the training step reads parameters of the model, and a rank of a pipeline has "
    "only a part of it; write a step that only calls the model, or parallelism=fsdp",
}


@pytest.mark.parametrize("step", first_of(STEPS))
def test_a_step_that_a_pipeline_would_compute_otherwise_is_one_line(
    step: str, letters: str
) -> None:
    """It would be silently wrong: the rank with the loss has no other rank's layers."""
    keys = (f"train.step=staged_models.{step}", "batch.count=tokens")
    config = compose_config(*KEYS, letters, *keys, world_size=2)
    with pytest.raises(RankFailedError, match=f"UserError: {STEPS[step]}"):
        run_ranks(one_step, 2, config)


def outputs(env: DistEnv, config: Config) -> tuple[torch.Tensor, str, int]:
    """Return the model's outputs, the error of a backward through them, and unequal logits."""
    state = build(env, config)
    tokens = torch.arange(16).view(2, 8)
    logits = state.module(tokens)
    try:
        logits.sum().backward()
    except UserError as error:
        return logits.detach(), str(error), len(state.module.whole_state)
    return logits, "", 0


def test_a_forward_is_a_collective_with_the_outputs_on_each_rank(letters: str) -> None:
    """So evaluations and metrics need not know where the last stage is; gradients need a step."""
    first, second = run_ranks(outputs, 2, compose_config(*KEYS, letters, world_size=2))
    assert torch.equal(first[0], second[0])
    alone = compose_config(*KEYS, letters, "parallelism=single")
    ((whole, error, _),) = [run_ranks(whole_outputs, 1, alone)[0]]
    assert torch.equal(first[0], whole)
    assert error == ""
    assert first[1] == second[1]
    assert first[1].startswith("the outputs of a pipeline have no graph: its schedule computes the")
    assert first[2] == second[2] == 38


def failure(env: DistEnv, config: Config) -> str:
    """Return how the forward of a token that only the last stage rejects ends."""
    module = build(env, config).module
    try:
        module(torch.full((2, 8), 99))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.full
def test_a_stage_that_fails_fails_on_each_rank(letters: str) -> None:
    """Else the others would wait for its output."""
    keys = (*OWN, "model._target_=staged_models.Strided")
    first, last = run_ranks(failure, 2, compose_config(*KEYS, letters, *keys, world_size=2))
    assert last == "ValueError: 99 is no token"
    assert first == f"RuntimeError: {last}"


def tried(env: DistEnv, config: Config) -> str:
    """Return why the trial rejects a run."""
    try:
        try_run(build(env, config))
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.full
def test_a_buffer_that_training_changes_is_one_line(letters: str) -> None:
    """It would count the samples that fill a micro-batch, on the ranks that have it."""
    keys = (*OWN, "model._target_=staged_models.Counting")
    for answer in run_ranks(tried, 2, compose_config(*KEYS, letters, *keys, world_size=2)):
        assert answer.startswith("training changes the buffer model.seen, and a pipeline computes ")


def whole_outputs(env: DistEnv, config: Config) -> tuple[torch.Tensor, str, int]:
    """Return the outputs of a whole model."""
    return build(env, config).module(torch.arange(16).view(2, 8)).detach(), "", 0


@pytest.mark.parametrize(("num_stages", "expected"), [(2, [5, 3]), (4, [1, 3, 3, 1]), (8, [1] * 8)])
def test_stages_are_balanced_with_both_ends(num_stages: int, expected: list[int]) -> None:
    """The embedding counts on the first stage, and the head, which has it too, on the last."""
    with torch.device("meta"):
        model = GPT(vocab_size=64, num_layers=8, width=16, num_heads=2)
        model.wide = nn.Linear(16, 300)  # of the head
    ends = {"embed": ["tokens"], "head": ["tokens", "norm", "wide"]}
    stages, _ = plan_cut(model, num_stages, patterns=["blocks.*"], ends=ends, split=None)
    assert [len(blocks) for blocks in stages] == expected
    with pytest.raises(UserError, match="names 8 blocks, fewer than the 9 stages of"):
        plan_cut(model, 9, patterns=["blocks.*"], ends=ends, split=None)
