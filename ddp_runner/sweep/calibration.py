"""The jobs that ``sweep.calibrate`` adds: how long an all_reduce between a sweep's ranks takes.

From their results a comparison predicts what more ranks should cost. Torch-free.
"""

from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path

from ddp_runner.config.identity import digest
from ddp_runner.config.sections import CollectivesConfig
from ddp_runner.job import Job

# Few calls per size, but many sizes: latency and bandwidth are fitted over the sizes.
ALL_REDUCE = CollectivesConfig(
    ops=["all_reduce"],
    reduce_ops=["sum"],
    dtypes=["float32"],
    min_bytes=4 * 2**10,
    max_bytes=64 * 2**20,
    size_factor=4,
    warmup_steps=2,
    steps=20,
)


def calibrations(jobs: Iterable[Job], *, folder: Path) -> dict[str, Job]:
    """Return the calibrations by their id: one for all training jobs whose ranks start alike.

    The `folder` is that of the sweep.
    """
    found = dict[str, Job]()
    for job in jobs:
        config = job.config
        if config.task != "train" or config.world_size == 1:
            continue
        start = [config.world_size, asdict(config.backend), asdict(config.launch)]
        chosen = (f"world_size={config.world_size}", f"backend={config.backend.name}")
        name = ",".join(["calibration", *chosen])
        calibration = replace(
            job,
            config=replace(config, task="collectives", resume=None, collectives=ALL_REDUCE),
            run_dir=folder / name,
            overrides=("task=collectives", *chosen),
            number=0,
            title=name,
        )
        found.setdefault(f"{digest(start)} {name}", calibration)
    return found
