"""What must hold between the keys of a config, and the values that follow from others.

Called by ``__main__`` on the composed config, before torch is imported: a mistake is answered in
one line that names the key, the value and the fix.
"""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from ddp_runner.config.allowed_targets import validate_targets
from ddp_runner.config.batch import num_shares, resolve_batch, validate_num_samples
from ddp_runner.config.checkpoint_rules import validate_checkpoints
from ddp_runner.config.collectives import validate_collectives
from ddp_runner.config.devices import resolve_backend
from ddp_runner.config.model_rules import validate_model
from ddp_runner.config.scheduler_rules import validate_scheduler
from ddp_runner.config.schema import BackendConfig, Config
from ddp_runner.config.values import validate_values
from ddp_runner.dist_env import DistEnv
from ddp_runner.errors import UserError
from ddp_runner.host.hardware import Hardware

TASKS = ("train", "collectives", "check")
BACKENDS = ("auto", "gloo", "nccl", "mpi")
PRECISIONS = ("fp32", "bf16", "fp16")
MADE_UP = ("ddp_runner.data.sources.fake_images.", "ddp_runner.data.sources.random.")
MOST_RANKS_A_CORE = 64  # a rank takes some 100 MiB, and a collective waits for the slowest of them


def resolve(
    config: Config,
    *,
    hardware: Hardware,
    chosen: Collection[str] = (),
    env: DistEnv | None = None,
) -> tuple[Config, list[str]]:
    """Return the config with every derived value filled in, and the warnings to print once.

    Args:
        config: as composed.
        hardware: what this machine has.
        chosen: the keys given on the command line; they win over a group's own choice when two
            keys exclude each other.
        env: this rank's facts where the ranks run already (torchrun, srun, mpirun).

    Raises:
        UserError: a rule is broken.
    """
    if not all(isinstance(name, str) for name in config.allowed_targets):
        raise UserError("allowed_targets must be a list of packages; write allowed_targets=[NAME]")
    validate_targets(config)
    validate_values(config)
    _validate_choices(config)
    validate_checkpoints(config, chosen=chosen)
    validate_model(config)
    ranks = _world_size(config, hardware, env.world_size if env else None)
    validate_collectives(config, num_ranks=ranks)
    shares = num_shares(config, ranks)
    _validate_init_method(config, env)
    nproc = env.local_world_size if env else _nproc_per_node(config, hardware, ranks)
    backend, warnings = resolve_backend(
        config, hardware, nproc=nproc, is_launched=env is not None, chosen=chosen
    )
    _validate_mode(config, ranks, backend)
    _validate_dataset(config, ranks)
    batch = resolve_batch(config, shares, chosen)
    validate_scheduler(replace(config, batch=batch))
    if env is not None and env.launcher == "torchrun" and config.launch.init_method is not None:
        warnings.append("launch.init_method is not used: torchrun has a rendezvous of its own")
    # Another launcher may have bound this rank to a part of the cores.
    if env is None and backend.device == "cpu" and nproc > hardware.num_cores:
        warnings.append(
            f"{nproc} ranks on {hardware.num_cores} cores: they take turns, expect no speedup"
        )
    if (env.num_nodes if env else config.launch.nnodes) > 1:
        warnings.append(
            "torch.distributed has no authentication: whoever reaches the ports of these machines "
            "can join or stop the run; keep them on a trusted network"
        )
    if config.parallelism.get("data_parallel") and (
        hardware.num_gpus < 2 or backend.device == "cpu"
    ):
        warnings.append("parallelism=dp has fewer than two GPUs: it runs as one device")
    return replace(config, world_size=ranks, backend=backend, batch=batch), warnings


def _validate_choices(config: Config) -> None:
    for key, choice, options in (
        ("task", config.task, TASKS),
        ("train.precision", config.train.precision, PRECISIONS),
        ("backend.name", config.backend.name, BACKENDS),
        ("sweep.retry", config.sweep.retry, (None, "failed")),
        ("backend.device", config.backend.device, ("auto", "cpu", "cuda")),
    ):
        if choice not in options:
            named = ", ".join("null" if one is None else one for one in options)
            raise UserError(f"{key} ({choice}) must be one of {named}")
    if config.data_root != "data" and not Path(config.data_root).is_dir():
        raise UserError(
            f"data_root ({config.data_root}) is not a folder; give one that holds the datasets, "
            "or dataset=digits, which needs none"
        )


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
    if config.parallelism.get("max_ranks"):
        return int(config.parallelism["max_ranks"])
    gpus = 0 if config.backend.device == "cpu" else hardware.num_gpus
    per_node = gpus // config.parallelism.get("devices_per_rank", 1)
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


def _validate_init_method(config: Config, env: DistEnv | None) -> None:
    asked, launch = config.launch.init_method, config.launch
    if asked is None:
        return
    if not asked.startswith(("tcp://", "file://")):
        raise UserError(
            f"launch.init_method ({asked}) must begin with tcp:// or file://; write "
            "tcp://HOST:PORT or file:///PATH"
        )
    is_file, is_alone = asked.startswith("file://"), env is None and launch.nnodes == 1
    if is_file and not is_alone and not asked.startswith("file:///"):
        raise UserError(
            f"launch.init_method ({asked}) names a file of this machine's launcher; on several "
            "machines, or under another launcher, write file:///PATH, in a folder that all share"
        )
    if is_file and launch.nnodes > 1 and launch.max_restarts:
        raise UserError(
            f"launch.init_method ({asked}) serves one start and launch.max_restarts is "
            f"{launch.max_restarts}; leave init_method out: launch.rdzv_endpoint is enough"
        )


def _validate_dataset(config: Config, ranks: int) -> None:
    """Refuse one of our own made-up datasets that is too small; of the others a rank finds out."""
    dataset = config.dataset
    is_ours = dataset["_target_"].startswith(MADE_UP)
    if is_ours and config.task != "collectives" and isinstance(dataset.get("num_samples"), int):
        validate_num_samples(dataset.get("name"), dataset["num_samples"], ranks=ranks)


def _validate_mode(config: Config, ranks: int, backend: BackendConfig) -> None:
    mode, name = config.parallelism, config.parallelism.get("name")
    if mode.get("max_ranks") and ranks > mode["max_ranks"]:
        raise UserError(
            f"parallelism={name} runs {mode['max_ranks']} process, world_size is {ranks}; "
            "leave world_size out, or write parallelism=ddp"
        )
    stages, wanted = config.model.get("num_stages", 1), mode.get("devices_per_rank", 1)
    if stages > wanted:
        raise UserError(
            f"model={config.model.get('name')} is cut into {stages} stages and parallelism={name} "
            f"gives a replica {wanted} device; write parallelism=ddp_mp"
        )
    if stages < wanted:
        raise UserError(
            f"parallelism={name} spreads a replica over {wanted} devices and "
            f"model={config.model.get('name')} has {stages} stage; "
            "take a model cut in two (toy_mp, convnet_mp, mnist_net_mp)"
        )
    if mode.get("static_graph") and config.train.grad_accum_steps > 1:
        raise UserError(
            "parallelism.static_graph=true cannot skip gradient syncs, which "
            f"train.grad_accum_steps ({config.train.grad_accum_steps}) does; turn one of them off"
        )
    if mode.get("data_parallel") and config.train.compile:
        raise UserError(
            f"train.compile=true does not work with parallelism={name}, which copies the model to "
            "the GPUs anew in each step; leave it out, or write parallelism=ddp"
        )
    if mode.get("sync_batchnorm") and backend.device == "cpu":
        raise UserError("parallelism.sync_batchnorm=true exists on CUDA only; set it to false")
