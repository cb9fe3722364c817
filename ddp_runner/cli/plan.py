"""Turns a command line into its composed config, and that into a job. Torch-free."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.conf import HydraConf
from omegaconf import DictConfig, OmegaConf

from ddp_runner.checkpoint.manifest import MANIFEST, WEIGHTS_INDEX
from ddp_runner.cli.chosen_options import changed_keys, changes, keep_chosen_options
from ddp_runner.cli.command import CommandLine
from ddp_runner.cli.compose import UNNAMED, opened, opened_node
from ddp_runner.cli.resume import dropped_trackers, lacks_run, with_resumed
from ddp_runner.cli.resume_arguments import resume_arguments
from ddp_runner.config.load import chosen_keys, find_secrets, interpolations, to_config
from ddp_runner.config.requires import validate_requires
from ddp_runner.config.resolve import resolve
from ddp_runner.config.rules import OFFLINE, validate_trackers
from ddp_runner.config.schema import LIST_GROUPS, Config, has_own_loop
from ddp_runner.config.secrets import KeyPath
from ddp_runner.config.sections import AUTO, INFERENCE, SAMPLE
from ddp_runner.config.task_rules import unused_note
from ddp_runner.data.tokenizer import tokenizer_file
from ddp_runner.dist_env import DistEnv
from ddp_runner.errors import UserError
from ddp_runner.files import safe_name
from ddp_runner.host.hardware import Hardware, memory_bytes
from ddp_runner.job import Job
from ddp_runner.sweep.jobs import JobHardware
from ddp_runner.sweep.sweep_dir import sweep_command
from ddp_runner.tracking.outputs import job_name
from ddp_runner.tracking.run_dir import RunDir

MODEL_FILE = "config.json"  # in a folder of transformers' weights
WEIGHT_FILES = (".safetensors", ".pt", ".pth")


@dataclass(frozen=True)
class Invocation:
    """The facts that all jobs of a command share."""

    command: CommandLine
    env: DistEnv | None  # this rank's facts; None if no launcher started this process
    started_at: float  # time.time()
    provenance: Mapping[str, Any]  # see ``Job``
    warnings: tuple[str, ...] = ()  # about stdout and stderr
    uncommitted: str = ""  # see ``uncommitted_changes``


def plan(composed: DictConfig, hardware: Hardware, invocation: Invocation) -> Job:
    """Return the job of a composed config on this machine; it has no run folder yet.

    Raises:
        UserError: the config is invalid, or a file that it names does not exist.
    """
    with opened(composed) as (given, node):
        words = written_words(node, invocation.command)
        prepared = prepare(given, node, invocation)
        return prepared.finish(lambda _: (hardware, invocation.env), words)


@dataclass(frozen=True)
class PreparedConfig:
    """A composed config with all facts that do not depend on the values of its plain keys."""

    given: DictConfig  # without its ``hydra`` node
    raw: DictConfig  # `given`, or a resumed run's config with this command's keys
    choices: Mapping[str, str]  # the option of each group
    lacks_run: bool  # the run to resume is not on this machine
    notes: Sequence[str]
    invocation: Invocation
    texts: Mapping[KeyPath, str]  # of `raw`, with an interpolation

    def finish(
        self,
        hardware_for: Callable[[Config], JobHardware],
        overrides: tuple[str, ...],
        read: Callable[["PreparedConfig"], Config] = lambda prepared: to_config(prepared.raw),
    ) -> Job:
        """Return the job, resolved and validated.

        `overrides` are those that the user wrote, and `read` gives the unresolved config.
        """
        invocation, choices = self.invocation, self.choices
        own_groups, secrets = invocation.command.own_groups, find_secrets(self.raw, self.texts)
        with secrets.hidden_in_errors():
            unresolved = read(self)
            hardware, env = hardware_for(unresolved)
            config, warnings = resolve(
                unresolved, hardware=hardware, chosen=chosen_keys(overrides), env=env
            )
            validate_files(config, env=env, is_here=env is invocation.env)
        written = secrets.written(config)
        return Job(
            config=config,
            started_at=invocation.started_at,
            lacks_run=self.lacks_run,
            provenance=invocation.provenance,
            uncommitted=invocation.uncommitted,
            overrides=overrides,
            own_groups=own_groups if invocation.env is None else None,
            resume_arguments=resume_arguments(
                written, self.given, overrides, own_groups, choices=choices
            ),
            secrets=secrets,
            choices=choices,
            warnings=(*invocation.warnings, *map(secrets.hide, [*self.notes, *warnings])),
        )


def prepare(given: DictConfig, node: HydraConf, invocation: Invocation) -> PreparedConfig:
    """Apply the effects of a command's choices to its composed config, in place."""
    command, env = invocation.command, invocation.env
    overrides = written_words(node, command)
    keys = chosen_keys(overrides)
    notes = _keep_options(given, node, command)
    # On several machines only rank 0 must have the run to resume.
    is_elsewhere = (env.num_nodes if env else given.launch.nnodes) > 1 and lacks_run(given)
    launched = env is not None
    raw = with_resumed(given, overrides, is_launched=launched, is_elsewhere=is_elsewhere)
    if raw is not given:
        notes = dropped_trackers(given, overrides)
    elif has_own_loop(raw.task):
        keys += changed_keys(raw, overrides)
    if not is_elsewhere:
        notes += unused_note(raw.task, keys)
    choices = {
        str(group): str(option)
        for group, option in node.runtime.choices.items()
        if option is not None and "/" not in str(group)
    }
    for group in LIST_GROUPS:  # Hydra leaves out groups with a list of options
        if raw[group]:
            choices[group] = f"[{','.join(map(str, raw[group]))}]"
    texts = interpolations(raw)
    return PreparedConfig(given, raw, choices, is_elsewhere, notes, invocation, texts)


def shown_arguments(command: CommandLine, composed: DictConfig) -> list[str]:
    """Return the arguments with which Hydra shows the config that a run would have."""
    with opened(composed) as (raw, node), opened(composed) as (kept, _):
        _keep_options(kept, node, command)
        return command.arguments(*changes(raw, kept))


def _keep_options(raw: DictConfig, node: HydraConf, command: CommandLine) -> list[str]:
    words, choices = written_words(node, command), node.runtime.choices
    return list(keep_chosen_options(raw, words, choices=choices, folders=command.folders))


def job_folder(composed: DictConfig, command: CommandLine) -> str:
    """Return the name of a sweep job's folder: the overrides that differ between the jobs.

    A job that resumes a run has that run's folder: an absolute path.
    """
    with opened_node(composed) as node:
        if composed.resume not in (None, AUTO) and composed.task not in INFERENCE:
            if node.sweep.subdir != UNNAMED:
                raise UserError(
                    f"hydra.sweep.subdir ({node.sweep.subdir}) names a new folder, and resume="
                    f"{composed.resume} continues in its own",
                    "leave hydra.sweep.subdir out",
                )
            return str(Path(composed.resume).absolute())
        if node.sweep.subdir != UNNAMED:
            return safe_name(str(node.sweep.subdir))  # directly in the sweep's folder
        swept = {item.key_or_group for item in command.overrides if item.is_sweep_override()}
        fixed = {item.key_or_group for item in command.overrides} - swept
        words = sweep_command(written_words(node, command))
        varied = [word for word in words if word.partition("=")[0].lstrip("+~") not in fixed]
        return job_name([word.removeprefix("++") for word in varied or words])


def written_words(node: HydraConf, command: CommandLine) -> tuple[str, ...]:
    """Return the overrides as the user wrote them, without those of a resumed run."""
    words: Any = OmegaConf.to_container(node.overrides.task, resolve=False)  # may hold secrets
    return tuple(word for word in map(str, words) if word not in command.implied)


def validate_files(config: Config, *, env: DistEnv | None = None, is_here: bool = True) -> None:
    """Reject a resolved config that needs a missing file, folder or package, or more memory.

    `env` holds this rank's facts if the ranks run already. Without `is_here` this machine only
    submits the job, and its memory does not matter.
    """
    model, dataset = config.model, config.dataset
    validate_requires(config)
    validate_trackers(config)
    if is_here:
        _validate_memory(dataset)
    if (name := model.get("pretrained")) is not None and not Path(str(name), MODEL_FILE).is_file():
        raise UserError(
            f"model.pretrained ({name}): there is no {MODEL_FILE} in {Path(str(name)).absolute()}",
            "name a folder that transformers' save_pretrained has written",
        )
    if config.task != SAMPLE and (name := dataset.get("tokenizer")) is not None:
        tokenizer_file(Path(str(name)))
    # Only rank 0 reads the weights, perhaps on another machine. A resumed run does not need them.
    num_nodes = env.num_nodes if env else config.launch.nnodes
    if (name := model.get("weights")) is not None and config.resume is None and num_nodes == 1:
        weights = Path(str(name))
        run = RunDir(weights)
        parts = (run.checkpoints, run.export, weights / MANIFEST, weights / WEIGHTS_INDEX)
        is_right = any(part.exists() for part in parts) or weights.suffix in WEIGHT_FILES
        if not (weights.exists() and is_right):
            fault = "is not a weights file or run folder" if weights.exists() else "does not exist"
            raise UserError(
                f"model.weights ({weights}) {fault}",
                "give a run folder, its "
                f"checkpoints/step-XXXXXXXX, or a file that ends in {', '.join(WEIGHT_FILES)}",
            )


def _validate_memory(dataset: Mapping[str, Any]) -> None:
    """Reject a generated dataset that is larger than this machine's memory."""
    sizes = {key: size for key, size in dataset.items() if isinstance(size, int)}
    if not str(dataset["_target_"]).startswith(OFFLINE):
        return
    if sizes.keys() >= {"channels", "height", "width"}:
        sample_bytes = math.prod(sizes[key] for key in ("channels", "height", "width"))
    else:
        sample_bytes = 4 * (sizes.get("input_size", 0) + sizes.get("target_size", 0))
    count = sizes.get("num_samples", 0) + sizes.get("eval_samples", 0)
    if count * sample_bytes < 2**26:
        return  # it fits into any memory, which each job of a sweep would measure again
    needed, memory = (size / 2**30 for size in (count * sample_bytes, memory_bytes()))
    if needed > memory:
        raise UserError(
            f"dataset={dataset.get('name')} of {count} samples takes {needed:.0f} GiB and this "
            f"machine has {memory:.0f}",
            "write a smaller dataset.num_samples",
        )
