"""A model starts from weights in any form, whole or split; weights that do not fit are errors."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from configs import config_error, freeze, resolved
from ranks import run_ranks
from rights import unreadable
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from train_states import SMALL, TOY, compose_config, flat_weights

from ddp_runner.checkpoint.model_file import export_weights, load_tensors
from ddp_runner.checkpoint.store import save_checkpoint
from ddp_runner.checkpoint.weights import Weights, starting_weights
from ddp_runner.config.instantiate import make
from ddp_runner.config.schema import Config
from ddp_runner.config.training import CheckpointConfig
from ddp_runner.data.load_dataset import load_dataset
from ddp_runner.dist_env import DistEnv
from ddp_runner.errors import UserError
from ddp_runner.metric_names import MONITORS
from ddp_runner.models.convnet import ConvNet, ConvNetMp
from ddp_runner.models.gpt import GPT
from ddp_runner.models.toy import ToyModel
from ddp_runner.train.build_state import build_state, build_work

CPU = torch.device("cpu")


def start(path: Path) -> Weights:
    """Return what a new run starts from that names a path."""
    config = compose_config(*TOY, f"model.weights={path}")
    found = starting_weights(config, path.parent / "none", log=lambda _: None)
    assert found is not None
    return found


def load(model: nn.Module, path: Path) -> None:
    """Load a file into a model."""
    load_tensors(model, start(path).tensors, named=f"model.weights ({path})")


def export(path: Path, state: dict[str, Tensor], **facts: Any) -> None:
    """Export a state_dict."""
    export_weights(path, state, state.values(), **facts)


def toy(value: float = 1.0) -> ToyModel:
    """Return a model whose parameters all have one value."""
    model = ToyModel()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def prefixed(prefix: str, content: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a state_dict as a wrapper saves it."""
    return {prefix + name: tensor for name, tensor in content.items()}


def as_checkpoint(path: Path, content: dict[str, Tensor]) -> Path:
    """Save a state_dict as our checkpoint."""
    return save_checkpoint(
        path,
        {"objects": {"model": content}},
        step=3,
        metrics={},
        config=CheckpointConfig(keep=1),
        log=print,
    )


def saved(path: Path, value: Any) -> Path:
    """Save with torch.save."""
    torch.save(value, path)
    return path


def as_safetensors(path: Path, content: dict[str, Tensor]) -> Path:
    """Save as safetensors."""
    save_file(content, path)
    return path


FORMS: dict[str, Callable[[Path, dict[str, Tensor]], Path]] = {
    "checkpoint": as_checkpoint,
    "safetensors": lambda folder, content: as_safetensors(folder / "a.safetensors", content),
    "state_dict": lambda folder, content: saved(folder / "a.pt", content),
    "under_model": lambda folder, content: saved(folder / "a.pth", {"model": content, "step": 3}),
    "under_state_dict": lambda folder, content: saved(folder / "a.pt", {"state_dict": content}),
    "compiled": lambda folder, content: saved(folder / "a.pt", prefixed("_orig_mod.", content)),
    "of_ddp": lambda folder, content: saved(
        folder / "a.pt", prefixed("module._orig_mod.", content)
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_weights_are_read_in_each_form(form: str, tmp_path: Path) -> None:
    """A checkpoint, safetensors, a state_dict, nested ones, and those of wrapped models."""
    path = FORMS[form](tmp_path, dict(toy(3.0).state_dict()))
    model = toy()
    load(model, path)
    assert all((parameter == 3.0).all() for parameter in model.parameters())


def test_a_split_model_starts_from_a_whole_one_and_back(tmp_path: Path) -> None:
    """They share the names of parameters and buffers, and the export keeps every bit."""
    whole = ConvNet().to(memory_format=torch.channels_last)
    whole(torch.randn(4, 1, 28, 28))  # moves the buffers
    path = tmp_path / "model.safetensors"
    metrics = {"eval/f1": 0.5, "eval/loss": None, "perf/step_time_ms": 1.5}
    export(path, whole.state_dict(), step=7, metrics=metrics)
    split, back = ConvNetMp(dev0=CPU, dev1=CPU), ConvNet()
    load(split, path)
    load(back, as_checkpoint(tmp_path / "checkpoints", split.state_dict()))
    for name, tensor in back.state_dict().items():
        assert torch.equal(tensor, whole.state_dict()[name])
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "step": "7", "eval/f1": "0.5"}


def test_tied_weights_are_exported_and_loaded(tmp_path: Path) -> None:
    """Each name is in the file, and a failed export leaves the previous file."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    path = tmp_path / "model.safetensors"
    export(path, model.state_dict(), step=1, metrics={})
    assert load_file(path).keys() == model.state_dict().keys()
    load(model, path)
    before = path.read_bytes()
    (tmp_path / "plain").touch()
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode, "others may read it as well"
    (tmp_path / ".model.safetensors.tmp").mkdir()
    with pytest.raises(UserError, match="could not be written"):
        export(path, toy().state_dict(), step=2, metrics={})
    assert path.read_bytes() == before


def test_what_a_killed_export_left_is_gone_after_the_next(tmp_path: Path) -> None:
    """A file as large as the model; nor does an export that fails leave one."""
    path = tmp_path / "model.safetensors"
    (tmp_path / ".model.safetensors.tmp").touch()
    export(path, toy().state_dict(), step=1, metrics={})
    assert [one.name for one in tmp_path.iterdir()] == ["model.safetensors"]
    with pytest.raises(UserError, match="complex128, which a safetensors file cannot hold"):
        export(path, {"odd": torch.zeros(2, dtype=torch.complex128)}, step=2, metrics={})
    assert [one.name for one in tmp_path.iterdir()] == ["model.safetensors"]


def foreign_folder(path: Path, model: nn.Module, *, num_files: int) -> Path:
    """Save a GPT in Llama's layout, as Hugging Face's libraries do."""
    names = compose_config("model=gpt").model["weight_names"]
    tensors = dict[str, Tensor]()
    for name, tensor in model.state_dict().items():
        number = next((part for part in name.split(".") if part.isdecimal()), "")
        ours = name.replace(f".{number}.", ".*.") if number else name
        theirs = next(foreign for foreign, own in names.items() if own == ours)
        tensors[theirs.replace("*", number)] = tensor
    path.mkdir()
    if num_files == 1:
        save_file(tensors, path / "model.safetensors")
        return path
    files = {name: f"model-{index % num_files}.safetensors" for index, name in enumerate(tensors)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in tensors if files[name] == file}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return path


@pytest.mark.parametrize("num_files", [1, 3])
def test_a_folder_in_another_layout_is_renamed_and_loaded(tmp_path: Path, num_files: int) -> None:
    """Of one file, or of several with an index; the model's YAML has the names."""
    whole, back = GPT(vocab_size=256), GPT(vocab_size=256)
    folder = foreign_folder(tmp_path / "llama", whole, num_files=num_files)
    config = compose_config("model=gpt", f"model.weights={folder}")
    found = starting_weights(config, tmp_path / "none", log=lambda _: None)
    assert found is not None
    load_tensors(back, found.tensors, named="it")
    for name, tensor in back.state_dict().items():
        assert torch.equal(tensor, whole.state_dict()[name])


def test_an_index_names_files_of_its_folder_only(tmp_path: Path) -> None:
    """It may come from anybody."""
    index = tmp_path / "model.safetensors.index.json"
    for content in ('{"weight_map": {"w": "../secret.safetensors"}}', "[]"):
        index.write_text(content)
        with pytest.raises(UserError, match=r"has a damaged model\.safetensors\.index\.json"):
            start(tmp_path)


def test_weights_of_another_model_are_rejected_with_what_differs(tmp_path: Path) -> None:
    """One line has the first missing or unexpected keys, or the shapes that differ."""
    content = dict(toy().state_dict())
    cases: dict[str, dict[str, Tensor]] = {
        "it lacks net1.weight, net1.bias, net2.weight and 1 more": {},
        "it has net3, which the model does not have": content | {"net3": torch.zeros(1)},
        "net1.weight is (3, 3) there and (10, 10) in the model": content
        | {"net1.weight": torch.zeros(3, 3)},
    }
    for message, found in cases.items():
        model = toy()
        with pytest.raises(UserError) as caught:
            load(model, as_safetensors(tmp_path / "a.safetensors", found))
        assert message in str(caught.value).replace(
            "layer.weight, layer.bias", "layer.bias, layer.weight"
        )
        assert str(tmp_path / "a.safetensors") in str(caught.value)
        assert len(str(caught.value).splitlines()) == 1
        assert (flat_weights(model) == 1.0).all()


class Hostile:
    """Pickles as a call that leaves a folder behind."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.target),)


def test_a_hostile_file_is_rejected_and_its_code_does_not_run(tmp_path: Path) -> None:
    """The message names the call; a whole pickled model is an error, too."""
    proof, path = tmp_path / "the code ran", tmp_path / "a.pt"
    with pytest.raises(
        UserError, match=r"rejected: it names posix\.mkdir, .*none was run"
    ) as caught:
        load(toy(), saved(path, {"model": Hostile(proof)}))
    assert len(str(caught.value).splitlines()) == 1
    assert not proof.exists()
    with pytest.raises(UserError, match=r"ToyModel.*save the model's state_dict\(\)"):
        load(toy(), saved(path, toy()))


@pytest.mark.parametrize("name", ["a.pt", "a.safetensors"])
@pytest.mark.parametrize("content", [b"", b"no weights at all" * 9, b"PK\x03\x04 cut short"])
def test_a_damaged_file_is_named(name: str, content: bytes, tmp_path: Path) -> None:
    """The answer is one line for any bytes."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=rf"model\.weights \(.*{name}\)") as caught:
        load(toy(), tmp_path / name)
    assert len(str(caught.value).splitlines()) == 1
    with pytest.raises(UserError, match="contains no state_dict"):
        load(toy(), saved(tmp_path / "b.pt", [1, 2]))


def test_a_run_that_has_a_checkpoint_of_its_own_goes_on_from_it(tmp_path: Path) -> None:
    """Only a new run reads weights; a run without an undamaged checkpoint has none."""
    logged: list[str] = []
    config = compose_config(
        *TOY, f"model.weights={saved(tmp_path / 'a.pt', dict(toy().state_dict()))}"
    )
    own = tmp_path / "checkpoints"
    found = starting_weights(config, own, log=logged.append)
    assert found is not None
    assert found.path == tmp_path / "a.pt"
    assert logged == [f"starts from the weights in {tmp_path / 'a.pt'}"]
    as_checkpoint(own, dict(toy().state_dict()))
    assert starting_weights(config, own, log=pytest.fail) is None
    empty = tmp_path / "run"
    (empty / "checkpoints").mkdir(parents=True)
    config = compose_config(*TOY, f"model.weights={empty}")
    with pytest.raises(UserError, match="does not say which checkpoint is best"):
        starting_weights(config, tmp_path / "none", log=pytest.fail)
    (empty / ".hydra").mkdir()
    settings = {"checkpoint": {"monitor": "eval/f1", "mode": "max"}}
    (empty / ".hydra" / "config.yaml").write_text(json.dumps(settings))
    with pytest.raises(UserError, match="has no undamaged checkpoint"):
        starting_weights(config, tmp_path / "none", log=pytest.fail)
    damaged = as_checkpoint(empty / "checkpoints", {})
    (damaged / "state.pt").write_bytes(b"")
    assert starting_weights(config, empty / "checkpoints", log=pytest.fail) is None
    logged.clear()
    with pytest.raises(UserError, match=r"has no undamaged checkpoint, and no model\.saf"):
        starting_weights(config, tmp_path / "none", log=logged.append)
    assert len(logged) == 1


def test_weights_that_are_somebody_elses_are_named(tmp_path: Path) -> None:
    """The run is private, or only a file in it."""
    run = tmp_path / "run"
    as_checkpoint(run / "checkpoints", dict(toy().state_dict()))
    for asked in (run, saved(run / "a.pt", {})):
        config = compose_config(*TOY, f"model.weights={asked}")
        with unreadable(run), pytest.raises(UserError, match=r"cannot be read \(Permission denied"):
            starting_weights(config, tmp_path / "none", log=pytest.fail)


def started(env: DistEnv, config: Config, path: Path) -> dict[str, Tensor]:
    """Build on ranks of which only rank 0 reads the weights."""
    dataset = load_dataset(make("dataset", config.dataset), data_root=Path("data"), log=print)
    mode, weights = (
        make("parallelism", config.parallelism),
        start(path) if env.is_rank_zero else None,
    )
    work = build_work(config, env, mode, devices=(CPU,), dataset=dataset)
    state = build_state(work, weights=weights)
    return dict(state.module.state_dict())


@pytest.mark.parametrize("mode", ["ddp", "ps"])
def test_weights_that_rank_zero_reads_reach_all_ranks(mode: str, tmp_path: Path) -> None:
    """DDP's constructor sends them; a parameter server sends parameters with each batch."""
    model = ConvNet()
    model(torch.randn(4, 1, 28, 28))
    path = saved(tmp_path / "a.pt", model.state_dict())
    keys = ("model=convnet", "dataset=fake_images", *SMALL, f"model.weights={path}")
    config = compose_config(*keys, f"parallelism={mode}", world_size=2)
    first, second = run_ranks(started, 2, config, path)
    buffers = dict(model.named_buffers())
    for name, tensor in model.state_dict().items():
        assert torch.equal(first[name], tensor)
        if mode == "ddp" or name in buffers:
            assert torch.equal(second[name], tensor)


INVALID = {
    "model.weights=nowhere": "model.weights (nowhere) does not exist; give a run folder, its "
    "checkpoints/step-XXXXXXXX, or a file that ends in .safetensors, .pt, .pth",
    "experiment=start_from_weights": "model.weights (PATH) does not exist; give a run folder, its "
    "checkpoints/step-XXXXXXXX, or a file that ends in .safetensors, .pt, .pth",
    "checkpoint.load_best=true": "checkpoint.load_best=true needs checkpoint.monitor, the metric "
    "that tells which is best; write checkpoint.monitor=eval/accuracy",
    "checkpoint.monitor=eval/f2": f"checkpoint.monitor (eval/f2) must be one of "
    f"{', '.join(MONITORS)}; did you mean eval/f1?",
    "checkpoint.monitor=eval/loss": "checkpoint.monitor=eval/loss with checkpoint.mode=max keeps "
    "the worst value, not the best; write checkpoint.mode=min",
    "checkpoint.monitor=eval/f1 train.eval_every_epochs=0": "checkpoint.monitor=eval/f1 needs "
    "evaluations and train.eval_every_epochs is 0; write train.eval_every_epochs=1",
}


@pytest.mark.parametrize("overrides", INVALID)
def test_each_broken_rule_is_one_line(overrides: str) -> None:
    """Rule, values and fix, word for word, before torch is imported."""
    assert config_error(*overrides.split()) == INVALID[overrides]


def test_a_resumed_run_does_not_miss_the_weights_that_it_began_with(tmp_path: Path) -> None:
    """The file may be gone; another file is an error."""
    config, _ = resolved("model=toy")
    frozen = replace(config, model=config.model | {"weights": "gone"})
    freeze(tmp_path, frozen)
    assert resolved(f"resume={tmp_path}")[0].model["weights"] == "gone"
    message = config_error(f"resume={tmp_path}", "model.weights=other")
    assert message.endswith("leave model.weights out, or start a new run without resume")
