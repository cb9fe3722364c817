"""Builds, for a loop of the user's own, from the groups of a resolved config."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ddp_runner.checkpoint.optimizer_state import settings_of
from ddp_runner.checkpoint.state import Saver
from ddp_runner.checkpoint.weights import load_weights, starting_weights
from ddp_runner.config.instantiate import complete, make
from ddp_runner.config.schema import RunConfig
from ddp_runner.config.validate import validate_num_samples
from ddp_runner.data.batches import NumberedBatches
from ddp_runner.data.build import build_dataset
from ddp_runner.data.dataset import Dataset
from ddp_runner.data.loader import LoaderSplit
from ddp_runner.data.splits import NumberedSplit
from ddp_runner.errors import UserError
from ddp_runner.own_loop.loader import Loader
from ddp_runner.parallelism.shards import fit_optimizer
from ddp_runner.parallelism.single import Single
from ddp_runner.rank.session import Session
from ddp_runner.seeds import seed_all
from ddp_runner.train.build_model import place_model


def build_model(session: Session, **arguments: Any) -> nn.Module:
    """Return the config's model on this rank's devices. Collective if it has ``model.weights``.

    Rank 0 reads the weights and sends them.

    Raises:
        UserError: the keys do not fit the model, or the weights do not.
    """
    config, devices = session.config, session.devices
    # ``wrap`` places it; a model of several stages places itself.
    mode = session.mode if len(devices) > 1 else Single("single")
    module = place_model(config, mode, {}, devices, **arguments)
    if config.model.get("weights") is not None:
        found = None
        if session.env.is_rank_zero:
            found = starting_weights(config, session.run_dir.checkpoints, log=session.log)
        load_weights(module, found)
    return module


def seeded_dataset(session: Session) -> Dataset:
    """Return the config's dataset, see ``build_dataset``, and seed what comes after it."""
    dataset = build_dataset(session.config, log=session.log)
    seed_all(session.config.seed, "own loop")  # one rank may have prepared it for the others
    return dataset


def build_optimizer(config: RunConfig, parameters: Iterable[Any]) -> Optimizer:
    """Return the config's optimizer for parameters, or for groups of them.

    Raises:
        UserError: the keys do not fit it, or it does not fit parameters that are split over ranks.
    """
    keys, allowed = config.optimizer, config.allowed_targets
    factory = make("optimizer", keys, allowed=allowed, partial=True)
    optimizer: Optimizer = complete("optimizer", keys, factory, parameters, kind=Optimizer)
    fit_optimizer(optimizer, keys, config.parallelism.get("name"))
    return optimizer


def build_saver(session: Session, objects: Mapping[str, Any]) -> Saver:
    """Return what saves and restores the objects that the loop names."""
    return Saver(
        objects,
        settings_of(objects),
        task=session.config.task,
        num_shares=session.mode.layout(session.env).num_shares,
        rank=session.env.rank,
        num_ranks=session.env.world_size,
        compares_buffers=True,
    )


def build_loader(
    session: Session,
    dataset: Any,
    *,
    name: str,
    global_size: int | None,
    seed: int,
    shuffle: bool,
    **options: Any,
) -> Loader:
    """Return this rank's share of the global batches of a map-style dataset, or of a split.

    Args:
        session: of this rank.
        dataset: a ``torch.utils.data.Dataset``, or a split of ours, which takes no options.
        name: of the loader, in messages.
        global_size: samples of a batch over all ranks; None: ``batch.global_size``.
        seed: of the order.
        shuffle: in another order in each epoch.
        options: see ``LoaderSplit``.

    Raises:
        UserError: the dataset is not map-style, has fewer samples than there are ranks, or gives
            them different numbers of batches to evaluate where a forward waits for all ranks.
    """
    layout, device = session.mode.layout(session.env), session.devices[0]
    split: NumberedSplit = dataset
    if not isinstance(dataset, NumberedSplit):
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            raise UserError(
                f"run.loader takes a dataset with __len__ and __getitem__, and {name} got a "
                f"{type(dataset).__name__}; give a map-style torch.utils.data.Dataset"
            )
        split = LoaderSplit(name, dataset, **options)
    validate_num_samples(type(dataset).__name__, len(split), ranks=layout.num_shares)
    batches = NumberedBatches(
        split=split.near(device),
        global_size=global_size or session.config.batch.global_size,
        grad_accum_steps=1,
        share=layout.share,
        num_shares=layout.num_shares,
        seed=seed,
    )
    return Loader(
        batches, device, shuffle=shuffle, equal_counts=layout.forward_is_collective and not shuffle
    )
