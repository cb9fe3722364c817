"""What must hold for modes that split a model over a mesh of ranks: fsdp, hsdp, tp. Torch-free."""

from collections.abc import Mapping

from ddp_runner.config.schema import Config, mode_needs
from ddp_runner.errors import UserError, in_yaml


def validate_mesh(config: Config) -> None:
    """Reject keys of a mesh that do not fit the ranks, the model or the device.

    `config` has its backend and its number of ranks filled in, which the groups of ranks divide.

    Raises:
        UserError: a rule is broken.
    """
    mode, model = config.parallelism, config.model
    _validate_names(model.get("blocks"), model.get("tensor_parallel"))
    if "tensor_parallel_size" not in mode:
        return
    needs, name = mode_needs(mode), mode.get("name")
    size = needs.model_ranks or config.world_size
    if mode.get("cpu_offload") and config.backend.device == "cpu":
        raise UserError(
            "parallelism.cpu_offload=true keeps in the host's memory what a GPU computes with, and "
            "this run has none; set it to false"
        )
    if mode.get("cpu_offload") and 1 < size == config.world_size:
        raise UserError(
            f"parallelism.cpu_offload=true keeps shards in the host's memory, and "
            f"parallelism={name} has none; write parallelism=fsdp_tp, or set it to false"
        )
    if needs.model_ranks is None and needs.num_replicas > 1:
        raise UserError(
            f"parallelism.num_replicas ({needs.num_replicas}) leaves too few ranks for "
            "parallelism.tensor_parallel_size=null, which takes all; write how many compute each "
            "layer together, such as parallelism.tensor_parallel_size=2"
        )
    _validate_resharding(config, num_shards=config.world_size // (needs.num_replicas * size))
    if size > 1 and not isinstance(mode.get("reshard_after_forward"), bool):
        raise UserError(
            f"parallelism.reshard_after_forward ({mode['reshard_after_forward']}) must be true or "
            "false beside tensor parallelism: torch would make groups of ranks that collide"
        )
    if size == 1 and mode.get("sequence_parallel"):
        raise UserError(
            "parallelism.sequence_parallel=true splits what the ranks of tensor parallelism share, "
            f"and parallelism={name} has none; write parallelism=tp, or set it to false"
        )
    if size == 1:
        return
    if not model.get("tensor_parallel"):
        raise UserError(
            f"parallelism={name} splits the layers that the key tensor_parallel of the model names "
            f"and model={model.get('name')} has none; add it, or write parallelism=fsdp"
        )
    length = config.dataset.get("sequence_length")
    if mode.get("sequence_parallel") and isinstance(length, int) and length % size:
        raise UserError(
            f"dataset.sequence_length ({length}) is not divisible by the {size} ranks that "
            "parallelism.sequence_parallel=true splits it over; choose a length that is"
        )
    num_heads = model.get("num_heads")
    if isinstance(num_heads, int) and num_heads % size:
        raise UserError(
            f"model.num_heads ({num_heads}) is not divisible by the {size} ranks that compute each "
            "layer together, and a head is not split; choose a parallelism.tensor_parallel_size "
            "that divides it"
        )


def _validate_names(blocks: object, plan: object) -> None:
    """Reject names of a model's modules that are not patterns."""
    if blocks is not None and not (
        isinstance(blocks, list) and all(isinstance(one, str) for one in blocks)
    ):
        raise UserError(
            f"model.blocks ({in_yaml(blocks)}) must be a list of patterns, such as [blocks.*]"
        )
    if plan is not None and not (
        isinstance(plan, Mapping) and all(isinstance(word, str) for word in plan.values())
    ):
        raise UserError(
            f"model.tensor_parallel ({in_yaml(plan)}) must give each pattern a word, such as "
            "{mlp.up: colwise, mlp.down: rowwise}"
        )


def _validate_resharding(config: Config, *, num_shards: int) -> None:
    """Reject a number of ranks that keep a block's shards after its forward, but no divisor."""
    asked = config.parallelism.get("reshard_after_forward")
    if isinstance(asked, bool):
        return
    if not isinstance(asked, int) or asked < 1 or num_shards % asked:
        raise UserError(
            f"parallelism.reshard_after_forward ({asked}) must be true, false, or a number of "
            f"ranks that divides the {num_shards} with a shard each"
        )
