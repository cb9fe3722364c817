"""What a run's frozen config may hold from an earlier version, and what it is called now."""

from typing import Any

MOVED_MODULES = {
    "ddp_runner.losses": "ddp_runner.train.losses",
    "ddp_runner.schedules": "ddp_runner.train.schedules",
    "ddp_runner.models.vision": "ddp_runner.models.torchvision_models",
    "ddp_runner.parallelism.ps": "ddp_runner.parallelism.parameter_server.mode",
    "ddp_runner.data.cifar": "ddp_runner.data.sources.cifar",
    "ddp_runner.data.csv_text": "ddp_runner.data.sources.csv_text",
    "ddp_runner.data.digits": "ddp_runner.data.sources.digits",
    "ddp_runner.data.fake_images": "ddp_runner.data.sources.fake_images",
    "ddp_runner.data.image_folder": "ddp_runner.data.sources.image_folder",
    "ddp_runner.data.mnist": "ddp_runner.data.sources.mnist",
    "ddp_runner.data.random": "ddp_runner.data.sources.random",
}

RENAMED_OBJECTS = {
    "ddp_runner.parallelism.ddp_mp.DDPModelParallel": "ddp_runner.parallelism.ddp.DDP"
}

RENAMED_KEYS = {"skip_refused": "skip_invalid"}
DROPPED_KEYS = {"ddp_runner.models.bert.Bert": ("tokenizer",)}  # the dataset passes its facts
# Keys of `parallelism` that are in its block `needs` now. DDP takes the first as well.
NEEDS = ("devices_per_rank", "max_ranks", "num_servers", "data_parallel")
IN_BOTH_PLACES = "ddp_runner.parallelism.ddp.DDP"


def with_moved_names(tree: Any) -> Any:
    """Return a frozen config by its present keys, ``_target_``s and losses."""
    if isinstance(tree, list):
        return [with_moved_names(value) for value in tree]
    if not isinstance(tree, dict):
        return tree
    renamed: dict[Any, Any] = {
        RENAMED_KEYS.get(key, key): present_name(value)
        if key in ("_target_", "loss")
        else with_moved_names(value)
        for key, value in tree.items()
        if key not in DROPPED_KEYS.get(str(tree.get("_target_")), ())
    }
    target = str(renamed.get("_target_"))
    if target.startswith("ddp_runner.parallelism.") and "needs" not in renamed:
        needs = {key: renamed.pop(key) for key in NEEDS if key in renamed}
        if target == IN_BOTH_PLACES and NEEDS[0] in needs:
            renamed[NEEDS[0]] = needs[NEEDS[0]]
        if needs:
            renamed["needs"] = needs
    return renamed


def present_name(name: Any) -> Any:
    """Return the present dotted name of what a config names; anything else as it is."""
    if not isinstance(name, str):
        return name
    name = RENAMED_OBJECTS.get(name, name)
    module, _, last = name.rpartition(".")
    return f"{MOVED_MODULES[module]}.{last}" if module in MOVED_MODULES else name
