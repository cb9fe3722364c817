"""Keys of fsdp, hsdp and tp that do not fit are one line, before torch is imported."""

import pytest
from configs import config_error, resolved

from ddp_runner.host.hardware import Hardware

GPT_TP = "model=gpt parallelism=tp"


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
