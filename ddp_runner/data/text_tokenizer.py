"""Tokenizers of language models, which give back the text: bytes, characters, or BPE. Torch-free.

Bytes and characters are our own: the first need no package, and of the second the library makes the
same tokens in 30 times the time. A run keeps its tokenizer as ``tokenizer/tokenizer.json``: our own
two in a format of ours, BPE in that of the library. Byte-level BPE: Radford et al., 2019;
https://huggingface.co/docs/tokenizers
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ddp_runner.data.tokenizer import (
    TOKENIZER_FILE,
    load_tokenizer,
    tokenizer_file,
    validate_installed,
)
from ddp_runner.errors import UserError, os_errors, typed

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BYTES, CHARACTERS, BPE = VOCABULARIES = ("bytes", "characters", "bpe")
NUM_BYTES = 256
UNKNOWN = "\ufffd"  # stands for a character that the training text lacks
CHUNK = 2**20  # characters of a part of a text for the library, up to the next line end
AT_ONCE = 16  # such parts
OWN = "ddp_runner"  # the key that marks a tokenizer.json of ours


@dataclass(frozen=True)
class Bytes:
    """The bytes of UTF-8: 256 tokens, for any text."""

    vocab_size: int = NUM_BYTES

    def encode(self, text: str) -> NDArray[Any]:
        """Return the bytes, uint8 (num_tokens,)."""
        return np.frombuffer(text.encode(errors="replace"), dtype=np.uint8)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of bytes."""
        return bytes(tokens).decode(errors="replace")

    def to_bytes(self) -> bytes:
        """Return the content of its tokenizer.json."""
        return json.dumps({OWN: {"vocabulary": BYTES}}).encode()


@dataclass(frozen=True)
class Characters:
    """The characters of a text; any other becomes U+FFFD."""

    characters: str  # in ascending order, each once, U+FFFD among them

    @property
    def vocab_size(self) -> int:
        """Return how many characters there are."""
        return len(self.characters)

    def encode(self, text: str) -> NDArray[Any]:
        """Return the place of each character, int64 (num_tokens,)."""
        codes = _codes(text)
        tokens = np.searchsorted(self._known, codes).clip(max=self.vocab_size - 1)
        tokens[self._known[tokens] != codes] = self.characters.index(UNKNOWN)
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of characters."""
        return "".join(self.characters[token] for token in tokens)

    def to_bytes(self) -> bytes:
        """Return the content of its tokenizer.json."""
        own = {"vocabulary": CHARACTERS, "characters": self.characters}
        return json.dumps({OWN: own}).encode()

    @cached_property
    def _known(self) -> NDArray[Any]:
        return _codes(self.characters)


@dataclass(frozen=True)
class Library:
    """A tokenizer of the library: a BPE that was built here, or that of a pretrained model."""

    tokenizer: "Tokenizer"

    @property
    def vocab_size(self) -> int:
        """Return how many tokens there are; all ids are below."""
        return 1 + max(self.tokenizer.get_vocab().values())

    def encode(self, text: str) -> NDArray[Any]:
        """Return the token ids, uint32 (num_tokens,); no special tokens are added."""
        chunks, found = list(_chunks(text)), [np.zeros(0, np.uint32)]
        for start in range(0, len(chunks), AT_ONCE):  # the library takes much memory for each token
            group = chunks[start : start + AT_ONCE]
            encodings = self.tokenizer.encode_batch_fast(group, add_special_tokens=False)
            found += [np.array(one.ids, np.uint32) for one in encodings]
        return np.concatenate(found)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids."""
        text: str = self.tokenizer.decode(list(tokens), skip_special_tokens=False)
        return text

    def to_bytes(self) -> bytes:
        """Return the content of its tokenizer.json."""
        return self.tokenizer.to_str().encode()


TextTokenizer = Bytes | Characters | Library  # text -> tokens, numbered from 0, and back


def build_text_tokenizer(text: str, *, vocabulary: str, vocab_size: int) -> TextTokenizer:
    """Return a tokenizer of the `vocabulary`; the same text always gives the same.

    Only that of ``bpe`` has a `vocab_size` to choose: 256 bytes, then the most frequent pairs.

    Raises:
        UserError: the library is not installed.
    """
    if vocabulary == BYTES:
        return Bytes()
    if vocabulary == CHARACTERS:
        return Characters("".join(sorted({*text, UNKNOWN})))
    validate_installed("dataset.vocabulary=bpe")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    options: Any = {"vocab_size": vocab_size, "initial_alphabet": alphabet, "show_progress": False}
    tokenizer.train_from_iterator(_chunks(text), trainers.BpeTrainer(**options))
    return Library(tokenizer)


def load_text_tokenizer(folder: Path) -> TextTokenizer:
    """Return the tokenizer that a run has kept in a folder, or that of a pretrained model.

    Raises:
        UserError: it is missing or damaged, or the library that it needs is not installed.
    """
    path = tokenizer_file(folder)
    if path.name != TOKENIZER_FILE:
        return Library(load_tokenizer(folder))
    with os_errors(f"{path} cannot be read", fix="make it readable"):
        text = path.read_bytes()
    try:
        content = json.loads(text)
        own = content.get(OWN)
        if own is not None:
            return Bytes() if own["vocabulary"] == BYTES else Characters(own["characters"])
    except (ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
        raise UserError(f"{path} is not a tokenizer file ({typed(error)}); restore it") from error
    return Library(load_tokenizer(folder))


def _chunks(text: str) -> Iterator[str]:
    """Yield parts of a text that end with a line, so that memory stays in bounds."""
    start = 0
    while start < len(text):
        end = text.find("\n", start + CHUNK) + 1 or len(text)
        yield text[start:end]
        start = end


def _codes(text: str) -> NDArray[Any]:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
