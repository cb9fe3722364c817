"""A training's state: what its checkpoints hold, and how a run continues from one."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from torch.optim.lr_scheduler import LambdaLR

from ddp_runner.checkpoint.optimizer_state import set_rates
from ddp_runner.checkpoint.state import Saver
from ddp_runner.data.batches import ORDER_VERSION
from ddp_runner.data.streams import num_samples
from ddp_runner.errors import UserError
from ddp_runner.train.first_batch import rehearse
from ddp_runner.train.same_data import are_same
from ddp_runner.train.state import Position, TrainState
from ddp_runner.train.step import modules_of
from ddp_runner.train.stream_batches import StreamBatches

GLOBAL_SIZE = "batch.global_size"
NOUNS = {"train_samples": "training samples", "eval_samples": "evaluation samples"}


def snapshot(state: TrainState, *, copies: set[int] | None = None) -> dict[str, Any]:
    """Return everything that the next step depends on. Collective: every rank must call.

    Args:
        state: of this rank.
        copies: takes the addresses of tensors that are copies already, as ``gathered``.

    Raises:
        UserError: see ``checkpoint.state.Saver``.
    """
    return _saver(state).snapshot(state.position.step, copies=copies)


def restore(state: TrainState, folder: Path, *, log: Callable[[str], None]) -> int | None:
    """Load the newest valid checkpoint of a folder into the state, if there is one.

    Every rank loads onto its own devices. Collective: every rank must call.

    Returns:
        The step that the run continues from; None if it starts at step 0.

    Raises:
        UserError: the checkpoint belongs to another model, optimizer or dataset, or every
            checkpoint is damaged. All ranks raise the same error.
    """
    setup, saver = state.setup, _saver(state)
    found = saver.restore(
        folder,
        is_resumed=setup.config.resume is not None,
        log=log,
        before=lambda: rehearse(state),
    )
    if found is None:
        return None
    objects: Mapping[str, Any] = saver.objects
    place: _Place = objects["position"]
    state.position = replace(place.found, metrics=found.metrics)
    if isinstance(setup.batches, StreamBatches) and state.position.step_in_epoch:
        batches = replace(setup.batches, resumed=objects["stream"].found)
        state.setup = replace(setup, batches=batches)
    _set_rates(state, then=place.order.get(GLOBAL_SIZE))
    return found.step


def saved_objects(state: TrainState) -> dict[str, Any]:
    """Return what a checkpoint holds, by name. Where the run stands comes first: it says most."""
    return {
        "position": _Place(state),
        "model": state.module,
        "optimizer": state.optimizer,
        "scheduler": state.schedule.scheduler,
        "scaler": state.scaler,
        **({} if state.ema is None else {"ema": state.ema.averaged}),
        **modules_of(state.setup.step),
        **({"stream": _Stream(state)} if isinstance(state.setup.batches, StreamBatches) else {}),
    }


def _saver(state: TrainState) -> Saver:
    setup = state.setup
    return Saver(
        saved_objects(state),
        state.settings,
        task="train",
        num_shares=setup.role.num_shares,
        rank=setup.env.rank,
        num_ranks=setup.env.world_size,
        group=setup.group,
        takes_all=setup.role.loop is not None,
    )


def _set_rates(state: TrainState, *, then: int | None) -> None:
    """Set the rates of a schedule that is a function of the step.

    If the run is measured in epochs, and its batches had another size, `then`, the step is that of
    a run whose epochs all had batches of this run's size.
    """
    config, scheduler = state.setup.config, state.schedule.scheduler
    steps_per_epoch = state.setup.batches.steps_per_epoch
    if not isinstance(scheduler, LambdaLR):
        return
    if (
        then not in (None, config.batch.global_size)
        and config.train.max_steps is None
        and steps_per_epoch is not None
    ):
        scheduler.last_epoch = state.position.epoch * steps_per_epoch
    set_rates(scheduler)


class _Place:
    """Where a run stands in which order of which samples."""

    def __init__(self, state: TrainState) -> None:
        self._state = state
        self.found = Position()  # as it was loaded
        self.order: Mapping[str, Any] = {}  # likewise

    def state_dict(self) -> dict[str, Any]:
        position = asdict(self._state.position)
        del position["metrics"]  # the manifest keeps them
        return {**position, "order": self._order(), "data": self._data()}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Take the position.

        Raises:
            UserError: the samples changed, or the run stands amid an epoch of another order.
        """
        names = {one.name for one in fields(Position)} - {"metrics"}
        found = Position(**{name: saved[name] for name in names})
        self._validate_data(saved["data"], seed=saved["order"]["seed"])
        if found.step_in_epoch:
            self._validate_order(saved["order"], found)
        self.found, self.order = found, saved["order"]

    def _order(self) -> dict[str, Any]:
        """Return what decides which samples are still to come in an epoch."""
        batches = self._state.setup.batches
        if isinstance(batches, StreamBatches):
            return {
                "seed": batches.seed,
                "ranks with samples of their own": batches.num_shares,
                "dataset.num_workers": batches.split.num_workers,
                "samples of a micro-batch": batches.micro_size,
            }
        order = {"seed": batches.seed, GLOBAL_SIZE: batches.global_size}
        order["dataset.shuffle"] = batches.shuffle
        return {**order, "the version of the order": ORDER_VERSION}

    def _data(self) -> dict[str, Any]:
        dataset = self._state.setup.dataset
        return {
            "train_samples": num_samples(dataset.train),
            "eval_samples": num_samples(dataset.eval),
            "digest": dataset.digest,
            "samples": self._state.setup.samples,
        }

    def _validate_order(self, saved: Mapping[str, Any], found: Position) -> None:
        now = self._order()
        if changed := [key for key in {**now, **saved} if saved.get(key) != now.get(key)]:
            then = ", ".join(f"{key}={saved.get(key)}" for key in changed)
            raise UserError(
                f"it was saved amid epoch {found.epoch + 1} with {then}, and this run has "
                f"{', '.join(f'{key}={now.get(key)}' for key in changed)}, so that some samples "
                "would be used twice and others never; leave these as they were, or resume from a "
                "checkpoint between epochs"
            )

    def _validate_data(self, saved: Mapping[str, Any], *, seed: int) -> None:
        """Validate that the samples did not change: the order of an epoch depends on their number.

        Raises:
            UserError: they did.
        """
        current, name = self._data(), self._state.setup.dataset.name
        changed = [
            f"{_shown(saved[key])} {noun} then, {_shown(current[key])} now"
            for key, noun in NOUNS.items()
            if saved[key] != current[key]
        ]
        digests = [str(one["digest"]) for one in (saved, current) if one["digest"] is not None]
        # A run whose pictures were prepared may go on with those in their files.
        kinds = {one.rpartition(":")[0] for one in digests}
        is_other = len(kinds) == 1 and len(set(digests)) > 1
        both = saved["samples"], current["samples"]
        if not digests and None not in both:
            pairs = [(both[0][name], both[1][name]) for name in both[1]]
            # Of samples that somebody draws anew each time nothing is known.
            is_other = not all(are_same(*pair) for pair in pairs if all(pair))
        if is_other and not changed:
            changed = [f"{_shown(current['train_samples'])} training samples, but different ones"]
        if changed:
            fix = f"put the data of dataset={name} back as it was"
            if (now := self._order()["seed"]) != seed:
                fix = f"the seed was {seed} and is {now} now; write seed={seed}"
            raise UserError(f"the data changed: {'; '.join(changed)}; {fix}, or start a new run")


class _Stream:
    """Where this rank's readers are in a stream; None between two epochs."""

    def __init__(self, state: TrainState) -> None:
        self._state, self.found = state, None

    def state_dict(self) -> dict[str, Any] | None:
        batches = self._state.setup.batches
        assert isinstance(batches, StreamBatches)
        return batches.state if self._state.position.step_in_epoch else None

    def load_state_dict(self, saved: Any) -> None:
        """Take what the rank needs to read on."""
        self.found = saved


def _shown(count: int | None) -> str:
    return "a stream of" if count is None else f"{count:,}"
