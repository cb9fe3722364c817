"""Tries the run on a few samples before the first step, where a message can name the mistake.

Every rank tries the same samples and gets the same result.
"""

from functools import partial
from itertools import product

import torch
from torch import nn

from ddp_runner.config.monitors import KnownMetrics, validate_monitors
from ddp_runner.data.splits import NUM_FIRST, validate_classes
from ddp_runner.data.stream import Split
from ddp_runner.data.trees import first_tensor, inputs_of, shapes_on_failure
from ddp_runner.errors import UserError, listed
from ddp_runner.metric_names import CLASS_METRICS
from ddp_runner.metrics.metric import directions
from ddp_runner.metrics.metric_trial import Batch, try_metrics
from ddp_runner.seeds import seed_all
from ddp_runner.train.buffers import find_changing
from ddp_runner.train.evaluation import has_classes, step_confusion
from ddp_runner.train.same_data import agreed_samples, has_same_first_sample
from ddp_runner.train.state import TrainState, Work, forward, restored_after
from ddp_runner.train.step import step_of, supervised
from ddp_runner.train.step_trial import Trial, loss_of, model_of, sum_form, try_loss, try_step


def try_run(state: TrainState) -> tuple[KnownMetrics, list[str]]:
    """Try the run on a few samples; return the metrics that it will have, and warnings.

    Sets the fields of the state that later steps read: samples, sample, scalars, changing.
    Collective: every rank must call.

    Raises:
        UserError: data, model, loss, training step or metrics do not fit each other, or the run
            lacks a monitored metric.
    """
    state.samples = agreed_samples(state.work.dataset)
    warnings = warnings_of(try_first_batch(state), state)
    find_changing(state)
    metrics = try_evaluation(state)
    validate_monitors(state.work.config, metrics)
    return metrics, warnings


def try_first_batch(state: TrainState) -> Trial:
    """Evaluate two training samples and their loss on this rank; set state.sample and scalars.

    Raises:
        UserError: the model does not accept the samples, the loss does not accept the outputs, or
            the training step returns something wrong. The message has the exception's type and
            text; the log has its traceback.
    """
    work, is_ordinary = state.work, _is_ordinary(state)
    state.sample = batch = state.first()
    name, samples = step_of(work.config), batch.data
    if is_ordinary:
        name, samples = model_of(work.config), inputs_of(samples)
    action = f"{name} cannot take dataset={work.dataset.name}, whose samples are"
    fix = "choose a dataset or a model that fits"
    pixels = first_tensor(samples)
    if work.dataset.mean is None and pixels is not None and pixels.dtype == torch.uint8:
        fix = f"scale pixels by dataset.mean=0 dataset.std=1, or {fix}"
    if work.layout.model_ranks > 1:
        key = "pipeline" if work.layout.has_stages else "tensor_parallel"
        fix += f"; if parallelism=single takes it, change model.{key}"
    with shapes_on_failure(action, samples, fix=fix), restored_after(state):
        trial = (try_loss if is_ordinary else try_step)(state, batch)
        gathers_layers = work.layout.forward_is_collective and not work.layout.has_stages
        if gathers_layers and work.layout.num_shares > 1:
            _ensure_same_layers(state)
    state.scalars = trial.scalars
    return trial


def warnings_of(trial: Trial, state: TrainState) -> list[str]:
    """Return warnings about the loss, the data and the batch size, a sentence each.

    Raises:
        UserError: the loss is a mean over the samples: its gradients would be too small by the
            batch size.
    """
    config, warnings = state.work.config, []
    name, fix = step_of(config), "set loss_sum to the sum over the counted samples or tokens"
    loss = f"the loss_sum of {name}"
    if _is_ordinary(state):
        name, loss, fix = loss_of(config), loss_of(config), sum_form(config)
    if trial.kind == "mean":
        raise UserError(f"{name} returns a mean over the samples, not a sum ({trial.detail})", fix)
    if trial.kind == "other":
        warnings.append(
            f"{loss} is not a sum over the samples ({trial.detail}), so the steps depend "
            "on how a batch is split into ranks and micro-batches"
        )
    if state.samples is not None and has_same_first_sample(state.samples):
        warnings.append(
            "the first evaluation sample is the first training sample: both are built with the "
            "same random numbers; if they should differ, give each split its own seed"
        )
    global_size, size = state.batches.global_size, state.batches.split.num_samples
    if size is not None and global_size > size:
        warnings.append(
            f"batch.global_size ({global_size}) is larger than the training set: "
            f"1 step an epoch of {size:,} samples"
        )
    return warnings


@torch.no_grad()
def try_evaluation(state: TrainState) -> KnownMetrics:
    """Evaluate a few training samples on this rank, and return the metrics of the run.

    A metric that does not accept the outputs would otherwise end the run after its first epoch.
    """
    work, names, num_classes = state.work, {"eval/loss"}, state.work.dataset.num_classes
    with restored_after(state):
        step = forward(work, state.module, state.first())
        configured, unknown = tried_metrics(work, state.module, state.batches.split)
    if num_classes and has_classes(step):
        validate_classes(step.targets, num_classes=num_classes)
        step_confusion(step, num_classes=num_classes)  # raises now instead of after an epoch
        names |= {name for name in CLASS_METRICS if name.startswith("eval/")}
    scalars = {f"eval/{name}" for name in step.scalars}
    if duplicates := sorted(scalars & (names | configured)):
        name = duplicates[0]
        raise UserError(
            f"{step_of(work.config)} returns the scalar {name.removeprefix('eval/')}, and "
            f"{name} is another metric of the run",
            "rename the scalar",
        )
    names |= configured | scalars | {f"train/{name}" for name in state.scalars or ()}
    return KnownMetrics(names, unknown, directions(work.metrics))


def tried_metrics(work: Work, module: nn.Module, split: Split) -> tuple[set[str], set[str]]:
    """Try the configured metrics on a module's outputs for a split; see ``try_metrics``."""
    batches = list[Batch]()
    for start in (0, NUM_FIRST) if work.metrics else ():
        numbers = range(start, start + NUM_FIRST)
        step = forward(work, module, split.first(numbers, seed=work.config.seed))
        batches.append((step.outputs, step.targets))
    return try_metrics(work.metrics, *batches, device=work.devices[-1])


@torch.no_grad()
def _ensure_same_layers(state: TrainState) -> None:
    """Reject a layer that is used only for some samples or some random numbers.

    FSDP2 gathers a layer, and reduces its gradients, on all ranks together: a rank would wait
    forever for a rank that skips the layer. Collective: every rank must call.
    """
    config, used = state.work.config, list[set[str]]()
    hooks = [
        part.register_forward_pre_hook(lambda *_, name=name: used[-1].add(name))
        for name, part in state.module.named_modules()
        if part._parameters
    ]
    for is_training, number in product((False, True), range(NUM_FIRST)):
        used.append(set())
        state.module.train(is_training)
        seed_all(number)
        forward(state.work, state.module, state.first([number] * NUM_FIRST))
    for hook in hooks:
        hook.remove()
    if occasional := (used[0] ^ used[1]) | (used[2] ^ used[3]):
        raise UserError(
            f"{model_of(config)} uses {listed(sorted(occasional))} for some samples only, and "
            f"parallelism={config.parallelism.get('name')} gathers a layer on all ranks "
            "together",
            "write parallelism=ddp parallelism.find_unused_parameters=true",
        )


def _is_ordinary(state: TrainState) -> bool:
    """Return whether the run uses the ordinary training step."""
    step = state.work.step_fn
    return isinstance(step, partial) and step.func is supervised
