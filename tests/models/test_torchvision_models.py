"""torchvision's classifiers for any images; models that do not fit the dataset are one line."""

import pytest
import torch
from configs import config_error, resolved
from tiers import first_of

from ddp_runner.config.instantiate import make
from ddp_runner.errors import UserError
from ddp_runner.models.torchvision_models import classifier

# architecture, its keys, the side of an image in pixels: one of each family
FAMILIES = [
    ("resnet18", {}, 28),
    ("resnet18", {"small_images": True}, 28),
    ("mobilenet_v3_small", {}, 28),
    ("mobilenet_v3_small", {"small_images": True}, 28),
    ("alexnet", {"small_images": True}, 32),
    ("vgg11", {}, 32),
    ("squeezenet1_1", {}, 28),
    ("densenet121", {"small_images": True}, 28),
    ("efficientnet_b0", {}, 28),
    ("shufflenet_v2_x0_5", {}, 28),
    ("mnasnet0_5", {}, 28),
    ("convnext_tiny", {}, 32),
    ("swin_t", {}, 32),
    ("vit_b_16", {"options": {"image_size": 32}}, 32),
]


@pytest.mark.parametrize("in_channels", first_of([1, 3]))
@pytest.mark.parametrize(("architecture", "keys", "side"), first_of(FAMILIES, num_quick=4))
def test_each_family_takes_any_channels_and_classes(
    architecture: str, keys: dict[str, bool], side: int, in_channels: int
) -> None:
    """Images with 1 or 3 channels give 7 logits each."""
    settings = {"small_images": False, **keys}
    with torch.device("meta"):  # only shapes matter
        model = classifier(
            architecture=architecture, num_classes=7, in_channels=in_channels, **settings
        )
        assert model(torch.zeros(2, in_channels, side, side)).shape == (2, 7)


def test_an_unchanged_architecture_is_torchvisions_own() -> None:
    """The same weights from the same seed, under the same names."""
    from torchvision.models import resnet18

    torch.manual_seed(3)
    expected = resnet18(num_classes=7).state_dict()
    torch.manual_seed(3)
    model = classifier(architecture="resnet18", num_classes=7, in_channels=3, small_images=False)
    found = model.state_dict()
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize(
    ("architecture", "body", "sides"),
    first_of(
        [
            ("resnet18", "layer4", [2, 8]),
            ("densenet121", "features", [2, 8]),
            ("mobilenet_v3_small", "features", [2, 4]),
        ]
    ),
)
def test_small_images_stay_larger(architecture: str, body: str, sides: list[int]) -> None:
    """With stride 1 at the start and no max-pooling, 64 pixels become 8 and not 2."""
    found: list[int] = []
    for small in (False, True):
        with torch.device("meta"):
            model = classifier(
                architecture=architecture, num_classes=2, in_channels=1, small_images=small
            )
            features = model.get_submodule(body)
            features.register_forward_hook(lambda *call: found.append(call[2].shape[-1]))
            model(torch.zeros(2, 1, 64, 64))
    assert found == sides


@pytest.mark.filterwarnings("ignore:The default weight initialization of GoogleNet")
@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"architecture": "resnet19"}, "did you mean resnet18 or"),
        ({"architecture": "fasterrcnn_resnet50_fpn"}, "is not one of torchvision's"),
        ({"options": {"colour": 1}}, "unexpected keyword argument 'colour'"),
        *first_of(
            [
                ({"architecture": "googlenet"}, "googlenet has auxiliary outputs in training"),
                ({"architecture": "vit_b_32", "small_images": True}, "vit_b_32 cuts an image"),
            ],
            num_quick=0,
        ),
    ],
)
def test_what_does_not_work_is_rejected_in_one_line(keys: dict[str, object], sentence: str) -> None:
    """The line has the architecture and the fix."""
    settings = resolved("model=resnet18")[0].model
    settings = {key: settings[key] for key in ("_target_", "architecture", "small_images")}
    with pytest.raises(UserError) as caught:
        make("model", {**settings, "num_classes": 2, "in_channels": 1, **keys})
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "model", first_of(["resnet18", "convnet", "mnist_net", "mobilenet_v3_small"])
)
def test_a_model_follows_the_dataset(model: str) -> None:
    """Classes and channels come from the dataset, unless the user sets them."""
    for dataset, expected in (("cifar100", (100, 3)), ("fashion_mnist", (10, 1))):
        keys = resolved(f"model={model}", f"dataset={dataset}")[0].model
        assert (keys["num_classes"], keys["in_channels"]) == expected
    shape = ("dataset=fake_images", "dataset.num_classes=4", "dataset.channels=5")
    keys = resolved(f"model={model}", *shape)[0].model
    assert (keys["num_classes"], keys["in_channels"]) == (4, 5)
    assert resolved(f"model={model}", "model.num_classes=1000")[0].model["num_classes"] == 1000


@pytest.mark.parametrize("model", ["convnet", "mnist_net"])
@pytest.mark.parametrize("side", first_of([17, 28, 32]))
def test_the_tutorials_networks_take_images_of_other_sizes(model: str, side: int) -> None:
    """Features of other sizes are averaged to those of 28x28."""
    keys = resolved(f"model={model}", "dataset=cifar10")[0].model
    used = ("_target_", "num_classes", "in_channels")
    net = make("model", {key: keys[key] for key in used})
    assert net(torch.randn(2, 3, side, side)).shape == (2, 10)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ("model.in_channels=3", "model.in_channels (3) differs from dataset.channels (1); leave"),
        ("model.num_classes=9", "model.num_classes (9) is less than dataset.num_classes (10); le"),
        ("dataset=random", "model.num_classes comes from dataset.num_classes, which this dataset"),
    ],
)
def test_a_model_that_does_not_fit_the_dataset_is_rejected(overrides: str, sentence: str) -> None:
    """One line, before anything starts."""
    assert config_error(*overrides.split()).startswith(sentence)
