"""What runs before the first step: a trial of two samples, and the rehearsal of a resumed run.

Most mistakes in a user's model, loss or training step show up here, where the message can name
them. Every rank tries the same two samples and gets the same result, so the trial needs no
collective.
"""

from itertools import product

import torch
from torch import nn

from ddp_runner.config.monitors import KnownMetrics
from ddp_runner.data.splits import NUM_FIRST, Split, validate_classes
from ddp_runner.data.trees import inputs_of, taking
from ddp_runner.errors import UserError, listed
from ddp_runner.metric_names import CLASS_METRICS
from ddp_runner.metrics.confusion import confusion_counts
from ddp_runner.metrics.metric import directions
from ddp_runner.metrics.trial import Batch, try_metrics
from ddp_runner.seeds import seed_all
from ddp_runner.train.evaluation import has_classes
from ddp_runner.train.same_data import begins_alike
from ddp_runner.train.state import TrainState, restored_after
from ddp_runner.train.trial import (
    Trial,
    is_ordinary,
    loss_of,
    model_of,
    step_of,
    sum_form,
    try_loss,
    try_step,
)
from ddp_runner.train.work import Work, forward


def try_first_batch(state: TrainState) -> Trial:
    """Evaluate two training samples and their loss on this rank, and leave the state as it was.

    Raises:
        UserError: the model cannot take the samples, the loss cannot take the outputs, or the
            training step does not return what it must. The message has the exception's type and
            text; the log has its traceback.
    """
    work = state.work
    state.sample = batch = state.first()
    who = step_of(work.config)
    samples, fix = batch.data, "choose a dataset or a model that fits"
    if is_ordinary(state):
        who, samples = model_of(work.config), inputs_of(samples)
    if work.layout.model_ranks > 1:
        fix += "; if parallelism=single takes it, change model.tensor_parallel"
    what = f"{who} cannot take dataset={work.dataset.name}, whose samples are"
    with taking(what, samples, fix=fix), restored_after(state):
        trial = try_loss(state, batch) if is_ordinary(state) else try_step(state, batch)
        _ensure_same_layers(state)
    return trial


@torch.no_grad()
def _ensure_same_layers(state: TrainState) -> None:
    """Reject a layer that is used for some samples, or some random numbers, only.

    FSDP2 gathers a layer, and reduces its gradients, on all ranks together, so one would wait for
    a rank that leaves it out. Collective there: every rank must call.
    """
    work = state.work
    if not work.layout.forward_is_collective or work.layout.num_shares == 1:
        return
    names = {part: name for name, part in state.module.named_modules() if [*part._parameters]}
    used, by_run = list[str](), list[set[str]]()
    hooks = [
        part.register_forward_pre_hook(lambda part, _: used.append(names[part])) for part in names
    ]
    for is_training, number in product((False, True), range(NUM_FIRST)):
        used.clear()
        state.module.train(is_training)
        seed_all(number)
        forward(state.work, state.module, state.first([number] * NUM_FIRST))
        by_run.append(set(used))
    for hook in hooks:
        hook.remove()
    evaluated, trained = by_run[:NUM_FIRST], by_run[NUM_FIRST:]
    if some := {name for runs in (evaluated, trained) for name in set.symmetric_difference(*runs)}:
        raise UserError(
            f"{model_of(work.config)} uses {listed(sorted(some))} for some samples only, and "
            f"parallelism={work.config.parallelism.get('name')} gathers a layer on all ranks "
            "together; write parallelism=ddp parallelism.find_unused_parameters=true"
        )


@torch.no_grad()
def try_evaluation(state: TrainState) -> KnownMetrics:
    """Evaluate a few training samples on this rank, and return which metrics the run will have.

    A metric that cannot take the outputs would otherwise end the run after its first epoch.

    Raises:
        UserError: see ``try_metrics``.
    """
    work, names = state.work, {"eval/loss"}
    with restored_after(state):
        step = forward(state.work, state.module, state.first())
        own, unknown = tried_metrics(work, state.module, state.batches.split)
    num_classes = work.dataset.num_classes
    if num_classes and has_classes(step):
        targets = step.targets.to(step.outputs.device)
        validate_classes(targets, num_classes=num_classes)
        confusion_counts(step.outputs, targets, num_classes=num_classes)  # raises, as later
        names |= {name for name in CLASS_METRICS if name.startswith("eval/")}
    for name in step.scalars:
        if f"eval/{name}" in names | own:
            raise UserError(
                f"{step_of(work.config)} returns the scalar {name}, and eval/{name} is another "
                "metric of the run; rename the scalar"
            )
    names |= {f"eval/{name}" for name in step.scalars}
    names |= {f"train/{name}" for name in state.scalars or ()}
    return KnownMetrics(names | own, unknown, directions(work.metrics))


def tried_metrics(work: Work, module: nn.Module, split: Split) -> tuple[set[str], set[str]]:
    """Try the configured metrics on what a module computes of a split; see ``try_metrics``."""
    batches = list[Batch]()
    for start in (0, NUM_FIRST) if work.metrics else ():
        numbers = range(start, start + NUM_FIRST)
        step = forward(work, module, split.first(numbers, seed=work.config.seed))
        batches.append((step.outputs, step.targets))
    return try_metrics(work.metrics, *batches, device=work.devices[-1])


def warnings_of(trial: Trial, state: TrainState) -> list[str]:
    """Return warnings about the loss and the batch size, a sentence each.

    Raises:
        UserError: the loss is a mean over the samples. Its gradients would be too small by the
            batch size.
    """
    config, warnings = state.work.config, []
    ordinary = is_ordinary(state)
    name = loss_of(config) if ordinary else f"the loss_sum of {step_of(config)}"
    if trial.kind == "mean":
        who = name if ordinary else step_of(config)
        fix = sum_form(config) if ordinary else "give loss_sum the sum over what count counts"
        raise UserError(f"{who} returns a mean over the samples, not a sum ({trial.detail}); {fix}")
    if trial.kind == "other":
        warnings.append(
            f"{name} is not a sum over the samples ({trial.detail}), so the steps depend "
            "on how a batch is split into ranks and micro-batches"
        )
    if state.samples is not None and begins_alike(state.samples):
        warnings.append(
            "the first evaluation sample is the first training sample: both are built with the "
            "same random numbers; if they are to be other samples, give each a seed of its own"
        )
    global_size, size = state.batches.global_size, state.batches.split.num_samples
    if size is not None and global_size > size:
        warnings.append(
            f"batch.global_size ({global_size}) is larger than the training set: "
            f"1 step an epoch of {size:,} samples"
        )
    return warnings


def rehearse(state: TrainState) -> None:
    """Run backwards whose gradients are dropped. Collective: every rank must call.

    DDP rebuilds its buckets after its first backward, with a static graph after the second. A
    gradient's place in its bucket decides in which order three or more ranks are added, and so how
    the sum is rounded. A resumed run must therefore not take its first step with the initial
    buckets. Call this before loading the state, since it changes buffers.
    """
    if state.model is state.module or state.work.env.world_size < 3:
        return  # the mode wraps nothing, or the sum has only one order
    state.model.train()
    # The real batch size, since torch.compile compiles for it.
    samples = state.first(range(state.batches.micro_size))
    for _ in range(2 if getattr(state.model, "static_graph", False) else 1):
        state.module.zero_grad(set_to_none=True)
        step = forward(state.work, state.model, samples)
        step.loss_sum.backward()  # the next step sets these gradients to None
