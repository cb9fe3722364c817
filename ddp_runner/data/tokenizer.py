"""Texts as token ids: with a vocabulary built from a corpus, or a pretrained model's tokenizer.

Both are tokenizers of the ``tokenizers`` library: https://huggingface.co/docs/tokenizers
"""

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ddp_runner.data.tokenizer_files import NEEDS_TEXT_EXTRA, VOCABULARY_FILE, tokenizer_file
from ddp_runner.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.models import WordPiece

PADDING, UNKNOWN, START, END = SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
VOCABULARIES = ("wordpiece", "characters")
CHUNK = 8192  # texts encoded at once


def build_tokenizer(texts: Sequence[str], *, vocabulary: str, vocab_size: int) -> "Tokenizer":
    """Return a tokenizer of the most frequent tokens; the same texts always give the same ids.

    Args:
        texts: the corpus.
        vocabulary: ``characters``, or ``wordpiece`` as in BERT: parts of words, and each Chinese
            character by itself. Both fold case.
        vocab_size: most tokens, including the four special ones.

    Raises:
        UserError: the library is not installed.
    """
    _validate_installed()
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

    special = list(SPECIAL_TOKENS)
    if vocabulary == "characters":
        tokenizer = Tokenizer(models.WordLevel(unk_token=UNKNOWN))
        tokenizer.normalizer = normalizers.Lowercase()
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(Regex("."), "isolated")]
        )
        by_count = trainers.WordLevelTrainer(
            vocab_size=vocab_size, special_tokens=special, show_progress=False
        )
        tokenizer.train_from_iterator(texts, by_count)
        return _bracketed(tokenizer)
    # A character inside a word is another token (##a), so the alphabet may take twice its size, and
    # the library does not limit that.
    for most_characters in (vocab_size - len(special), (vocab_size - len(special)) // 2):
        tokenizer = _wordpiece(models.WordPiece(unk_token=UNKNOWN), lowercase=True)
        trainer = trainers.WordPieceTrainer(
            vocab_size=vocab_size,
            limit_alphabet=most_characters,
            special_tokens=special,
            show_progress=False,
        )
        tokenizer.train_from_iterator(texts, trainer)
        if tokenizer.get_vocab_size() <= vocab_size:
            break
    return _bracketed(tokenizer)


def load_tokenizer(folder: Path) -> "Tokenizer":
    """Return the tokenizer in the folder of a pretrained model or of a run.

    Raises:
        UserError: it is missing or damaged, or the library is not installed.
    """
    _validate_installed()
    from tokenizers import Tokenizer, models

    path = tokenizer_file(folder)
    try:
        if path.name != VOCABULARY_FILE:
            tokenizer = Tokenizer.from_file(str(path))
            tokenizer.no_padding()
            tokenizer.no_truncation()
            return tokenizer
        settings_path = folder / "tokenizer_config.json"
        settings = json.loads(settings_path.read_bytes()) if settings_path.exists() else {}
        model = models.WordPiece.from_file(str(path), unk_token=UNKNOWN)
        return _bracketed(_wordpiece(model, lowercase=settings.get("do_lower_case", True)))
    except Exception as error:  # the library raises nothing more specific
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"{path} is not a tokenizer file ({reason}); restore it") from error


def encode(
    tokenizer: "Tokenizer", texts: Sequence[str], *, max_length: int, padding: int
) -> Tensor:
    """Return the texts' token ids, int32 (num_texts, max_length), truncated or padded."""
    tokenizer.enable_truncation(max_length)
    ids = torch.full((len(texts), max_length), padding, dtype=torch.int32)
    for start in range(0, len(texts), CHUNK):
        encodings = tokenizer.encode_batch(list(texts[start : start + CHUNK]))
        for row, encoding in zip(ids[start : start + CHUNK], encodings, strict=True):
            row[: len(encoding.ids)] = torch.tensor(encoding.ids, dtype=torch.int32)
    tokenizer.no_truncation()
    return ids


def _wordpiece(model: "WordPiece", *, lowercase: bool) -> "Tokenizer":
    from tokenizers import Tokenizer, normalizers, pre_tokenizers

    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


def _bracketed(tokenizer: "Tokenizer") -> "Tokenizer":
    """Make each text begin and end with BERT's special tokens."""
    from tokenizers import processors

    ids = [(token, tokenizer.token_to_id(token)) for token in (START, END)]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{START} $A {END}", special_tokens=ids
    )
    return tokenizer


def _validate_installed() -> None:
    if importlib.util.find_spec("tokenizers") is None:
        raise UserError(f"dataset=csv_text: {NEEDS_TEXT_EXTRA}")
