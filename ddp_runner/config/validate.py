"""What must hold between the keys of a config. Torch-free: an invalid config is reported at once.

Each message names the key, its value and the fix. What a value must be by itself is in ``values``.
"""

import math
from collections.abc import Collection
from pathlib import Path

from ddp_runner.config.inference import INFERENCE, SAMPLE
from ddp_runner.config.monitors import validate_monitors
from ddp_runner.config.own_loop import has_own_loop, validate_own_loop
from ddp_runner.config.schema import Config, RunConfig, mode_needs, num_shares
from ddp_runner.config.validate_ddp import validate_ddp
from ddp_runner.config.validate_inference import validate_inference
from ddp_runner.config.validate_mesh import validate_mesh
from ddp_runner.config.validate_optimizing import validate_optimizing
from ddp_runner.dist_env import DistEnv
from ddp_runner.errors import UserError

OFFLINE = "ddp_runner.data.sources.offline."


def validate_config(config: Config, *, chosen: Collection[str]) -> None:
    """Reject keys that do not fit each other, on however many ranks.

    `chosen` holds the keys given on the command line.

    Raises:
        UserError: a rule is broken.
    """
    needs_data = config.task != SAMPLE and config.data_root != "data"
    if needs_data and not Path(config.data_root).is_dir():
        raise UserError(
            f"data_root ({config.data_root}) is not a folder; give one that holds the datasets, "
            "or dataset=digits, which needs none"
        )
    if config.resume is not None and "model.weights" in chosen:
        raise UserError(
            f"resume={config.resume} goes on with that run's own weights; leave model.weights "
            "out, or start a run of its own without resume"
        )
    asked = config.collectives
    if asked.min_bytes > asked.max_bytes:
        raise UserError(
            f"collectives.min_bytes ({asked.min_bytes}) is greater than collectives.max_bytes "
            f"({asked.max_bytes}); give both, the smaller as min_bytes"
        )
    validate_own_loop(config)
    validate_inference(config, chosen=chosen)
    if not has_own_loop(config.task):
        if config.task not in INFERENCE:  # they monitor nothing, and may evaluate other data
            validate_monitors(config)
        validate_optimizing(config)
        _validate_model(config)
    _validate_servers(config)


def validate_ranks(config: Config, env: DistEnv | None) -> None:
    """Reject keys that do not fit the ranks, whose number and backend are filled in.

    `env` holds this rank's facts if the ranks run already.

    Raises:
        UserError: a rule is broken.
    """
    if config.task == "collectives" and config.world_size < 2:
        raise UserError(
            "task=collectives measures what ranks send each other, world_size is "
            f"{config.world_size}; write world_size=2 or more"
        )
    _validate_init_method(config, env)
    _validate_mode(config)
    # A rank validates the datasets whose samples are not known yet.
    name, samples = config.dataset.get("name"), config.dataset.get("num_samples")
    is_offline = config.dataset["_target_"].startswith(OFFLINE)
    if is_offline and config.task in ("train", "check") and isinstance(samples, int):
        ranks = num_shares(config.parallelism, config.world_size)
        validate_num_samples(name, samples, ranks=ranks)


def validate_num_samples(name: object, count: int, *, ranks: int) -> None:
    """Reject a dataset with fewer samples than ranks.

    Raises:
        UserError: some ranks would have no sample.
    """
    if count < ranks:
        raise UserError(
            f"dataset={name} has {count} training samples and world_size is {ranks}; use "
            f"world_size={count} or less"
        )


def validate_scheduler(config: RunConfig) -> None:
    """Reject what would not begin, or not end, in the run. The config has its batch filled in.

    Raises:
        UserError: a rule is broken.
    """
    if config.task in INFERENCE:
        return
    warmup, steps = config.scheduler.get("warmup_steps"), known_steps(config)
    if isinstance(warmup, int) and steps is not None and warmup > steps:
        raise UserError(
            f"scheduler.warmup_steps ({warmup}) must be from 0 to the run's total steps ({steps}); "
            "shorten the warm-up or train longer"
        )


def known_steps(config: RunConfig) -> int | None:
    """Return the optimizer steps of a run; None if only its data, or its GPU, can tell."""
    steps, samples = config.train.max_steps, config.dataset.get("num_samples")
    if steps is None and isinstance(samples, int):
        steps = config.train.epochs * math.ceil(samples / config.batch.global_size)
    return steps


def _validate_model(config: Config) -> None:
    """Reject a model with other channels, fewer classes or other tokens than the dataset.

    The model's keys follow the dataset's, so they differ only if the user sets one of them.
    """
    model, dataset = config.model, config.dataset
    wanted, given = model.get("in_channels"), dataset.get("channels")
    if None not in (wanted, given) and wanted != given:
        raise UserError(
            f"model.in_channels ({wanted}) differs from dataset.channels ({given}); leave it out: "
            "it follows the dataset"
        )
    wanted, given = model.get("num_classes"), dataset.get("num_classes")
    if isinstance(wanted, int) and isinstance(given, int) and wanted < given:
        raise UserError(
            f"model.num_classes ({wanted}) is less than dataset.num_classes ({given}); leave it "
            "out: it follows the dataset"
        )
    pretrained = model.get("pretrained")
    if pretrained is not None and dataset.get("tokenizer", "") is None:
        raise UserError(
            f"model.pretrained ({pretrained}) knows only its own tokens; leave out "
            "dataset.tokenizer, which follows it, or name its folder"
        )


def _validate_servers(config: Config) -> None:
    mode, name = config.parallelism, config.parallelism.get("name")
    num_servers = mode_needs(mode).num_servers
    if not num_servers:
        return
    if config.task == "check":
        raise UserError(f"task=check compares equal ranks, not parallelism={name}; write ddp")
    if num_servers != 1:
        raise UserError(
            f"parallelism.needs.num_servers ({num_servers}) must be 1; there is one server"
        )
    if mode.get("mode") not in ("sync", "async"):
        raise UserError(f"parallelism.mode ({mode.get('mode')}) must be sync or async")
    if config.train.precision == "fp16":
        raise UserError(f"parallelism={name} has no scaled loss; write train.precision=bf16")


def _validate_init_method(config: Config, env: DistEnv | None) -> None:
    """Reject an address that not all machines, or not all restarts, could use."""
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


def _validate_mode(config: Config) -> None:
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
    validate_ddp(config)
    validate_mesh(config)
    if needs.data_parallel and config.train.compile:
        raise UserError(
            f"train.compile=true does not work with parallelism={name}, which copies the model to "
            "the GPUs anew in each step; leave it out, or write parallelism=ddp"
        )
    if needs.splits_parameters and config.train.precision == "fp16":
        raise UserError(
            f"train.precision=fp16 scales the loss down when a gradient overflows, and under "
            f"parallelism={name} a rank sees only its own part of them; write train.precision=bf16"
        )
    if mode.get("sync_batchnorm") and config.backend.device == "cpu":
        raise UserError("parallelism.sync_batchnorm=true exists on CUDA only; set it to false")
