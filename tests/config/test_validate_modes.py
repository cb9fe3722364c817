"""Keys of fsdp, hsdp and tp that do not fit are one line, before torch is imported."""

import pytest
from configs import config_error, resolved

from ddp_runner.host.hardware import Hardware

GPT_TP = "model=gpt parallelism=tp"
PP = "model=gpt parallelism=pp"


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        (
            "parallelism=fsdp world_size=2 parallelism.cpu_offload=true",
            "parallelism.cpu_offload=true works on GPUs only",
        ),
        (
            "parallelism=fsdp world_size=4 parallelism.reshard_after_forward=3",
            "parallelism.reshard_after_forward (3) must be true or false, or a number of ranks "
            "that divides the 4 ranks with a shard",
        ),
        (
            "parallelism=hsdp world_size=4 parallelism.reshard_after_forward=4",
            "that divides the 2 ranks with a shard",
        ),
        ("parallelism=fsdp world_size=2 parallelism.reshard_after_forward=0", "forward (0) must"),
        ("parallelism=fsdp world_size=2 parallelism.reshard_after_forward=x", "forward (x) must"),
        (
            "parallelism=fsdp world_size=2 parallelism.sequence_parallel=true",
            "which parallelism=fsdp does not have; write parallelism=tp, or set it to false",
        ),
        ("parallelism=hsdp parallelism.num_replicas=0", "parallelism.num_replicas (0) must be"),
        (
            "parallelism=tp world_size=2",
            "model=convnet does not have; add it, or write parallelism=fsdp",
        ),
        ("model=gpt parallelism=fsdp model.blocks=layers", "model.blocks (layers) must be a list"),
        (
            "parallelism=tp world_size=2 +model.tensor_parallel=[a]",
            "model.tensor_parallel (['a']) must be a mapping",
        ),
        (
            f"{GPT_TP} world_size=2 parallelism.sequence_parallel=true dataset.sequence_length=15",
            "dataset.sequence_length (15) is not divisible by the 2 ranks that compute each layer "
            "together; write parallelism=fsdp",
        ),
        (
            "model=gpt parallelism=fsdp_tp world_size=8 parallelism.reshard_after_forward=2",
            "parallelism.reshard_after_forward (2) must be true or false with tensor parallelism",
        ),
        (
            f"{GPT_TP} world_size=8",
            "model.num_heads (4) is not divisible by the 8 ranks that compute each layer together; "
            "write parallelism.tensor_parallel_size=4",
        ),
        (
            f"{GPT_TP} world_size=4 parallelism.num_replicas=2",
            "leaves too few ranks for parallelism.tensor_parallel_size=null, which takes all",
        ),
        (
            f"{PP} world_size=4",
            "parallelism=pp needs train.grad_accum_steps (1) of at least the 4 ranks of a pipeline"
            ", or most of them wait; write train.grad_accum_steps=8",
        ),
        (
            "parallelism=pp world_size=2 train.grad_accum_steps=2",
            "model=convnet has no stages: parallelism=pp needs the methods embed and head, and the "
            "key model.blocks; write parallelism=fsdp",
        ),
        (
            f"{PP} world_size=4 parallelism.schedule=interleaved parallelism.stages_per_rank=2",
            "model.num_layers (4) is fewer than the 8 stages of parallelism=pp",
        ),
        (
            f"{PP} parallelism.schedule=interleaved",
            "parallelism.stages_per_rank=1 does not fit parallelism.schedule=interleaved: only",
        ),
        (f"{PP} world_size=2 parallelism.stages_per_rank=2", "stages_per_rank=2 does not fit"),
        (f"{PP} parallelism.schedule=zero", "must be one of 1f1b, gpipe, interleaved"),
        (f"{PP} world_size=2 parallelism.pipeline_size=1", "pipeline_size (1) must be 2 or"),
        (
            f"{PP} world_size=2 train.grad_accum_steps=3 parallelism.stages_per_rank=2 "
            "parallelism.schedule=interleaved",
            "needs train.grad_accum_steps (3) divisible by the 2 ranks of a pipeline; write "
            "train.grad_accum_steps=4",
        ),
        (
            "model=gpt parallelism=ddp_pp world_size=5",
            "needs 4 ranks or more, a multiple of 2, and",
        ),
        (
            f"{PP} train.precision=fp16",
            "no rank sees under parallelism=pp; write train.precision=bf16",
        ),
        (f"{PP} train.compile=true", "a rank of parallelism=pp has only some of its layers; write"),
        (f"{PP} task=a.b", "samples of its own on each rank, which parallelism=pp does not give"),
        (
            f"{PP} world_size=2 batch.virtual_ranks=4 train.grad_accum_steps=2",
            "pp has its own order",
        ),
    ],
)
def test_keys_that_do_not_fit_are_one_line(keys: str, sentence: str) -> None:
    """Else a key is ignored, or torch raises."""
    assert sentence in config_error("backend.device=cpu", *keys.split())


def test_tensor_parallelism_alone_has_no_shards_to_keep_on_the_host() -> None:
    """On a GPU its parameters would be left on the CPU, and its batches not."""
    gpus = Hardware(num_gpus=2, num_cores=4)
    offload = ("parallelism.cpu_offload=true", "world_size=2")
    error = config_error(*GPT_TP.split(), *offload, hardware=gpus)
    assert "parallelism=tp has no shards; write parallelism=fsdp_tp" in error
    resolved("model=gpt", "parallelism=fsdp", *offload, hardware=gpus)


@pytest.mark.parametrize("asked", ["true", "false", "1", "2", "4"])
def test_shards_of_a_block_may_be_kept_for_some_ranks(asked: str) -> None:
    """As the YAML says: a number of ranks in place of true or false."""
    keys = ("parallelism=fsdp", "world_size=4", f"parallelism.reshard_after_forward={asked}")
    resolved(*keys, "backend.device=cpu")
