"""Where the ranks of a config compute, and what carries their collectives. Torch-free."""

from dataclasses import replace

from ddp_runner.config.schema import Config, mode_needs
from ddp_runner.config.sections import BackendConfig
from ddp_runner.errors import UserError, counted
from ddp_runner.host.accelerators import BACKENDS, CUDA, FOR_CPU
from ddp_runner.host.hardware import Hardware

ON_CPU = "backend=gloo backend.device=cpu"


def resolve_backend(
    config: Config, hardware: Hardware, *, nproc: int, sees_its_own: bool
) -> BackendConfig:
    """Return the backend with its name and device filled in."""
    name, device, gpus = config.backend.name, config.backend.device, hardware.num_gpus
    needs, kinds = mode_needs(config.parallelism), BACKENDS | {hardware.kind: hardware.backend}
    for key, options, fix in (
        ("name", {"auto", *FOR_CPU, *kinds.values()}, "backend"),
        ("device", {"auto", "cpu", *kinds}, "backend.device"),
    ):
        if (value := getattr(config.backend, key)) not in options:
            known = ", ".join(sorted(options))
            raise UserError(f"backend.{key} ({value}) must be one of {known}; write {fix}=auto")
    kind_of = {own: kind for kind, own in kinds.items() if own not in FOR_CPU}
    wanted = kind_of.get(name) or (device if device in kinds else None)
    if wanted is not None:
        asked = f"backend={name}" if name in kind_of else f"backend.device={device}"
        lacks = f"{asked} needs {wanted.upper()} devices"
        if hardware.unusable:
            raise UserError(f"{lacks}: {hardware.unusable}, or write {ON_CPU}")
        if gpus and hardware.kind != wanted:
            fix = f"write {asked.partition('=')[0]}=auto"
            raise UserError(f"{lacks} and torch has {hardware.kind} here; {fix}")
        if gpus == 0 and name in kind_of:
            raise UserError(f"{lacks} and this machine shows none; write backend=gloo")
        if device not in ("auto", wanted):
            raise UserError(
                f"{asked} moves only {wanted.upper()} tensors; backend.device={device} needs "
                f"{kinds.get(device, 'gloo')}"
            )
    num_devices = nproc * needs.devices_per_rank
    fits = num_devices <= gpus or (sees_its_own and (wanted is not None or hardware.binds_gpus))
    if wanted is not None and not fits:
        most = gpus // needs.devices_per_rank
        raise UserError(
            f"{counted(nproc, 'rank')} with {counted(needs.devices_per_rank, 'device')} each need "
            f"{counted(num_devices, f'{wanted.upper()} device')} and this machine shows {gpus}; "
            f"{f'write world_size={most}, or' if most else 'write'} {ON_CPU}"
        )
    obstacle = _obstacle(config, hardware)
    if wanted is not None and obstacle is not None:
        raise UserError(f"{asked} cannot be used, {obstacle}, or backend.device=cpu")
    if device == "auto":
        device = wanted or (hardware.kind if gpus and fits and obstacle is None else "cpu")
    if name == "auto":
        name = kinds.get(device, "gloo")
    if config.train.precision == "fp16" and device == "cpu":
        raise UserError("train.precision=fp16 needs a GPU; on a CPU write bf16")
    if config.train.precision == "tf32" and device != CUDA:
        raise UserError("train.precision=tf32 needs a CUDA device; elsewhere write fp32")
    return replace(config.backend, name=name, device=device)


def _obstacle(config: Config, hardware: Hardware) -> str | None:
    """Return why a config cannot use the accelerators, however many there are, and what would."""
    name, kind, needs = config.backend.name, hardware.kind, mode_needs(config.parallelism)
    if hardware.backend in FOR_CPU and needs.max_ranks != 1:
        return f"since no backend moves {kind.upper()} tensors; write parallelism=single"
    if needs.data_parallel and kind != CUDA:
        other = "single" if hardware.backend in FOR_CPU else "ddp"
        return f"since torch's DataParallel is for CUDA alone; write parallelism={other}"
    if name == "mpi" or (name == "gloo" and kind != CUDA and hardware.backend != name):
        return f"since backend={name} moves CPU tensors; write backend=auto"
    return None


def idle_gpus(config: Config, hardware: Hardware, *, nproc: int, sees_its_own: bool) -> list[str]:
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
    obstacle = _obstacle(config, hardware)
    if backend.device == "cpu":
        reason = "as it did before it was resumed; add backend=auto to use them"
    elif obstacle is not None:
        reason = f"{obstacle} to use them"
    elif gpus < per_rank:
        reason = (
            f"since each rank needs {per_rank}; take a model in one piece and parallelism=ddp to "
            "use them"
        )
    else:
        fix = f"write world_size={gpus // per_rank * config.launch.nnodes} to use them"
        if sees_its_own:
            fix = f"write backend.device={hardware.kind} if each rank has its own"
        reason = f"since its {nproc} ranks need {nproc * per_rank}; {fix}"
    noun = "GPU is" if gpus == 1 else "GPUs are"
    return [f"{gpus} {noun} visible and the run computes on the CPU, {reason}, {meant}"]
