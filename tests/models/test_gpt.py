"""The GPT is causal, sees distances only, ties its embeddings, and initialises part by part."""

import random
from fnmatch import fnmatchcase

import pytest
import torch
from configs import resolved
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_runner.config.instantiate import make
from ddp_runner.config.schema import CONFIG_DIR
from ddp_runner.models.gpt import GPT, ResidualLinear, rotary_table, rotate
from ddp_runner.train.losses import token_cross_entropy

# Parameters, from the formula: width x (rows + layers x (4 x width + 3 x feedforward + 2) + 1).
PRESETS = {
    "gpt": 885_888,
    "gpt_10m": 10_720_128,
    "gpt_124m": 123_587_328,
    "gpt_350m": 355_124_224,
    "gpt_1b": 1_176_832_000,
    "gpt_7b": 6_607_343_616,
}


@pytest.fixture(scope="module")
def model() -> GPT:
    """Return a small model in evaluation mode, whose attention is far from uniform."""
    torch.manual_seed(0)
    model = GPT(vocab_size=50, num_layers=2, width=32, num_heads=2).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5)
    return model.eval()


def draw_tokens(*shape: int) -> Tensor:
    """Return random tokens."""
    return torch.randint(50, shape, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def test_a_token_changes_no_earlier_logit(model: GPT) -> None:
    """It changes those from its own position on; the model would otherwise see its targets."""
    tokens = draw_tokens(3, 12)
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 50
    before, after = model(tokens), model(changed)
    assert before.shape == (3, 12, 50)
    torch.testing.assert_close(after[:, :7], before[:, :7], rtol=1e-12, atol=1e-12)
    differs = (after[:, 7:] - before[:, 7:]).abs().amax(dim=(0, 2))
    assert (differs > 1e-3).all()


@torch.no_grad()
def test_the_logits_are_those_of_attention_written_out(model: GPT) -> None:
    """Softmax over the past, by head, with the residual stream around it."""
    tokens = draw_tokens(2, 9)
    hidden, rotary = model.tokens(tokens), rotary_table(9, 16, tokens.device)
    past = torch.ones(9, 9).tril().bool()
    for block in model.blocks:
        normed, attention = block.attention_norm(hidden), block.attention
        query, key, value = (
            layer(normed).unflatten(-1, (2, 16)).movedim(2, 1)
            for layer in (attention.query, attention.key, attention.value)
        )
        scores = rotate(query, rotary) @ rotate(key, rotary).mT / 4
        weights = scores.masked_fill(~past, -torch.inf).softmax(dim=-1)
        hidden = hidden + attention.out((weights @ value).movedim(1, 2).flatten(-2))
        normed, mlp = block.mlp_norm(hidden), block.mlp
        hidden = hidden + mlp.down(F.silu(mlp.gate(normed)) * mlp.up(normed))
    expected = model.norm(hidden) @ model.tokens.weight.T
    torch.testing.assert_close(model(tokens), expected, rtol=1e-10, atol=1e-10)


def test_rotary_products_depend_on_the_distance_alone() -> None:
    """The same query and key, three tokens apart, give one product wherever they are."""
    features = torch.randn(2, 1, 1, 16, generator=torch.Generator().manual_seed(2))
    query, key = features.expand(2, 1, 64, 16)
    table = rotary_table(64, 16, torch.device("cpu"))
    products = (rotate(query, table) @ rotate(key, table).mT)[0]
    for distance in (0, 3, 20):
        found = products.diagonal(-distance)
        torch.testing.assert_close(found, found[:1].expand_as(found), rtol=1e-4, atol=1e-5)
    assert (products[3, 0] - products[0, 0]).abs() > 1e-2
    torch.testing.assert_close(rotate(query, table).norm(dim=-1), query.norm(dim=-1))


def test_the_output_layer_is_the_embedding() -> None:
    """It is one parameter, and its gradient has both parts."""
    model = GPT(vocab_size=50, num_layers=1, width=32, num_heads=2)
    assert [name for name, _ in model.named_parameters() if "blocks" not in name] == [
        "tokens.weight",
        "norm.weight",
    ]
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    token_cross_entropy(model(tokens), tokens).backward()
    gradient = model.tokens.weight.grad
    assert gradient is not None
    assert (gradient.abs().amax(dim=1) > 0).all()  # of all logits, not of token 0 alone


def test_weights_of_a_submodule_depend_on_its_seed_alone() -> None:
    """In any order of the calls, after a build on the meta device; and sizes are as documented."""
    names = ["tokens", "norm", "blocks.0.attention.out", "blocks.1.mlp.down", "blocks.1.mlp.up"]
    found = []
    for order in (names, names[::-1]):
        with torch.device("meta"):
            model = GPT(vocab_size=500, num_layers=2, width=64, num_heads=2)
        model.to_empty(device="cpu")
        for name in order:
            torch.manual_seed(names.index(name))
            model.init_weights(model.get_submodule(name))
        found.append({name: model.get_submodule(name).weight.detach() for name in names})
    for name in names:
        assert torch.equal(found[0][name], found[1][name])
    assert found[0]["norm"].eq(1).all()
    for name, std in (("tokens", 0.02), ("blocks.1.mlp.up", 0.02), ("blocks.1.mlp.down", 0.01)):
        assert found[0][name].std().item() == pytest.approx(std, rel=0.05)


def test_every_parameter_is_initialised_by_the_module_that_holds_it() -> None:
    """Called for each submodule, nothing of ``to_empty`` is left; for the root alone, all is."""
    with torch.device("meta"):
        model = GPT(vocab_size=50, num_layers=1, width=32, num_heads=2)
    model.to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        nn.init.constant_(tensor, torch.nan)
    model.init_weights(model)
    assert all(parameter.isnan().all() for parameter in model.parameters())
    for module in random.Random(0).sample(list(model.modules()), k=len(list(model.modules()))):
        model.init_weights(module)
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_size_of_its_name(name: str) -> None:
    """On the meta device, where even the largest takes no memory; a forward fits its shapes."""
    assert {path.stem for path in (CONFIG_DIR / "model").glob("gpt*.yaml")} == {*PRESETS}
    config, _ = resolved(f"model={name}")
    with torch.device("meta"):
        model = make("model", config.model)
        logits = model(torch.zeros(1, 8, dtype=torch.int64))
    assert sum(parameter.numel() for parameter in model.parameters()) == PRESETS[name]
    rows = max(256, config.model["min_vocab_size"])
    assert logits.shape == (1, 8, rows)
    if name != "gpt":
        count, unit = int(name[4:-1]), {"m": 1e6, "b": 1e9}[name[-1]]
        assert PRESETS[name] == pytest.approx(count * unit, rel=0.2)
    assert config.model["name"] == name
    assert (config.batch.count, list(config.metrics)) == ("tokens", ["perplexity"])


def test_the_yaml_names_all_blocks_and_all_projections() -> None:
    """Each block is named once, and each linear layer is split the way that its class needs."""
    keys = resolved("model=gpt")[0].model
    model = make("model", keys)
    modules = dict(model.named_modules())

    def matching(pattern: str) -> list[str]:
        depth = pattern.count(".")
        names = [name for name in modules if name.count(".") == depth]
        return [name for name in names if fnmatchcase(name, pattern)]

    (pattern,) = keys["blocks"]
    assert matching(pattern) == [f"blocks.{index}" for index in range(4)]
    styles = {
        name: style
        for pattern, style in keys["tensor_parallel"].items()
        for name in matching(pattern)
    }
    linear = {name: one for name, one in modules.items() if isinstance(one, nn.Linear)}
    assert {name: style for name, style in styles.items() if name in linear} == {
        name: "rowwise" if isinstance(one, ResidualLinear) else "colwise"
        for name, one in linear.items()
    }


def test_part_of_the_heads_is_computed_by_the_shapes_of_the_projections(model: GPT) -> None:
    """Attention over the first half of the heads plus the other half is that over all."""
    attention, table = model.blocks[0].attention, rotary_table(6, 16, torch.device("cpu"))
    hidden = torch.randn(2, 6, 32, dtype=torch.float64)
    with torch.no_grad():
        total = torch.zeros(2, 6, 32, dtype=torch.float64)
        for half in (slice(0, 16), slice(16, 32)):
            own = GPT(vocab_size=50, num_layers=1, width=32, num_heads=2).double().blocks[0]
            for name in ("query", "key", "value"):
                weight = getattr(attention, name).weight[half]
                getattr(own.attention, name).weight = nn.Parameter(weight)
            own.attention.out.weight = nn.Parameter(attention.out.weight[:, half])
            total += own.attention(hidden, table)
        torch.testing.assert_close(total, attention(hidden, table), rtol=1e-12, atol=1e-12)


def test_dropout_is_off_unless_it_is_asked_for() -> None:
    """In training mode, too; with it, two forwards differ in training alone."""
    tokens = draw_tokens(2, 8)
    for dropout in (0.0, 0.5):
        model = GPT(vocab_size=50, num_layers=1, width=32, num_heads=2, dropout=dropout)
        assert torch.equal(model(tokens), model(tokens)) == (dropout == 0)
        model.eval()
        assert torch.equal(model(tokens), model(tokens))


@pytest.mark.parametrize(("width", "num_heads", "fix"), [(30, 4, 24), (12, 4, 8), (2, 4, 8)])
def test_sizes_that_do_not_fit_are_named(width: int, num_heads: int, fix: int) -> None:
    """Each head has pairs of features."""
    with pytest.raises(ValueError, match=rf"model.width \({width}\).*; use {fix}"):
        GPT(vocab_size=8, width=width, num_heads=num_heads)
    GPT(vocab_size=8, width=fix, num_heads=num_heads)


def test_the_loss_is_summed_over_the_tokens_that_count() -> None:
    """Targets of -100 do not; other shapes are rejected."""
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(3))
    targets = torch.tensor([[0, 4, -100], [1, 2, 3]])
    expected = -sum(
        logits[row, place].log_softmax(0)[targets[row, place]]
        for row in range(2)
        for place in range(3)
        if targets[row, place] >= 0
    )
    torch.testing.assert_close(token_cross_entropy(logits, targets), expected)
    with pytest.raises(ValueError, match=r"not \(2, 3, 5\) and \(2,\)"):
        token_cross_entropy(logits, targets[:, 0])
