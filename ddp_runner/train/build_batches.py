"""Builds a rank's share of the training batches: of numbered samples, or of a stream."""

from collections.abc import Callable
from typing import Any

from torch.distributed import ProcessGroup

from ddp_runner.config.schema import RunConfig
from ddp_runner.config.validate import validate_num_samples
from ddp_runner.data.batches import GlobalBatches
from ddp_runner.data.dataset import Dataset
from ddp_runner.data.streams import AnySplit, StreamSplit
from ddp_runner.errors import UserError
from ddp_runner.metric_names import StepPart
from ddp_runner.parallelism.mode import Role
from ddp_runner.train.stream_batches import StreamBatches


def build_batches(
    config: RunConfig,
    dataset: Dataset,
    role: Role,
    *,
    split: AnySplit,
    group: ProcessGroup | None,
    mark: Callable[[StepPart], None],
) -> GlobalBatches | StreamBatches:
    """Return a rank's share of the training batches.

    Args:
        config: resolved.
        dataset: whose training split it is.
        role: of this rank.
        split: the training split, perhaps on the rank's GPU.
        group: one rank of each share; None: all.
        mark: adds the time since the last mark to a part of the step.

    Raises:
        UserError: there are fewer samples than ranks, or the mode cannot use a stream.
    """
    common: dict[str, Any] = {
        "global_size": config.batch.global_size,
        "grad_accum_steps": config.train.grad_accum_steps,
        "share": role.share,
        "num_shares": role.num_shares,
        "seed": config.seed,
    }
    if not isinstance(split, StreamSplit):
        validate_num_samples(dataset.name, len(split), ranks=role.num_shares)
        return GlobalBatches(
            split=split,
            is_computed=role.gradients is None,  # a server's trainers compute
            num_randoms=dataset.num_randoms,
            lengths=dataset.lengths() if dataset.group_by_length else None,
            **common,
        )
    if role.serve is not None or role.gradients is not None:
        raise UserError(
            f"parallelism={config.parallelism.get('name')} gives out batches by their numbers, and "
            f"the batches of dataset={dataset.name}, a stream, have none; write parallelism=ddp"
        )
    return StreamBatches(split=split, group=group, mark=mark, **common)
