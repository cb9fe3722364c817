"""torchvision's image classifiers, for any number of classes and channels and for small images."""

import difflib
from collections.abc import Mapping
from typing import Any

from torch import nn


def classifier(
    *,
    architecture: str,  # a name in https://docs.pytorch.org/vision/stable/models.html
    num_classes: int,
    in_channels: int,
    small_images: bool,
    options: Mapping[str, Any] | None = None,  # keywords of torchvision's builder
) -> nn.Module:
    """Return an untrained model from (batch, in_channels, height, width) to (batch, num_classes).

    It is torchvision's module, with its parameter names. A replaced first convolution has PyTorch's
    default initial weights. With `small_images` the model begins with a 3x3 convolution of stride 1
    and no max-pooling, the usual form for images of 32x32 pixels (arXiv:2002.05709, B.9).

    Raises:
        ValueError: the architecture is unknown, or it cannot be changed in this way.
    """
    from torchvision import models  # slow to import

    names = models.list_models(module=models)
    if architecture not in names:
        near = difflib.get_close_matches(architecture, names, n=3) or ["resnet18"]
        raise ValueError(
            f"architecture {architecture} is not one of torchvision's {len(names)} image "
            f"classifiers; did you mean {' or '.join(near)}?"
        )
    model: nn.Module = models.get_model(
        architecture, weights=None, num_classes=num_classes, **(options or {})
    )
    if getattr(model, "aux_logits", False):
        raise ValueError(
            f"architecture {architecture} has auxiliary outputs in training; write "
            "model.options={aux_logits:false,init_weights:true}"
        )
    if in_channels != 3 or small_images:
        _replace_first_convolution(model, architecture, in_channels, small_images=small_images)
    return model


def _replace_first_convolution(
    model: nn.Module, architecture: str, in_channels: int, *, small_images: bool
) -> None:
    modules = dict(model.named_modules())
    name, first = next(item for item in modules.items() if isinstance(item[1], nn.Conv2d))
    shape = {key: getattr(first, key) for key in ("kernel_size", "stride", "padding")}
    if small_images:
        if first.kernel_size == first.stride:
            raise ValueError(
                f"architecture {architecture} cuts an image into patches of "
                f"{first.kernel_size[0]} pixels and has no small_images form; write "
                "model.small_images=false"
            )
        shape = {"kernel_size": 3, "stride": 1, "padding": 1}
        for pool in {"maxpool", "features.pool0"} & modules.keys():  # ResNet and DenseNet
            model.set_submodule(pool, nn.Identity())
    convolution = nn.Conv2d(in_channels, first.out_channels, bias=first.bias is not None, **shape)
    model.set_submodule(name, convolution)
