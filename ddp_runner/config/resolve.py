"""The values of a config that follow from other values and from the machine. Torch-free."""

from collections.abc import Collection
from dataclasses import replace

from ddp_runner.config.allowed_targets import validate_targets
from ddp_runner.config.batch import num_shares, resolve_batch
from ddp_runner.config.needs import mode_needs
from ddp_runner.config.schema import BackendConfig, Config
from ddp_runner.config.validate import (
    validate_checkpoints,
    validate_choices,
    validate_dataset,
    validate_init_method,
    validate_mode,
    validate_model,
    validate_scheduler,
)
from ddp_runner.config.values import validate_collectives, validate_values
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
) -> tuple[Config, list[str]]:
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
    if not all(isinstance(name, str) for name in config.allowed_targets):
        raise UserError("allowed_targets must be a list of packages; write allowed_targets=[NAME]")
    validate_targets(config)
    validate_values(config)
    validate_choices(config)
    validate_checkpoints(config, chosen=chosen)
    validate_model(config)
    ranks = _world_size(config, hardware, env.world_size if env else None)
    validate_collectives(config, num_ranks=ranks)
    shares = num_shares(config, ranks)
    validate_init_method(config, env)
    nproc = env.local_world_size if env else _nproc_per_node(config, hardware, ranks)
    backend, warnings = resolve_backend(
        config, hardware, nproc=nproc, is_launched=env is not None, chosen=chosen
    )
    validate_mode(config, ranks, backend)
    validate_dataset(config, ranks)
    batch = resolve_batch(config, shares, chosen)
    validate_scheduler(replace(config, batch=batch))
    if env is not None and env.launcher == "torchrun" and config.launch.init_method is not None:
        warnings.append("launch.init_method is not used: torchrun has a rendezvous of its own")
    # Under another launcher this rank may be bound to a part of the cores.
    if env is None and backend.device == "cpu" and nproc > hardware.num_cores:
        warnings.append(
            f"{nproc} ranks on {hardware.num_cores} cores: they take turns, expect no speedup"
        )
    if (env.num_nodes if env else config.launch.nnodes) > 1:
        warnings.append(
            "torch.distributed has no authentication: whoever reaches the ports of these machines "
            "can join or stop the run; keep them on a trusted network"
        )
    if mode_needs(config.parallelism).data_parallel and (
        hardware.num_gpus < 2 or backend.device == "cpu"
    ):
        warnings.append("parallelism=dp has fewer than two GPUs: it runs as one device")
    return replace(config, world_size=ranks, backend=backend, batch=batch), warnings


def _world_size(config: Config, hardware: Hardware, running: int | None) -> int:
    asked, launch = config.world_size, config.launch
    if asked != "auto" and (isinstance(asked, bool) or not isinstance(asked, int) or asked < 1):
        raise UserError(f"world_size ({asked}) must be a whole number of ranks from 1 up, or auto")
    if running is not None:
        if asked not in ("auto", running):
            raise UserError(
                f"world_size ({asked}) differs from the {running} ranks that were launched; "
                "leave it out, or launch as many"
            )
        return running
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


def resolve_backend(
    config: Config, hardware: Hardware, *, nproc: int, is_launched: bool, chosen: Collection[str]
) -> tuple[BackendConfig, list[str]]:
    """Return the backend with its name and device filled in, and warnings about idle GPUs.

    Args:
        config: as composed.
        hardware: what this machine has.
        nproc: ranks on this machine.
        is_launched: whether torchrun, srun or mpirun has started this process as a rank.
        chosen: the keys given on the command line.

    Raises:
        UserError: the GPUs are missing, or torch cannot use them.
    """
    backend, gpus = config.backend, hardware.num_gpus
    per_rank = mode_needs(config.parallelism).devices_per_rank
    needed = nproc * per_rank
    wants_cuda = backend.device == "cuda" or backend.name == "nccl"
    if wants_cuda and hardware.unusable:
        asked = "backend=nccl" if backend.name == "nccl" else "backend.device=cuda"
        raise UserError(
            f"{asked} needs CUDA devices: {hardware.unusable}, or write backend=gloo "
            "backend.device=cpu"
        )
    if backend.name == "nccl" and gpus == 0:
        raise UserError(
            "backend=nccl needs CUDA devices and this machine shows none; write backend=gloo"
        )
    if wants_cuda and backend.device == "cpu":
        raise UserError("backend=nccl moves only CUDA tensors; backend.device=cpu needs gloo")
    # A rank may see only its own GPUs. Unless Slurm says so, that looks like one GPU for all ranks,
    # so the user must ask for it. The ranks then compare their GPUs.
    sees_its_own = is_launched and gpus == per_rank
    fits = needed <= gpus or (sees_its_own and (wants_cuda or hardware.binds_gpus))
    if wants_cuda and not fits:
        fewer = (
            f"write world_size={gpus * nproc // needed}, or" if gpus * nproc >= needed else "write"
        )
        raise UserError(
            f"{nproc} ranks of {needed // nproc} devices need {needed} GPUs and this machine shows "
            f"{gpus}; {fewer} backend=gloo backend.device=cpu"
        )
    device = backend.device
    if device == "auto":
        device = "cuda" if gpus and fits and backend.name != "mpi" else "cpu"
    name = backend.name
    if name == "auto":
        name = "nccl" if device == "cuda" else "gloo"
    if config.train.precision == "fp16" and device == "cpu":
        raise UserError("train.precision=fp16 needs a CUDA device; on a CPU write bf16")
    resolved = replace(backend, name=name, device=device)
    # A resumed run has the device of its frozen config, whoever chose it.
    is_inherited = config.resume is not None and not {"backend", "backend.device"} & set(chosen)
    if device == "cuda" or (backend.device == "cpu" and not is_inherited):
        return resolved, []
    return resolved, _about_idle_gpus(config, hardware, nproc=nproc, sees_its_own=sees_its_own)


def _about_idle_gpus(
    config: Config, hardware: Hardware, *, nproc: int, sees_its_own: bool
) -> list[str]:
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
