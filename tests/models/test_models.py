"""Models compute what their sources define, split or whole; losses are sums."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_runner.errors import UserError
from ddp_runner.models.convnet import ConvNet, ConvNetMp
from ddp_runner.models.mnist_net import MpNet, Net
from ddp_runner.models.toy import ToyModel, ToyMpModel
from ddp_runner.train import losses

CPU = torch.device("cpu")
META = torch.device("meta")


@dataclass(frozen=True)
class Pair:
    """A model, its split form, its input and output shapes and its first stage's layers."""

    whole: Callable[..., nn.Module]
    split: Callable[..., nn.Module]
    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    stage0: tuple[str, ...]


PAIRS = {
    "toy": Pair(ToyModel, ToyMpModel, (20, 10), (20, 5), ("net1.",)),
    "convnet": Pair(ConvNet, ConvNetMp, (4, 1, 28, 28), (4, 10), ("layer1.",)),
    "mnist_net": Pair(Net, MpNet, (4, 1, 28, 28), (4, 10), ("conv1.", "conv2.")),
}


@pytest.fixture(params=PAIRS)
def pair(request: pytest.FixtureRequest) -> Pair:
    """Return each model with its split form."""
    return PAIRS[request.param]


def seeded(build: Callable[..., nn.Module], **kwargs: object) -> nn.Module:
    """Return the model, built after the seed that all tests share."""
    torch.manual_seed(0)
    return build(**kwargs)


def outputs_and_gradients(
    model: nn.Module, inputs: Tensor, function: Callable[[Tensor], Tensor] | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return outputs and parameter gradients of ``function``, or of the model, in train mode."""
    model.train().zero_grad()
    torch.manual_seed(1)  # dropout
    outputs = (function or model)(inputs)
    outputs.square().sum().backward()
    return outputs.detach(), {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def assert_same_step(
    left: tuple[Tensor, dict[str, Tensor]], right: tuple[Tensor, dict[str, Tensor]]
) -> None:
    """Assert that outputs and gradients are equal bit for bit."""
    torch.testing.assert_close(left, right, rtol=0, atol=0)


def test_outputs_have_the_documented_shape(pair: Pair) -> None:
    """The batch size stays, with one output per class or feature."""
    outputs = seeded(pair.whole)(torch.randn(pair.input_shape))
    assert outputs.shape == pair.output_shape


def test_split_model_starts_from_the_whole_models_weights(pair: Pair) -> None:
    """Equal seeds give equal state dicts, key by key and in the same order."""
    whole = seeded(pair.whole).state_dict()
    split = seeded(pair.split, dev0=CPU, dev1=CPU).state_dict()
    assert list(whole) == list(split)
    torch.testing.assert_close(dict(split), dict(whole), rtol=0, atol=0)


def test_split_model_takes_the_whole_models_step(pair: Pair) -> None:
    """Outputs and gradients of the split model equal the whole model's, dropout included."""
    inputs = torch.randn(pair.input_shape)
    whole, split = seeded(pair.whole), seeded(pair.split, dev0=CPU, dev1=CPU)
    step = outputs_and_gradients(whole, inputs)
    assert set(step[1]) == {name for name, _ in whole.named_parameters()}
    assert_same_step(outputs_and_gradients(split, inputs), step)


def test_stages_lie_on_their_own_devices(pair: Pair) -> None:
    """The first stage's tensors are on dev0 and all others on dev1."""
    for dev0, dev1 in ((CPU, META), (META, CPU)):
        state = seeded(pair.split, dev0=dev0, dev1=dev1).state_dict()
        for name, tensor in state.items():
            assert tensor.device == (dev0 if name.startswith(pair.stage0) else dev1), name


def test_forward_moves_activations_to_the_second_device(pair: Pair) -> None:
    """Inputs on the first device give outputs on the second."""
    model = seeded(pair.split, dev0=CPU, dev1=META)
    assert model(torch.randn(pair.input_shape)).device == META


def test_toy_is_the_tutorials_model() -> None:
    """ToyModel is Linear(10, 10), ReLU, Linear(10, 5)."""
    model, inputs = ToyModel(), torch.randn(20, 10)
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == {
        "net1.weight": (10, 10),
        "net1.bias": (10,),
        "net2.weight": (5, 10),
        "net2.bias": (5,),
    }
    torch.testing.assert_close(model(inputs), model.net2(model.net1(inputs).clamp(min=0)))


def test_convnet_has_the_tutorials_parameters() -> None:
    """Names, shapes and creation order are those of the tutorials' ConvNet."""
    assert [(name, tuple(p.shape)) for name, p in ConvNet().named_parameters()] == [
        ("layer1.0.weight", (16, 1, 5, 5)),
        ("layer1.0.bias", (16,)),
        ("layer1.1.weight", (16,)),
        ("layer1.1.bias", (16,)),
        ("layer2.0.weight", (32, 16, 5, 5)),
        ("layer2.0.bias", (32,)),
        ("layer2.1.weight", (32,)),
        ("layer2.1.bias", (32,)),
        ("fc.weight", (10, 7 * 7 * 32)),
        ("fc.bias", (10,)),
    ]


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_convnet_equals_the_tutorials_order_of_layers(memory_format: torch.memory_format) -> None:
    """Max-pool before ReLU gives the outputs and gradients of ReLU before max-pool."""
    model = ConvNet()
    model.to(memory_format=memory_format)
    images = torch.randn(8, 1, 28, 28).to(memory_format=memory_format)

    def tutorial(images: Tensor) -> Tensor:
        for conv, norm in (model.layer1[:2], model.layer2[:2]):
            images = F.max_pool2d(F.relu(norm(conv(images))), 2)
        logits: Tensor = model.fc(images.flatten(1))
        return logits

    assert_same_step(
        outputs_and_gradients(model, images), outputs_and_gradients(model, images, tutorial)
    )


def test_mnist_net_equals_the_examples_order_of_layers() -> None:
    """Net gives the outputs and gradients of the MNIST example's forward."""
    model, images = Net(), torch.randn(8, 1, 28, 28)

    def example(x: Tensor) -> Tensor:
        x = F.relu(model.conv2(F.relu(model.conv1(x))))
        x = torch.flatten(model.dropout1(F.max_pool2d(x, 2)), 1)
        x = model.dropout2(F.relu(model.fc1(x)))
        return F.log_softmax(model.fc2(x), dim=1)

    assert_same_step(
        outputs_and_gradients(model, images), outputs_and_gradients(model, images, example)
    )


def test_model_options_reach_the_layers() -> None:
    """Classes, channels and dropout probabilities are the configured ones, split or whole."""
    images = torch.randn(2, 3, 28, 28)
    assert ConvNet(num_classes=7, in_channels=3)(images).shape == (2, 7)
    assert ConvNetMp(num_classes=7, in_channels=3, dev0=CPU, dev1=CPU)(images).shape == (2, 7)
    for net in (
        Net(num_classes=7, dropout1=0.1, dropout2=0.2),
        MpNet(num_classes=7, dropout1=0.1, dropout2=0.2, dev0=CPU, dev1=CPU),
    ):
        assert (net.dropout1.p, net.dropout2.p) == (0.1, 0.2)
        assert net(images[:, :1]).shape == (2, 7)


def test_losses_are_torchs_mean_times_the_samples() -> None:
    """Each loss is a sum, so the halves of a batch add up to the whole."""
    logits, classes = torch.randn(6, 10), torch.randint(10, (6,))
    values, goals = torch.randn(6, 5), torch.randn(6, 5)
    cases = (
        (losses.cross_entropy, nn.CrossEntropyLoss(), logits, classes),
        (losses.nll, nn.NLLLoss(), logits.log_softmax(1), classes),
        (losses.mse, nn.MSELoss(), values, goals),
        (losses.mse, nn.MSELoss(), values[:, 0], goals[:, 0]),
    )
    for loss, torch_mean, outputs, targets in cases:
        total = loss(outputs, targets)
        torch.testing.assert_close(total, torch_mean(outputs, targets) * 6)
        parts = loss(outputs[:1], targets[:1]) + loss(outputs[1:], targets[1:])
        torch.testing.assert_close(parts, total)


def test_mse_rejects_shapes_that_torch_would_broadcast() -> None:
    """Outputs (6, 1) against targets (6,) are an error, not a 6x6 comparison."""
    with pytest.raises(UserError, match=r"\(6, 1\) and \(6,\)"):
        losses.mse(torch.zeros(6, 1), torch.zeros(6))
