"""The settings of runs: which are equal, in which keys they differ, how they read in a table."""

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any

from ddp_runner.config.schema import RUNNER_KEYS, has_own_loop
from ddp_runner.errors import UserError, counted, nearest, printable

ALWAYS_SHOWN = ("parallelism.name", "world_size")  # even if all runs agree
GLOBAL_BATCH, BATCH_PER_RANK = BATCH_SIZES = ("batch.global_size", "batch.per_rank")
FIRST_KEYS = (
    "task",
    "model.name",
    "dataset.name",
    "parallelism.name",
    "backend.name",
    "world_size",
    "num_devices",
    *BATCH_SIZES,
)

LONGEST_LABEL = 60  # characters; a longer one leaves no room for what it names

Setting = Mapping[str, Any]  # dotted keys and values


def identity(setting: Setting, *, without: Collection[str] = ()) -> str:
    """Return a text that is equal for settings that are equal but for the keys `without`.

    Of these, ``parallelism.`` stands for every key of that group.
    """
    groups = tuple(key for key in without if key.endswith("."))
    return "\n".join(
        f"{key}={setting[key]!r}"
        for key in sorted(setting)
        if key not in without and not key.startswith(groups)
    )


def varied_keys(settings: Sequence[Setting]) -> tuple[str, ...]:
    """Return the keys in which settings differ, without copies and what a shown key implies.

    If a whole group differs, as `model` does, its name is enough; a key inside it is shown only if
    it differs between settings with the same name, or if it is a number in all of them. Of the two
    batch sizes, one follows from the other and the world size.
    """
    keys = dict.fromkeys(key for setting in settings for key in setting)
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
    return tuple(sorted({*shown, *ALWAYS_SHOWN}, key=_column_order))


def with_copies(keys: Sequence[str], settings: Sequence[Setting]) -> dict[str, list[str]]:
    """Return the keys, each with those after it that have its values, as interpolations have."""
    found = dict[tuple[str, ...], list[str]]()
    for key in keys:
        found.setdefault(tuple(repr(one.get(key)) for one in settings), []).append(key)
    return {first: others for first, *others in found.values()}


def tied_keys(settings: Sequence[Setting], over: str) -> tuple[str, ...]:
    """Return the keys of which each value goes with one value of `over`; that is one of them.

    Raises:
        UserError: it is no key, or all settings have one value of it.
    """
    keys = dict.fromkeys(key for setting in settings for key in setting)
    named = {title_of(key): key for key in keys} | {key: key for key in keys}
    if over not in named:
        hint = f"did you mean {meant}?" if (meant := nearest(over, named)) else "see run.json"
        raise UserError(f"--over ({over}) is no key of these runs; {hint}")

    def pattern(key: str) -> list[int]:
        return _numbered(repr(one.get(key)) for one in settings)

    wanted = pattern(named[over])
    if not any(wanted):
        raise UserError(f"--over ({over}) is equal in all runs; name a key in which they differ")
    return tuple(key for key in keys if pattern(key) == wanted)


def missing_keys(settings: Sequence[Setting]) -> tuple[str, ...]:
    """Return the keys that only some settings have, except those inside of exchangeable groups."""
    keys = dict.fromkeys(key for setting in settings for key in setting)
    groups = {key.partition(".")[0] for key in keys if key.endswith("._target_")}
    if any(has_own_loop(str(setting.get("task"))) for setting in settings):
        groups |= {"loop", "train", *RUNNER_KEYS}  # see only_used
    return tuple(
        key
        for key in keys
        if key.partition(".")[0] not in groups and any(key not in setting for setting in settings)
    )


def same_keys(settings: Sequence[Setting]) -> Setting:
    """Return those of the first keys that have one value in all settings."""
    return {
        key: settings[0][key]
        for key in FIRST_KEYS
        if settings and key in settings[0] and len(_values(settings, key)) == 1
    }


def title_of(key: str) -> str:
    """Return a key as a column title: ``model.name`` becomes ``model``."""
    return key.removesuffix(".name").removeprefix("num_")


def label(setting: Setting, keys: Iterable[str]) -> str:
    """Return a setting in a few words, for example ``ddp, 2 ranks, optimizer.lr 0.1``.

    Keys that it lacks, or that are null, are left out.
    """
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
            words.append(f"{'global batch' if key == GLOBAL_BATCH else 'batch per rank'} {value}")
        else:
            words.append(str(value) if key.endswith(".name") else f"{key} {value}")
    return printable(", ".join(words))  # plots and TensorBoard show it as it is


def labels(settings: Sequence[Setting]) -> list[str]:
    """Return the labels of settings with the same keys, by their ``telling_keys``."""
    columns = {key: rounded([one[key] for one in settings]) for key in (settings or [{}])[0]}
    short = [{key: of[place] for key, of in columns.items()} for place in range(len(settings))]
    keys = telling_keys(short)
    return [label(one, keys) for one in short]


def rounded(values: Sequence[Any]) -> list[Any]:
    """Return values with long fractions rounded to four digits, or more if two would be equal.

    A search draws numbers of 17 digits. In the names of its jobs they are rounded, too.
    """
    floats = {one for one in values if isinstance(one, float)}
    short = dict[float, float]()
    for num_digits in range(4, 18):
        short = {one: float(f"{one:.{num_digits}g}") if abs(one) < 1000 else one for one in floats}
        if len(set(short.values())) == len(floats):
            break
    return [short[one] if isinstance(one, float) else one for one in values]


def telling_keys(settings: Sequence[Setting]) -> tuple[str, ...]:
    """Return the keys of settings with the same keys that are enough to tell them apart.

    The keys in which they differ, unless a label of these is longer than LONGEST_LABEL. Then those
    of ALWAYS_SHOWN, and one by one the keys that tell the most settings apart. If a label would be
    empty, ALWAYS_SHOWN are added.
    """
    every = tuple(settings[0]) if settings else ()
    values = {key: _numbered(repr(one[key]) for one in settings) for key in every}
    chosen = {key for key in every if any(values[key])}
    if any(len(label(one, chosen)) > LONGEST_LABEL for one in settings):
        whole = _numbered(zip(*values.values(), strict=True))  # equal: not told apart
        chosen, groups = chosen & {*ALWAYS_SHOWN}, [0] * len(settings)
        for key in chosen:
            groups = _numbered(zip(groups, values[key], strict=True))
        while max(groups) < max(whole):
            key = max(every, key=lambda key: len({*zip(groups, values[key], strict=True)}))
            chosen, groups = {*chosen, key}, _numbered(zip(groups, values[key], strict=True))
    if not all(label(one, chosen) for one in settings):
        chosen |= {*ALWAYS_SHOWN}
    return tuple(key for key in every if key in chosen)


def _numbered(values: Iterable[Hashable]) -> list[int]:
    """Return a number for each value, from 0 on; equal values have equal ones."""
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(value, len(numbers)) for value in values]


def sort_key(setting: Setting) -> list[tuple[bool, bool, Any]]:
    """Return what sorts settings by their values: None first, then numbers, then text."""
    are_texts = [(value, not isinstance(value, int | float)) for value in setting.values()]
    return [
        (value is not None, is_text, str(value) if is_text else value)
        for value, is_text in are_texts
    ]


def _values(settings: Sequence[Setting], key: str) -> set[str]:
    """Return a key's different values, over the settings that have the key."""
    return {repr(setting[key]) for setting in settings if key in setting}


def _is_implied(key: str, settings: Sequence[Setting], varied: Collection[str]) -> bool:
    """Return whether the name of a key's group determines the value of the key."""
    name = f"{key.partition('.')[0]}.name"
    if key == name or name not in varied:
        return False
    values = [setting.get(key) for setting in settings]
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        return False
    pairs = {(repr(one.get(name)), repr(one[key])) for one in settings if key in one}
    return len(pairs) == len({name for name, _ in pairs})


def _is_copy(key: str, settings: Sequence[Setting]) -> bool:
    """Return whether a mode's key repeats one of `train` or `model`, as its precision does."""
    group, _, name = key.partition(".")
    with_key = [one for one in settings if key in one]
    return group == "parallelism" and any(
        all(repr(one[key]) == repr(one.get(source)) for one in with_key)
        for source in (f"train.{name}", f"model.{name}")
    )


def _column_order(key: str) -> tuple[int, str]:
    is_first = key in FIRST_KEYS
    place = FIRST_KEYS.index(key) if is_first else len(FIRST_KEYS) + (not key.endswith(".name"))
    return place, key
