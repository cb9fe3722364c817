"""The settings of runs: compare, sort and label them."""

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any

from ddp_runner.config.schema import RUNNER_KEYS, has_own_loop
from ddp_runner.errors import UserError, counted, nearest, printable

ALWAYS_SHOWN = ("parallelism.name", "world_size")  # even if they are equal in all runs
BATCH_SIZES = {"batch.global_size": "global batch", "batch.per_rank": "batch per rank"}  # names
GLOBAL_BATCH, BATCH_PER_RANK = BATCH_SIZES
SIZE_KEYS = ("world_size", "num_devices", *BATCH_SIZES)  # what a scaling study varies
FIRST_KEYS = ("task", "model.name", "dataset.name", "parallelism.name", "backend.name", *SIZE_KEYS)
LONGEST_LABEL = 60  # characters

Setting = Mapping[str, Any]  # dotted keys and values


def identity(setting: Setting, *, without: Collection[str] = ()) -> Hashable:
    """Return a value that is equal for settings that differ only in the keys `without`.

    A key that ends in a dot, such as ``parallelism.``, stands for all keys of the group.
    """
    keys = _sorted_keys(tuple(setting), tuple(without))
    return keys, repr([setting[key] for key in keys])


@lru_cache(maxsize=1000)  # thousands of runs have the same keys
def _sorted_keys(keys: Iterable[str], without: Collection[str]) -> tuple[str, ...]:
    groups = tuple(key for key in without if key.endswith("."))
    return tuple(sorted(key for key in {*keys} - {*without} if not key.startswith(groups)))


def varied_keys(settings: Sequence[Setting]) -> dict[str, list[str]]:
    """Return the keys in which settings differ, each with the later keys that have its values.

    Left out are keys that another key implies. If a whole group differs, such as `model`, its name
    is enough: a key inside it is left out unless it differs between settings with the same name, or
    is a number in all of them. A batch size follows from the other batch size and the world size.
    """
    keys = dict.fromkeys(chain.from_iterable(settings))
    varied = {key for key in keys if len(_values(settings, key)) > 1}
    shown = {
        key
        for key in varied
        if not _is_implied(key, settings, varied) and not _is_copy(key, settings)
    }
    if varied.issuperset(BATCH_SIZES):
        shown.discard(BATCH_PER_RANK)
    elif "world_size" in varied:
        shown -= set(BATCH_SIZES)  # strong or weak scaling: `same_keys` has the constant size
    if all(setting.get("num_devices") == setting.get("world_size") for setting in settings):
        shown.discard("num_devices")
    groups = dict[tuple[str, ...], list[str]]()
    for key in sorted({*shown, *ALWAYS_SHOWN}, key=_column_order):
        groups.setdefault(tuple(repr(item.get(key)) for item in settings), []).append(key)
    return {first: copies for first, *copies in groups.values()}


def tied_keys(settings: Sequence[Setting], over: str) -> tuple[str, ...]:
    """Return the keys that change together with `over`, which is a key itself.

    Raises:
        UserError: there is no key `over`, or it is equal in all settings.
    """
    keys = dict.fromkeys(chain.from_iterable(settings))
    named = {title_of(key): key for key in keys} | {key: key for key in keys}
    if over not in named:
        hint = f"did you mean {meant}?" if (meant := nearest(over, named)) else "see run.json"
        raise UserError(f"--over ({over}) is not a key of these runs", hint)
    patterns = {key: _numbered(repr(item.get(key)) for item in settings) for key in keys}
    if not any(patterns[named[over]]):
        raise UserError(f"--over ({over}) is equal in all runs", "name a key in which they differ")
    return tuple(key for key in keys if patterns[key] == patterns[named[over]])


def missing_keys(settings: Sequence[Setting]) -> tuple[str, ...]:
    """Return the keys that only some settings have, except keys of groups with a ``_target_``."""
    keys = dict.fromkeys(chain.from_iterable(settings))
    common = {*keys}.intersection(*settings)
    groups = {key.partition(".")[0] for key in keys if key.endswith("._target_")}
    if any(has_own_loop(str(setting.get("task"))) for setting in settings):
        groups |= {"loop", "train", *RUNNER_KEYS}  # see only_used
    missing = (key for key in keys if key not in common)
    return tuple(key for key in missing if key.partition(".")[0] not in groups)


def same_keys(settings: Sequence[Setting]) -> Setting:
    """Return the FIRST_KEYS that have the same value in all settings."""
    return {
        key: settings[0][key]
        for key in FIRST_KEYS
        if settings and key in settings[0] and len(_values(settings, key)) == 1
    }


def title_of(key: str) -> str:
    """Return a key as a column title: ``model.name`` becomes ``model``."""
    return key.removesuffix(".name").removeprefix("num_")


def label(setting: Setting, keys: Iterable[str]) -> str:
    """Return a setting in a few words, such as ``ddp, 2 ranks, optimizer.lr 0.1``."""
    words = []
    for key in keys:
        value = setting.get(key)
        if value is None:
            continue
        if key in ("world_size", "num_devices"):
            words.append(counted(int(value), "rank" if key == "world_size" else "device"))
        elif key == "parallel_jobs":
            words += ["parallel jobs"] if value else []
        elif key in BATCH_SIZES:
            words.append(f"{BATCH_SIZES[key]} {value}")
        else:
            words.append(str(value) if key.endswith(".name") else f"{key} {value}")
    return printable(", ".join(words))  # plots and TensorBoard do not escape it


def labels(settings: Sequence[Setting]) -> list[str]:
    """Return the labels of settings with the same keys, by their ``telling_keys``."""
    columns = {key: rounded([item[key] for item in settings]) for key in (settings or [{}])[0]}
    short = [{key: values[row] for key, values in columns.items()} for row in range(len(settings))]
    keys = telling_keys(short)
    return [label(setting, keys) for setting in short]


def rounded(values: Sequence[Any]) -> list[Any]:
    """Return values with floats rounded to four digits, or to more if two would be equal."""
    floats = {value for value in values if isinstance(value, float)}
    short = dict[float, float]()
    for num_digits in range(4, 18):
        short = {x: float(f"{x:.{num_digits}g}") if abs(x) < 1000 else x for x in floats}
        if len(set(short.values())) == len(floats):
            break
    return [short[value] if isinstance(value, float) else value for value in values]


def telling_keys(settings: Sequence[Setting]) -> tuple[str, ...]:
    """Return the keys that are enough to tell settings apart; all settings have the same keys.

    These are the keys in which settings differ. If a label gets longer than LONGEST_LABEL, start
    from ALWAYS_SHOWN and add the key that tells the most settings apart, until all differ. If a
    label would be empty, add ALWAYS_SHOWN.
    """
    every = tuple(settings[0]) if settings else ()
    values = {key: _numbered(repr(setting[key]) for setting in settings) for key in every}
    chosen = {key for key in every if any(values[key])}
    if any(len(label(setting, chosen)) > LONGEST_LABEL for setting in settings):
        whole = _numbered(zip(*values.values(), strict=True))  # equal settings have equal numbers
        chosen, groups = chosen & {*ALWAYS_SHOWN}, [0] * len(settings)
        for key in chosen:
            groups = _numbered(zip(groups, values[key], strict=True))
        while max(groups) < max(whole):
            key = max(every, key=lambda key: len({*zip(groups, values[key], strict=True)}))
            chosen, groups = {*chosen, key}, _numbered(zip(groups, values[key], strict=True))
    if not all(label(setting, chosen) for setting in settings):
        chosen |= {*ALWAYS_SHOWN}
    return tuple(key for key in every if key in chosen)


def _numbered(values: Iterable[Hashable]) -> list[int]:
    """Return a number for each value, from 0; equal values have equal numbers."""
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(value, len(numbers)) for value in values]


def sort_key(setting: Setting) -> list[tuple[bool, bool, Any]]:
    """Return a key that sorts settings by their values: None first, then numbers, then text."""
    are_texts = [(value, not isinstance(value, int | float)) for value in setting.values()]
    return [
        (value is not None, is_text, str(value) if is_text else value)
        for value, is_text in are_texts
    ]


def _values(settings: Sequence[Setting], key: str) -> set[str]:
    return {repr(setting[key]) for setting in settings if key in setting}


def _is_implied(key: str, settings: Sequence[Setting], varied: Collection[str]) -> bool:
    """Return whether the name of a key's group determines the value of the key."""
    name = f"{key.partition('.')[0]}.name"
    if key == name or name not in varied:
        return False
    values = [setting.get(key) for setting in settings]
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        return False
    pairs = {(repr(item.get(name)), repr(item[key])) for item in settings if key in item}
    return len(pairs) == len({name for name, _ in pairs})


def _is_copy(key: str, settings: Sequence[Setting]) -> bool:
    """Return whether a mode's key repeats a key of `train` or `model`, such as its precision."""
    group, _, name = key.partition(".")
    with_key = [setting for setting in settings if key in setting]
    return group == "parallelism" and any(
        all(repr(setting[key]) == repr(setting.get(source)) for setting in with_key)
        for source in (f"train.{name}", f"model.{name}")
    )


def _column_order(key: str) -> tuple[int, str]:
    if key in FIRST_KEYS:
        return FIRST_KEYS.index(key), key
    return len(FIRST_KEYS) + (not key.endswith(".name")), key
