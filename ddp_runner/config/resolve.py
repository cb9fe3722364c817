"""The values of a config that follow from other values and from the machine. Torch-free."""

from collections.abc import Collection
from dataclasses import replace

from ddp_runner.config.allowed_targets import validate_targets
from ddp_runner.config.profiling import validate_profile
from ddp_runner.config.ranks import num_local_ranks, num_ranks, resolve_batch
from ddp_runner.config.schema import BackendConfig, Config, RunConfig, mode_needs
from ddp_runner.config.signatures import validate_keywords
from ddp_runner.config.validate import (
    known_steps,
    validate_config,
    validate_ranks,
    validate_scheduler,
)
from ddp_runner.config.validate_inference import fitted
from ddp_runner.config.values import validate_values
from ddp_runner.dist_env import DistEnv
from ddp_runner.errors import UserError, counted
from ddp_runner.host.accelerators import BACKENDS, CUDA, FOR_CPU
from ddp_runner.host.hardware import Hardware

ON_CPU = "backend=gloo backend.device=cpu"


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
    validate_keywords(config)
    validate_values(config)
    validate_config(config, chosen=chosen)
    given = {"backend", "backend.name", "backend.device"} & {*chosen}
    if config.resume and given == {"backend.device"}:  # which the run's own backend may not serve
        config = replace(config, backend=replace(config.backend, name="auto"))
    config, notes = fitted(config, hardware, chosen=chosen)
    ranks = num_ranks(config, hardware, env)
    nproc = env.local_world_size if env else num_local_ranks(config, hardware, ranks)
    # A rank may see only its own GPUs. Unless Slurm says so, that looks like one GPU for all ranks,
    # so the user must ask for it. The ranks then compare their GPUs.
    per_rank = mode_needs(config.parallelism).devices_per_rank
    sees_its_own = env is not None and hardware.num_gpus == per_rank
    backend = _backend(config, hardware, nproc=nproc, sees_its_own=sees_its_own)
    validate_ranks(replace(config, world_size=ranks, backend=backend), env)
    found = {"world_size": ranks, "backend": backend, "batch": resolve_batch(config, ranks, chosen)}
    resolved = RunConfig(**(vars(config) | found))
    validate_scheduler(resolved)
    validate_profile(resolved, num_steps=known_steps(resolved), chosen=chosen)
    warnings = [*notes, *_warnings(resolved, hardware, env, nproc)]
    # A resumed run has the device of its frozen config, whoever chose it.
    is_inherited = config.resume is not None and not given - {"backend.name"}
    if backend.device == "cpu" and (config.backend.device != "cpu" or is_inherited):
        idle = _idle_gpus(config, hardware, nproc=nproc, sees_its_own=sees_its_own)
        warnings = [*idle, *warnings]
    return resolved, warnings


def _backend(
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
            "can run code as you; keep them on a trusted network"
        )
    if mode_needs(config.parallelism).data_parallel and (
        hardware.num_gpus < 2 or config.backend.device == "cpu"
    ):
        warnings.append("parallelism=dp has fewer than two GPUs: it runs as one device")
    return warnings
