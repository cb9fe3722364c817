"""The rules of ``task=plan``, and the machine that it plans for. Torch-free."""

from collections.abc import Collection
from dataclasses import replace

from ddp_runner.config.schema import Config, mode_needs, num_shares
from ddp_runner.config.sections import AUTO, BackendConfig, LaunchConfig
from ddp_runner.dist_env import DistEnv
from ddp_runner.errors import UserError, in_yaml
from ddp_runner.host.hardware import Hardware

# The modes that a trace can build.
PLANNED = ("single.Single", "ddp.DDP", "mesh.Mesh", "pipeline.Pipeline")


def validate_plan(config: Config) -> None:
    """Reject what a trace of one rank on fake tensors cannot tell."""
    mode, virtual = config.parallelism, config.batch.virtual_ranks
    is_known = mode["_target_"].removeprefix("ddp_runner.parallelism.") in PLANNED
    if not is_known or mode_needs(mode).devices_per_rank != 1:
        reason = "one rank on one device must stand for all"
        raise _cannot(f"parallelism={mode.get('name')}", reason, "parallelism=fsdp")
    for key, value, reason in (
        ("parallelism.cpu_offload", mode.get("cpu_offload"), "a plan counts the memory of GPUs"),
        ("parallelism.sync_batchnorm", mode.get("sync_batchnorm"), "it computes on GPUs only"),
        ("batch.virtual_ranks", virtual, "its sums need the numbers of other ranks"),
    ):
        if value:
            off = "false" if value is True else "null"
            raise _cannot(f"{key}={in_yaml(value)}", reason, f"{key}={off}")
    if not isinstance(mode.get("comm_hook"), str | None):
        reason = "it needs the buckets of DDP's reducer"
        raise _cannot("a parallelism.comm_hook of your own", reason, "parallelism.comm_hook=null")
    if config.resume is not None:
        raise _cannot("resume", "a plan has no steps to continue", "the keys of that run")


def _cannot(what: str, reason: str, fix: str) -> UserError:
    return UserError(f"{what} cannot be planned: {reason}", f"write {fix}")


def on_planned_machine(
    config: Config, env: DistEnv | None, *, chosen: Collection[str]
) -> tuple[Config, Hardware, list[str]]:
    """Return the config of a plan, a machine for all its ranks, and notes.

    The plan is of GPUs with NCCL, and is traced on a CPU, in one process. A default batch that does
    not divide among the ranks becomes one sample for each.
    """
    if env is not None:
        raise UserError(
            f"task=plan runs in one process of its own, and {env.launcher} starts ranks",
            f"leave {env.launcher} out",
        )
    ranks, notes = config.world_size, []
    if ranks == AUTO or config.plan.rank >= ranks:
        raise UserError(
            f"task=plan needs a world_size ({ranks}) greater than plan.rank ({config.plan.rank})",
            f"write world_size={max(64, config.plan.rank + 1)}",
        )
    size, parts = config.batch.global_size, num_shares(config, ranks)
    parts *= config.train.grad_accum_steps
    is_default = not {"batch", "batch.global_size", "batch.per_rank"} & {*chosen}
    if is_default and size is not None and parts and size % parts:
        notes = [f"the default batch of {size} is not divisible by {parts}: batch.per_rank is 1"]
        config = replace(config, batch=replace(config.batch, global_size=None, per_rank=1))
    cpu = BackendConfig(name="gloo", device="cpu")
    config = replace(config, backend=cpu, launch=LaunchConfig())
    return config, Hardware(num_gpus=0, num_cores=ranks), notes
