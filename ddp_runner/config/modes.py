"""What each mode of parallelism needs of the rest of a config. Torch-free.

Each pair was tried with torch 2.15: only what fails, or is wrong silently, is rejected, by a
UserError for the first rule that is broken.
"""

from collections.abc import Mapping

from ddp_runner.config.schema import Config, has_own_loop, mode_needs
from ddp_runner.errors import UserError, in_yaml

COMM_HOOKS = ("bf16", "fp16")


def validate_servers(config: Config) -> None:
    """Reject keys that do not fit a mode with a server, on however many ranks."""
    mode, name = config.parallelism, config.parallelism.get("name")
    if not mode_needs(mode).num_servers:
        return
    if config.task == "check":
        raise UserError(f"task=check compares equal ranks, not parallelism={name}; write ddp")
    if mode.get("mode") not in ("sync", "async"):
        raise UserError(f"parallelism.mode ({mode.get('mode')}) must be sync or async")
    if config.train.precision == "fp16":
        raise UserError(f"parallelism={name} has no scaled loss; write train.precision=bf16")


def validate_mode(config: Config) -> None:
    """Reject keys of a mode that do not fit each other, the ranks, the model or the device.

    `config` has its backend and its number of ranks filled in.
    """
    mode, name, model = config.parallelism, config.parallelism.get("name"), config.model.get("name")
    needs, ranks, stages = mode_needs(mode), config.world_size, config.model.get("num_stages") or 1
    if needs.max_ranks is not None and ranks > needs.max_ranks:
        raise UserError(
            f"parallelism={name} runs {needs.max_ranks} process, world_size is {ranks}; "
            "leave world_size out, or write parallelism=ddp"
        )
    if needs.num_servers and ranks < 2:
        raise UserError(
            f"parallelism={name} needs a server and a trainer, world_size is {ranks}; use 2 or more"
        )
    parts = needs.num_replicas * (needs.model_ranks or 1)
    if ranks < needs.min_ranks or ranks % parts:
        multiple = f", a multiple of {parts}," if parts > 1 else ""
        raise UserError(
            f"parallelism={name} needs {needs.min_ranks} ranks or more{multiple} and world_size is "
            f"{ranks}; write world_size={max(needs.min_ranks, -(-ranks // parts) * parts)}"
        )
    if has_own_loop(config.task):
        stages = needs.devices_per_rank  # the function places its modules itself
    if stages > needs.devices_per_rank:
        raise UserError(
            f"model={model} is cut into {stages} stages and parallelism={name} gives a replica "
            f"{needs.devices_per_rank} device; write parallelism=ddp_mp"
        )
    if stages < needs.devices_per_rank:
        raise UserError(
            f"parallelism={name} spreads a replica over {needs.devices_per_rank} devices and "
            f"model={model} has {stages} stage; take a model cut in two (toy_mp, convnet_mp, "
            "mnist_net_mp)"
        )
    _validate_ddp(config)
    _validate_mesh(config)
    if needs.data_parallel and config.train.compile:
        raise UserError(
            f"train.compile=true does not work with parallelism={name}, which copies the model to "
            "the GPUs in each step; leave it out, or write parallelism=ddp"
        )
    if needs.splits_parameters and config.train.precision == "fp16":
        raise UserError(
            f"train.precision=fp16 scales the loss down when a gradient overflows, and under "
            f"parallelism={name} a rank sees only its own part of them; write train.precision=bf16"
        )
    if mode.get("sync_batchnorm") and config.backend.device == "cpu":
        raise UserError("parallelism.sync_batchnorm=true exists on GPUs only; set it to false")


def _validate_ddp(config: Config) -> None:
    """Validate DDP's communication hooks and its static graph."""
    mode, train = config.parallelism, config.train
    hook, cap_mb = mode.get("comm_hook"), mode.get("bucket_cap_mb")
    if train.compile and cap_mb is not None and cap_mb < 1:
        raise UserError(
            f"parallelism.bucket_cap_mb ({cap_mb:g}) must be 1 or greater with train.compile=true, "
            "which cuts the model at DDP's first bucket of 1 MiB; write 1 or more"
        )
    if mode.get("static_graph") and train.grad_accum_steps > 1:
        raise UserError(
            "parallelism.static_graph=true cannot skip gradient syncs, which "
            f"train.grad_accum_steps ({train.grad_accum_steps}) does; turn one of them off"
        )
    if hook is not None:
        _validate_hook(config, hook)


def _validate_hook(config: Config, hook: object) -> None:
    is_own = isinstance(hook, Mapping) and "_target_" in hook
    if not is_own and hook not in COMM_HOOKS:
        raise UserError(
            f"parallelism.comm_hook ({hook}) must be null, {' or '.join(COMM_HOOKS)}, or a mapping "
            "with the _target_ of your own"
        )
    devices = mode_needs(config.parallelism).devices_per_rank
    if devices > 1:
        raise UserError(
            "parallelism.comm_hook needs a replica on one device, as torch's hooks do, and "
            f"parallelism={config.parallelism.get('name')} cuts it over {devices}; write "
            "parallelism.comm_hook=null"
        )
    if not is_own and config.backend.name == "mpi":
        raise UserError(
            f"parallelism.comm_hook={hook} does not work with backend=mpi, which has no 16-bit "
            "numbers in torch; write backend=gloo or parallelism.comm_hook=null"
        )


def _validate_mesh(config: Config) -> None:
    """Validate the modes that split a model over a mesh of ranks: fsdp, hsdp, tp."""
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
