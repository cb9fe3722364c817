"""What must hold between the keys of a config. Torch-free: an invalid config is reported at once.

Each message names the key, its value and the fix. What a value must be by itself is in ``values``.
"""

import math
from collections.abc import Collection
from pathlib import Path

from ddp_runner.config.batch import validate_num_samples
from ddp_runner.config.needs import mode_needs
from ddp_runner.config.schema import (
    BACKENDS,
    PRECISIONS,
    TASKS,
    BackendConfig,
    Config,
)
from ddp_runner.dist_env import DistEnv
from ddp_runner.errors import UserError, nearest
from ddp_runner.metric_names import MONITORS, is_lower_better

OFFLINE = "ddp_runner.data.sources.offline."


def validate_choices(config: Config) -> None:
    """Refuse a word that a key cannot be, and a data_root that is not a folder.

    Raises:
        UserError: it lists the words.
    """
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


def validate_checkpoints(config: Config, *, chosen: Collection[str]) -> None:
    """Refuse a metric that no checkpoint has, and weights to start from for a resumed run.

    Args:
        config: as composed.
        chosen: the keys given on the command line.

    Raises:
        UserError: a rule is broken.
    """
    for name in ("every_epochs", "every_steps", "keep"):
        value = getattr(config.checkpoint, name)
        if value is not None and not value > 0:
            raise UserError(f"checkpoint.{name} ({value}) must be greater than 0")
    _validate_monitor(config)
    if config.resume is not None and "model.weights" in chosen:
        raise UserError(
            f"resume={config.resume} goes on with that run's own weights; leave model.weights "
            "out, or start a run of its own without resume"
        )


def _validate_monitor(config: Config) -> None:
    checkpoint = config.checkpoint
    monitor = checkpoint.monitor
    if checkpoint.mode not in ("max", "min"):
        raise UserError(f"checkpoint.mode ({checkpoint.mode}) must be one of max, min")
    if monitor is None:
        if checkpoint.load_best:
            raise UserError(
                "checkpoint.load_best=true needs checkpoint.monitor, the metric that tells which "
                "is best; write checkpoint.monitor=eval/accuracy"
            )
        return
    if monitor not in MONITORS:
        meant = nearest(monitor, MONITORS)
        hint = f"; did you mean {meant}?" if meant else ""
        raise UserError(
            f"checkpoint.monitor ({monitor}) must be one of {', '.join(MONITORS)}{hint}"
        )
    if is_lower_better(monitor) and checkpoint.mode == "max":
        raise UserError(
            f"checkpoint.monitor={monitor} with checkpoint.mode=max would keep the worst; write "
            "checkpoint.mode=min"
        )
    if monitor.startswith("eval/") and not config.train.eval_every_epochs:
        raise UserError(
            f"checkpoint.monitor={monitor} needs evaluations and train.eval_every_epochs is 0; "
            "write train.eval_every_epochs=1"
        )


def validate_model(config: Config) -> None:
    """Refuse a model with other channels, fewer classes or other tokens than the dataset.

    The model's keys follow the dataset's, so they differ only if the user sets one of them.

    Raises:
        UserError: a rule is broken.
    """
    wanted, given = config.model.get("in_channels"), config.dataset.get("channels")
    if None not in (wanted, given) and wanted != given:
        raise UserError(
            f"model.in_channels ({wanted}) differs from dataset.channels ({given}); leave it out: "
            "it follows the dataset"
        )
    wanted, given = config.model.get("num_classes"), config.dataset.get("num_classes")
    if isinstance(wanted, int) and isinstance(given, int) and wanted < given:
        raise UserError(
            f"model.num_classes ({wanted}) is less than dataset.num_classes ({given}); leave it "
            "out: it follows the dataset"
        )
    pretrained = config.model.get("pretrained")
    if pretrained is not None and config.dataset.get("tokenizer", "") is None:
        raise UserError(
            f"model.pretrained ({pretrained}) knows only its own tokens; leave out "
            "dataset.tokenizer, which follows it, or name its folder"
        )


def validate_scheduler(config: Config) -> None:
    """Refuse a metric that no evaluation gives, and a warm-up longer than the run.

    Raises:
        UserError: a rule is broken.
    """
    settings = config.scheduler
    monitor, mode, warmup = (settings.get(key) for key in ("monitor", "mode", "warmup_steps"))
    if monitor is not None:
        known = tuple(name for name in MONITORS if name.startswith("eval/"))
        if monitor not in known:
            raise UserError(f"scheduler.monitor ({monitor}) must be one of {', '.join(known)}")
        if not config.train.eval_every_epochs:
            raise UserError(
                f"scheduler.monitor={monitor} needs evaluations and train.eval_every_epochs is 0; "
                "write train.eval_every_epochs=1"
            )
        better = "min" if is_lower_better(monitor) else "max"
        if mode is not None and mode != better:
            raise UserError(
                f"scheduler.monitor={monitor} with scheduler.mode={mode} would lower the rate "
                f"while it improves; write scheduler.mode={better}"
            )
    steps = num_steps(config)
    if isinstance(warmup, int) and steps is not None and warmup > steps:
        raise UserError(
            f"scheduler.warmup_steps ({warmup}) must be from 0 to the run's total steps ({steps}); "
            "shorten the warm-up or train longer"
        )


def num_steps(config: Config) -> int | None:
    """Return the optimizer steps of the whole run; None if the number of samples is not known."""
    samples, size = config.dataset.get("num_samples"), config.batch.global_size
    if config.train.max_steps is not None:
        return config.train.max_steps
    if not isinstance(samples, int) or not size:
        return None
    return config.train.epochs * math.ceil(samples / size)


def validate_init_method(config: Config, env: DistEnv | None) -> None:
    """Refuse an address at which the ranks could not meet.

    Raises:
        UserError: not all machines and restarts could use the address.
    """
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


def validate_dataset(config: Config, ranks: int) -> None:
    """Refuse a generated dataset with fewer samples than ranks; a rank checks all others."""
    dataset = config.dataset
    is_ours = dataset["_target_"].startswith(OFFLINE)
    if is_ours and config.task != "collectives" and isinstance(dataset.get("num_samples"), int):
        validate_num_samples(dataset.get("name"), dataset["num_samples"], ranks=ranks)


def validate_mode(config: Config, ranks: int, backend: BackendConfig) -> None:
    """Refuse a form of parallelism that does not fit the model, the ranks or their devices.

    Args:
        config: as composed.
        ranks: the world size.
        backend: with its device filled in.

    Raises:
        UserError: it names what to use instead.
    """
    mode, name = config.parallelism, config.parallelism.get("name")
    needs = mode_needs(mode)
    if needs.max_ranks is not None and ranks > needs.max_ranks:
        raise UserError(
            f"parallelism={name} runs {needs.max_ranks} process, world_size is {ranks}; "
            "leave world_size out, or write parallelism=ddp"
        )
    stages, wanted = config.model.get("num_stages", 1), needs.devices_per_rank
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
    if needs.data_parallel and config.train.compile:
        raise UserError(
            f"train.compile=true does not work with parallelism={name}, which copies the model to "
            "the GPUs anew in each step; leave it out, or write parallelism=ddp"
        )
    if mode.get("sync_batchnorm") and backend.device == "cpu":
        raise UserError("parallelism.sync_batchnorm=true exists on CUDA only; set it to false")
