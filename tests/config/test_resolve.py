"""Every rule between the keys answers in one line with key, value and fix."""

import inspect
import re
import sys
from pathlib import Path

import pytest
from configs import config_error, freeze, resolved

from ddp_runner.config.schema import CONFIG_DIR
from ddp_runner.config.sections import LaunchConfig, meeting_place
from ddp_runner.dist_env import DistEnv
from ddp_runner.errors import UserError
from ddp_runner.host.hardware import Hardware
from ddp_runner.train import losses

MINE = "task=mine.train allowed_targets=[mine]"
LOSSES = " or ".join(
    f"ddp_runner.train.losses.{name}"
    for name, value in sorted(vars(losses).items())
    if inspect.isfunction(value) and value.__module__ == losses.__name__ and name[0] != "_"
)


OWN = "; for your own write --config-dir=FOLDER"


def options(group: str) -> str:
    """Return the options of a group, as a message lists them."""
    return ", ".join(sorted(path.stem for path in (CONFIG_DIR / group).glob("*.yaml")))


POSITIVE = (
    *("train.epochs", "train.max_steps", "train.log_every_steps", "train.grad_accum_steps"),
    *("train.clip_norm", "train.num_threads", "batch.global_size", "batch.per_rank"),
    *("batch.eval_per_rank", "checkpoint.keep", "checkpoint.every_epochs"),
    *("checkpoint.every_steps", "launch.nproc_per_node"),
    *("launch.shutdown_timeout_s", "optimizer.lr"),
)
NOT_NEGATIVE = (
    *("seed", "train.eval_every_epochs", "launch.max_restarts"),
    *("optimizer.weight_decay", "optimizer.momentum"),
)


@pytest.mark.parametrize(
    "place", ["n1:99999", "n_1:", "fd00::1", "n1:0", "n1:29400:1", "a b", "[n1]"]
)
def test_machines_meet_at_a_host_and_a_port(place: str) -> None:
    """Another address is rejected before torch is imported."""
    rule = "must be HOST:PORT, with a port from 1 to 65535 and an IPv6 address in brackets; write"
    with pytest.raises(UserError, match=r"rdzv_endpoint \(None\) must be HOST:PORT"):
        meeting_place(LaunchConfig(nnodes=2))
    assert f"launch.rdzv_endpoint ({place}) {rule}" in config_error(
        f"launch.rdzv_endpoint='{place}'"
    )


@pytest.mark.parametrize(
    ("place", "expected"),
    [("n_1", ("n_1", 29400)), ("10.0.0.1:1", ("10.0.0.1", 1)), ("[fd00::1]:5", ("fd00::1", 5))],
)
def test_the_port_may_be_left_out(place: str, expected: tuple[str, int]) -> None:
    """It is then torchrun's."""
    assert meeting_place(resolved(f"launch.rdzv_endpoint='{place}'")[0].launch) == expected


@pytest.mark.parametrize("nnodes", ["1:4", "1.5", "true", "two"])
def test_the_number_of_machines_is_a_whole_number(nnodes: str) -> None:
    """The rule is that of any other key."""
    assert config_error(f"launch.nnodes={nnodes}").startswith(f"launch.nnodes ({nnodes}) must be a")


@pytest.mark.parametrize("key", POSITIVE)
def test_zero_is_rejected_where_it_makes_no_sense(key: str) -> None:
    """Zero epochs, ranks, samples or seconds: key, value and rule."""
    value = "0.0" if key.endswith(("_s", "norm")) else "0"
    assert config_error(f"{key}=0") == f"{key} ({value}) must be greater than 0"


@pytest.mark.parametrize("key", NOT_NEGATIVE)
def test_negative_numbers_are_rejected(key: str) -> None:
    """Where zero is a choice, less than zero is none."""
    assert config_error(f"{key}=-1") == f"{key} (-1) must be 0 or greater"


INVALID = [
    ("backend.device=cuda world_size=2",
     "backend.device=cuda needs CUDA devices and this machine shows none; write "
     "backend.device=auto"),
    ("parallelism=ps train.precision=fp16",
     "train.precision=fp16 scales the loss by whole gradients, which no rank sees under "
     "parallelism=ps; write train.precision=bf16"),
    ("batch.global_size=100 world_size=3",
     "batch.global_size (100) is not divisible by world_size (3); use 99 or 102"),
    ("batch.global_size=2 world_size=3",
     "batch.global_size (2) is not divisible by world_size (3); use 3"),
    ("batch.global_size=100 world_size=3 train.grad_accum_steps=2",
     "batch.global_size (100) is not divisible by world_size (3) x train.grad_accum_steps (2); "
     "use 96 or 102"),
    ("batch.global_size=64 batch.per_rank=32",
     "batch.global_size (64) and batch.per_rank (32) exclude each other; give one, and the "
     "other follows"),
    ("batch.per_rank=null",
     "batch.global_size and batch.per_rank are both null; give one of them"),
    *((f"world_size={value}",
       f"world_size ({value}) must be a whole number of ranks from 1 up, or auto")
      for value in ("0", "-2", "1.5", "many")),
    ("train.epochs=ten", "train.epochs (ten) must be a whole number"),
    ("train.compile=perhaps", "train.compile (perhaps) must be true or false"),
    ("backend.timeout_s=soon", "backend.timeout_s (soon) must be a number"),
    ("model=toy scheduler=cosine scheduler.warmup_steps=21 train.max_steps=20",
     "scheduler.warmup_steps (21) must be from 0 to the total steps (20); use fewer "
     "warm-up steps, or more total steps"),
    ("model=toy scheduler=cosine scheduler.warmup_steps=51",
     "scheduler.warmup_steps (51) must be from 0 to the total steps (50); use fewer "
     "warm-up steps, or more total steps"),
    ("model=toy scheduler=cosine scheduler.warmup_steps=21 scheduler.total_steps=20",
     "scheduler.warmup_steps (21) must be from 0 to the total steps (20); use fewer "
     "warm-up steps, or more total steps"),
    ("scheduler=plateau scheduler.monitor=train/loss",
     "scheduler.monitor (train/loss) must be one of eval/accuracy, eval/loss, eval/f1, "
     "eval/precision, eval/recall; did you mean eval/loss?"),
    ("scheduler=plateau scheduler.monitor=eval/f1",
     "scheduler.monitor=eval/f1 with scheduler.mode=min keeps the worst value, not the best; "
     "write scheduler.mode=max"),
    ("scheduler=plateau train.eval_every_epochs=0",
     "scheduler.monitor=eval/loss needs evaluations and train.eval_every_epochs is 0; write "
     "train.eval_every_epochs=1"),
    *((f"batch.virtual_ranks={count}",
       f"batch.virtual_ranks ({count}) must be a power of two; write batch.virtual_ranks=8")
      for count in (0, 3, -4)),
    *((f"batch.virtual_ranks=8 {keys}",
       f"batch.virtual_ranks=8 adds everything in one order, {reason}; write {fix}")
      for keys, reason, fix in (
          ("model=gpt parallelism=tp", "and parallelism=tp has its own order", "parallelism=ddp"),
          ("parallelism=ps world_size=3", "and parallelism=ps has its own order",
           "parallelism=ddp"),
          ("model=toy_mp parallelism=ddp_mp", "and parallelism=ddp_mp has its own order",
           "parallelism=ddp"),
          ("world_size=3", "in halves, so it must be divisible by world_size (3)", "world_size=2"),
          ("world_size=16", "in halves, so it must be divisible by world_size (16)",
           "world_size=8"),
          ("parallelism.comm_hook=bf16", "and a parallelism.comm_hook changes what is sent",
           "parallelism.comm_hook=null"),
          ("train.compile=true",
           "and train.compile=true chooses kernels by the sizes that a rank has seen",
           "train.compile=false"),
          ("parallelism=fsdp world_size=1", "and parallelism=fsdp on 1 rank splits nothing",
           "parallelism=ddp"),
          ("parallelism=hsdp parallelism.num_replicas=4 world_size=4",
           "and parallelism=hsdp on 4 ranks splits nothing", "parallelism=ddp"),
          ("parallelism=fsdp optimizer=muon",
           "and optimizer=muon needs whole parameters, which parallelism=fsdp splits",
           "parallelism=ddp"),
          ("parallelism=fsdp optimizer=adamw +optimizer.fused=true",
           "and optimizer.fused=true rounds the parts of parallelism=fsdp in another way",
           "optimizer.fused=false"),
      )),
    ("model=toy dataset.num_samples=50 batch.virtual_ranks=64",
     "dataset=random has 50 training samples and batch.virtual_ranks is 64; use "
     "batch.virtual_ranks=32 or less"),
    ("optimizer.lr=inf", "optimizer.lr (inf) must be a finite number"),
    ("optimizer.lr=nan", "optimizer.lr (nan) must be a finite number"),
    ("train.clip_norm=inf", "train.clip_norm (inf) must be a finite number"),
    ("optimizer.nesterov=maybe", "optimizer.nesterov (maybe) must be true or false"),
    ("backend.timeout_s=0.001", "backend.timeout_s (0.001) must be 1 or greater"),
    ("backend.timeout_s=1e300", "backend.timeout_s (1e+300) must be 31536000 or less"),
    ("launch.join_timeout_s=1e300", "launch.join_timeout_s (1e+300) must be 31536000 or less"),
    ("launch.shutdown_timeout_s=1e9",
     "launch.shutdown_timeout_s (1000000000.0) must be 31536000 or less"),
    (f"seed={10**30}", f"seed ({10**30}) must be {2**63 - 1} or less"),
    ("world_size=1000000",
     "1000000 ranks are too many for a machine of 4 cores; write world_size=256 or less"),
    ("world_size=1000000 launch.nnodes=1000 launch.rdzv_endpoint=h:1",
     "1000 ranks are too many for a machine of 4 cores; write world_size=256000 or less"),
    ("model=toy dataset.num_samples=1 world_size=2",
     "dataset=random has 1 training samples and world_size is 2; use world_size=1 or less"),
    ("task=check dataset=fake_images dataset.num_samples=3 world_size=4",
     "dataset=fake_images has 3 training samples and world_size is 4; use world_size=3 or less"),
    ("model=toy dataset.num_samples=0", "dataset.num_samples (0) must be greater than 0"),
    ("parallelism=ps train.precision=bf16 task=check",
     "task=check compares equal ranks, not parallelism=ps; write "
     "parallelism=ddp"),
    ("train.num_threads=1000000", "train.num_threads (1000000) must be 4096 or less"),
    ("model=toy dataset.num_samples=1e9",
     "dataset.num_samples (1000000000.0) must be a whole number"),
    ("model=toy dataset.num_samples=2.5", "dataset.num_samples (2.5) must be a whole number"),
    ("dataset=fake_images dataset.height=-1", "dataset.height (-1) must be greater than 0"),
    ("dataset.augmentation=3",
     "dataset.augmentation (3) must be a mapping with a _target_; write "
     "dataset.augmentation=null, or dataset.augmentation.KEY=VALUE"),
    ("~optimizer._target_",
     "optimizer has no _target_, the name of its class or function; choose an option, as in "
     "optimizer=NAME: see --help"),
    ("optimizer.lr=fast", "optimizer.lr (fast) must be a number"),
    ("optimizer.lr=-0.1", "optimizer.lr (-0.1) must be greater than 0"),
    ("task=trian",
     "task (trian) must be one of train, evaluate, predict, export, sample, collectives, check, "
     "plan, or a function of your own, as PACKAGE.MODULE.FUNCTION; did you mean train?"),
    ("task=torch.save",
     "task (torch.save) is not a task of ddp_runner; if it is a function of your own, add "
     "allowed_targets=[torch.save]"),
    ("task=mine..train allowed_targets=[mine]",
     "task (mine..train) is not a dotted name; write PACKAGE.MODULE.FUNCTION"),
    ("loop.latent=64",
     "loop.latent is a key of your own that no YAML gives; write +loop.latent=VALUE"),
    *((f"{MINE} parallelism={mode}",
       "task=mine.train needs samples of its own on each rank, which "
       f"parallelism={mode} does not give; write parallelism=ddp or "
       "parallelism=fsdp")
      for mode in ("ps", "tp")),
    (f"{MINE} checkpoint.monitor=d/loss",
     "checkpoint.monitor=d/loss with checkpoint.mode=max keeps the worst value, not the best; "
     "write checkpoint.mode=min"),
    ("train.precision=int8", "train.precision (int8) must be one of fp32, tf32, bf16, fp16"),
    ("train.precision=fp61",
     "train.precision (fp61) must be one of fp32, tf32, bf16, fp16; did you mean fp16?"),
    (f"parallelism=fsdp parallelism.num_replicas={10**30}",
     f"parallelism.num_replicas ({10**30}) must be {2**63 - 1} or less"),
    ("parallelism=fsdp parallelism.num_replicas=two",
     "parallelism.num_replicas (two) must be a whole number"),
    ("train.precision=fp16", "train.precision=fp16 needs a GPU; on a CPU write bf16"),
    ("checkpoint.mode=best", "checkpoint.mode (best) must be one of max, min"),
    ("backend.name=tcp",
     "backend.name (tcp) must be one of auto, gloo, mpi, nccl, xccl; write backend=auto"),
    ("backend.device=tpu",
     "backend.device (tpu) must be one of auto, cpu, cuda, mps, xpu; write backend.device=auto"),
    ("backend=nccl",
     "backend=nccl needs CUDA devices and this machine shows none; write backend=auto"),
    ("launch.nnodes=2",
     "launch.nnodes (2) needs launch.rdzv_endpoint=HOST:PORT, the same on every machine"),
    ("launch.nnodes=2 launch.rdzv_endpoint=h:1 launch.nproc_per_node=2 world_size=3",
     "launch.nnodes (2) times launch.nproc_per_node (2) is not world_size (3); leave world_size "
     "out, or make them agree"),
    ("parallelism=single world_size=2",
     "parallelism=single runs 1 process, world_size is 2; write world_size=1 or "
     "parallelism=ddp"),
    ("parallelism=hsdp world_size=3",
     "parallelism=hsdp needs 4 ranks or more, a multiple of 2, and world_size is 3; write "
     "world_size=4"),
    ("parallelism=fsdp_tp world_size=6 parallelism.tensor_parallel_size=4",
     "parallelism=fsdp_tp needs 4 ranks or more, a multiple of 4, and world_size is 6; write "
     "world_size=8"),
    ("parallelism=tp world_size=1",
     "parallelism=tp needs 2 ranks or more and world_size is 1; write world_size=2"),
    ("model=toy parallelism=fsdp_tp world_size=4 batch.per_rank=null batch.global_size=7",
     "batch.global_size (7) is not divisible by the ranks with samples of their own (2); use 6 or "
     "8"),
    ("parallelism=fsdp parallelism.cpu_offload=true",
     "parallelism.cpu_offload=true works on GPUs only; set it to false"),
    ("parallelism=fsdp parallelism.tensor_parallel_size=0",
     "parallelism.tensor_parallel_size (0) must be greater than 0"),
    ("model=toy_mp",
     "model=toy_mp is cut into 2 stages and parallelism=ddp gives a replica 1 device; write "
     "parallelism=ddp_mp"),
    ("model=toy parallelism=ddp_mp",
     "model=toy is cut into 1 stage and parallelism=ddp_mp gives a replica 2 devices; write "
     "parallelism=ddp, or choose a model with 2 stages: convnet_mp"),
    ("parallelism.static_graph=true train.grad_accum_steps=4",
     "parallelism.static_graph=true cannot skip gradient syncs, which train.grad_accum_steps (4) "
     "does; turn one of them off"),
    ("parallelism=dp train.compile=true",
     "train.compile=true: parallelism=dp copies the model in each step; write "
     "parallelism=ddp"),
    ("dataset.augmentation._target_={}", "dataset.augmentation._target_ ({}) must be a text"),
    *((f"+parallelism.needs{given}",
       f"parallelism.needs ({shown}) must be a mapping with some of the keys devices_per_rank, "
       "max_ranks, min_ranks, num_replicas, model_ranks, num_servers, splits_parameters, "
       "data_parallel")
      for given, shown in (("=3", "3"), (".num_server=1", "{'num_server': 1}"))),
    ("+parallelism.needs.devices_per_rank=0",
     "parallelism.needs.devices_per_rank (0) must be greater than 0"),
    ("+parallelism.needs.max_ranks=1.5",
     "parallelism.needs.max_ranks (1.5) must be a whole number"),
    ("+parallelism.needs.data_parallel=1",
     "parallelism.needs.data_parallel (1) must be true or false"),
    ("parallelism.sync_batchnorm=true",
     "parallelism.sync_batchnorm=true works on GPUs only; set it to false"),
    ("data_root=/no/such",
     "data_root (/no/such) is not a folder; give the folder of the datasets, or dataset=digits, "
     "which is bundled"),
    ("resume=no/such",
     "resume=no/such is not a run folder: no/such/.hydra/config.yaml does not exist; name the "
     "folder that holds run.json"),
    ("model._target_=torchvison.models.resnet18",
     "model._target_ (torchvison.models.resnet18) needs torchvison, which is not installed; "
     "install it, if you trust it, or start in the folder that holds it"),
    ("+model.width=3",
     "model.width is not a keyword of ddp_runner.models.convnet.ConvNet; it has in_channels, "
     "num_classes"),
    ("model.loss=torch.load",
     f"model.loss (torch.load) is not a loss function that a config may name; write {LOSSES}"),
    ("model._target_=ddp_runner.models.convnet.ConvNte",
     "model._target_ (ddp_runner.models.convnet.ConvNte) is not a part of ddp_runner; did you mean "
     "ddp_runner.models.convnet.ConvNet?"),
    ("model._target_=ConvNet",
     "model._target_ (ConvNet) is not a dotted name; write a name such as "
     "ddp_runner.models.convnet.ConvNet"),
    ("model.loss=mse", "model.loss (mse) is not a dotted name; write ddp_runner.train.losses.mse"),
    ("model.loss=torch.nn.CrossEntropyLoss",
     "model.loss (torch.nn.CrossEntropyLoss) is not a loss function that a config may name; write "
     "ddp_runner.train.losses.cross_entropy"),
    ("model.loss=torch.nn.functional.nope",
     "model.loss (torch.nn.functional.nope) is not a loss function that a config may name; write "
     f"{LOSSES}"),
    ("train.epoch=3", "train.epoch is not a key of the config; did you mean train.epochs?"),
    ("modle=toy", "modle is not a key of the config; did you mean model?"),
    ("+epochs=3",
     "epochs is not a key of the config; see --help for all keys, and put your own under user, as "
     "in user.epochs"),
    ("lr=3", "lr is not a key of the config; did you mean optimizer.lr?"),
    ("optimizer.nothing=3",
     "optimizer.nothing is not a key of the config; the keys of optimizer are name, _target_, lr, "
     "momentum, dampening, weight_decay, nesterov"),
    ("optimizer=sgdd",
     f"optimizer=sgdd does not exist; did you mean sgd? options: {options('optimizer')}{OWN}"),
    ("scheduler=x", f"scheduler=x does not exist; options: {options('scheduler')}{OWN}"),
    ("scheduler=steplr", "scheduler.step_size has no value; write scheduler.step_size=VALUE"),
    ("optimizer=lbfgs",
     "optimizer=lbfgs (torch.optim.LBFGS) computes the loss several times in a step, and the "
     "training loop computes it once; write your own loop, as in docs/your_own_loop.md#lbfgs, or "
     "optimizer=adamw"),
    ("+optimizer.momentun=3",
     "optimizer.momentun is not a keyword of torch.optim.SGD; did you mean optimizer.momentum?"),
    ("scheduler=step +scheduler.gama=3",
     "scheduler.gama is not a keyword of ddp_runner.train.schedules.step_decay; did you mean "
     "scheduler.gamma?"),
    ("dataset=torch_dataset dataset.num_workers=two",
     "dataset.num_workers (two) must be a whole number"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "sentence"), INVALID, ids=[row[0] for row in INVALID])
def test_each_broken_rule_is_one_line(
    overrides: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rule, values and fix, word for word; a number that is proposed works."""
    monkeypatch.setattr(sys, "argv", ["ddp_runner", *overrides.split()])
    assert config_error(*overrides.split()) == sentence
    if overrides.startswith("batch.global_size=100"):
        for size in sentence.partition("use ")[2].split(" or "):
            resolved(f"batch.global_size={size}", *overrides.split()[1:])


@pytest.mark.parametrize(
    ("overrides", "gpus", "cores", "expected"),
    [
        ("", 0, 4, (2, "gloo", "cpu")),
        ("", 0, 1, (1, "gloo", "cpu")),
        ("", 4, 8, (4, "nccl", "cuda")),
        ("backend=nccl", 4, 8, (4, "nccl", "cuda")),
        ("backend=gloo", 4, 8, (4, "gloo", "cuda")),
        ("backend=mpi", 4, 8, (4, "mpi", "cpu")),
        ("backend.device=cpu", 4, 8, (2, "gloo", "cpu")),
        ("world_size=2", 4, 8, (2, "nccl", "cuda")),
        ("world_size=8", 4, 8, (8, "gloo", "cpu")),
        ("parallelism=single", 4, 8, (1, "nccl", "cuda")),
        ("parallelism=dp", 4, 8, (1, "nccl", "cuda")),
        ("model=toy_mp parallelism=ddp_mp", 4, 8, (2, "nccl", "cuda")),
        ("model=toy_mp parallelism=ddp_mp", 1, 8, (2, "gloo", "cpu")),
        ("launch.nproc_per_node=3", 0, 4, (3, "gloo", "cpu")),
        ("launch.nnodes=2 launch.rdzv_endpoint=h:1", 4, 8, (8, "nccl", "cuda")),
    ],
)
def test_ranks_backend_and_device_follow_the_hardware(
    overrides: str, gpus: int, cores: int, expected: tuple[int, str, str]
) -> None:
    """Each rank gets its GPU, or each block of GPUs, where there are enough; else gloo on CPU."""
    config, _ = resolved(*overrides.split(), hardware=Hardware(num_gpus=gpus, num_cores=cores))
    assert (config.world_size, config.backend.name, config.backend.device) == expected


@pytest.mark.parametrize(
    ("overrides", "gpus", "sentence"),
    [
        ("backend=nccl world_size=8", 4,
         "need 8 CUDA devices and this machine shows 4; write world_size=4"),
        ("model=toy_mp parallelism=ddp_mp backend=nccl world_size=4", 4,
         "4 ranks with 2 devices each need 8 CUDA devices and this machine shows 4; write world_"),
        ("backend=nccl backend.device=cpu", 4, "backend.device=cpu needs gloo"),
    ],
)  # fmt: skip
def test_more_ranks_than_gpus_is_rejected(overrides: str, gpus: int, sentence: str) -> None:
    """What is there, and a world size that works."""
    machine = Hardware(num_gpus=gpus, num_cores=8)
    assert sentence in config_error(*overrides.split(), hardware=machine)
    if (fix := sentence.rpartition("write ")[2]).startswith("world_size="):
        kept = [one for one in overrides.split() if not one.startswith("world_size=")]
        resolved(*kept, fix, hardware=machine)


def test_several_machines_are_warned_that_nothing_is_authenticated() -> None:
    """One line, for our own launcher and for another's ranks; none within one machine."""
    warnings = [
        resolved("launch.nnodes=2", "launch.rdzv_endpoint=h:1")[1],
        resolved(env=DistEnv(rank=1, local_rank=1, world_size=4, local_world_size=2))[1],
    ]
    for (warning,) in warnings:
        assert "has no authentication" in warning
        assert "trusted network" in warning
    assert resolved(env=DistEnv(rank=1, local_rank=1, world_size=2, local_world_size=2))[1] == []
    assert resolved()[1] == []


MEANT = "or write backend.device=cpu if you meant this"
LAUNCHED = DistEnv(rank=3, local_rank=3, world_size=4, local_world_size=4)


@pytest.mark.parametrize(
    ("overrides", "gpus", "warning"),
    [
        ("world_size=4", 2,
         "2 GPUs are visible and the run computes on the CPU, since its 4 ranks need 4; write "
         f"world_size=2 to use them, {MEANT}"),
        ("world_size=2", 1,
         "1 GPU is visible and the run computes on the CPU, since its 2 ranks need 2; write "
         f"world_size=1 to use them, {MEANT}"),
        ("model=toy_mp parallelism=ddp_mp", 1,
         "1 GPU is visible and the run computes on the CPU, since its 2 ranks need 4; choose "
         f"a model with one stage to use them, {MEANT}"),
        ("model=toy_mp parallelism=ddp_mp world_size=4", 5,
         "5 GPUs are visible and the run computes on the CPU, since its 4 ranks need 8; write "
         f"world_size=2 to use them, {MEANT}"),
        ("launch.nnodes=2 launch.rdzv_endpoint=h:1 world_size=8", 2,
         "2 GPUs are visible and the run computes on the CPU, since its 4 ranks need 4; write "
         f"world_size=4 to use them, {MEANT}"),
        ("backend=mpi", 2,
         "2 GPUs are visible and the run computes on the CPU, since backend=mpi sends CPU "
         f"tensors; write backend=auto to use them, {MEANT}"),
    ],
)  # fmt: skip
def test_idle_gpus_are_reported(overrides: str, gpus: int, warning: str) -> None:
    """With the reason and both ways out, which work and are silent."""
    machine = Hardware(num_gpus=gpus, num_cores=16)
    config, warnings = resolved(*overrides.split(), hardware=machine)
    assert config.backend.device == "cpu"
    assert about_gpus(warnings) == [warning]
    meant = resolved(*overrides.split(), "backend.device=cpu", hardware=machine)
    assert about_gpus(meant[1]) == []
    if fix := re.search(r"write (world_size=\d+|backend=nccl) ", warning):
        key = fix[1].partition("=")[0]
        kept = [one for one in overrides.split() if not one.startswith(f"{key}=")]
        config, warnings = resolved(*kept, fix[1], hardware=machine)
        assert (config.backend.device, about_gpus(warnings)) == ("cuda", [])


def about_gpus(warnings: list[str]) -> list[str]:
    """Return the warnings about a GPU."""
    return [one for one in warnings if "GPU" in one]


@pytest.mark.parametrize("gpus", [0, 2])
def test_a_sweep_over_world_sizes_says_which_jobs_leave_the_gpus(gpus: int) -> None:
    """One and two ranks compute on two GPUs, four do not; without GPUs there is no warning."""
    machine = Hardware(num_gpus=gpus, num_cores=4)
    warned = [bool(resolved(f"world_size={size}", hardware=machine)[1]) for size in (1, 2, 4)]
    assert warned == [False, False, gpus > 0]


def test_a_resumed_run_that_once_fell_to_the_cpu_says_so(tmp_path: Path) -> None:
    """Its frozen config cannot tell whether that was meant; both ways out are keys of resume."""
    begun = resolved("world_size=2")[0]
    freeze(tmp_path, begun)
    resume, machine = f"resume={tmp_path}", Hardware(num_gpus=2, num_cores=4)
    assert resolved(resume)[1] == []
    config, warnings = resolved(resume, hardware=machine)
    assert (config.backend.name, config.backend.device) == ("gloo", "cpu")
    assert warnings == [
        "2 GPUs are visible and the run computes on the CPU, as it did before it was resumed; add "
        f"backend=auto to use them, {MEANT}"
    ]
    config, warnings = resolved(resume, "backend=auto", hardware=machine)
    assert (config.backend.name, config.backend.device, warnings) == ("nccl", "cuda", [])
    assert resolved(resume, "backend.device=cpu", hardware=machine)[1] == []


@pytest.mark.parametrize(
    ("overrides", "binds_gpus", "gpus", "expected"),
    [
        ("", True, 1, ("nccl", "cuda", False)),
        ("backend=nccl", True, 1, ("nccl", "cuda", False)),
        ("backend=gloo", True, 1, ("gloo", "cuda", False)),
        ("model=toy_mp parallelism=ddp_mp", True, 2, ("nccl", "cuda", False)),
        ("backend=nccl", False, 1, ("nccl", "cuda", False)),
        ("backend.device=cuda", False, 1, ("nccl", "cuda", False)),
        ("", False, 1, ("gloo", "cpu", True)),
        ("model=toy_mp parallelism=ddp_mp", True, 3, ("gloo", "cpu", True)),
    ],
)
def test_a_rank_that_is_shown_its_own_gpus_uses_them(
    overrides: str, binds_gpus: bool, gpus: int, expected: tuple[str, str, bool]
) -> None:
    """As Slurm binds them, or where the user says so; else one GPU may be shared by all ranks."""
    machine = Hardware(num_gpus=gpus, num_cores=8, binds_gpus=binds_gpus)
    config, warnings = resolved(*overrides.split(), hardware=machine, env=LAUNCHED)
    assert (config.backend.name, config.backend.device, bool(warnings)) == expected


def test_one_gpu_for_all_ranks_is_reported_from_one_for_each() -> None:
    """The warning names the key for the case that cannot be seen from here."""
    machine = Hardware(num_gpus=1, num_cores=8)
    (warning,) = resolved(hardware=machine, env=LAUNCHED)[1]
    assert "its 4 ranks need 4; write backend.device=cuda if each rank has its own GPU, " in warning
    assert resolved("backend.device=cuda", hardware=machine, env=LAUNCHED)[1] == []
    assert "need 4 CUDA devices" in config_error("backend=nccl", "world_size=4", hardware=machine)


@pytest.mark.parametrize(
    ("kind", "overrides", "expected"),
    [
        ("xpu xccl", "", (4, "xccl", "xpu")),
        ("xpu xccl", "backend.device=xpu world_size=2", (2, "xccl", "xpu")),
        ("npu hccl", "backend.name=hccl", (4, "hccl", "npu")),
        ("xpu xccl", "parallelism=fsdp train.precision=bf16", (4, "xccl", "xpu")),
        ("xpu xccl", "backend=gloo world_size=2", "since backend=gloo sends CPU tensors; write "
         "backend=auto to use them"),
        ("xpu xccl", "parallelism=dp", "since torch's DataParallel needs CUDA; write "
         "parallelism=ddp to use them"),
        ("xpu xccl", "backend=nccl", "backend=nccl needs CUDA devices and this machine shows 4 "
         "xpu; write backend=auto"),
        ("xpu xccl", "backend=gloo backend.device=xpu", "backend.device=xpu cannot be used, since "
         "backend=gloo sends CPU tensors; write backend=auto, or backend.device=cpu"),
        ("xpu xccl", "parallelism=single train.precision=tf32", "train.precision=tf32 needs a "
         "CUDA device; elsewhere write fp32"),
        ("mps gloo", "parallelism=single", (1, "gloo", "mps")),
        ("mps gloo", "parallelism=ddp", "since no backend sends MPS tensors; write "
         "parallelism=single to use them"),
        ("mps gloo", "backend.device=mps world_size=1", "backend.device=mps cannot be used, since "
         "no backend sends MPS tensors; write parallelism=single, or backend.device=cpu"),
        ("cuda nccl", "backend.device=xpu", "backend.device=xpu needs XPU devices and this "
         "machine shows 4 cuda; write backend.device=auto"),
        ("cuda nccl", "backend=nccl backend.device=xpu", "backend=nccl sends only CUDA tensors; "
         "backend.device=xpu needs xccl"),
    ],
)  # fmt: skip
def test_any_kind_of_accelerator_is_used_as_far_as_torch_knows_it(
    kind: str, overrides: str, expected: str | tuple[int, str, str]
) -> None:
    """Ranks, backend and device follow from the kind; what it cannot do is said in one line."""
    name, backend = kind.split()
    number = 1 if name == "mps" else 4
    machine = Hardware(num_gpus=number, num_cores=8, kind=name, backend=backend)
    if isinstance(expected, str) and "to use them" not in expected:
        assert config_error(*overrides.split(), hardware=machine) == expected
        return
    config, warnings = resolved(*overrides.split(), hardware=machine)
    found = config.world_size, config.backend.name, config.backend.device
    if isinstance(expected, tuple):
        assert (found, warnings) == (expected, [])
    else:
        assert config.backend.device == "cpu"
        assert expected in warnings[0]


def test_gpus_that_torch_cannot_use_are_reported_or_rejected() -> None:
    """The default runs on the CPU and says why; whoever asks for CUDA gets the reason."""
    machine = Hardware(num_gpus=0, num_cores=4, unusable="torch was built without CUDA; buy one")
    config, warnings = resolved(hardware=machine)
    assert (config.world_size, config.backend.name, config.backend.device) == (2, "gloo", "cpu")
    assert warnings == [
        f"the run computes on the CPU: torch was built without CUDA; buy one, {MEANT}"
    ]
    assert resolved("backend.device=cpu", hardware=machine)[1] == []
    assert config_error("backend=nccl", hardware=machine) == (
        "backend=nccl needs CUDA devices and this machine shows none (torch was built without "
        "CUDA; buy one); write backend=auto"
    )
    assert config_error("backend.device=cuda", hardware=machine).startswith(
        "backend.device=cuda needs"
    )


def test_a_proposed_world_size_never_needs_a_gpu_that_is_not_there() -> None:
    """Without any GPU no number of CUDA ranks works, so none is proposed."""
    assert "world_size=" not in config_error("backend.device=cuda")


def test_crowded_machines_are_warned_about_once() -> None:
    """More ranks than cores run, with one warning; dp without GPUs says what it is."""
    _, crowded = resolved("world_size=5")
    assert [text for text in crowded if "5 ranks on 4 cores" in text] == crowded != []
    _, alone = resolved("parallelism=dp")
    assert "dp has fewer than two GPUs" in alone[0]
    assert resolved()[1] == []


def test_a_running_gang_decides_the_world_size() -> None:
    """Under torchrun auto is what was launched, and another number is a mistake."""
    env = DistEnv(rank=1, local_rank=1, world_size=3, local_world_size=3)
    assert resolved(env=env)[0].world_size == 3
    assert "world_size (2) differs from the 3 ranks" in config_error("world_size=2", env=env)


def test_one_batch_size_follows_from_the_other() -> None:
    """The size that the user writes wins over a default; the other is derived."""
    sizes = {
        key: resolved(*key.split())[0].batch
        for key in (
            "batch.global_size=48 train.grad_accum_steps=3",
            "batch.per_rank=7 train.grad_accum_steps=3",
            "model=toy",
            "model=toy batch.global_size=8",
        )
    }
    assert [(one.global_size, one.per_rank) for one in sizes.values()] == [
        (48, 8), (42, 7), (40, 20), (8, 4),
    ]  # fmt: skip


@pytest.mark.parametrize("overrides", ["model=toy", "dataset=fake_images"])
def test_a_made_up_dataset_beyond_the_memory_is_rejected(overrides: str) -> None:
    """At once and with both sizes, before anything is made."""
    rejected = config_error(*overrides.split(), f"dataset.num_samples={10**15}")
    assert re.search(r"of \d+ samples takes \d+ GiB and this machine has \d+; write a s", rejected)
