"""Which keys a class takes is read from its source: a wrong one is answered before torch."""

import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from configs import compose_raw, config_error, resolved
from omegaconf import OmegaConf
from torch.optim import lr_scheduler

from ddp_runner.config.instantiate import keywords
from ddp_runner.config.load import to_config
from ddp_runner.config.schema import CONFIG_DIR
from ddp_runner.config.signatures import ANY, source_keywords
from ddp_runner.config.validate import validate_values

SOURCE = """
import functools
from dataclasses import dataclass
from typing import Protocol
from . import others as more
from .others import Renamed as Base, helper
from third_party import *

class Plain:
    def __init__(self, a, *, b=2): ...

class Child(Base):
    size = 3

class Inner(more.Renamed): ...
class Mixed(Plain, Base): ...
class Mixin: ...
class Named(NamedTuple):
    a: int
class Table(dict): ...
class Late(Mixin, Base): ...

@dataclass(frozen=True)
class Fields(Protocol):
    a: int
    b: int = 3

@dataclass
class More(Fields):
    unit: ClassVar[str]
    c: int = 4

class Any(Plain):
    def __init__(self, **kwargs): ...

@functools.cache
class Decorated:
    def __init__(self, a): ...

if True:
    def branch(a, b): ...
else:
    def branch(a): ...

computed = functools.partial(branch, a=1)

@functools.cache
def cached(a): ...
"""
OTHERS = "class Renamed:\n    def __new__(cls, root, train): ...\ndef helper(x, *rest, y): ...\n"
EXPECTED: dict[str, set[str]] = {
    "Plain": {"a", "b"},
    "Child": {"root", "train"},
    "Inner": {"root", "train"},
    "Mixed": {"a", "b"},
    "Late": {"root", "train"},
    "Fields": {"a", "b"},
    "More": {"a", "b", "c"},
    "Any": {ANY},
    "Mixin": set(),
    "Named": {ANY},
    "Table": {ANY},
    "helper": {"x", "y"},
    "branch": {"a", "b"},
    "Decorated": {ANY},
    "computed": {ANY},
    "cached": {ANY},
    "unheard_of": {ANY},  # it may come from the star
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a package of the user's, which must not be imported."""
    folder = tmp_path / "shapes" / "parts"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(f"{SOURCE}\nraise RuntimeError")
    (folder / "others.py").write_text(OTHERS)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "shapes.parts"


@pytest.mark.parametrize("name", EXPECTED)
def test_the_source_says_which_keywords_there_are(name: str, package: str) -> None:
    """Or that it does not say, and then the rank asks the object."""
    assert {*source_keywords(f"{package}.{name}")} == EXPECTED[name]
    assert package not in sys.modules


@pytest.mark.parametrize(
    "source",
    [
        "import torch\nclass Mine(torch.optim.SGD): ...",
        "import torch.optim as optimizers\nclass Mine(optimizers.SGD): ...",
        "from torch import optim\nclass Mine(optim.SGD): ...",
        "from torch import optim as o\nclass Mine(o.SGD): ...",
        "from torch.optim import SGD\nclass Mine(SGD): ...",
    ],
)
def test_a_base_class_may_be_named_through_its_module(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most optimizers and models of users are written this way."""
    (tmp_path / "mine_by_base.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    keywords = source_keywords("mine_by_base.Mine")
    assert {"params", "lr", "momentum"} <= {*keywords}


def test_the_source_says_which_kind_a_key_has(package: str, tmp_path: Path) -> None:
    """A plain one, which may be null; those of a dataclass's bases, which it may change."""
    (tmp_path / "shapes" / "parts" / "kinds.py").write_text(
        "from dataclasses import dataclass\n"
        "@dataclass\nclass A:\n    a: int\n    b: 'int'\n    c: float | None = None\n"
        "@dataclass\nclass B(A):\n    a: str\n    d: bool | int = 1\n"
        "def f(a: bool, b: list[int], *, c: None | str, d=3): ...\n"
    )
    a, b, f = (
        {key: one.kind for key, one in source_keywords(f"{package}.kinds.{name}").items()}
        for name in "ABf"
    )
    assert a == {"a": int, "b": None, "c": float}
    assert b == {"a": str, "b": None, "c": float, "d": None}
    assert f == {"a": bool, "b": None, "c": str, "d": None}


@pytest.mark.parametrize(
    ("name", "required"),
    [
        ("Plain", {"a"}),
        ("More", {"a"}),
        ("Any", set()),
        ("Mixed", set()),  # another base may count
        ("branch", {"a", "b"}),
        ("others.helper", {"x", "y"}),
    ],
)
def test_the_source_says_which_keys_must_be_given(
    name: str, required: set[str], package: str
) -> None:
    """They are those without a default."""
    found = source_keywords(f"{package}.{name}")
    assert {key for key, one in found.items() if one.is_required} == required


def test_a_model_is_given_all_that_its_class_needs(package: str, tmp_path: Path) -> None:
    """Else the command says so; the runner itself gives facts of the data, and devices."""
    (tmp_path / "shapes" / "parts" / "nets.py").write_text(
        "class Net:\n"
        "    def __init__(self, width, *, depth, dev0, vocab_size, padding_id, bias=True): ...\n"
    )
    keys = (f"model._target_={package}.nets.Net", "~model.in_channels", "~model.num_classes")
    answer = config_error(*keys, "+model.depth=3")
    assert answer == (
        f"model gives no width, which {package}.nets.Net needs; put it into the YAML, or write "
        "+model.width=VALUE"
    )
    validate_values(to_config(compose_raw(*keys, "task=predict")))  # its run has what was given
    config, _ = resolved(*keys, "+model.depth=3", "+model.width=3", "~model.name")
    assert config.model["name"] == "net"
    lacking = f"+metrics.mine={{_target_:{package}.nets.Net,width:3}}"
    assert config_error(lacking).startswith("metrics.mine gives no depth, which")


def test_a_name_that_its_module_does_not_have_is_an_error(package: str) -> None:
    """With the one that is near."""
    with pytest.raises(ImportError, match=r"did you mean shapes\.parts\.others\.helper\?"):
        source_keywords(f"{package}.others.helpr")
    assert {*source_keywords("there.is.none")} == {ANY}  # ``plan`` reports missing packages


@pytest.mark.parametrize("path", [*CONFIG_DIR.glob("optimizer/*"), *CONFIG_DIR.glob("scheduler/*")])
def test_of_our_own_options_the_source_is_right(path: Path) -> None:
    """As the object itself says."""
    name = OmegaConf.load(path)["_target_"]
    module, _, word = name.rpartition(".")
    assert {*source_keywords(name)} == keywords(getattr(import_module(module), word))


def test_every_optimizer_and_scheduler_of_torch_has_its_option() -> None:
    """By its lower-case name; a new one shows up here."""
    for group, module, kind in (
        ("optimizer", torch.optim, torch.optim.Optimizer),
        ("scheduler", lr_scheduler, lr_scheduler.LRScheduler),
    ):
        classes = [one for one in vars(module).values() if isinstance(one, type)]
        names = {one.__name__.lower() for one in classes if issubclass(one, kind)}
        public = {name for name in names if name[0] != "_"} - {kind.__name__.lower()}
        assert public <= {path.stem for path in (CONFIG_DIR / group).glob("*.yaml")}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("model=toy", "+dataset.eval_sample=3"), "did you mean dataset.eval_samples?"),
        (("metrics=[top_k]", "+metrics.top_k.n=3"), "metrics.top_k.n is not a keyword of"),
        (("dataset.augmentation.crop=1",), "dataset.augmentation.crop"),
        (("train.step={_target_:ddp_runner.train.step.supervised,target:x}",),
         "train.step.target is not a keyword of ddp_runner.train.step.supervised; did you mean "
         "train.step.targets?"),
        (("train.step={_target_:ddp_runner.train.step.supervised,targets:3}",),
         "train.step.targets (3) must be a text"),
        (("dataset=mnist", "dataset.eval.download=perhaps"),
         "dataset.eval.download (perhaps) must be true or false"),
        (("model=gpt", "model.num_layers=-1"), "model.num_layers (-1) must be 0 or greater"),
        (("scheduler=exponentiallr", "scheduler.gamma=-0.5"), "(-0.5) must be 0 or greater"),
        (("model.num_stages=x",), "model.num_stages (x) must be a whole number"),
        (("model.loss=null",), "model.loss is null or deleted"),
    ],
)  # fmt: skip
def test_a_wrong_key_is_named_with_the_right_one(words: tuple[str, ...], sentence: str) -> None:
    """This holds for any group, at any depth."""
    assert sentence in config_error(*words)
