"""What a demanding user asks of fsdp, hsdp and tp: a plain line, or the right result."""

from pathlib import Path

import pytest
from commands import error_line
from own_loops import run_function
from ranks import run_ranks
from tiers import first_of
from train_states import TOY, compose_config, rejection

ADAM, OURS = "optimizer=adamw", "allowed_targets=[broken_models]"
OPTIMIZERS = {
    "tp": (
        (ADAM, "+optimizer.fused=true", "model._target_=broken_models.Idle", OURS),
        "optimizer.fused=true steps all parameters in one call, which torch cannot do under "
        "parallelism=tp, which splits only some; leave it out",
    ),
    "fsdp": (
        ("optimizer=adafactor",),
        "takes norms in place, which torch cannot do for parameters that parallelism=fsdp splits; "
        "write optimizer=adamw, or parallelism=ddp",
    ),
}


@pytest.mark.parametrize("mode", first_of(OPTIMIZERS))
def test_an_optimizer_that_cannot_step_shards_is_one_line(mode: str) -> None:
    """It would raise within torch in the first step. On whole parameters it is taken."""
    keys, sentence = OPTIMIZERS[mode]
    config = compose_config(*TOY, *keys, f"parallelism={mode}", world_size=2)
    for answer in run_ranks(rejection, 2, config):
        assert answer.endswith(sentence)
    assert run_ranks(rejection, 1, compose_config(*TOY, *keys, "parallelism=single")) == [""]


def test_a_weight_that_two_blocks_share_is_one_line() -> None:
    """FSDP2 would raise in the first forward. Outside of the blocks both are in one group."""
    keys = (*TOY, "model._target_=broken_models.Tied", OURS, "parallelism=fsdp")
    blocks = compose_config(*keys, "+model.blocks=[blocks.*]", world_size=2)
    for answer in run_ranks(rejection, 2, blocks):
        assert answer.startswith("model.blocks puts blocks.0.weight and blocks.2.weight, which ")
    inner = compose_config(*keys, "+model.blocks=[blocks.1]", world_size=2)
    assert run_ranks(rejection, 2, inner) == ["", ""]


@pytest.mark.full
def test_an_optimizer_from_before_the_shards_is_one_line(tmp_path: Path) -> None:
    """It holds parameters that the module has no more, and would train nothing."""
    source = """
    import torch

    def train(run):
        module = run.model()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        model = run.wrap(module)
        run.restore(module=module, optimizer=optimizer)
        model(torch.ones(4, 10)).sum().backward()
        optimizer.step()
        run.log({"bias": module.net2.bias.sum()}, step=1)
    """
    end = run_function(source, "model=toy", "parallelism=fsdp", folder=tmp_path)
    assert error_line(end).startswith("optimizer was made before run.wrap, which replaced the ")
    end = run_function(source, "model=toy", "parallelism=ddp", folder=tmp_path / "ddp")
    assert end.exit_code == 0, end.stderr
