"""The rules between a mode of parallelism and the rest of a config. Torch-free.

Each combination was tried with torch 2.15: those that fail, or are silently wrong, are rejected.
"""

import math
from collections.abc import Mapping

from ddp_runner.config.pipeline_rules import validate_pipeline
from ddp_runner.config.schema import Config, has_own_loop, mode_needs
from ddp_runner.config.sections import INFERENCE, PLAN
from ddp_runner.errors import UserError, counted

COMM_HOOKS = ("bf16", "fp16")
UNSUMMED = {*INFERENCE, "collectives"} - {"evaluate"}  # tasks that add nothing over virtual ranks
# The modes that can add gradients in the order of ``batch.virtual_ranks``.
IN_TREE = ("single.Single", "ddp.DDP", "mesh.Mesh")
ON_CPU = ("dp.DataParallelMode",)  # with GPUs it splits a batch over them
# torch's optimizers in which no element of a parameter affects another. Fused on the CPU, they
# round the last elements of a tensor in another way.
ELEMENTWISE = (
    "SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "Rprop",
    "ASGD",
)  # fmt: skip


def validate_clashes(config: Config) -> None:
    """Reject keys that do not fit a mode, on any number of ranks and any device."""
    mode, train = config.parallelism, config.train
    needs, name, cap_mb = mode_needs(mode), mode.get("name"), mode.get("bucket_cap_mb")
    if needs.num_servers and mode.get("mode") not in ("sync", "async"):
        raise UserError(f"parallelism.mode ({mode.get('mode')}) must be sync or async")
    is_pipeline = "pipeline_size" in mode
    if needs.num_servers and config.task == "check":
        raise UserError(
            f"task=check compares equal ranks, not parallelism={name}", "write parallelism=ddp"
        )
    if needs.num_servers and config.checkpoint.format == "sharded":
        raise UserError(
            f"checkpoint.format=sharded saves what each rank holds, and under parallelism={name} "
            "rank 0 holds all",
            "write checkpoint.format=file",
        )
    if has_own_loop(config.task) and (needs.num_servers or needs.model_ranks != 1):
        raise UserError(
            f"task={config.task} needs samples of its own on each rank, which parallelism={name} "
            "does not give",
            "write parallelism=ddp or parallelism=fsdp",
        )
    if needs.num_servers and train.profile is not None:
        raise UserError(
            f"train.profile traces ranks of one loop, not parallelism={name}",
            "write parallelism=ddp",
        )
    if train.precision == "fp16" and (needs.num_servers or needs.splits_parameters or is_pipeline):
        raise UserError(
            f"train.precision=fp16 scales the loss by whole gradients, which no rank sees under "
            f"parallelism={name}",
            "write train.precision=bf16",
        )
    if train.compile and needs.data_parallel:
        raise UserError(
            f"train.compile=true: parallelism={name} copies the model in each step",
            "write parallelism=ddp",
        )
    if train.compile and is_pipeline:
        raise UserError(
            f"train.compile=true compiles a whole model, and a rank of parallelism={name} has only "
            "some of its layers",
            "write train.compile=false, or parallelism=fsdp",
        )
    if train.compile and cap_mb is not None and cap_mb < 1:  # the first bucket has 1 MiB
        raise UserError(
            f"parallelism.bucket_cap_mb ({cap_mb:g}) must be 1 or greater with train.compile=true"
        )
    if mode.get("static_graph") and train.grad_accum_steps > 1:
        raise UserError(
            "parallelism.static_graph=true cannot skip gradient syncs, which "
            f"train.grad_accum_steps ({train.grad_accum_steps}) does",
            "turn one of them off",
        )


def validate_mode(config: Config) -> None:
    """Reject a mode that does not fit the model, or the resolved ranks and backend."""
    mode, name, model = config.parallelism, config.parallelism.get("name"), config.model.get("name")
    needs, ranks, stages = mode_needs(mode), config.world_size, config.model.get("num_stages") or 1
    if needs.max_ranks is not None and ranks > needs.max_ranks:
        raise UserError(
            f"parallelism={name} runs {needs.max_ranks} process, world_size is {ranks}",
            "write world_size=1 or parallelism=ddp",
        )
    parts = needs.num_replicas * (needs.model_ranks or 1)
    least = max(needs.min_ranks, needs.num_servers + 1)  # a server needs a trainer
    if ranks < least or ranks % parts:
        multiple = f", a multiple of {parts}," if parts > 1 else ""
        raise UserError(
            f"parallelism={name} needs {least} ranks or more{multiple} and world_size is {ranks}",
            f"write world_size={max(least, -(-ranks // parts) * parts)}",
        )
    # The user's own loop places its modules itself.
    if stages != needs.devices_per_rank and not has_own_loop(config.task):
        other = "ddp_mp" if stages > 1 else "ddp, or choose a model with 2 stages: convnet_mp"
        raise UserError(
            f"model={model} is cut into {counted(stages, 'stage')} and parallelism={name} gives a "
            f"replica {counted(needs.devices_per_rank, 'device')}",
            f"write parallelism={other}",
        )
    if mode.get("sync_batchnorm") and config.backend.device == "cpu":
        raise UserError("parallelism.sync_batchnorm=true works on GPUs only", "set it to false")
    if (hook := mode.get("comm_hook")) is not None:
        _validate_hook(config, hook)
    if "tensor_parallel_size" in mode:
        _validate_mesh(config)
    if "pipeline_size" in mode and config.task in ("train", "check", PLAN):
        validate_pipeline(config)
    if config.batch.virtual_ranks is not None and config.task not in UNSUMMED:
        _validate_virtual_ranks(config, config.batch.virtual_ranks)


def _validate_virtual_ranks(config: Config, count: int) -> None:
    """Reject what would compute other bytes at another world size, or in another mode."""
    mode, optimizer, ranks = config.parallelism, config.optimizer, config.world_size
    needs, name = mode_needs(mode), f"parallelism={mode.get('name')}"
    devices = ON_CPU if config.backend.device == "cpu" else ()
    in_tree = mode["_target_"].removeprefix("ddp_runner.parallelism.") in (*IN_TREE, *devices)
    is_elementwise = optimizer["_target_"].removeprefix("torch.optim.") in ELEMENTWISE
    is_fused = any(group.get("fused") for group in (optimizer, *config.params.groups))
    splits = needs.splits_parameters
    for is_broken, reason, fix in (
        (
            has_own_loop(config.task),
            f"and task={config.task} adds gradients itself",
            "batch.virtual_ranks=null",
        ),
        (
            not in_tree or needs.devices_per_rank > 1 or needs.model_ranks != 1,
            f"and {name} has its own order",
            "parallelism=ddp",
        ),
        (
            count % ranks > 0,
            f"in halves, so it must be divisible by world_size ({ranks})",
            f"world_size={min(count, 2 ** (ranks.bit_length() - 1))}",
        ),
        (
            mode.get("comm_hook") is not None,
            "and a parallelism.comm_hook changes what is sent",
            "parallelism.comm_hook=null",
        ),
        (
            bool(mode.get("sync_batchnorm")),
            "and parallelism.sync_batchnorm=true adds over ranks in each layer",
            "parallelism.sync_batchnorm=false",
        ),
        (
            config.train.compile,
            "and train.compile=true chooses kernels by the sizes that a rank has seen",
            "train.compile=false",
        ),
        # FSDP2 adds in its own order in a group of one rank.
        (
            splits and ranks == needs.num_replicas,
            f"and {name} on {counted(ranks, 'rank')} splits nothing",
            "parallelism=ddp",
        ),
        (
            splits and bool(mode.get("cpu_offload")),
            "and parallelism.cpu_offload=true computes norms on another device",
            "parallelism.cpu_offload=false",
        ),
        (
            splits and not is_elementwise,
            f"and optimizer={optimizer.get('name')} needs whole parameters, which {name} splits",
            "parallelism=ddp",
        ),
        (
            splits and is_fused,
            f"and optimizer.fused=true rounds the parts of {name} in another way",
            "optimizer.fused=false",
        ),
    ):
        if is_broken:
            raise UserError(
                f"batch.virtual_ranks={count} adds everything in one order, {reason}",
                f"write {fix}",
            )


def _validate_hook(config: Config, hook: object) -> None:
    is_own = isinstance(hook, Mapping) and "_target_" in hook
    if not is_own and hook not in COMM_HOOKS:
        raise UserError(
            f"parallelism.comm_hook ({hook}) must be null, {' or '.join(COMM_HOOKS)}, or a mapping "
            "with the _target_ of your own"
        )
    if mode_needs(config.parallelism).devices_per_rank > 1:
        raise UserError(
            f"parallelism.comm_hook ({hook}) needs a replica on one device, as torch's hooks do",
            "write null",
        )
    if not is_own and config.backend.name == "mpi":
        raise UserError(
            f"parallelism.comm_hook={hook} does not work with backend=mpi, which cannot send "
            "16-bit numbers",
            "write backend=gloo or parallelism.comm_hook=null",
        )


def _validate_mesh(config: Config) -> None:
    """Validate the modes that split a model over a mesh of ranks: fsdp, hsdp, tp."""
    mode, name = config.parallelism, config.parallelism.get("name")
    needs, reshard = mode_needs(mode), mode.get("reshard_after_forward")
    size = needs.model_ranks or config.world_size
    num_shards = config.world_size // (needs.num_replicas * size)
    if mode.get("cpu_offload") and config.backend.device == "cpu":
        raise UserError("parallelism.cpu_offload=true works on GPUs only", "set it to false")
    if mode.get("cpu_offload") and 1 < size == config.world_size:
        raise UserError(
            f"parallelism.cpu_offload=true keeps shards in the host's memory, and "
            f"parallelism={name} has no shards",
            "write parallelism=fsdp_tp, or set it to false",
        )
    if not num_shards:
        raise UserError(
            f"parallelism.num_replicas ({needs.num_replicas}) leaves too few ranks for "
            "parallelism.tensor_parallel_size=null, which takes all",
            "write parallelism.tensor_parallel_size=2",
        )
    is_number = type(reshard) is int and reshard > 0 and num_shards % reshard == 0 and size == 1
    if not (isinstance(reshard, bool) or is_number):
        # With tensor parallelism torch would make process groups that collide.
        number = f", or a number of ranks that divides the {num_shards} ranks with a shard"
        raise UserError(
            f"parallelism.reshard_after_forward ({reshard}) must be true or false"
            f"{number if size == 1 else ' with tensor parallelism'}"
        )
    _validate_tensor_parallel(config, size)


def _validate_tensor_parallel(config: Config, size: int) -> None:
    """Reject a model whose layers `size` ranks cannot split."""
    mode, model, name = config.parallelism, config.model, config.parallelism.get("name")
    if size == 1 and mode.get("sequence_parallel"):
        raise UserError(
            "parallelism.sequence_parallel=true needs tensor parallelism, which "
            f"parallelism={name} does not have",
            "write parallelism=tp, or set it to false",
        )
    if size > 1 and not model.get("tensor_parallel"):
        raise UserError(
            f"parallelism={name} splits the layers in model.tensor_parallel, which "
            f"model={model.get('name')} does not have",
            "add it, or write parallelism=fsdp",
        )
    length = config.dataset.get("sequence_length") if mode.get("sequence_parallel") else None
    for key, count in (
        ("model.num_heads", model.get("num_heads")),
        ("dataset.sequence_length", length),
    ):
        if isinstance(count, int) and count % size:
            common = math.gcd(count, size)
            fix = "=fsdp" if common == 1 else f".tensor_parallel_size={common}"
            raise UserError(
                f"{key} ({count}) is not divisible by the {size} ranks that compute each layer "
                "together",
                f"write parallelism{fix}",
            )
