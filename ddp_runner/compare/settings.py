"""What was set differently between runs: the keys that tell their rows apart, and their words."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from ddp_runner.compare.run import Run

# What neither the work nor its speed depends on, and the seed, over which is averaged.
IGNORED = ("seed", "name", "resume", "data_root", "allowed_targets")
ALWAYS = ("parallelism.name", "world_size")  # shown even where all runs have the same
BATCH = ("batch.global_size", "batch.per_rank")
FIRST = (
    *("task", "model.name", "dataset.name", ALWAYS[0], "backend.name", ALWAYS[1], "num_devices"),
    *BATCH,
)
WORDS = {BATCH[0]: "global batch", BATCH[1]: "batch per rank"}

Setting = Mapping[str, Any]


def setting_of(run: Run) -> Setting:
    """Return all that two runs must have in common to be one setting, whatever their seeds."""
    keys = {
        key: value
        for key, value in run.config.items()
        if key not in IGNORED and not key.startswith("launch.")
    }
    # Times beside other runs on one machine are not those of a run alone.
    facts = {"num_devices": run.num_devices, "packed": run.is_packed}
    return keys | {"world_size": run.world_size, **facts}


def identity(setting: Setting, *, without: Collection[str] = ()) -> str:
    """Return a text that is equal for equal settings.

    Args:
        setting: of a run.
        without: keys that do not count; ``parallelism.`` stands for every key of that group.
    """
    groups = tuple(key for key in without if key.endswith("."))
    return "\n".join(
        f"{key}={setting[key]!r}"
        for key in sorted(setting)
        if key not in without and not (groups and key.startswith(groups))
    )


def varied_keys(settings: Sequence[Setting]) -> tuple[str, ...]:
    """Return the keys in which settings differ, without those that follow from a shown one.

    Where a group differs, as `model` does, its name says so; a key inside it is shown where it
    differs under one name too, or is a number under each. Of the two batch sizes, one follows from
    the other and the world size.
    """
    everything = dict.fromkeys(key for setting in settings for key in setting)
    varied = {key for key in everything if len(_values(settings, key)) > 1}
    shown = {key for key in varied if not _follows(key, settings, varied)}
    if varied.issuperset(BATCH):
        shown.discard(BATCH[1])
    elif "world_size" in varied:
        shown -= set(BATCH)  # strong or weak scaling: the one that stays is among `same_keys`
    if all(one["num_devices"] == one["world_size"] for one in settings):
        shown.discard("num_devices")  # as on the CPU, and wherever a rank has one device
    return tuple(sorted(shown | set(ALWAYS), key=_order))


def missing_keys(settings: Sequence[Setting]) -> tuple[str, ...]:
    """Return the keys that some settings lack, as runs of another version do; groups aside."""
    keys = dict.fromkeys(key for setting in settings for key in setting)
    groups = {key.partition(".")[0] for key in keys if key.endswith("._target_")}
    return tuple(
        key
        for key in keys
        if key.partition(".")[0] not in groups and any(key not in one for one in settings)
    )


def same_keys(settings: Sequence[Setting]) -> Setting:
    """Return what all settings have in common of the keys that a reader asks for first."""
    return {
        key: settings[0][key]
        for key in FIRST
        if settings and key in settings[0] and len(_values(settings, key)) == 1
    }


def word(key: str) -> str:
    """Return a key as a column's title: a group's name stands for the group."""
    return key.removesuffix(".name").removeprefix("num_")


def label(setting: Setting, keys: Iterable[str]) -> str:
    """Return a setting in a few words, as ``ddp, 2 ranks, optimizer.lr 0.1``."""
    words = []
    for key in keys:
        value = setting.get(key)
        if key == "world_size":
            words.append(ranks(int(value or 0)))
        elif key == "num_devices":
            words.append(devices(int(value or 0)))
        elif key == "packed":
            words += ["packed"] if value else []
        else:
            words.append(str(value) if key.endswith(".name") else f"{WORDS.get(key, key)} {value}")
    return ", ".join(words)


def ranks(count: int) -> str:
    """Return a world size in words."""
    return f"{count} rank" if count == 1 else f"{count} ranks"


def devices(count: int) -> str:
    """Return a number of devices in words."""
    return f"{count} device" if count == 1 else f"{count} devices"


def place(setting: Setting) -> str:
    """Return what a setting ran on: its ranks, and its devices where those are others."""
    names = [ranks(setting["world_size"]), devices(setting["num_devices"])]
    return ", ".join(names[: 1 + (setting["world_size"] != setting["num_devices"])])


def _values(settings: Sequence[Setting], key: str) -> set[str]:
    """Return a key's values; a setting without the key says nothing."""
    return {repr(setting[key]) for setting in settings if key in setting}


def _follows(key: str, settings: Sequence[Setting], varied: Collection[str]) -> bool:
    """Return whether a key inside a group says no more than that the group is another one."""
    name = f"{key.partition('.')[0]}.name"
    if key == name or name not in varied:
        return False
    values = [setting.get(key) for setting in settings]
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        return False
    by_name: dict[str, list[Setting]] = {}
    for setting in settings:
        by_name.setdefault(repr(setting.get(name)), []).append(setting)
    return all(len(_values(group, key)) <= 1 for group in by_name.values())


def _order(key: str) -> tuple[int, str]:
    return (FIRST.index(key) if key in FIRST else len(FIRST) + (not key.endswith(".name")), key)
