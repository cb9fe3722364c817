"""The rules of the modes that cut a model into stages: pp, ddp_pp. Torch-free."""

from ddp_runner.config.schema import Config
from ddp_runner.errors import UserError


def validate_pipeline(config: Config) -> None:
    """Reject a pipeline that does not fit the model, or whose ranks would mostly wait."""
    mode, model, steps = config.parallelism, config.model, config.train.grad_accum_steps
    name, size = mode.get("name"), mode["pipeline_size"] or config.world_size
    stages, is_interleaved = size * mode["stages_per_rank"], mode["schedule"] == "interleaved"
    if size < 2:
        raise UserError(f"parallelism.pipeline_size ({size}) must be 2 or greater")
    if not model.get("blocks"):
        raise UserError(
            f"model={model.get('name')} has no stages: parallelism={name} needs the methods embed "
            "and head, and the key model.blocks",
            "write parallelism=fsdp",
        )
    if is_interleaved != (stages > size):
        raise UserError(
            f"parallelism.stages_per_rank={stages // size} does not fit parallelism.schedule="
            f"{mode['schedule']}: only interleaved has several stages on a rank",
            "write parallelism.stages_per_rank=2 with interleaved, else 1",
        )
    if isinstance(layers := model.get("num_layers"), int) and layers < stages:
        raise UserError(
            f"model.num_layers ({layers}) is fewer than the {stages} stages of parallelism={name}",
            f"write model.num_layers={stages} or more, or use fewer ranks in a pipeline",
        )
    if steps < size:
        raise UserError(
            f"parallelism={name} needs train.grad_accum_steps ({steps}) of at least the {size} "
            "ranks of a pipeline, or most of them wait",
            f"write train.grad_accum_steps={2 * size}",
        )
    if is_interleaved and steps % size:
        raise UserError(
            f"parallelism.schedule=interleaved needs train.grad_accum_steps ({steps}) divisible by "
            f"the {size} ranks of a pipeline",
            f"write train.grad_accum_steps={-(-steps // size) * size}",
        )
