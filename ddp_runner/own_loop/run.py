"""``Run``: the argument of a user's own loop, with its rank, objects, checkpoints and logs."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_runner.checkpoint.weights import load_weights, starting_weights
from ddp_runner.config.schema import RunConfig
from ddp_runner.data.dataset import Dataset
from ddp_runner.data.load_dataset import build_dataset
from ddp_runner.distributed import StopVote, sum_over_ranks
from ddp_runner.errors import UserError
from ddp_runner.job import Status
from ddp_runner.own_loop.loop_log import LoopLog, number
from ddp_runner.own_loop.rank_batches import Loader, open_loader
from ddp_runner.own_loop.wrapping import bare, build_saver, fix_bucket_order, mark_replaced
from ddp_runner.parallelism.shards import whole_state, whole_tensors
from ddp_runner.parallelism.single import Single
from ddp_runner.rank.records import Records, export_model
from ddp_runner.rank.session import Session, report_start
from ddp_runner.seeds import seed_all
from ddp_runner.tracking.run_record import RunFields
from ddp_runner.train.build_model import place_model
from ddp_runner.train.optimizers import optimizer_of

PLAIN = (int, float, str, list, type(None))  # the types that run.json can hold


class Run:
    """A rank's part of a run, for a function with its own loop.

    Until ``restore`` all ranks draw the same random numbers, so that they build equal modules. Then
    each ``should_stop`` seeds torch, NumPy and ``random`` by the step, and each batch of a loader
    by its position: the same on ranks that share samples, different on all others.

    Attributes:
        rank, world_size: this rank, from 0, and the number of ranks.
        is_rank_zero: whether this rank logs and saves.
        devices, device: this rank's devices in its mode of parallelism, and the first of them.
        config: the resolved config. The runner applies train.deterministic, train.num_threads and
            all of checkpoint except every_epochs; it ignores params, ema, early_stop, scheduler and
            metrics.
        seed: ``config.seed``.
        run_dir: the run's folder.
    """

    def __init__(
        self, session: Session, *, stop_requested: Callable[[], bool], stack: ExitStack
    ) -> None:
        env = session.env
        self.rank, self.world_size, self.is_rank_zero = env.rank, env.world_size, env.is_rank_zero
        self.devices, self.device = session.devices, session.devices[0]
        self.config: RunConfig = session.config
        self.seed, self.run_dir = session.config.seed, session.run_dir.path
        self._session, self._stop_requested, self._stack = session, stop_requested, stack
        self._layout = session.mode.layout(env)
        self._vote, self._loaders = StopVote(), list[Loader]()
        self._objects: dict[str, Any] = {}
        self._log: LoopLog | None = None
        self._uses = dict[str, dict[str, Any]]()  # the config groups in use, with extra arguments
        self._step, self._saved_step = 0, -1  # the last step reported, and the last saved
        self._is_stopped = False

    def model(self, **arguments: Any) -> nn.Module:
        """Return the config's model on this rank's devices, not wrapped; arguments override keys.

        Rank 0 reads ``model.weights`` and sends them to all ranks: then the call is collective.

        Raises:
            UserError: the keys or the weights do not fit the model.
        """
        self._uses["model"] = arguments
        session, config, weights = self._session, self.config, None
        # Only a model of several stages gets its mode's placement here; ``wrap`` places any other.
        mode = session.mode if len(self.devices) > 1 else Single("single")
        module = place_model(config, mode, {}, self.devices, **arguments)
        if config.model.get("weights") is not None:
            if self.is_rank_zero:
                weights = starting_weights(config, session.run_dir.checkpoints, log=session.log)
            load_weights(module, weights)
        return module

    def dataset(self) -> Dataset:
        """Return the config's dataset; pass its splits ``train`` and ``eval`` to ``loader``.

        Raises:
            UserError: the keys or the files of the dataset are unusable.
        """
        self._uses["dataset"] = {}
        dataset = build_dataset(self.config, log=self._session.log)
        seed_all(self.seed, "own loop")  # a rank that prepared the dataset drew random numbers
        return dataset

    def optimizer(self, parameters: Iterable[Any]) -> Optimizer:
        """Return the config's optimizer for parameters or parameter groups.

        Raises:
            UserError: the keys do not fit the optimizer.
        """
        self._uses["optimizer"] = {}
        return optimizer_of(self.config, parameters)

    def wrap(self, module: nn.Module) -> nn.Module:
        """Return the module in the run's mode of parallelism, on this rank's devices.

        Its backward averages the gradients over the ranks. Keep the bare module for optimizers,
        ``restore`` and evaluations. Collective: all ranks wrap equal modules in the same order.
        """
        mode, before = self._session.mode, list(module.parameters())
        if len(self.devices) == 1:  # a module on several devices placed its stages when built
            module = mode.place(lambda: module, self.devices)
        mark_replaced(before, module)
        model = mode.wrap(module, self.devices)
        fix_bucket_order(model)
        return model

    def loader(
        self, dataset: Any, *, global_size: int | None = None, shuffle: bool = True, **options: Any
    ) -> Loader:
        """Return this rank's batches of a dataset, on its device; see ``Loader``.

        Args:
            dataset: a map-style ``torch.utils.data.Dataset``, or a split of ``dataset()``, which
                yields batches as they are stored, without normalisation.
            global_size: samples of a batch over all ranks; None: ``batch.global_size``.
            shuffle: False for evaluation.
            options: for a torch dataset: collate_fn, num_workers, prefetch_factor,
                persistent_workers and pin_memory of ``torch.utils.data.DataLoader``.

        Raises:
            UserError: there are fewer samples than ranks.
        """
        loader = open_loader(
            self._session,
            dataset,
            number=len(self._loaders),
            global_size=global_size,
            shuffle=shuffle,
            **options,
        )
        self._loaders.append(loader)
        return loader

    def restore(self, **objects: Any) -> int:
        """Set the content of checkpoints, and load the run's newest checkpoint if there is any.

        Call it once, before the loop, even with nothing to save: the run's records begin here, and
        loaders return to their start. Collective: every rank must call.

        Args:
            objects: objects with ``state_dict`` and ``load_state_dict``: modules, optimizers,
                schedulers, scalers, loaders. Or a dict of plain values, which is updated in place.
                Dicts, other objects and buffers may differ between ranks: each rank gets its own.

        Returns:
            The steps taken: 0 in a new run.

        Raises:
            UserError: an object has no state or was made before ``wrap``, or no checkpoint fits.
        """
        if self._log is not None:
            raise UserError("run.restore was called twice", "call it once, with everything to save")
        for loader in self._loaders:
            loader.rewind()
        self._objects = {name: bare(value) for name, value in objects.items()}
        session, folder = self._session, self._session.run_dir.checkpoints
        self._saver = build_saver(session, self._objects)
        is_resumed = self.config.resume is not None
        checkpoint = self._saver.restore(folder, is_resumed=is_resumed, log=session.log)
        step = None if checkpoint is None else checkpoint[0]
        self._step = step or 0
        seed_all(self.seed, "own loop", self._step, self._layout.share)
        report_start(session, step=self._step)
        fields = RunFields(uses=sorted(self._uses))
        if (arguments := self._uses.get("model")) is not None:  # to build it from the run later
            plain = {key: value for key, value in arguments.items() if isinstance(value, PLAIN)}
            fields["model_arguments"] = plain
        stack = self._stack
        records = Records(session, fields=fields, resume_step=step, stack=stack, max_steps=None)
        self._log = LoopLog(records, self._loaders, step=self._step)
        return self._step

    def log(self, values: Mapping[str, float | Tensor], *, step: int) -> None:
        """Write rank 0's values of a step to metrics.jsonl, TensorBoard and the terminal.

        Choose any name, such as "discriminator/loss"; a slash makes a group. The runner adds the
        speed since the last call: perf/step_time_ms, and perf/samples_per_s of the loaders.
        Call ``sum`` first to log values over all ranks.
        """
        self._at(step).log(values, step=step)

    def log_image(self, name: str, image: Tensor, *, step: int) -> None:
        """Write rank 0's image of a step to the folder images/NAME and to TensorBoard.

        Args:
            name: letters, digits, -, _ and ., with slashes between names.
            image: (3 or 1, height, width) or (height, width), floats in [0, 1] or uint8.
            step: steps taken.

        Raises:
            UserError: the name or the shape cannot be used.
        """
        self._at(step).log_image(name, image, step=step)

    def sum(self, values: Mapping[str, float | Tensor]) -> dict[str, float]:
        """Return each value summed over the ranks, in float64. Collective: every rank must call."""
        numbers = [*map(number, values.values())]
        return dict(zip(values, sum_over_ranks(numbers), strict=True))

    def save(self, step: int) -> None:
        """Save a checkpoint of the objects of ``restore``; it is written while the loop continues.

        Collective: every rank must call.

        Raises:
            UserError: ``restore`` got no objects, or a parameter is not finite.
        """
        if not self._objects:
            raise UserError(
                "run.save has nothing to save", "name it in run.restore(NAME=OBJECT, …)"
            )
        log, content = self._at(step), partial(self._saver.snapshot, step)
        log.records.save(content, step=step, metrics=log.metrics_of(step))
        self._saved_step = step

    def should_stop(self, step: int) -> bool:
        """Return whether the function must return now; call it at the end of each step.

        True follows a Ctrl-C, a SIGTERM or a scheduler's notice. A checkpoint is saved before that,
        and every ``checkpoint.every_steps``. Collective: every rank must call.
        """
        self._at(step).step_done(step)
        every = self.config.checkpoint.every_steps
        is_due = every is not None and step % every == 0
        self._is_stopped = self._vote.agreed(self._stop_requested)
        if (is_due or self._is_stopped) and self._objects and step != self._saved_step:
            self.save(step)
        seed_all(self.seed, "own loop", step, self._layout.share)
        return self._is_stopped

    def export(self, module: nn.Module) -> None:
        """Write rank 0's weights of a module, bare or wrapped, to model.safetensors. Collective.

        Raises:
            UserError: the file cannot be written.
        """
        model, step, metrics = bare(module), self._step, self._at().metrics_of(self._step)
        run_dir, specs, tensors = self._session.run_dir, whole_state(model), whole_tensors(model)
        export_model(run_dir, specs, tensors, step=step, metrics=metrics)

    def _at(self, step: int | None = None) -> LoopLog:
        """Return the log, and set the loop's step if given."""
        if self._log is None:  # log may run on a single rank, restore is a collective
            raise UserError(
                "the loop began without run.restore",
                "call it before the loop, with the objects to save, as in "
                "step = run.restore(model=model), or with nothing",
            )
        self._step = self._step if step is None else step
        return self._log


def finish(run: Run) -> Status:
    """Write the run's end after its function returned. Collective: every rank must call."""
    run._vote.settle()
    if run._log is None:
        run.restore()
    status = Status.PREEMPTED if run._is_stopped else Status.COMPLETED
    records, epochs = run._at().records, [loader.epoch for loader in run._loaders]
    records.wait()
    records.logger.finish(status, step=run._step, epoch=max(epochs, default=0))
    return status
