"""The modes of parallelism, as the folder of their YAMLs has them: a new one is in every table."""

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
# Of models that say which layers are split, into parts that divide the 10 units of toy.
TENSOR_PARALLEL = {"tp", "fsdp_tp"}


def needs(mode: str) -> DictConfig:
    """Return what a mode needs, as its YAML says."""
    return MODES[mode].get("needs", DictConfig({}))


def is_cut(mode: str) -> bool:
    """Return whether a mode trains a model in stages, one on each device of a rank."""
    return bool(MODES[mode].get("devices_per_rank", 1) > 1)


def smallest_world(mode: str) -> int:
    """Return as few ranks as make a mode what it is: two that share the work, if it can be."""
    of_mode = needs(mode)
    sharing = min(of_mode.get("min_ranks", 2), of_mode.get("max_ranks", 4))
    return int(sharing + of_mode.get("num_servers", 0))
