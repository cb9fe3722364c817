"""Read the modes of parallelism from conf/, so that a new mode is in every table at once."""

from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from ddp_runner.config.schema import CONFIG_DIR


def _keys(path: Path) -> DictConfig:
    """Return the keys of a YAML, and those of the YAML that it names in its defaults."""
    keys = DictConfig(OmegaConf.load(path))
    bases = [_keys(path.with_stem(name)) for name in keys.pop("defaults", ())]
    return DictConfig(OmegaConf.merge(*bases, keys))


MODES = {path.stem: _keys(path) for path in sorted((CONFIG_DIR / "parallelism").glob("*.yaml"))}
MESHES = {mode for mode, keys in MODES.items() if keys["_target_"].endswith(".Mesh")}
# They cut a model that names its blocks; see tests/parallelism/test_pipeline.py.
PIPELINES = {mode for mode, keys in MODES.items() if keys["_target_"].endswith(".Pipeline")}
OF_ANY_MODEL = [mode for mode in MODES if mode not in PIPELINES]
# They split the layers that a model names, into parts that must divide toy's 10 units.
TENSOR_PARALLEL = {"tp", "fsdp_tp"}


def needs(mode: str) -> DictConfig:
    """Return what a mode needs, as its YAML says."""
    return MODES[mode].get("needs", DictConfig({}))


def has_stages(mode: str) -> bool:
    """Return whether a mode cuts a model into stages, with a device of the rank for each."""
    return bool(MODES[mode].get("devices_per_rank", 1) > 1)


def smallest_world(mode: str) -> int:
    """Return the fewest ranks that show what a mode does: two share the work if it lets them."""
    of_mode = needs(mode)
    sharing = min(of_mode.get("min_ranks", 2), of_mode.get("max_ranks", 4))
    return int(sharing + of_mode.get("num_servers", 0))
