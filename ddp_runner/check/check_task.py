"""``task=check``: verify the guarantees of data parallelism on the user's model and data."""

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace

import torch

from ddp_runner.check.checks import (
    equal_buffers,
    equal_outputs,
    equal_parameters,
    equal_start,
    eval_samples,
    same_data,
    train_samples,
    unregistered_values,
    wait_for_mean,
)
from ddp_runner.check.rank_differences import Verdict, differences
from ddp_runner.check.step_check import StepCheck
from ddp_runner.distributed import gather_objects
from ddp_runner.errors import UserError
from ddp_runner.job import Status
from ddp_runner.rank.session import Session, report_start
from ddp_runner.tracking.run_record import end_session, forget_earlier_sessions, write_run_record
from ddp_runner.train.buffers import find_changing
from ddp_runner.train.build_state import build_session_state
from ddp_runner.train.first_batch import try_first_batch
from ddp_runner.train.state import TrainState


def run_check(session: Session, stop_requested: Callable[[], bool]) -> Status:
    """Run all checks, log their verdicts and return the status. Collective: every rank must call.

    Raises:
        UserError: a check failed. All ranks raise, after all verdicts are logged.
    """
    config, env, log = session.config, session.env, session.log
    report_start(session, step=0)
    if env.is_rank_zero:
        forget_earlier_sessions(session.run_dir)
    if config.train.compile:
        log("train.compile=true is ignored: compiled code draws other random numbers")
        config = replace(config, train=replace(config.train, compile=False))
    state = build_session_state(session, config)
    for warning in session.job.warnings:
        log(f"warning: {warning}")
    log(
        f"model={config.model.get('name')} dataset={config.dataset.get('name')} "
        f"parallelism={config.parallelism.get('name')}, {env.world_size} ranks on "
        f"{state.work.devices[0].type}"
    )
    session.heartbeat.note(Status.RUNNING)
    status, verdicts = Status.COMPLETED, list[Verdict]()
    for verdict in run_checks(state):
        verdicts.append(verdict)
        log(f"{'ok    ' if verdict.ok else 'FAILED'}  {verdict.name}: {verdict.detail}")
        if any(gather_objects(stop_requested())):
            status = Status.PREEMPTED
            break
    failed = [verdict for verdict in verdicts if not verdict.ok]
    if env.is_rank_zero:
        write_run_record(session.run_dir, checks=[asdict(verdict) for verdict in verdicts])
    if failed:
        raise UserError(
            f"task=check ({len(failed)} of {len(verdicts)} failed): {failed[0].name}: "
            f"{failed[0].detail}",
            "fix it, then check again",
        )
    log(f"{status} in {time.time() - session.job.started_at:.1f} s, {len(verdicts)} checks ok")
    if env.is_rank_zero:
        end_session(session.run_dir, status=status)
    return status


def run_checks(state: TrainState) -> Iterator[Verdict]:
    """Yield the verdict of each check, ordered so that the first failure is closest to its cause.

    Collective: every rank must call, and iterate to the end.

    Raises:
        UserError: model, loss and data do not fit.
    """
    # Drop what no check needs: a scaled loss may overflow in the first steps, averaged weights
    # follow from the trained weights, and some metrics need all samples.
    state.scaler, state.ema = torch.amp.GradScaler(enabled=False), None
    state.work = replace(state.work, metrics={})
    yield train_samples(state)
    yield eval_samples(state)
    trials = gather_objects(try_first_batch(state))
    trial = next((trial for trial in trials if trial.kind != "sum"), trials[0])
    yield Verdict("the loss is a sum over the samples", trial.kind == "sum", trial.detail)
    find_changing(state)
    has_peers = state.work.env.world_size > 1
    if has_peers:
        yield same_data(state)
        yield equal_start(state)
    step = StepCheck(state)
    verdict = step.verdict()
    if not verdict.ok and (causes := differences(unregistered_values(state.module))):
        verdict = replace(verdict, detail="; ".join([verdict.detail, *causes]))
    yield verdict
    if not has_peers:
        yield Verdict("what ranks have in common", True, "nothing to compare: one rank")
    elif verdict.ok:  # else DDP may raise in the next forward, after an unfinished reduction
        rounding = step.output_rounding
        del step
        yield wait_for_mean(state, next(iter(replace(state.batches))))
        yield equal_parameters(state)
        yield equal_buffers(state)
        yield equal_outputs(state, rounding=rounding)
