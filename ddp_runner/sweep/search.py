"""Which jobs a sweep runs: all of a grid, or those that Optuna chooses. Torch-free.

A search chooses each batch by the results of the earlier jobs, with Optuna's ask and tell:
https://optuna.readthedocs.io/en/stable/tutorial/20_recipes/009_ask_and_tell.html
The study is in the sweep's folder: a stopped search continues, and Optuna's tools can read it.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count, product
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from ddp_runner.config.identity import digest
from ddp_runner.errors import UserError, any_error, one_line, os_errors
from ddp_runner.files import locked, replace_file, yaml_dump
from ddp_runner.sweep.search_space import grid_values, search_direction, search_distribution
from ddp_runner.tracking.start_block import shown_path

STUDY, RESULTS = "optuna.db", "optimization_results.yaml"
LOCK = ".search.lock"  # held while the study is read and changed
RETRY = "retry"  # attribute of a trial that retries another: it does not count as a new trial
SAMPLERS = "optuna.samplers."  # prefix of hydra.sweeper.sampler._target_


class Grid:
    """Makes every combination of the values as one batch of jobs; the last key varies first.

    Raises:
        UserError: there are no jobs.
    """

    def __init__(self, overrides: Sequence[Override]) -> None:
        axes = dict[str, list[str]]()  # the last override of a repeated key wins
        for override in overrides:
            if override.is_hydra_override():
                continue
            key = override.get_key_element()
            axes[key] = [str(override.input_line)]
            if override.is_sweep_override():
                axes[key] = [f"{key}={value}" for value in override.sweep_string_iterator()]
        self._batches = [[list(words) for words in product(*axes.values())]]
        self.numbers = count()  # of the batch's jobs
        if not self._batches[0]:
            raise UserError("the sweep has no jobs: a range is empty", "write range(3) or 1,2")

    def ask(self) -> list[list[str]]:
        """Return the words of each job of the next batch; an empty list at the end."""
        return self._batches.pop() if self._batches else []


class Search:
    """The trials of a study, as batches of jobs.

    Overrides of the command with several values or an interval are searched. `batch_size` is the
    number of trials in a batch, unless ``hydra.sweeper.n_jobs``, of the `node`, sets it. With
    `retries` the values of failed trials are tried again.

    Raises:
        UserError: Optuna is missing, or cannot run this search.
    """

    def __init__(
        self,
        node: DictConfig,
        overrides: Sequence[Override],
        *,
        objective: str,
        folder: Path,
        batch_size: int,
        retries: bool = False,
        is_dry: bool = False,  # save nothing
    ) -> None:
        with any_error("hydra/sweeper=optuna needs Optuna", "pip install 'ddp-runner[optuna]'"):
            import optuna
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._optuna, self._node, self._folder = optuna, node, folder
        self._objective, self._is_dry = objective, is_dry
        keys = {word.get_key_element(): word for word in overrides if not word.is_hydra_override()}
        self._fixed, self._space = list[str](), dict[str, Any]()
        for key, override in keys.items():
            if override.is_sweep_override():
                self._space[key] = search_distribution(override, optuna.distributions)
            else:
                self._fixed.append(str(override.input_line))
        self._num_trials, self._batch_size = self._limits(node.n_jobs or batch_size)
        self._study = self._open_study()
        self._states = optuna.trial.TrialState
        self.numbers: list[int] = []  # trials of the last batch
        self._batched = set[int]()  # trials of all batches of this launcher
        with self._study_locked():
            # Trials of a search that was stopped: their runs are resumed.
            self._stopped = self._study.get_trials(deepcopy=False, states=[self._states.RUNNING])
            if retries:
                self._retry_failed()

    def _limits(self, batch_size: int) -> tuple[int, int]:
        """Return the number of trials, at most those of a grid, and of trials in a batch."""
        node = self._node
        for name, value in {"n_trials": node.n_trials, "n_jobs": batch_size}.items():
            if not isinstance(value, int) or value < 1:
                raise UserError(f"hydra.sweeper.{name} ({value}) must be a number greater than 0")
        if str(node.sampler.get("_target_")) != f"{SAMPLERS}GridSampler":
            return node.n_trials, batch_size
        sizes = [len(grid_values(key, values)) for key, values in self._space.items()]
        return min(node.n_trials, math.prod(sizes)), batch_size

    def _open_study(self) -> Any:
        optuna, node = self._optuna, self._node
        wanted, sampler = search_direction(self._objective, node.direction), self._sampler(0)
        storage = str(node.storage or f"sqlite:///{self._folder / STUDY}")
        name, file = node.study_name or self._folder.name, storage.removeprefix("sqlite:///")
        exists = file == storage or Path(file).exists()
        target = optuna.storages.InMemoryStorage() if self._is_dry else storage
        try:
            if self._is_dry and exists and name in optuna.get_all_study_names(storage):
                optuna.copy_study(from_study_name=name, from_storage=storage, to_storage=target)
            study = optuna.create_study(
                storage=target,
                sampler=sampler,
                study_name=name,
                direction=wanted,
                load_if_exists=True,
            )
        except Exception as error:  # each storage has its own classes
            reason = one_line(getattr(error, "orig", error))  # a database error without its SQL
            raise UserError(
                f"hydra.sweeper: Optuna cannot open the study ({reason})",
                "repair its storage, or give another hydra.sweep.dir or hydra.sweeper.storage",
            ) from error
        actual = study.direction.name.lower()
        if actual != wanted:
            raise UserError(
                f"this search would {wanted} {self._objective}, and the study {name} is to "
                f"{actual} its metric",
                "give another hydra.sweep.dir or hydra.sweeper.study_name",
            )
        return study

    def ask(self) -> list[list[str]]:
        """Return the words of each job of the next batch; an empty list after the last trial."""
        with self._study_locked():
            batch = self._next_batch()
        self.numbers = list(batch)
        return [
            [*self._fixed, *(f"{key}={value}" for key, value in values.items())]
            for values in batch.values()
        ]

    def _next_batch(self) -> dict[int, dict[str, Any]]:
        """Return the values of each trial of the next batch, by its number."""
        batch, trials = dict[int, dict[str, Any]](), self._study.get_trials(deepcopy=False)
        retries = {trial.number for trial in trials if RETRY in trial.user_attrs}
        for trial in self._stopped:
            if trial.params.keys() == self._space.keys():
                batch[trial.number] = trial.params
            else:  # the search was killed before Optuna had chosen all values
                self._study.tell(trial.number, state=self._states.FAIL, skip_if_finished=True)
                self._num_trials += trial.number not in retries
        self._stopped = []
        begun = {trial.number for trial in trials if trial.state != self._states.WAITING}
        num_remaining = self._num_trials - len(begun - retries) + len(retries - begun)
        for index in range(min(num_remaining, self._batch_size - len(batch))):
            self._study.sampler = self._sampler(len(begun) + index)
            trial = self._study.ask(self._space)
            batch[trial.number] = trial.params
        if not batch:  # wait for the trials of other launchers, or run them if those were killed
            batch = {
                trial.number: trial.params
                for trial in self._study.get_trials(deepcopy=False, states=[self._states.RUNNING])
                if trial.number not in self._batched and trial.params.keys() == self._space.keys()
            }
        self._batched |= batch.keys()
        return batch

    def tell(self, results: Sequence[float | str | None]) -> None:
        """Save the results of the last batch: a number, why it is missing, or None if not ended."""
        for number, result in zip(self.numbers, results, strict=True):
            if result is None:
                continue
            values, state = (None, self._states.FAIL) if isinstance(result, str) else (result, None)
            with self._study_locked():
                try:  # another launcher of this search may have saved the result before
                    self._study.tell(number, values, state=state, skip_if_finished=True)
                except RuntimeError as error:
                    if "Study.stop" not in str(error):  # the grid sampler's, after its last trial
                        raise

    def finish(self) -> str:
        """Write the best trial beside the study, and return a line about it."""
        completed = self._study.get_trials(deepcopy=False, states=[self._states.COMPLETE])
        if not completed:
            raise UserError(
                "the search has no best job, because no job was completed", "see the errors above"
            )
        best = self._study.best_trial
        parse = OverridesParser.create().parse_override  # reads a text as its job reads it
        params = {
            key: parse(f"x={value}").value() if isinstance(value, str) else value
            for key, value in best.params.items()
        }
        content = {"name": "optuna", "best_params": params, "best_value": best.value}
        with os_errors(f"{self._folder / RESULTS} cannot be written"):
            replace_file(self._folder / RESULTS, yaml_dump(content))
        values = " ".join(f"{key}={value}" for key, value in best.params.items())
        return (
            f"best: trial {best.number}, {self._objective} {best.value:.4g}, {values} "
            f"({shown_path(self._folder / RESULTS)})"
        )

    @contextmanager
    def _study_locked(self) -> Iterator[None]:
        """Keep the other launchers of this search from the study for the block."""
        if self._is_dry:
            yield
        else:
            path = self._folder / LOCK
            with os_errors(f"{path} cannot be locked"), locked(path):
                yield

    def _retry_failed(self) -> None:
        """Queue the values of failed trials, unless another trial has completed or queued them."""
        failed, tried = list[Any](), list[Any]()
        for trial in self._study.get_trials(deepcopy=False):
            values: Any = trial.params
            if trial.state == self._states.WAITING:  # its values are only here yet
                values = trial.system_attrs.get("fixed_params")
            (failed if trial.state == self._states.FAIL else tried).append(values)
        for values in failed:
            if values.keys() == self._space.keys() and values not in tried:
                self._study.enqueue_trial(values, user_attrs={RETRY: True})
                tried.append(values)

    def _sampler(self, number: int) -> Any:
        """Return the sampler for a trial.

        With a seed, each trial has its own, so it draws the same values after a stopped search. A
        grid keeps its seed, because that orders its combinations.
        """
        keywords: Any = OmegaConf.to_container(self._node.sampler, resolve=True)
        target = str(keywords.pop("_target_", None))
        name = target.removeprefix(SAMPLERS)
        kind = getattr(self._optuna.samplers, name, None) if target.startswith(SAMPLERS) else None
        if kind is None:
            raise UserError(
                f"hydra.sweeper.sampler._target_ ({target}) must be a class of optuna.samplers"
            )
        if name == "GridSampler":
            keywords["search_space"] = {
                key: grid_values(key, values) for key, values in self._space.items()
            }
        elif keywords.get("seed") is not None:
            keywords["seed"] = int(digest([keywords["seed"], number]), 16) % 2**32
        with any_error(f"hydra.sweeper.sampler ({target}) cannot be built"):
            return kind(**keywords)
