"""How many operations a step has: exact, or unknown with a reason, and counted without a trace."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, library, nn
from torch.nn.functional import normalize, scaled_dot_product_attention
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from ddp_runner.train.flops import FlopCounter, has_compiled

LINEAR = 2 * 5 * 3 * 4  # a product of (5, 3) and (3, 4): multiplications and additions


def counted(loss: Callable[[], Tensor]) -> FlopCounter:
    """Count a loss and its gradients."""
    counter = FlopCounter()
    with counter.counting(num_samples=1):
        loss().backward()
    return counter


def same_padded(channels: int, *, groups: int) -> nn.Conv2d:
    """Return kernels of 3 x 3 that keep the size of a picture."""
    return nn.Conv2d(channels, channels, 3, padding=1, groups=groups)


PICTURES = torch.ones(2, 8, 5, 5, requires_grad=True)


@pytest.mark.parametrize(
    ("module", "inputs", "expected"),
    [
        (nn.Linear(3, 4), torch.ones(5, 3), 2 * LINEAR),  # forward, and the weights' gradients
        # The second layer also has its inputs' gradients.
        (
            nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)),
            torch.ones(5, 3),
            2 * LINEAR + 3 * 2 * 5 * 4 * 2,
        ),
        (weight_norm(nn.Linear(3, 4)), torch.ones(5, 3), 2 * LINEAR),
        # 2 x 2 kernels of 3 channels, at 4 x 4 places of 6 channels.
        (nn.Conv2d(3, 6, 2), torch.ones(1, 3, 5, 5), 2 * 2 * (3 * 2 * 2) * (6 * 4 * 4)),
        # Each channel sees those of its group only: in the forward, and for both gradients.
        (same_padded(8, groups=1), PICTURES, 3 * 2 * (2 * 5 * 5) * 8 * 8 * 9),
        (same_padded(8, groups=2), PICTURES, 3 * 2 * (2 * 5 * 5) * 8 * 4 * 9),
        (same_padded(8, groups=8), PICTURES, 3 * 2 * (2 * 5 * 5) * 8 * 9),
        (nn.ConvTranspose2d(8, 4, 3, groups=2), PICTURES, 3 * 2 * (2 * 5 * 5) * 8 * 2 * 9),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_operations_are_counted(module: nn.Module, inputs: Tensor, expected: int) -> None:
    """As by hand; a norm beside them is no product."""
    assert counted(lambda: module(inputs).sum()).flops == expected
    assert counted(lambda: normalize(module(inputs)).sum()).flops == expected


def test_what_nothing_multiplies_or_has_no_formula_is_unknown() -> None:
    """Better no count than one that is too low; the reason names the operator."""
    lstm, bilinear = nn.LSTM(3, 4), nn.Bilinear(3, 3, 4)
    embedding, ones = nn.Embedding(3, 4), torch.ones(5, 1, 3)
    weights = torch.ones(3, 3, dtype=torch.complex64, requires_grad=True)
    linear, sparse = nn.Linear(3, 4), torch.eye(3).to_sparse()
    solved = torch.ones(3, 1, requires_grad=True)
    nested = torch.nested.nested_tensor([ones[0], ones[1]], layout=torch.jagged)
    unknown: dict[str, Callable[[], Tensor]] = {
        "rnn_layer has no formula": lambda: torch.sum(lstm(ones)[0]),
        "trilinear has no formula": lambda: bilinear(ones, ones).sum(),
        "multiplies nothing": lambda: embedding(torch.tensor([1])).sum(),
        "mm multiplies complex numbers": lambda: (weights @ weights).abs().sum(),
        "mm multiplies sparse tensors": lambda: torch.sum(sparse @ weights.real),
        "cholesky_solve has no formula": lambda: torch.cholesky_solve(solved, torch.eye(3)).sum(),
        "NestedTensor is no plain tensor": lambda: linear(nested).values().sum(),
    }
    for reason, loss in unknown.items():
        counter = counted(loss)
        assert counter.flops is None
        assert reason in counter.why_unknown


def test_attention_is_counted() -> None:
    """A transformer's attention is a large part of it; on a CPU it is an operator of its own."""
    linear = nn.Linear(8, 8, bias=False)

    def loss() -> Tensor:
        projected = linear(torch.ones(1, 1, 6, 8))
        return scaled_dot_product_attention(projected, projected, projected).sum()

    linear_flops, product = 2 * 2 * 6 * 8 * 8, 2 * 6 * 6 * 8
    flops = counted(loss).flops
    assert flops is not None
    # Two products forward; backward four, and the scores once more if they were not kept.
    assert (flops - linear_flops) / product in (6, 7)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_what_checkpointing_computes_twice_counts_once(use_reentrant: bool) -> None:
    """Utilisation is of what the model needs; the gradients of gradients are a part of that."""
    module = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    inputs = torch.ones(5, 4, requires_grad=True)

    def penalized() -> Tensor:
        (gradient,) = torch.autograd.grad(module(inputs).sum(), inputs, create_graph=True)
        return gradient.square().sum()

    product = 2 * 5 * 4 * 4
    assert counted(lambda: module(inputs).sum()).flops == 6 * product
    checkpointed = counted(lambda: checkpoint(module, inputs, use_reentrant=use_reentrant).sum())
    assert checkpointed.flops == 6 * product
    # Forward 2, and 2 for the inputs' gradient. Its own gradients: 2 through the first layer, 1 for
    # the second one's weights, and 2 through the activation for the first layer and the inputs.
    assert counted(penalized).flops == 9 * product


def test_a_kernel_of_somebody_has_no_formula() -> None:
    """It may be the attention of another library, so the count would be too low."""

    @library.custom_op("flops_test::double", mutates_args=())
    def double(inputs: Tensor) -> Tensor:
        return inputs * 2

    double.register_autograd(lambda _, gradient: gradient * 2)
    linear = nn.Linear(3, 3)
    assert counted(lambda: linear(torch.ones(1, 3)).sum()).flops
    counter = counted(lambda: double(linear(torch.ones(1, 3))).sum())
    assert counter.flops is None
    assert counter.why_unknown == "flops_test.double has no formula"


def test_counting_is_over_after_its_block() -> None:
    """What is computed later adds nothing, and an error within leaves nothing behind."""
    linear, counter = nn.Linear(3, 4), FlopCounter()
    assert not counter.is_over
    with pytest.raises(RuntimeError), counter.counting(num_samples=5):
        linear(torch.ones(5, 2))
    assert counter.is_over
    linear(torch.ones(5, 3)).sum().backward()
    assert counter.flops is None
    assert counter.num_samples == 5


@pytest.mark.full
def test_compiled_code_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """To count would run it uncompiled for one step, with other rounding."""
    from torch._dynamo.utils import counters

    monkeypatch.setitem(counters["frames"], "ok", 0)
    assert not has_compiled()
    torch.compile(lambda inputs: inputs + 1, backend="eager")(torch.ones(1))
    assert has_compiled()
