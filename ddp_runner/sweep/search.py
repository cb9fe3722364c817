"""A search: Optuna chooses each batch of jobs by the results of the jobs before. Torch-free.

Optuna's ask and tell (https://optuna.readthedocs.io/en/stable/tutorial/20_recipes/009_ask_and_tell.html).
The study is in the sweep's folder, so that a search that was stopped continues, and Optuna's own
tools read it.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from ddp_runner.config.identity import digest
from ddp_runner.errors import UserError, one_line, os_errors
from ddp_runner.files import locked, replace_file, yaml_dump
from ddp_runner.sweep.search_space import direction_of, distribution_of, values_of
from ddp_runner.tracking.start_block import shown_path

STUDY, RESULTS = "optuna.db", "optimization_results.yaml"
LOCK = ".search.lock"  # held while the study is read and changed
SAMPLERS = "optuna.samplers."  # where hydra.sweeper.sampler._target_ is


class Search:
    """The trials of a study, as batches of jobs.

    Args:
        node: ``hydra.sweeper``.
        overrides: of the command: those with several values, or an interval, are searched.
        objective: the metric that is optimized; it says in which direction, if the node does not.
        folder: of the sweep.
        is_dry: whether nothing is kept: the jobs are only listed.
        batch_size: trials that are asked for at once, unless the node says so.
        retries: whether the values of trials that have failed are tried again.

    Raises:
        UserError: Optuna cannot search these.
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
        is_dry: bool = False,
    ) -> None:
        try:
            import optuna
        except ImportError as error:
            raise UserError(
                f"hydra/sweeper=optuna needs Optuna ({one_line(error)}); "
                "pip install 'ddp-runner[optuna]'"
            ) from error
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._optuna, self._node, self._folder = optuna, node, folder
        self._objective, self._is_dry = objective, is_dry
        given = {one.get_key_element(): one for one in overrides if not one.is_hydra_override()}
        searched = {key: one for key, one in given.items() if one.is_sweep_override()}
        self._same = [str(one.input_line) for key, one in given.items() if key not in searched]
        self._space = dict[str, Any]()
        for key, one in searched.items():
            try:
                self._space[key] = distribution_of(one, optuna.distributions)
            except ValueError as error:
                raise UserError(f"{one.input_line}: {one_line(error)}") from error
        for name, value in {"n_trials": node.n_trials, "n_jobs": node.n_jobs or batch_size}.items():
            if not isinstance(value, int) or value < 1:
                raise UserError(f"hydra.sweeper.{name} ({value}) must be a number greater than 0")
        self._batch_size, self._num_trials = node.n_jobs or batch_size, node.n_trials
        if str(node.sampler.get("_target_")) == f"{SAMPLERS}GridSampler":
            sizes = [len(values_of(key, one)) for key, one in self._space.items()]
            self._num_trials = min(self._num_trials, math.prod(sizes))
        direction, sampler = direction_of(objective, node.direction), self._sampler(0)
        storage = str(node.storage or f"sqlite:///{folder / STUDY}")
        name, file = node.study_name or folder.name, storage.removeprefix("sqlite:///")
        is_there, earlier = file == storage or Path(file).exists(), None
        try:
            if is_dry and is_there and name in optuna.get_all_study_names(storage):
                earlier = optuna.load_study(study_name=name, storage=storage)
            self._study = optuna.create_study(
                storage=None if is_dry else storage,
                sampler=sampler,
                study_name=name,
                direction=direction,
                load_if_exists=True,
            )
            self._study.add_trials(earlier.get_trials() if earlier else [])
        except Exception as error:  # of any class, by the storage
            reason = one_line(getattr(error, "orig", error))  # of a database without its SQL
            raise UserError(
                f"hydra.sweeper: Optuna cannot open the study ({reason}); repair what holds it, or "
                "give another hydra.sweep.dir or hydra.sweeper.storage"
            ) from error
        known = (earlier or self._study).direction.name.lower()
        if known != direction:
            raise UserError(
                f"this search would {direction} {objective}, and the study {name} is to {known} "
                "its metric; give another hydra.sweep.dir or hydra.sweeper.study_name"
            )
        self._states = states = optuna.trial.TrialState
        self.numbers: list[int] = []  # of the trials of the last batch
        self._seen = set[int]()  # those of all batches
        with self._in_turn():
            # A search that was stopped left them; their runs are resumed.
            self._stopped = self._study.get_trials(deepcopy=False, states=[states.RUNNING])
            if retries:
                self._retry_failed()

    def ask(self) -> list[list[str]]:
        """Return the words of each job of the next batch; none is left after all trials."""
        with self._in_turn():
            batch = self._next()
        self.numbers = list(batch)
        return [
            [*self._same, *(f"{key}={value}" for key, value in values.items())]
            for values in batch.values()
        ]

    def _next(self) -> dict[int, dict[str, Any]]:
        """Return the values of each trial of the next batch, by its number."""
        batch, again = dict[int, dict[str, Any]](), self._again()
        for stopped in self._stopped:
            if stopped.params.keys() == self._space.keys():
                batch[stopped.number] = stopped.params
            else:  # the search was killed while it asked
                self._study.tell(stopped.number, state=self._states.FAIL, skip_if_finished=True)
                self._num_trials += stopped.number not in again
        self._stopped = []
        trials = self._study.get_trials(deepcopy=False)
        asked = {one.number for one in trials if one.state != self._states.WAITING}
        num_left = self._num_trials - len(asked - again) + len(again - asked)
        for number in range(min(num_left, self._batch_size - len(batch))):
            self._study.sampler = self._sampler(len(asked) + number)
            trial = self._study.ask(self._space)
            batch[trial.number] = trial.params
        if not batch:  # wait for what other launchers run, or run it if they were killed
            batch = {
                one.number: one.params
                for one in self._study.get_trials(deepcopy=False, states=[self._states.RUNNING])
                if one.number not in self._seen and one.params.keys() == self._space.keys()
            }
        self._seen |= batch.keys()
        return batch

    def tell(self, results: Sequence[float | str | None]) -> None:
        """Take the results of the last batch: a number, why there is none, or None: not yet."""
        for number, result in zip(self.numbers, results, strict=True):
            if result is None:
                continue
            values, state = (None, self._states.FAIL) if isinstance(result, str) else (result, None)
            with self._in_turn():  # another launcher of this search may have told it
                try:
                    self._study.tell(number, values, state=state, skip_if_finished=True)
                except RuntimeError as error:
                    if "Study.stop" not in str(error):  # the grid sampler's, after its last trial
                        raise

    def finish(self) -> str:
        """Write the best trial beside the study, and return a line about it.

        Raises:
            UserError: no trial was completed.
        """
        completed = self._study.get_trials(deepcopy=False, states=[self._states.COMPLETE])
        if not completed:
            raise UserError(
                "the search has no best job, since none was completed; see the sentences above"
            )
        best = self._study.best_trial
        read = OverridesParser.create().parse_override  # a text as its job got it
        params = {
            key: read(f"x={value}").value() if isinstance(value, str) else value
            for key, value in best.params.items()
        }
        found = {"name": "optuna", "best_params": params, "best_value": best.value}
        with os_errors(f"{self._folder / RESULTS} cannot be written"):
            replace_file(self._folder / RESULTS, yaml_dump(found))
        values = " ".join(f"{key}={value}" for key, value in best.params.items())
        return (
            f"best: trial {best.number}, {self._objective} {best.value:.4g}, {values} "
            f"({shown_path(self._folder / RESULTS)})"
        )

    @contextmanager
    def _in_turn(self) -> Iterator[None]:
        """Keep the other launchers of this search from the study meanwhile."""
        with ExitStack() as stack:
            if not self._is_dry:
                stack.enter_context(os_errors(f"{self._folder / LOCK} cannot be locked"))
                stack.enter_context(locked(self._folder / LOCK))
            yield

    def _retry_failed(self) -> None:
        """Let the values of failed trials be tried again, unless they are, or were completed."""
        states, failed, others = self._states, list[Any](), list[Any]()
        for one in self._study.get_trials(deepcopy=False):
            values: Any = one.params
            if one.state == states.WAITING:  # it has no other values yet
                values = one.system_attrs.get("fixed_params")
            (failed if one.state == states.FAIL else others).append(values)
        for values in failed:
            if values.keys() == self._space.keys() and values not in others:
                self._study.enqueue_trial(values)
                others.append(values)

    def _again(self) -> set[int]:
        """Return the numbers of the trials that retry others: they take no new trial's place."""
        failed, again = list[Any](), set[int]()
        for one in self._study.get_trials(deepcopy=False):
            if one.system_attrs.get("fixed_params") in failed:
                again.add(one.number)
            elif one.state == self._states.FAIL:
                failed.append(one.params)
        return again

    def _sampler(self, number: int) -> Any:
        """Return the sampler for a trial.

        With a seed, each trial has one of its own: it then draws the same whether or not the search
        was stopped before. A grid keeps its seed, which is the order of its combinations.
        """
        keywords: Any = OmegaConf.to_container(self._node.sampler, resolve=True)
        target = str(keywords.pop("_target_", None))
        name = target.removeprefix(SAMPLERS)
        kind = getattr(self._optuna.samplers, name, None) if target.startswith(SAMPLERS) else None
        if kind is None:
            raise UserError(
                f"hydra.sweeper.sampler._target_ ({target}) must be a class of optuna.samplers"
            )
        if keywords.get("seed") is not None and name != "GridSampler":
            keywords["seed"] = int(digest([keywords["seed"], number]), 16) % 2**32
        if name == "GridSampler":
            keywords["search_space"] = {
                key: values_of(key, one) for key, one in self._space.items()
            }
        try:
            return kind(**keywords)
        except (TypeError, ValueError, ImportError, AttributeError) as error:
            raise UserError(f"hydra.sweeper.sampler: {target}: {one_line(error)}") from error
