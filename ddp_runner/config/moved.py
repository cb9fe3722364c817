"""Names that a run's frozen config may hold from before their modules moved: where they are now."""

from typing import Any

MOVED_MODULES = {
    "ddp_runner.losses": "ddp_runner.train.losses",
    "ddp_runner.schedules": "ddp_runner.train.schedules",
    "ddp_runner.models.vision": "ddp_runner.models.torchvision_models",
    "ddp_runner.parallelism.ps": "ddp_runner.parallelism.parameter_server.mode",
    **{
        f"ddp_runner.data.{name}": f"ddp_runner.data.sources.{name}"
        for name in (
            "cifar",
            "csv_text",
            "digits",
            "fake_images",
            "image_folder",
            "mnist",
            "random",
        )
    },
}


RENAMED_OBJECTS = {
    "ddp_runner.parallelism.ddp_mp.DDPModelParallel": "ddp_runner.parallelism.ddp.DDP"
}

RENAMED_KEYS = {"skip_refused": "skip_invalid"}


def with_moved_names(tree: Any) -> Any:
    """Return a frozen config with its keys, ``_target_``s and losses by their present names."""
    if isinstance(tree, dict):
        return {
            RENAMED_KEYS.get(key, key): present_name(value)
            if key in ("_target_", "loss")
            else with_moved_names(value)
            for key, value in tree.items()
        }
    if isinstance(tree, list):
        return [with_moved_names(value) for value in tree]
    return tree


def present_name(name: Any) -> Any:
    """Return the present dotted name of what a config names; anything else as it is."""
    if not isinstance(name, str):
        return name
    name = RENAMED_OBJECTS.get(name, name)
    module, _, last = name.rpartition(".")
    return f"{MOVED_MODULES[module]}.{last}" if module in MOVED_MODULES else name
