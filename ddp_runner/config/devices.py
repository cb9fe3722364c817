"""Where the ranks compute and which library carries their messages; used by ``rules``.

Torch-free.
"""

from collections.abc import Collection
from dataclasses import replace

from ddp_runner.config.schema import BackendConfig, Config
from ddp_runner.errors import UserError
from ddp_runner.host.hardware import Hardware


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
        UserError: the GPUs that are asked for are not there, or torch cannot use them.
    """
    backend, gpus = config.backend, hardware.num_gpus
    per_rank = config.parallelism.get("devices_per_rank", 1)
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
    # A rank may be shown its own GPUs alone. Without Slurm's word for it, one GPU that all ranks
    # share looks the same, so that the user has to ask for it; the ranks then compare their GPUs.
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
    # A resumed run has its device from the config that it began with, whoever chose it.
    is_inherited = config.resume is not None and not {"backend", "backend.device"} & set(chosen)
    if device == "cuda" or (backend.device == "cpu" and not is_inherited):
        return resolved, []
    return resolved, _about_idle_gpus(config, hardware, nproc=nproc, sees_its_own=sees_its_own)


def _about_idle_gpus(
    config: Config, hardware: Hardware, *, nproc: int, sees_its_own: bool
) -> list[str]:
    """Return why a run on the CPU leaves GPUs idle, and what to write; nothing if there are none.

    The config's backend is the one from before it was filled in.
    """
    backend, gpus = config.backend, hardware.num_gpus
    per_rank = config.parallelism.get("devices_per_rank", 1)
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
