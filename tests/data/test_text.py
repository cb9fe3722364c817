"""Texts as token ids: vocabularies, the split, batches, and the model that takes them."""

import hashlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from configs import resolved
from orders import samples_of, steps_of
from ranks import run_ranks
from texts import BAD, GOOD, csv_error, csv_text, load_csv, write_reviews

from ddp_runner.cli.plan import validate_files
from ddp_runner.data.batches import NumberedBatches
from ddp_runner.data.dataset import Dataset
from ddp_runner.data.load_dataset import load_dataset
from ddp_runner.data.sources.csv_text import encode
from ddp_runner.data.tokenizer import SPECIAL_TOKENS, build_tokenizer, load_tokenizer
from ddp_runner.dist_env import DistEnv
from ddp_runner.errors import UserError
from ddp_runner.models.bert import Bert
from ddp_runner.tracking.run_dir import keep_files
from ddp_runner.train.build_model import model_factory

CORPUS = ["The hotel is good", "the room is BAD, bad", "酒店很好", "好好好"] * 3
SMALL = {"num_classes": 2, "vocab_size": 50, "max_length": 32, "width": 16, "feedforward": 32}
KEPT = "tokenizer/tokenizer.json"


def test_the_split_is_fixed_and_each_row_is_in_one_part(tmp_path: Path) -> None:
    """It is 90 to 10, only split_seed changes it, and decoding the ids gives the texts."""
    path = write_reviews(tmp_path / "x.csv", num_rows=200)
    dataset = load_csv(path)
    assert (len(dataset.train), len(dataset.eval)) == (180, 20)
    tokenizer = load_tokenizer(kept(dataset, tmp_path / "run"))
    ids = torch.cat([dataset.train.inputs, dataset.eval.inputs])
    targets = torch.cat([dataset.train.targets, dataset.eval.targets]).tolist()
    found = [text.replace(" ", "") for text in tokenizer.decode_batch(ids.tolist())]
    lines = path.read_text(encoding="utf-8").splitlines()[1:]
    pairs = zip(targets, found, strict=True)
    assert sorted(f"{label},{text}" for label, text in pairs) == sorted(lines)
    other = load_csv(path, split_seed=1)
    assert not torch.equal(other.train.inputs, dataset.train.inputs)


def kept(dataset: Dataset, run_dir: Path) -> Path:
    """Return the tokenizer's folder that a run keeps."""
    keep_files(run_dir, dataset.files)
    return run_dir / "tokenizer"


def test_a_resumed_run_rejects_another_vocabulary(tmp_path: Path) -> None:
    """Other tokens would give the checkpoint's embeddings new meanings."""
    dataset = load_csv(write_reviews(tmp_path / "x.csv"))
    for _ in range(2):
        folder = kept(dataset, tmp_path)
    assert [path.name for path in folder.iterdir()] == ["tokenizer.json"]
    with pytest.raises(UserError, match="differs from the current dataset's file"):
        keep_files(tmp_path, {KEPT: b"{}"})


def test_characters_are_counted_and_the_frequent_ones_are_tokens() -> None:
    """Most frequent first, case folded, no spaces, and rare characters unknown."""
    tokenizer = build_tokenizer(["aAab b", "ac"], vocabulary="characters", vocab_size=6)
    assert tokenizer.get_vocab() == {
        **{token: index for index, token in enumerate(SPECIAL_TOKENS)},
        **{"a": 4, "b": 5},
    }
    assert encode(tokenizer, ["C aB", "a" * 9], max_length=6, padding=0).tolist() == [
        [2, 1, 4, 5, 3, 0],
        [2, 4, 4, 4, 4, 3],
    ]


@pytest.mark.parametrize("vocab_size", [8, 20, 40, 200])
def test_wordpiece_keeps_its_size_and_knows_words(vocab_size: int) -> None:
    """It never exceeds vocab_size; frequent words are one token if they fit."""
    tokenizer = build_tokenizer(CORPUS, vocabulary="wordpiece", vocab_size=vocab_size)
    assert tokenizer.get_vocab_size() <= vocab_size
    if vocab_size == 200:
        assert tokenizer.encode("The BAD 好好").tokens == [
            "[CLS]",
            "the",
            "bad",
            "好",
            "好",
            "[SEP]",
        ]


@pytest.mark.full
def test_a_tokenizer_of_a_folder_is_used_as_it_is(tmp_path: Path) -> None:
    """Its size and padding id reach the model; a damaged file is reported."""
    path = write_reviews(tmp_path / "x.csv")
    words = ["[UNK]", "[CLS]", "[SEP]", GOOD, BAD, "[PAD]", "x"]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n")
    old = load_csv(path, tokenizer=str(tmp_path))
    assert (old.padding_id, old.vocab_size) == (5, 7)
    assert {int(one) for one in old.train.inputs.unique()} == {0, 1, 2, 3, 4, 5}
    new = load_csv(path, tokenizer=str(kept(old, tmp_path / "run")))
    assert torch.equal(new.train.inputs, old.train.inputs)
    config, _ = resolved("model=bert")
    model: Any = model_factory(config, old.model_arguments)()
    assert (model.padding_id, model.network.get_input_embeddings().num_embeddings) == (5, 7)
    (tmp_path / "run" / "tokenizer" / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="is not a tokenizer file"):
        load_tokenizer(tmp_path / "run" / "tokenizer")


def prepare(env: DistEnv, path: Path) -> tuple[str, list[str]]:
    """Return the digest of one process's tensors, and the lines that it logged."""
    logged: list[str] = []
    dataset = load_dataset(
        csv_text(path, vocabulary="wordpiece"), data_root=path.parent, log=logged.append
    )
    parts = [dataset.train.inputs, dataset.train.targets, dataset.eval.inputs, dataset.eval.targets]
    content = b"".join([*(part.numpy().tobytes() for part in parts), dataset.files[KEPT]])
    return hashlib.sha256(content).hexdigest(), logged


def test_one_process_prepares_and_all_get_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Machines that prepare separately also get the same bits."""
    path = write_reviews(tmp_path / "x.csv")
    answers = []
    for name in ("one", "two"):
        monkeypatch.setenv("DDP_RUNNER_CACHE", str(tmp_path / name))
        answers += run_ranks(prepare, 3, path, backend=None)
    assert len({digest for digest, _ in answers}) == 1
    lines = [line for _, logged in answers for line in logged]
    assert len([line for line in lines if "preparing it, once" in line]) == 2


def test_batches_of_similar_length_hold_each_sample_once(tmp_path: Path) -> None:
    """Each epoch is complete and in another order, with less than half of the padding."""
    dataset = load_csv(write_reviews(tmp_path / "x.csv", num_rows=500))
    padded = {}
    for lengths in (None, dataset.lengths()):
        batches = NumberedBatches(
            split=dataset.train,
            global_size=16,
            grad_accum_steps=1,
            share=0,
            num_shares=1,
            seed=0,
            lengths=lengths,
        )
        orders = [samples_of(batches, epoch) for epoch in (0, 1)]
        assert all(order.sort().values.equal(torch.arange(450)) for order in orders)
        assert not orders[0].equal(orders[1])
        pairs = [step.micro_batches[0].data for step in steps_of(batches)]
        cut = [dataset.prepare(pair, torch.device("cpu"))[0] for pair in pairs]
        padded[lengths is None] = sum(int(one.eq(0).sum()) for one in cut)
    assert padded[False] < padded[True] / 2
    lengths = dataset.eval.inputs.ne(0).sum(dim=1)
    assert int((lengths.diff() < 0).sum()) == 3  # four runs of rising length


@pytest.mark.parametrize("ngrams", [1, 3])
def test_padding_changes_no_logit(ngrams: int) -> None:
    """A sequence has the same logits alone and beside a longer one."""
    torch.manual_seed(0)
    model = Bert(**SMALL, ngrams=ngrams, ngram_buckets=64).double().eval()
    ids = torch.randint(4, 50, (2, 20), dtype=torch.int32)
    ids[0, 7:] = 0
    together = model(ids)
    assert torch.allclose(together[:1], model(ids[:1, :7]), rtol=0, atol=1e-12)
    ids[0, 7] = 9
    assert not torch.allclose(together[:1], model(ids)[:1], rtol=0, atol=1e-6)


def test_ngrams_tell_the_same_tokens_in_another_order_apart() -> None:
    """Without positions single tokens are a bag; groups of tokens keep their order."""
    torch.manual_seed(0)
    ids = torch.tensor([[2, 8, 9, 3], [2, 9, 8, 3]])
    for ngrams in (1, 2):
        model = Bert(**SMALL, ngrams=ngrams, ngram_buckets=64).double().eval()
        for name, parameter in model.named_parameters():
            if "position" in name:
                torch.nn.init.zeros_(parameter)
        one, other = model(ids)
        assert torch.allclose(one, other, rtol=0, atol=1e-12) == (ngrams == 1)


def test_without_the_extra_one_line_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both the model and the dataset need it."""
    for name in ("transformers", "tokenizers"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=r"model=bert needs .*pip install 'ddp-runner\[text\]'"):
        validate_files(resolved("model=bert")[0])
    assert 'write pip install "ddp-runner[text]"' in csv_error(write_reviews(tmp_path / "x.csv"))


def test_a_tokenizer_without_padding_is_rejected(tmp_path: Path) -> None:
    """A tokenizer needs a token to pad with."""
    (tmp_path / "vocab.txt").write_text("\n".join(("[UNK]", "[CLS]", "[SEP]", GOOD, BAD)))
    answer = csv_error(write_reviews(tmp_path / "x.csv"), tokenizer=str(tmp_path))
    assert f"the tokenizer in {tmp_path} has no [PAD] or <pad> to pad short texts" in answer
