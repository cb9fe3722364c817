"""From a command line to Hydra's composed config, and to a job whose files exist. Torch-free."""

import importlib.util
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hydra.conf import HydraConf
from hydra.core.config_store import ConfigStore
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from ddp_runner.checkpoint.manifest import MANIFEST
from ddp_runner.cli.command_line import CommandLine
from ddp_runner.cli.hydra_adapter import UNNAMED, compose_config, is_grid, opened, opened_node
from ddp_runner.cli.resume import NotARunError, left_trackers, said_again, with_resumed
from ddp_runner.config.keys import help_text
from ddp_runner.config.launching import LaunchConfig
from ddp_runner.config.load import as_written, chosen_keys, find_secrets, to_config
from ddp_runner.config.resolve import resolve
from ddp_runner.config.schema import LIST_GROUPS, Config
from ddp_runner.config.tracking import validate_installed
from ddp_runner.data.tokenizer import NEEDS_TEXT_EXTRA, tokenizer_file
from ddp_runner.dist_env import DistEnv
from ddp_runner.errors import UserError
from ddp_runner.files import safe_name
from ddp_runner.host.hardware import Hardware
from ddp_runner.job import Job
from ddp_runner.sweep.executor import Place
from ddp_runner.tracking.outputs import job_name
from ddp_runner.tracking.run_dir import RunDir

MODEL_FILE = "config.json"  # of a folder of trained weights
BERT = "ddp_runner.models.bert.Bert"
SOURCES = "ddp_runner.data.sources"
HF_DATASET = f"{SOURCES}.hf_dataset.HFDataset"
FOLDERS = (f"{SOURCES}.image_folder.ImageFolder", f"{SOURCES}.shards.Shards")
WEIGHT_FILES = (".safetensors", ".pt", ".pth")


@dataclass(frozen=True)
class Invocation:
    """What all jobs of a command have in common."""

    command: CommandLine
    env: DistEnv | None  # this rank's facts; None where no launcher has started this process
    started_at: float  # time.time()
    code: Mapping[str, Any]  # git_revision and versions
    warnings: tuple[str, ...] = ()  # about stdout and stderr


def register() -> None:
    """Give Hydra the schema, and OmegaConf the two resolvers that conf/ uses."""
    ConfigStore.instance().store(name="schema", node=Config)
    data_root = partial(os.environ.get, "DDP_RUNNER_DATA_ROOT", "data")
    OmegaConf.register_new_resolver("data_root", data_root, replace=True)
    OmegaConf.register_new_resolver("keys", help_text, replace=True)


def compose(command: CommandLine) -> DictConfig:
    """Return the composed config of a run, or what all jobs of a sweep have in common.

    Raises:
        UserError: a key has several values and the command is not a sweep.
        HydraException: the config cannot be composed.
    """
    register()
    composed = compose_config(command.fixed, folders=command.folders)
    for sweep in command.sweeps:
        line = sweep.input_line
        if is_sweep(command, composed):
            if is_grid(composed.hydra.sweeper) and not sweep.is_discrete_sweep():
                raise UserError(
                    f"{line} is an interval and this sweeper takes a list of values; write "
                    "hydra/sweeper=optuna, which searches intervals"
                )
        elif sweep.is_choice_sweep():
            raise UserError(
                f"{line} has a comma; write -m for a sweep over its values, or "
                f"{sweep.key_or_group}=[ONE,OTHER] for a list"
            )
        else:
            raise UserError(f"{line} is a sweep; write -m for it")
    if composed.hydra.job.chdir:
        raise UserError(
            "hydra.job.chdir=true would change what data_root and resume mean; leave it out: a run "
            "writes all that it leaves into its own folder anyway"
        )
    return composed


def is_sweep(command: CommandLine, composed: DictConfig) -> bool:
    """Return whether the command is a sweep: by -m, or by ``hydra.mode`` in a YAML."""
    return command.is_multirun or composed.hydra.mode == RunMode.MULTIRUN


def plan(composed: DictConfig, hardware: Hardware, invocation: Invocation) -> Job:
    """Return the job that a composed config describes, on this machine; see ``plan_at``."""
    return plan_at(composed, lambda _: Place(hardware, env=invocation.env), invocation)


def plan_at(
    composed: DictConfig, place_of: Callable[[Config], Place], invocation: Invocation
) -> Job:
    """Return the job that a composed config describes; it has no run folder yet.

    Args:
        composed: with its ``hydra`` node.
        place_of: gives the place where a job of this config will run.
        invocation: the command.

    Raises:
        UserError: the config is invalid, or a file that it names does not exist.
    """
    command, env = invocation.command, invocation.env
    with opened(composed) as (given, node):
        raw, overrides, lacks_run, notes = given, _written(node, command), False, list[str]()
        try:
            raw = with_resumed(given, overrides, is_launched=env is not None)
            notes = left_trackers(given, overrides)
        except NotARunError:
            most_nodes = LaunchConfig(nnodes=given.launch.nnodes).most_nodes
            lacks_run = (env.num_nodes if env else most_nodes) > 1
            if not lacks_run:
                raise
        secrets = find_secrets(raw)
        with secrets.hidden_in_errors():
            unresolved = to_config(raw)
            place = place_of(unresolved)
            if place.num_nodes is not None:
                unresolved.launch.nnodes = place.num_nodes
            config, warnings = resolve(
                unresolved,
                hardware=place.hardware,
                chosen=chosen_keys(overrides),
                env=place.env,
                lacks_run=lacks_run,
            )
            validate_files(config, env=place.env)
        choices = _choices(node, config)
        return Job(
            config=config,
            started_at=invocation.started_at,
            lacks_run=lacks_run,
            code=invocation.code,
            overrides=overrides,
            own_groups=command.own_groups if invocation.env is None else None,
            said_again=said_again(given, overrides, command.own_groups, choices=choices),
            secrets=secrets,
            choices=choices,
            warnings=(*invocation.warnings, *map(secrets.hide, [*notes, *warnings])),
        )


def _choices(node: HydraConf, config: Config) -> dict[str, str]:
    """Return the option of each group; a list for those of several, which Hydra leaves out."""
    choices = {
        str(group): str(option)
        for group, option in node.runtime.choices.items()
        if option is not None and "/" not in str(group)
    }
    lists = {one: ",".join(getattr(config, one)) for one in LIST_GROUPS}
    return choices | {group: f"[{names}]" for group, names in lists.items() if names}


def job_folder(composed: DictConfig, command: CommandLine) -> str:
    """Return the name of a sweep job's folder: the overrides that differ between the jobs."""
    with opened_node(composed) as node:
        if node.sweep.subdir != UNNAMED:
            return safe_name(str(node.sweep.subdir))  # a job's folder is directly in the sweep's
        fixed = {one.key_or_group for one in command.overrides if not one.is_sweep_override()}
        overrides = _written(node, command)
        varied = [one for one in overrides if one.partition("=")[0].lstrip("+~") not in fixed]
        return job_name(varied or overrides)


def _written(node: HydraConf, command: CommandLine) -> tuple[str, ...]:
    """Return the overrides that the user wrote, as they were written."""
    return tuple(one for one in as_written(node.overrides.task) if one not in command.implied)


def validate_files(config: Config, *, env: DistEnv | None = None) -> None:
    """Reject a resolved config that names a missing file, folder or package.

    `env` holds this rank's facts if the ranks run already.

    Raises:
        UserError: something is missing; the message says what to write instead.
    """
    model, dataset, data_root = config.model, config.dataset, Path(config.data_root)
    if model.get("_target_") == BERT and importlib.util.find_spec("transformers") is None:
        raise UserError(f"model=bert: {NEEDS_TEXT_EXTRA}")
    for metric, keys in config.metrics.items():
        is_theirs = str(keys["_target_"]).startswith("torchmetrics.")
        if is_theirs and importlib.util.find_spec("torchmetrics") is None:
            raise UserError(
                f"metrics.{metric} ({keys['_target_']}) is of torchmetrics, which is not "
                "installed; pip install 'ddp-runner[metrics]'"
            )
    validate_installed(config)
    for key, package, extra in (
        ("inference.format=parquet", "pyarrow", "parquet"),
        ("checkpoint.export=[onnx]", "onnxscript", "onnx"),
    ):
        is_asked = extra in (config.inference.format, *config.checkpoint.export)
        if is_asked and importlib.util.find_spec(package) is None:
            raise UserError(
                f"{key} needs {package}, which is not installed; pip install 'ddp-runner[{extra}]'"
            )
    if dataset.get("_target_") == HF_DATASET:
        _validate_hf(dataset)
    elif (path := dataset.get("path")) is not None and not (data_root / str(path)).is_file():
        raise UserError(
            f"dataset.path ({path}): there is no file {(data_root / str(path)).absolute()}; give a "
            "path under data_root, or an absolute one"
        )
    if dataset.get("_target_") in FOLDERS:
        folder = data_root / str(dataset.get("folder"))
        if not folder.is_dir():
            raise UserError(
                f"dataset.folder ({dataset.get('folder')}): there is no folder "
                f"{folder.absolute()}; give one under data_root, or an absolute one"
            )
    if (name := model.get("pretrained")) is not None and not Path(str(name), MODEL_FILE).is_file():
        raise UserError(
            f"model.pretrained ({name}): there is no {MODEL_FILE} in {Path(str(name)).absolute()}; "
            "name a folder of trained weights, as transformers' save_pretrained leaves it"
        )
    if (name := dataset.get("tokenizer")) is not None:
        tokenizer_file(Path(str(name)))
    # Only rank 0 reads the weights, perhaps on another machine. A resumed run needs them no more.
    num_nodes = env.num_nodes if env else config.launch.most_nodes
    if (name := model.get("weights")) is not None and config.resume is None and num_nodes == 1:
        weights = Path(str(name))
        is_checkpoint = (weights / MANIFEST).exists() or RunDir(weights).checkpoints.is_dir()
        if not (weights.exists() and (is_checkpoint or weights.suffix in WEIGHT_FILES)):
            fault = "is not a weights file or run folder" if weights.exists() else "does not exist"
            raise UserError(
                f"model.weights ({weights}) {fault}; give a run folder, its "
                f"checkpoints/step-XXXXXXXX, or a file that ends in {', '.join(WEIGHT_FILES)}"
            )


def _validate_hf(dataset: Mapping[str, Any]) -> None:
    """Reject a dataset of Hugging Face's library without a path, or without its packages."""
    if not isinstance(dataset.get("path"), str):
        raise UserError(
            f"dataset.path ({dataset.get('path')}) must name a dataset; write a folder under "
            "data_root, a name of the hub, or dataset.path=csv with dataset.data_files"
        )
    needed = {"datasets": "hf"} | ({"torchdata": "streams"} if dataset.get("streaming") else {})
    for package, extra in needed.items():
        if importlib.util.find_spec(package) is None:
            raise UserError(
                f"dataset={dataset.get('name')} needs {package}; write pip install "
                f'"ddp-runner[{extra}]"'
            )
