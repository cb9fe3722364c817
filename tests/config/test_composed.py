"""The tests' own short way to a config gives what Hydra composes."""

import shlex

import pytest
from configs import compose_by_hydra, compose_raw
from hydra.errors import HydraException
from omegaconf import OmegaConf
from tiers import first_of

LINES = (
    "",
    "model=toy",
    "model=toy seed=3 train.epochs=2 optimizer.lr=0.5",
    "optimizer.lr=1e-3 optimizer.lr=2 optimizer=adam",
    "model=bert dataset=csv_text dataset.path=a.csv model.dropout=0",
    "metrics=[top_k,pixel_accuracy] metrics.top_k.k=3",
    "+model.mine=3 model.mine=4",
    "++train.epochs=5 ~optimizer.momentum",
    "model=gpt dataset=text parallelism=fsdp_tp world_size=4",
    "trackers=[mlflow] train.max_steps=7",
    "scaling=strong batch.global_size=64",
    "train.profile=[5,6] checkpoint.monitor=eval/loss",
    'data_root="$HOME" resume=auto',
    "seed=${world_size} world_size=3",
    "hydra.run.dir=x seed=1",
)
WRONG = (
    "train.epoch=3",
    "train.epochs=abc",
    "model=nothing",
    "experiment=nothing seed=1",
    "seed=1,2",
    "train=3",
    "train={a: 1}",
    "model.x.y=1",
    "parallelism=fsdp_tp parallelism.nothing=2",
)


@pytest.mark.parametrize("line", first_of(LINES, num_quick=6))
def test_keys_set_in_a_copy_give_what_hydra_composes(line: str) -> None:
    """Twice, since the second one is made from the first one's options."""
    expected = compose_by_hydra(*shlex.split(line))
    for _ in range(2):
        found = compose_raw(*shlex.split(line))
        assert OmegaConf.to_container(found) == OmegaConf.to_container(expected)
        assert OmegaConf.is_struct(found) == OmegaConf.is_struct(expected)


@pytest.mark.parametrize("line", WRONG)
def test_a_mistake_is_hydras(line: str) -> None:
    """The error and its sentence."""
    with pytest.raises(HydraException) as expected:
        compose_by_hydra(*shlex.split(line))
    with pytest.raises(type(expected.value)) as found:
        compose_raw(*shlex.split(line))
    assert str(found.value) == str(expected.value)
