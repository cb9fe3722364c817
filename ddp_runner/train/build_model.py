"""Builds a run's model on a rank's devices, with its starting weights."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ddp_runner.checkpoint.weights import Weights, load_weights
from ddp_runner.config.instantiate import find, keywords, make
from ddp_runner.config.schema import Config, RunConfig, mode_needs
from ddp_runner.errors import UserError
from ddp_runner.parallelism.mode import Mode
from ddp_runner.parallelism.modules import blocks_of, build_by_modules
from ddp_runner.parallelism.shards import has_shards
from ddp_runner.parallelism.single import Single
from ddp_runner.parallelism.stages import whole_parameters
from ddp_runner.rank.session import make_mode
from ddp_runner.train.optimizers import freeze
from ddp_runner.train.state import Work


def build_module(work: Work, *, weights: Weights | None) -> nn.Module:
    """Return the bare model to train, with rank 0's weights. Collective: every rank must call.

    Raises:
        UserError: the weights do not fit, all parameters are frozen, or
            ``train.activation_checkpointing`` has no blocks.
    """
    config = work.config
    module = place_model(config, work.mode, work.dataset.model_arguments, work.devices)
    freeze(module, config.params.freeze)
    if not any(parameter.requires_grad for parameter in whole_parameters(module).values()):
        raise UserError(
            f"model={config.model.get('name')} has no parameter that requires a gradient, so there "
            "is nothing to train",
            "unfreeze some, or choose another model",
        )
    if config.model.get("weights") is not None:
        load_weights(module, weights)
    if config.train.activation_checkpointing:
        _checkpoint_blocks(module, config)
    return module


def _checkpoint_blocks(module: nn.Module, config: RunConfig) -> None:
    """Let each block keep only its inputs, and compute its activations again in the backward.

    Source: https://docs.pytorch.org/docs/stable/checkpoint.html
    """
    patterns = config.model.get("blocks") or ()
    if not patterns:
        raise UserError(
            f"train.activation_checkpointing=true computes the blocks of a model twice, and "
            f"model={config.model.get('name')} names none",
            "write +model.blocks=[PATTERN], such as [layers.*], or leave it out",
        )
    for block in blocks_of(module, patterns):
        # Set on the instance: a wrapper module would change the parameters' names.
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def model_factory(
    config: Config, facts: Mapping[str, Any], **arguments: Any
) -> Callable[..., nn.Module]:
    """Return a function that builds the config's model; its arguments are the stages' devices.

    The model gets the `arguments`, and the `facts` of the data that its constructor names.

    Raises:
        UserError: the model's target is not allowed, or does not exist.
    """
    allowed = config.allowed_targets
    names = keywords(find(config.model.get("_target_"), key="model._target_", allowed=allowed))
    arguments |= {name: value for name, value in facts.items() if name in names}
    build = partial(make, "model", config.model, kind=nn.Module, allowed=allowed, **arguments)
    return partial(build_by_modules, build) if config.model.get("meta_init") else build


def place_alone(config: Config, facts: Mapping[str, Any], device: torch.device) -> nn.Module:
    """Return the bare, whole model on a single device, for a process without other ranks."""
    num_devices = mode_needs(config.parallelism).devices_per_rank
    mode = make_mode(config) if num_devices > 1 else Single("single")
    return place_model(config, mode, facts, (device,) * num_devices)


def place_model(
    config: Config,
    mode: Mode,
    facts: Mapping[str, Any],
    devices: Sequence[torch.device],
    **arguments: Any,
) -> nn.Module:
    """Return the bare model on its devices; for the arguments see ``model_factory``."""
    module = mode.place(model_factory(config, facts, **arguments), devices)
    if config.model.get("channels_last") and not has_shards(module):
        module = module.to(memory_format=torch.channels_last)
    elif config.model.get("channels_last"):
        # Shards are contiguous, so the inputs decide how a convolution computes.
        for part in module.modules():
            if isinstance(part, nn.Conv2d | nn.ConvTranspose2d):
                part.register_forward_pre_hook(_to_channels_last)
    return module


def _to_channels_last(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return a convolution's input in the format channels last, also where it has one pixel."""
    images, *others = inputs
    if images.ndim == 4:
        images = images.to(memory_format=torch.channels_last)
    return images, *others
