"""The values of a config that follow from other values and from the machine. Torch-free."""

from collections.abc import Collection
from dataclasses import replace

from ddp_runner.config.allowed_targets import validate_targets
from ddp_runner.config.schema import (
    AUTO,
    BackendConfig,
    Batch,
    Config,
    RunConfig,
    is_asynchronous,
    mode_needs,
)
from ddp_runner.config.validate import validate_config, validate_ranks, validate_scheduler
from ddp_runner.config.validate_optimizing import validate_auto_batch
from ddp_runner.config.values import validate_values
from ddp_runner.dist_env import DistEnv
from ddp_runner.errors import UserError
from ddp_runner.host.hardware import Hardware

MOST_RANKS_A_CORE = 64  # a rank takes some 100 MiB, and a collective waits for the slowest rank


def resolve(
    config: Config,
    *,
    hardware: Hardware,
    chosen: Collection[str] = (),
    env: DistEnv | None = None,
) -> tuple[RunConfig, list[str]]:
    """Return the config with every derived value filled in, and warnings to print once.

    Args:
        config: as composed.
        hardware: what this machine has.
        chosen: the keys given on the command line. If two keys exclude each other, they win over
            the choice of a group.
        env: this rank's facts where the ranks run already (torchrun, srun, mpirun).

    Raises:
        UserError: a rule is broken.
    """
    validate_targets(config)
    validate_values(config)
    validate_config(config, chosen=chosen)
    ranks = _world_size(config, hardware, env)
    nproc = env.local_world_size if env else _nproc_per_node(config, hardware, ranks)
    # A rank may see only its own GPUs. Unless Slurm says so, that looks like one GPU for all ranks,
    # so the user must ask for it. The ranks then compare their GPUs.
    per_rank = mode_needs(config.parallelism).devices_per_rank
    sees_its_own = env is not None and hardware.num_gpus == per_rank
    backend = _backend(config, hardware, nproc=nproc, sees_its_own=sees_its_own)
    validate_ranks(replace(config, world_size=ranks, backend=backend), env)
    found = {"world_size": ranks, "backend": backend, "batch": resolve_batch(config, ranks, chosen)}
    resolved = RunConfig(**(vars(config) | found))
    validate_scheduler(resolved)
    validate_auto_batch(resolved)
    warnings = _warnings(resolved, hardware, env, nproc)
    # A resumed run has the device of its frozen config, whoever chose it.
    is_inherited = config.resume is not None and not {"backend", "backend.device"} & set(chosen)
    if backend.device == "cpu" and (config.backend.device != "cpu" or is_inherited):
        idle = _idle_gpus(config, hardware, nproc=nproc, sees_its_own=sees_its_own)
        warnings = [*idle, *warnings]
    return resolved, warnings


def resolve_batch(config: Config, ranks: int, chosen: Collection[str] = ()) -> Batch:
    """Return the batch sizes with both filled in.

    Raises:
        UserError: neither or both sizes are given, or the ranks do not divide the global size.
    """
    total, per_rank = config.batch.global_size, config.batch.per_rank
    if total is not None and per_rank is not None:
        # The key that the user wrote wins over the default or an experiment's choice.
        explicit = {"batch.global_size", "batch.per_rank"} & set(chosen)
        if len(explicit) == 2:
            raise UserError(
                f"batch.global_size ({total}) and batch.per_rank ({per_rank}) exclude each other; "
                "give one, the other follows"
            )
        if explicit == {"batch.per_rank"} or (per_rank == AUTO and not explicit):
            total = None
    num_servers = mode_needs(config.parallelism).num_servers
    shares = 1 if is_asynchronous(config.parallelism) else ranks - num_servers
    num_micro_steps = config.train.grad_accum_steps
    parts = shares * num_micro_steps
    if total is None:
        if per_rank is None:
            raise UserError("batch.global_size and batch.per_rank are both null; give one of them")
        size = parts if per_rank == AUTO else per_rank * parts
        return Batch(**vars(config.batch) | {"global_size": size, "per_rank": per_rank})
    if total % parts:
        below, above = total // parts * parts, (total // parts + 1) * parts
        nearest = f"{below} or {above}" if below else f"{above}"
        divisor = f"{'trainers' if num_servers else 'world_size'} ({shares})"
        if num_micro_steps > 1:
            divisor += f" x train.grad_accum_steps ({num_micro_steps})"
        raise UserError(f"batch.global_size ({total}) is not divisible by {divisor}; use {nearest}")
    return Batch(**vars(config.batch) | {"global_size": total, "per_rank": total // parts})


def _world_size(config: Config, hardware: Hardware, env: DistEnv | None) -> int:
    asked, launch = config.world_size, config.launch
    if asked != "auto" and (isinstance(asked, bool) or not isinstance(asked, int) or asked < 1):
        raise UserError(f"world_size ({asked}) must be a whole number of ranks from 1 up, or auto")
    if env is not None:
        if asked not in ("auto", env.world_size):
            raise UserError(
                f"world_size ({asked}) differs from the {env.world_size} ranks that were launched; "
                "leave it out, or launch as many"
            )
        return env.world_size
    if asked != "auto":
        return int(asked)
    if launch.nproc_per_node is not None:
        return launch.nproc_per_node * launch.nnodes
    needs = mode_needs(config.parallelism)
    if needs.max_ranks is not None:
        return needs.max_ranks
    gpus = 0 if config.backend.device == "cpu" else hardware.num_gpus
    per_node = gpus // needs.devices_per_rank
    return (per_node or min(2, hardware.num_cores)) * launch.nnodes


def _nproc_per_node(config: Config, hardware: Hardware, ranks: int) -> int:
    launch = config.launch
    if launch.nnodes > 1 and launch.rdzv_endpoint is None:
        raise UserError(
            f"launch.nnodes ({launch.nnodes}) needs launch.rdzv_endpoint=HOST:PORT, "
            "the same on every machine"
        )
    nproc = launch.nproc_per_node or ranks // launch.nnodes
    most = MOST_RANKS_A_CORE * hardware.num_cores
    if nproc > most:
        raise UserError(
            f"{nproc} ranks on a machine of {hardware.num_cores} cores would never meet; write "
            f"world_size={most * launch.nnodes} or less"
        )
    if nproc * launch.nnodes != ranks:
        raise UserError(
            f"launch.nnodes ({launch.nnodes}) times launch.nproc_per_node ({nproc}) is not "
            f"world_size ({ranks}); leave world_size out, or make them agree"
        )
    return nproc


def _backend(
    config: Config, hardware: Hardware, *, nproc: int, sees_its_own: bool
) -> BackendConfig:
    """Return the backend with its name and device filled in."""
    name, device, gpus = config.backend.name, config.backend.device, hardware.num_gpus
    per_rank = mode_needs(config.parallelism).devices_per_rank
    wants_cuda = device == "cuda" or name == "nccl"
    if wants_cuda and hardware.unusable:
        asked = "backend=nccl" if name == "nccl" else "backend.device=cuda"
        raise UserError(
            f"{asked} needs CUDA devices: {hardware.unusable}, or write backend=gloo "
            "backend.device=cpu"
        )
    if name == "nccl" and gpus == 0:
        raise UserError(
            "backend=nccl needs CUDA devices and this machine shows none; write backend=gloo"
        )
    if wants_cuda and device == "cpu":
        raise UserError("backend=nccl moves only CUDA tensors; backend.device=cpu needs gloo")
    fits = nproc * per_rank <= gpus or (sees_its_own and (wants_cuda or hardware.binds_gpus))
    if wants_cuda and not fits:
        fewer = f"write world_size={gpus // per_rank}, or" if gpus >= per_rank else "write"
        raise UserError(
            f"{nproc} ranks of {per_rank} devices need {nproc * per_rank} GPUs and this machine "
            f"shows {gpus}; {fewer} backend=gloo backend.device=cpu"
        )
    if device == "auto":
        device = "cuda" if gpus and fits and name != "mpi" else "cpu"
    if name == "auto":
        name = "nccl" if device == "cuda" else "gloo"
    if config.train.precision == "fp16" and device == "cpu":
        raise UserError("train.precision=fp16 needs a CUDA device; on a CPU write bf16")
    return replace(config.backend, name=name, device=device)


def _idle_gpus(config: Config, hardware: Hardware, *, nproc: int, sees_its_own: bool) -> list[str]:
    """Return why a run on the CPU leaves GPUs idle, and what to write; nothing without GPUs.

    `config` has its backend as the user chose it.
    """
    backend, gpus = config.backend, hardware.num_gpus
    per_rank = mode_needs(config.parallelism).devices_per_rank
    meant = "or write backend.device=cpu if this is meant"
    if hardware.unusable:
        return [f"the run computes on the CPU: {hardware.unusable}, {meant}"]
    if gpus == 0:
        return []
    if backend.device == "cpu":
        reason = "as it did before it was resumed; add backend=auto to use them"
    elif backend.name == "mpi":
        reason = "since backend=mpi moves CPU tensors; write backend=nccl to use them"
    elif gpus < per_rank:
        reason = (
            f"since each rank needs {per_rank}; take a model in one piece and parallelism=ddp to "
            "use them"
        )
    else:
        fix = f"write world_size={gpus // per_rank * config.launch.nnodes} to use them"
        if sees_its_own:
            fix = "write backend.device=cuda if each rank has its own"
        reason = f"since its {nproc} ranks need {nproc * per_rank}; {fix}"
    noun = "GPU is" if gpus == 1 else "GPUs are"
    return [f"{gpus} {noun} visible and the run computes on the CPU, {reason}, {meant}"]


def _warnings(config: RunConfig, hardware: Hardware, env: DistEnv | None, nproc: int) -> list[str]:
    """Return what a resolved config does that the user may not expect."""
    warnings = []
    if env is not None and env.launcher == "torchrun" and config.launch.init_method is not None:
        warnings.append("launch.init_method is not used: torchrun has a rendezvous of its own")
    # Under another launcher this rank may be bound to a part of the cores.
    if env is None and config.backend.device == "cpu" and nproc > hardware.num_cores:
        warnings.append(
            f"{nproc} ranks on {hardware.num_cores} cores: they take turns, expect no speedup"
        )
    if (env.num_nodes if env else config.launch.nnodes) > 1:
        warnings.append(
            "torch.distributed has no authentication: whoever reaches the ports of these machines "
            "can join or stop the run; keep them on a trusted network"
        )
    if mode_needs(config.parallelism).data_parallel and (
        hardware.num_gpus < 2 or config.backend.device == "cpu"
    ):
        warnings.append("parallelism=dp has fewer than two GPUs: it runs as one device")
    return warnings
