"""task=sample writes what the model of a run gives, the same text for a seed, from its folder."""

import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import error_line, run_command
from configs import config_error, resolved
from pages import blocks, commands
from run_folders import metrics, record
from torch import Tensor, nn

import ddp_runner
from ddp_runner.config.sections import InferenceConfig
from ddp_runner.data.text_tokenizer import build_text_tokenizer
from ddp_runner.errors import UserError
from ddp_runner.inference.sample import choose, encoded_prompt, sampled
from ddp_runner.seeds import derive

PAGE = "docs/language_models.md"
RUN = "run"
LENGTH = 16
ASKED = ("inference.prompt=abc", "inference.num_tokens=40", "inference.temperature=4")
TRAINING = (
    *("experiment=gpt_text", "model.num_layers=1", "model.width=32", "model.num_heads=2"),
    *("dataset.path=abc.txt", "dataset.vocabulary=characters", f"dataset.sequence_length={LENGTH}"),
    *("train.max_steps=40", "train.epochs=9", "scheduler.warmup_steps=4"),
    *("optimizer.lr=0.02", "train.num_threads=1", f"hydra.run.dir={RUN}"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run that has learnt the alphabet; its data are gone."""
    folder = tmp_path_factory.mktemp("letters")
    alphabet = "".join(map(chr, range(97, 123)))
    data = folder / "texts"
    data.mkdir()
    (data / "abc.txt").write_text(f"{alphabet}\n" * 100)
    end = run_command(*TRAINING, folder=folder, environ={"DDP_RUNNER_DATA_ROOT": str(data)})
    assert end.exit_code == 0, end.stderr
    shutil.rmtree(data)
    return folder


def sample(folder: Path, *args: str, name: str) -> str:
    """Return the text that a command has written."""
    keys = ("task=sample", f"resume={RUN}", f"hydra.run.dir={name}")
    end = run_command(*keys, *args, folder=folder)
    assert end.exit_code == 0, end.stderr
    fields = record(folder / name)
    assert (fields["status"], fields["task"], fields["world_size"]) == ("completed", "sample", 1)
    return (folder / name / "sample.txt").read_text()


def test_a_run_logs_its_perplexity_and_keeps_its_tokenizer(folder: Path) -> None:
    """It is the exponential of the loss of a token, which has learnt the alphabet by now."""
    line = next(line for line in reversed(metrics(folder / RUN)) if "eval/loss" in line)
    expected = torch.tensor(line["eval/loss"], dtype=torch.float64).exp().item()
    assert line["eval/perplexity"] == pytest.approx(expected, rel=1e-6)
    assert line["eval/loss"] < 1
    assert (folder / RUN / "tokenizer" / "tokenizer.json").is_file()


@pytest.mark.full
def test_the_text_is_what_the_loaded_model_gives_with_the_seed(folder: Path) -> None:
    """The command on one rank and a notebook write the same; the seed of the run decides."""
    text = sample(folder, *ASKED, name="sampled")
    assert text.startswith("abc")
    model, tokenizer = ddp_runner.load(folder / RUN), ddp_runner.load_tokenizer(folder / RUN)

    def written(seed: int, temperature: float = 4.0) -> str:
        tokens: list[int] = tokenizer.encode("abc").tolist()
        new = sampled(
            model,
            tokens,
            InferenceConfig(num_tokens=40, temperature=temperature),
            vocab_size=tokenizer.vocab_size,
            context=LENGTH,
            generator=torch.Generator().manual_seed(derive(seed, "sample")),
            device=torch.device("cpu"),
        )
        return tokenizer.decode([*tokens, *new])

    assert written(0) == text
    assert written(1) != text
    assert written(1, temperature=0).startswith("abcdefghijklmnopqrstuvwxyz\nabc")


@pytest.mark.full
def test_other_texts_are_evaluated_with_the_tokens_of_the_run(folder: Path) -> None:
    """A vocabulary of their own would give each token another meaning."""
    (folder / "other.txt").write_text("xyz\nabcdefghijklmnopqrstuvw\n" * 20)
    keys = ("task=evaluate", f"resume={RUN}", "dataset.path=other.txt", f"data_root={folder}")
    end = run_command(*keys, "hydra.run.dir=evaluated", folder=folder)
    assert end.exit_code == 0, end.stderr
    (line,) = metrics(folder / "evaluated")
    assert line["eval/perplexity"] < 10


@pytest.mark.full
def test_an_exported_program_takes_texts_of_any_length(folder: Path) -> None:
    """And any number of them, as the model does."""
    (folder / "long.txt").write_text("abc\n" * 100)
    keys = ("task=export", f"resume={RUN}", "dataset.path=long.txt", f"data_root={folder}")
    formats = ("checkpoint.export=[torch_export]", "hydra.run.dir=exported")
    assert run_command(*keys, *formats, folder=folder).exit_code == 0
    program = torch.export.load(folder / "exported" / "model.pt2").module()
    model = ddp_runner.load(folder / RUN)
    for shape in ((1, 5), (3, LENGTH), (2, 2 * LENGTH)):
        tokens = torch.arange(shape[0] * shape[1]).view(shape) % 26
        with torch.no_grad():
            torch.testing.assert_close(program(tokens), model(tokens))


@pytest.mark.full
def test_a_run_without_a_language_model_is_rejected(folder: Path) -> None:
    """By its tokenizer, which it lacks; or by what its model returns."""
    short = ("model=toy", "train.max_steps=1", "world_size=1", "hydra.run.dir=toy")
    assert run_command(*short, folder=folder).exit_code == 0
    answer = error_line(run_command("task=sample", "resume=toy", folder=folder))
    assert answer.endswith("which a run of texts keeps; name a run of dataset=text")
    shutil.copytree(folder / RUN / "tokenizer", folder / "toy" / "tokenizer")
    answer = error_line(run_command("task=sample", "resume=toy", folder=folder))
    assert "the model cannot take tokens, (1, 1) of int64" in answer
    assert answer.endswith("task=sample takes a language model, such as model=gpt")


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        (("inference.temperature=-1",), "inference.temperature (-1.0) must be 0 or greater"),
        (("inference.num_tokens=0",), "inference.num_tokens (0) must be greater than 0"),
        (("inference.top_k=0",), "inference.top_k (0) must be greater than 0"),
    ],
    ids=str,
)
def test_keys_that_make_no_sense_are_named(
    keys: tuple[str, ...], sentence: str, folder: Path
) -> None:
    """Before anything starts."""
    assert config_error("task=sample", f"resume={folder / RUN}", *keys).startswith(sentence)


def test_each_mode_is_sampled_by_one_process(folder: Path) -> None:
    """The run's own number of ranks and mode are for training."""
    config, _ = resolved("task=sample", f"resume={folder / RUN}")
    assert (config.world_size, config.parallelism["name"]) == (1, "single")


class Successor(nn.Module):
    """Gives the next number the highest logit, and notes how many tokens it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths: list[int] = []

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (1, length) to (1, length, 12): two logits too many, which are the highest."""
        self.lengths.append(tokens.shape[1])
        logits = 5.0 * nn.functional.one_hot((tokens + 1) % 10, 12)
        logits[..., 10:] = 99.0
        return logits


def draw(model: nn.Module, *, seed: int = 0, **keys: Any) -> list[int]:
    """Return 30 tokens after 3, 4."""
    asked = replace(InferenceConfig(num_tokens=30), **keys)
    generator = torch.Generator().manual_seed(seed)
    common = {"vocab_size": 10, "context": 5, "device": torch.device("cpu")}
    return list(sampled(model, [3, 4], asked, generator=generator, **common))


def test_tokens_are_drawn_by_seed_temperature_and_top_k() -> None:
    """The model sees the last tokens only, and none beyond the vocabulary is drawn."""
    model = Successor()
    successors = [number % 10 for number in range(5, 35)]
    assert draw(model, temperature=0.0) == successors
    assert model.lengths == [2, 3, 4, *[5] * 27]
    assert draw(model, top_k=1, temperature=3.0) == successors
    assert draw(model, temperature=1e-300) == successors
    hot = draw(model, temperature=5.0)
    assert hot == draw(model, temperature=5.0)
    assert hot != draw(model, temperature=5.0, seed=1)
    assert max(hot) < 10
    logits = torch.tensor([0.0, 2.0, 1.0, -3.0])
    generator = torch.Generator().manual_seed(0)
    found = [choose(logits, 1.0, 2, generator) for _ in range(4000)]
    assert {*found} == {1, 2}
    assert found.count(1) / 4000 == pytest.approx(1 / (1 + math.exp(-1)), abs=0.03)


class Broken(nn.Module):
    """Returns what is no logits of a language model."""

    def __init__(self, outputs: Any) -> None:
        super().__init__()
        self.outputs = outputs

    def forward(self, tokens: Tensor) -> Any:
        """Return the outputs."""
        return self.outputs


@pytest.mark.parametrize(
    ("outputs", "sentence"),
    [
        (torch.zeros(1, 10), r"not logits \(1, 2, 10\)"),
        (torch.zeros(1, 2, 9), r"not logits \(1, 2, 10\)"),
        ({"logits": torch.zeros(1, 2, 10)}, r"not logits \(1, 2, 10\)"),
        (torch.full((1, 2, 10), torch.nan), "are not finite; name an earlier checkpoint"),
    ],
    ids=["a class", "a smaller vocabulary", "a mapping", "NaN"],
)
def test_a_model_that_returns_no_logits_is_rejected(outputs: Any, sentence: str) -> None:
    """The answer is one line."""
    with pytest.raises(UserError, match=sentence):
        draw(Broken(outputs))


def test_a_prompt_has_tokens_that_the_run_knows() -> None:
    """An empty one is a line end; a character that the run has never seen is named."""
    known = build_text_tokenizer("ab\n", vocabulary="characters", vocab_size=0)
    assert encoded_prompt(known, "") == known.encode("\n").tolist()
    with pytest.raises(UserError, match=r"lacks \('c', 'é'\); write another prompt"):
        encoded_prompt(known, "abcé")


GPT_COMMANDS = [words for words in commands(PAGE) if "model=reader" not in words]


@pytest.mark.parametrize("args", GPT_COMMANDS, ids=" ".join)
def test_the_commands_of_the_page_are_accepted(args: list[str], folder: Path) -> None:
    """Composed and resolved, with the run's folder in place of RUN."""
    named = ("resume=RUN", "resume=last")
    given = [f"resume={folder / RUN}" if one in named else one for one in args]
    assert resolved(*given)[0].model["name"].startswith("gpt")


def test_the_cell_of_the_page_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The block of Python, where the run is."""
    python = [block for block in blocks(PAGE) if block.language == "python"]
    (cell,) = (block.text for block in python if block.path is None)
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {}
    exec(cell.replace('"RUN"', f'"{RUN}"').replace("The value", "abc"), names)
    assert names["logits"].shape == (1, 3, ddp_runner.load_tokenizer(RUN).vocab_size)
