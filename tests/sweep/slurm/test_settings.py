"""How the jobs of a sweep are spread over the nodes of a Slurm, by the launcher's keys."""

import re
from pathlib import Path
from typing import Any

import pytest
from commands import error_line, run_command
from configs import compose_raw, resolved
from fake_slurm import SETTINGS
from omegaconf import OmegaConf

from ddp_runner.cli.compose import register
from ddp_runner.config.load import to_config
from ddp_runner.config.schema import CONFIG_DIR
from ddp_runner.errors import UserError
from ddp_runner.host.hardware import Hardware
from ddp_runner.sweep.slurm import slurm_settings
from ddp_runner.sweep.slurm.executor import Slurm
from ddp_runner.sweep.slurm.slurm_settings import LOCAL, OURS, SlurmSettings
from ddp_runner.sweep.slurm.slurm_settings import slurm_settings as read_settings
from ddp_runner.sweep.sweep_dir import sweep_command

GPU_NODE, CPU_NODE = Hardware(num_gpus=8, num_cores=96), Hardware(num_gpus=0, num_cores=16)


def on_nodes(node: Hardware, **keys: Any) -> SlurmSettings:
    """Return settings whose nodes have this hardware."""
    return SlurmSettings(gpus_per_node=node.num_gpus, cpus_per_node=node.num_cores, **keys)


@pytest.mark.parametrize(
    ("node", "overrides", "cpus_per_task", "nodes", "ranks_per_node"),
    [
        (GPU_NODE, ("world_size=2",), None, 1, 2),
        (GPU_NODE, ("world_size=12",), None, 2, 6),
        (GPU_NODE, ("world_size=8", "launch.nproc_per_node=4"), None, 2, 4),
        (GPU_NODE, ("world_size=4", "model=toy_mp", "parallelism=ddp_mp"), None, 1, 4),
        (GPU_NODE, ("world_size=8", "model=toy_mp", "parallelism=ddp_mp"), None, 2, 4),
        (GPU_NODE, ("world_size=96", "backend.device=cpu"), None, 1, 96),
        (CPU_NODE, ("world_size=8",), 4, 2, 4),
        (CPU_NODE, ("parallelism=hsdp",), 8, 2, 2),
    ],
)
def test_a_job_takes_as_few_nodes_as_hold_it(
    node: Hardware,
    overrides: tuple[str, ...],
    cpus_per_task: int | None,
    nodes: int,
    ranks_per_node: int,
) -> None:
    """The GPUs of a node decide, or without GPUs its cores."""
    register()
    config = to_config(compose_raw(*overrides))
    settings = on_nodes(node, cpus_per_task=cpus_per_task)
    assert settings.layout(config) == (nodes, ranks_per_node)


def test_a_job_asks_for_the_gpus_and_cores_that_its_ranks_use() -> None:
    """It does not ask for whole nodes, and the user's own options win."""
    config, _ = resolved("world_size=4", "model=toy", hardware=GPU_NODE)
    settings = on_nodes(
        GPU_NODE,
        partition="gpu",
        mem_gb=1.5,
        additional_parameters={"exclusive": True, "signal": "TERM@9", "requeue": False, "nice": 0},
    )
    assert settings.sbatch_options(config) == {
        **{"partition": "gpu", "time": 60, "mem": "1536M", "nodes": 1, "ntasks_per_node": 4},
        **{"cpus_per_task": 12, "gpus_per_node": 4, "open_mode": "append"},
        **{"exclusive": True, "signal": "TERM@9", "nice": 0},
    }
    on_cpu, _ = resolved("world_size=4", "model=toy", "backend.device=cpu")
    options = settings.sbatch_options(on_cpu)
    assert (options.get("gpus_per_node"), options["cpus_per_task"]) == (None, 1)


def test_ranks_that_no_nodes_hold_are_rejected() -> None:
    """The message has numbers that work."""
    config, _ = resolved("world_size=9", "model=toy", hardware=Hardware(9, 9))
    with pytest.raises(UserError, match=r"write 8 or 10, or give launch\.nproc_per_node"):
        on_nodes(GPU_NODE).layout(config)
    config, _ = resolved("world_size=8", "launch.nproc_per_node=8", "model=toy")
    with pytest.raises(UserError, match="8 ranks on a node take 32 cores and a node has 16"):
        on_nodes(CPU_NODE, cpus_per_task=4).layout(config)


def test_a_node_has_what_slurm_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest node of a partition counts; the launcher's keys win."""
    asked = list[tuple[str, ...]]()
    report = "cpu|64|(null)\ngpu*|96|gpu:a100:8(S:0-1),lscratch:2\ngpu*|48|gpu:2,gpu:h100:4\n"

    def sinfo(*command: str) -> str:
        asked.append(command)
        return report

    monkeypatch.setattr(slurm_settings, "run_slurm", sinfo)
    assert SlurmSettings().node == Hardware(num_gpus=6, num_cores=48)
    assert SlurmSettings(gpus_per_node=1).node == Hardware(num_gpus=1, num_cores=48)
    report = "cpu|64|(null)\n"
    assert SlurmSettings(partition="cpu").node == Hardware(num_gpus=0, num_cores=64)
    assert asked[-1][-2:] == ("--partition", "cpu")
    with pytest.raises(UserError, match=r"no default partition; write hydra\.launcher\.partition"):
        _ = SlurmSettings().node
    num_asked = len(asked)
    assert SETTINGS.node == Hardware(num_gpus=0, num_cores=4)
    assert len(asked) == num_asked


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("timeout_min", "soon", r"timeout_min \(soon\) must be a whole number"),
        ("cpus_per_task", 0, r"cpus_per_task \(0\) must be 1 or greater"),
        ("gpus_per_node", -1, r"gpus_per_node \(-1\) must be 0 or greater"),
        ("setup", 3, r"setup \(3\) must be a list"),
        ("partitoin", "gpu", "partitoin is not a key"),
        (
            "additional_parameters",
            {"job-name": "x"},
            "additional_parameters.job-name is set by the sweep",
        ),
    ],
)
def test_a_wrong_key_of_the_launcher_is_answered_in_one_line(
    key: str, value: object, rule: str
) -> None:
    """Any other key is answered alike."""
    with pytest.raises(UserError, match=rf"hydra\.launcher\.{rule}"):
        read_settings(OmegaConf.create({"_target_": OURS, key: value}))


def test_the_yaml_has_every_key_with_its_default() -> None:
    """Hydra accepts no key on the command line that the YAML lacks."""
    path = CONFIG_DIR / "hydra" / "launcher" / "slurm.yaml"
    assert read_settings(OmegaConf.load(path)) == SlurmSettings()
    assert set(OmegaConf.load(path)) == {"_target_", *vars(SlurmSettings())}


def test_other_launchers_have_no_settings_of_slurm() -> None:
    """Our own for one machine has none, and somebody else's is rejected."""
    assert read_settings(OmegaConf.create({"_target_": LOCAL})) is None
    with pytest.raises(UserError, match="other is of another package, and a sweep needs"):
        read_settings(OmegaConf.create({"_target_": "other", "partition": "gpu"}))


def test_a_sweep_stays_the_same_wherever_its_jobs_run() -> None:
    """So it goes on with another time limit, in another partition, or on this machine."""
    on_slurm = ("-m", "hydra/launcher=slurm", "hydra.launcher.timeout_min=9", "seed=1,2")
    assert sweep_command(on_slurm) == sweep_command(("-m", "seed=1,2", "sweep.parallel_jobs=2"))
    signed = (
        "seed=1,2",
        "--multirun",
        "++sweep.retry=failed",
        "+hydra.launcher.x.y=1",
        "verbose=1",
    )
    assert sweep_command(on_slurm) == sweep_command(signed)
    searches = [sweep_command(("-m", f"sweep.objective={name}")) for name in ("a", "b")]
    assert searches[0] != searches[1]


@pytest.mark.parametrize("override", ["sweep.parallel_jobs=2", "launch.init_method=file:///x"])
def test_keys_for_jobs_of_one_machine_are_rejected(tmp_path: Path, override: str) -> None:
    """Slurm decides how many jobs run at the same time."""
    register()
    config, (key, value) = to_config(compose_raw(override)), override.split("=")
    with pytest.raises(UserError, match=rf"^{re.escape(key)} \({re.escape(value)}\) "):
        Slurm(tmp_path, SETTINGS).validate(config)


def test_a_search_submits_its_jobs_itself(tmp_path: Path) -> None:
    """It needs the results of a batch to choose the next one."""
    search = ("hydra/sweeper=optuna", "sweep.objective=eval/loss", "optimizer.lr=0.1,0.2")
    on_slurm = ("hydra/launcher=slurm", "hydra.launcher.submit=false")
    end = run_command("-m", "model=toy", *search, *on_slurm, folder=tmp_path)
    assert "hydra.launcher.submit=false leaves the jobs to you" in error_line(end)
