"""Text files as tokens: what a sample is, the split, tokenizers that give back the text, errors."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from configs import config_error
from torch import Tensor

from ddp_runner.config.instantiate import make
from ddp_runner.config.schema import CONFIG_DIR
from ddp_runner.data import text_tokenizer
from ddp_runner.data.dataset import Dataset
from ddp_runner.data.load_dataset import load_dataset
from ddp_runner.data.sources.text import bundled_text
from ddp_runner.data.splits import MicroPlan, TokenSplit
from ddp_runner.data.stream import Split
from ddp_runner.data.text_tokenizer import (
    VOCABULARIES,
    Library,
    build_text_tokenizer,
    load_text_tokenizer,
)
from ddp_runner.errors import UserError
from ddp_runner.tracking.run_dir import keep_files

TEXT = "".join(f"Line {number}: ä好 and {number**2} more\r\n" for number in range(300))
KEPT = "tokenizer/tokenizer.json"


def text_source(**keys: Any) -> Any:
    """Return the source of conf/dataset/text.yaml, with some other keys."""
    settings = yaml.safe_load((CONFIG_DIR / "dataset" / "text.yaml").read_text())
    return make("dataset", settings | keys)


def load(folder: Path, **keys: Any) -> Dataset:
    """Return the dataset of TEXT in a folder."""
    if not (folder / "a.txt").exists():
        (folder / "a.txt").write_text(TEXT, encoding="utf-8", newline="")
    return load_dataset(text_source(path="a.txt", **keys), data_root=folder, log=print)


def samples(split: Any) -> tuple[Tensor, Tensor]:
    """Return all inputs and targets of a split, (num_samples, length) each."""
    (pair,) = split.load([MicroPlan(range(len(split)))])
    return pair


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_each_token_is_a_target_once_and_the_splits_share_none(
    vocabulary: str, tmp_path: Path
) -> None:
    """Inputs and targets, read in order, are the text; the end of the text is for evaluations."""
    dataset = load(tmp_path, vocabulary=vocabulary, vocab_size=300, sequence_length=7)
    keep_files(tmp_path / "run", dataset.files)
    tokenizer = load_text_tokenizer(tmp_path / "run" / "tokenizer")
    assert dataset.model_arguments == {"vocab_size": tokenizer.vocab_size}
    texts = []
    for split in (dataset.train, dataset.eval):
        assert isinstance(split, TokenSplit)
        inputs, targets = samples(split)
        assert (inputs.dtype, targets.dtype) == (torch.int64, torch.int64)
        assert inputs.shape == targets.shape == (len(split), 7)
        assert torch.equal(inputs.flatten()[1:], targets.flatten()[:-1])
        num_left = len(split.tokens) - 1 - targets.numel()
        assert 0 <= num_left < 7
        tokens = split.tokens.long() & 0xFFFF
        assert targets.flatten().tolist() == tokens[1 : len(tokens) - num_left].tolist()
        texts.append(tokenizer.decode(tokens.tolist()))
    assert texts[0] == TEXT[: round(0.9 * len(TEXT))]
    if vocabulary != "characters":
        assert "".join(texts) == TEXT


def test_samples_are_the_same_one_by_one_and_in_batches(tmp_path: Path) -> None:
    """By any piece, as the numbered path of a run asks for them."""
    split: Split = load(tmp_path, sequence_length=5).train
    inputs, targets = samples(split)
    for indices in (torch.tensor([3, 0, 3]), range(1, 4)):
        ((some, of_them),) = split.load([MicroPlan(indices)], seed=0)
        assert torch.equal(some, inputs[torch.as_tensor(indices)])
        assert torch.equal(of_them, targets[torch.as_tensor(indices)])


@pytest.mark.parametrize("top", [2**15, 2**16 - 1])
def test_two_bytes_hold_65536_tokens(top: int) -> None:
    """Those whose first bit is set as well; and a split shorter than a sample has none."""
    tokens = torch.tensor([0, top, 1, top - 1, 2]).to(torch.uint16).view(torch.int16)
    inputs, targets = samples(TokenSplit(tokens, 2))
    assert (inputs.tolist(), targets.tolist()) == (
        [[0, top], [1, top - 1]],
        [[top, 1], [top - 1, 2]],
    )
    large = TokenSplit(torch.tensor([70_000, 1, 2], dtype=torch.int32), 2)
    assert samples(large)[0].tolist() == [[70_000, 1]]
    assert [len(TokenSplit(tokens[:count], 2)) for count in (0, 1, 2, 3)] == [0, 0, 0, 1]


def test_the_cache_keeps_each_token_once_and_serves_every_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inputs and targets are views of one sequence, which is memory-mapped."""
    monkeypatch.setenv("DDP_RUNNER_CACHE", str(tmp_path / "cache"))
    num_bytes = len(TEXT.encode())
    for length in (4, 9):
        load(tmp_path, sequence_length=length)
    (file,) = (tmp_path / "cache").glob("*/tensors.pt")
    assert 2 * num_bytes <= file.stat().st_size <= 2 * num_bytes + 8000
    load(tmp_path, vocabulary="characters")
    assert len([*(tmp_path / "cache").glob("*/tensors.pt")]) == 2


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("text", ["Line 7: 好\r\n  x", "\n", "  ", "Line Line"])
def test_a_tokenizer_gives_back_the_text(vocabulary: str, text: str, tmp_path: Path) -> None:
    """Byte by byte, and once more after it was written to a file."""
    tokenizer = build_text_tokenizer(TEXT + "x", vocabulary=vocabulary, vocab_size=280)
    keep_files(tmp_path, {KEPT: tokenizer.to_bytes()})
    for one in (tokenizer, load_text_tokenizer(tmp_path / "tokenizer")):
        assert one.decode(one.encode(text).tolist()) == text
        assert one.vocab_size == tokenizer.vocab_size
    again = build_text_tokenizer(TEXT + "x", vocabulary=vocabulary, vocab_size=280)
    assert again.to_bytes() == tokenizer.to_bytes()


@pytest.mark.parametrize("vocabulary", ["characters", "bpe"])
def test_a_vocabulary_is_that_of_the_training_split(vocabulary: str, tmp_path: Path) -> None:
    """What only the end of a text has is not known."""
    (tmp_path / "a.txt").write_text("ab " * 60 + "zz " * 7)
    source = text_source(path="a.txt", vocabulary=vocabulary, sequence_length=2)
    tensors = source.build(tmp_path)
    content = source.dataset(tensors).files[KEPT].decode()
    assert ("zz" in content, "ab" in content) == (False, True)


def test_what_a_vocabulary_lacks_is_one_sign() -> None:
    """Bytes and BPE lack nothing; bytes that are no UTF-8, as a model may write, are one, too."""
    characters = build_text_tokenizer("abc", vocabulary="characters", vocab_size=0)
    assert characters.decode(characters.encode("aé😀c").tolist()) == "a\ufffd\ufffdc"
    for vocabulary in ("bytes", "bpe"):
        tokenizer = build_text_tokenizer("abc", vocabulary=vocabulary, vocab_size=256)
        assert tokenizer.decode(tokenizer.encode("aé😀c").tolist()) == "aé😀c"
        assert tokenizer.vocab_size == 256
    assert build_text_tokenizer("", vocabulary="bytes", vocab_size=0).decode([97, 200]) == "a\ufffd"


def test_a_long_text_is_encoded_in_parts_that_end_with_a_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No character is lost between them."""
    monkeypatch.setattr(text_tokenizer, "CHUNK", 50)
    tokenizer = build_text_tokenizer(TEXT, vocabulary="bpe", vocab_size=300)
    assert isinstance(tokenizer, Library)
    assert tokenizer.decode(tokenizer.encode(TEXT).tolist()) == TEXT
    assert tokenizer.encode("").tolist() == []


def test_other_texts_take_the_tokenizer_of_a_run(tmp_path: Path) -> None:
    """The tokens mean the same; several files are joined by an empty line."""
    first = load(tmp_path, vocabulary="characters")
    keep_files(tmp_path / "run", first.files)
    (tmp_path / "b.txt").write_text("\ufeffmore 7\n", encoding="utf-8")
    (tmp_path / "c.txt").write_text("and Line", encoding="utf-8")
    source = text_source(
        path=["b.txt", "c.txt"],
        tokenizer=str(tmp_path / "run" / "tokenizer"),
        sequence_length=1,
        eval_fraction=0.2,
    )
    dataset = load_dataset(source, data_root=tmp_path, log=print)
    assert dataset.files == first.files
    tokenizer = load_text_tokenizer(tmp_path / "run" / "tokenizer")
    splits: list[Any] = [dataset.train, dataset.eval]  # of tokens, which other datasets lack
    tokens = torch.cat([split.tokens for split in splits])
    assert tokenizer.decode(tokens.tolist()) == "more 7\n\n\nand Line"


def test_the_bundled_text_is_that_of_this_python(tmp_path: Path) -> None:
    """It needs no file; its parts are in a fixed order; the note says how much it is."""
    text = bundled_text()
    assert text == bundled_text()
    assert len(text) > 200_000
    dataset = load_dataset(text_source(), data_root=tmp_path, log=print)
    (note,) = dataset.notes
    assert note.endswith("from a vocabulary of 256")


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"vocabulary": "words"}, "must be one of bytes, characters, bpe"),
        ({"sequence_length": 0}, "must be at least 1"),
        ({"vocab_size": 255}, "must be at least 256"),
        ({"path": []}, "must be a file, or a list of files"),
        ({"path": [3]}, "must be a file, or a list of files"),
        ({"path": "missing.txt"}, "missing.txt cannot be read (No such file"),
        ({"path": "latin1.txt"}, "is not UTF-8 (byte 1 is 0xe4)"),
        ({"path": "empty.txt"}, "has 0 tokens; give a longer text"),
        ({"sequence_length": 1000}, "has 844 tokens, too few for dataset.sequence_length=1000"),
        ({"tokenizer": "damaged"}, "is not a tokenizer file"),
        ({"tokenizer": "nowhere"}, "there is neither tokenizer.json nor"),
    ],
    ids=str,
)
def test_what_cannot_be_used_is_named(keys: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    """The answer is one line with the fix."""
    (tmp_path / "latin1.txt").write_bytes("wäre".encode("latin-1"))
    (tmp_path / "empty.txt").touch()
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "tokenizer.json").write_text('{"ddp_runner": 3}')
    keys = {key: str(tmp_path / one) if key == "tokenizer" else one for key, one in keys.items()}
    (tmp_path / "short.txt").write_text(TEXT, encoding="utf-8", newline="")
    with pytest.raises(UserError) as error:
        load_dataset(
            text_source(**{"path": "short.txt", "vocabulary": "characters"} | keys),
            data_root=tmp_path,
            log=print,
        )
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


def test_missing_files_and_packages_are_named_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each file of a list, and the library of BPE."""
    answer = config_error("model=gpt", "dataset.path=[pyproject.toml,nowhere.txt]")
    assert answer.startswith("dataset.path (pyproject.toml): there is no file")
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "tokenizers" else find_spec(name)
    )
    wanted = "needs tokenizers, which is not installed; pip install 'ddp-runner[text]'"
    assert config_error("model=gpt", "dataset.vocabulary=bpe").endswith(wanted)
    with pytest.raises(UserError, match="needs the packages of an extra"):
        build_text_tokenizer("a", vocabulary="bpe", vocab_size=256)
