"""Tokenizers for classification: built from texts, or read from a model's folder. Torch-free.

The library: https://huggingface.co/docs/tokenizers
"""

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp_runner.errors import UserError, any_error

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.models import WordPiece

PADDING, UNKNOWN, START, END = SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
PADDING_TOKENS = (PADDING, "<pad>")
VOCABULARIES = ("wordpiece", "characters")
TOKENIZER_FILE, VOCABULARY_FILE = "tokenizer.json", "vocab.txt"
SETTINGS_FILE = "tokenizer_config.json"


def validate_installed(key: str = "dataset=csv_text") -> None:
    """Raise a UserError if the library that a key needs is not installed."""
    if importlib.util.find_spec("tokenizers") is None:
        raise UserError(
            f"{key}: text needs the packages of an extra", 'write pip install "ddp-runner[text]"'
        )


def tokenizer_file(folder: Path) -> Path:
    """Return a folder's tokenizer.json, or its vocab.txt; a ``UserError`` if it has neither."""
    for name in (TOKENIZER_FILE, VOCABULARY_FILE):
        if (folder / name).is_file():
            return folder / name
    raise UserError(
        f"dataset.tokenizer ({folder}): there is neither {TOKENIZER_FILE} nor {VOCABULARY_FILE} in "
        f"{folder.absolute()}",
        "name the folder of a tokenizer, or write null to build a vocabulary",
    )


def build_tokenizer(texts: Sequence[str], *, vocabulary: str, vocab_size: int) -> "Tokenizer":
    """Return a tokenizer of the most frequent tokens; the same texts always give the same ids.

    Its tokens are single ``characters``, or BERT's ``wordpiece``: parts of words and single Chinese
    characters. Both fold case. `vocab_size` includes the four special tokens.

    Raises:
        UserError: the library is not installed.
    """
    validate_installed()
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

    num_tokens, special = vocab_size - len(SPECIAL_TOKENS), list(SPECIAL_TOKENS)
    options: Any = {"vocab_size": vocab_size, "special_tokens": special, "show_progress": False}
    if vocabulary == "characters":
        tokenizer = Tokenizer(models.WordLevel(unk_token=UNKNOWN))
        tokenizer.normalizer = normalizers.Lowercase()
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(Regex("."), "isolated")]
        )
        tokenizer.train_from_iterator(texts, trainers.WordLevelTrainer(**options))
        return _bracketed(tokenizer)
    # A character inside a word is another token (##a), so the alphabet may need twice its size. The
    # library does not limit that.
    for most_characters in (num_tokens, num_tokens // 2):
        tokenizer = _wordpiece(models.WordPiece(unk_token=UNKNOWN), lowercase=True)
        trainer = trainers.WordPieceTrainer(limit_alphabet=most_characters, **options)
        tokenizer.train_from_iterator(texts, trainer)
        if tokenizer.get_vocab_size() <= vocab_size:
            break
    return _bracketed(tokenizer)


def load_tokenizer(folder: Path) -> "Tokenizer":
    """Return the tokenizer in the folder of a pretrained model or of a run.

    Raises:
        UserError: the file is missing or damaged, or the library is not installed.
    """
    validate_installed()
    from tokenizers import Tokenizer, models

    path = tokenizer_file(folder)
    with any_error(f"{path} is not a tokenizer file", "restore it"):
        if path.name != VOCABULARY_FILE:
            tokenizer = Tokenizer.from_file(str(path))
            tokenizer.no_padding()
            tokenizer.no_truncation()
            return tokenizer
        settings_path = folder / SETTINGS_FILE
        settings = json.loads(settings_path.read_bytes()) if settings_path.exists() else {}
        model = models.WordPiece.from_file(str(path), unk_token=UNKNOWN)
        return _bracketed(_wordpiece(model, lowercase=settings.get("do_lower_case", True)))


def padding_id(tokenizer: "Tokenizer", *, folder: str | None) -> int:
    """Return the id of the token that pads short texts; a ``UserError`` if there is none."""
    for token in PADDING_TOKENS:
        index: int | None = tokenizer.token_to_id(token)
        if index is not None:
            return index
    raise UserError(
        f"the tokenizer in {folder} has no {' or '.join(PADDING_TOKENS)} to pad short texts",
        "use the tokenizer of a BERT-type model",
    )


def _wordpiece(model: "WordPiece", *, lowercase: bool) -> "Tokenizer":
    from tokenizers import Tokenizer, normalizers, pre_tokenizers

    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


def _bracketed(tokenizer: "Tokenizer") -> "Tokenizer":
    """Put BERT's special tokens around each text."""
    from tokenizers import processors

    ids = [(token, tokenizer.token_to_id(token)) for token in (START, END)]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{START} $A {END}", special_tokens=ids
    )
    return tokenizer
