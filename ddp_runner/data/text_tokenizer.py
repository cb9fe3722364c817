"""Reversible tokenizers for language models: bytes, characters, or BPE. Torch-free.

Bytes and characters are our own: bytes need no package, and characters are 30 times as fast as the
library's. A run keeps its tokenizer as ``tokenizer/tokenizer.json``: bytes and characters in our
format, BPE in the library's. Byte-level BPE: Radford et al., 2019;
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
from ddp_runner.errors import any_error, os_errors

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BYTES, CHARACTERS, BPE = VOCABULARIES = ("bytes", "characters", "bpe")
NUM_BYTES = 256
UNKNOWN = "\ufffd"  # token of characters that the training text lacks
CHUNK = 2**20  # characters, up to the next line end, of a chunk for the library
CHUNKS_AT_ONCE = 16
OWN = "ddp_runner"  # key of a tokenizer.json in our format


@dataclass(frozen=True)
class Bytes:
    """The bytes of UTF-8: 256 tokens, for any text."""

    vocab_size: int = NUM_BYTES

    def encode(self, text: str) -> NDArray[Any]:
        """Return the bytes of a text, uint8 (num_tokens,)."""
        return np.frombuffer(text.encode(errors="replace"), dtype=np.uint8)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text."""
        return bytes(tokens).decode(errors="replace")

    def to_bytes(self) -> bytes:
        """Return the content of its tokenizer.json."""
        return json.dumps({OWN: {"vocabulary": BYTES}}).encode()


@dataclass(frozen=True)
class Characters:
    """The characters of a text; other characters become U+FFFD."""

    characters: str  # in ascending order, each once, including U+FFFD

    @property
    def vocab_size(self) -> int:
        """Return the number of characters."""
        return len(self.characters)

    def encode(self, text: str) -> NDArray[Any]:
        """Return the index of each character, int64 (num_tokens,)."""
        codes = _code_points(text)
        tokens = np.searchsorted(self._codes, codes).clip(max=self.vocab_size - 1)
        tokens[self._codes[tokens] != codes] = self.characters.index(UNKNOWN)
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text."""
        return "".join(self.characters[token] for token in tokens)

    def to_bytes(self) -> bytes:
        """Return the content of its tokenizer.json."""
        content = {"vocabulary": CHARACTERS, "characters": self.characters}
        return json.dumps({OWN: content}).encode()

    @cached_property
    def _codes(self) -> NDArray[Any]:
        return _code_points(self.characters)


@dataclass(frozen=True)
class Library:
    """A tokenizer of the library: a BPE built here, or a pretrained model's tokenizer."""

    tokenizer: "Tokenizer"

    @property
    def vocab_size(self) -> int:
        """Return the number of tokens; every id is below it."""
        return 1 + max(self.tokenizer.get_vocab().values())

    def encode(self, text: str) -> NDArray[Any]:
        """Return the token ids, uint32 (num_tokens,); no special tokens are added."""
        chunks, ids = list(_chunks(text)), [np.zeros(0, np.uint32)]
        # In groups, since the library needs much memory for each token.
        for start in range(0, len(chunks), CHUNKS_AT_ONCE):
            group = chunks[start : start + CHUNKS_AT_ONCE]
            encodings = self.tokenizer.encode_batch_fast(group, add_special_tokens=False)
            ids += [np.array(encoding.ids, np.uint32) for encoding in encodings]
        return np.concatenate(ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text."""
        text: str = self.tokenizer.decode(list(tokens), skip_special_tokens=False)
        return text

    def to_bytes(self) -> bytes:
        """Return the content of its tokenizer.json."""
        return self.tokenizer.to_str().encode()


TextTokenizer = Bytes | Characters | Library  # text -> tokens, numbered from 0, and back


def build_text_tokenizer(text: str, *, vocabulary: str, vocab_size: int) -> TextTokenizer:
    """Return a tokenizer with the `vocabulary`; the same text always gives the same tokenizer.

    Only ``bpe`` uses `vocab_size`: 256 bytes, then the most frequent pairs.

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
    """Return the tokenizer in the folder of a run or of a pretrained model.

    Raises:
        UserError: the file is missing or damaged, or its library is not installed.
    """
    path = tokenizer_file(folder)
    if path.name == TOKENIZER_FILE:
        with os_errors(f"{path} cannot be read", fix="make it readable"):
            text = path.read_bytes()
        with any_error(f"{path} is not a tokenizer file", "restore it"):
            content = json.loads(text).get(OWN)
            if content is not None:
                is_bytes = content["vocabulary"] == BYTES
                return Bytes() if is_bytes else Characters(content["characters"])
    return Library(load_tokenizer(folder))


def _chunks(text: str) -> Iterator[str]:
    """Yield parts of a text that end with a line."""
    start = 0
    while start < len(text):
        end = text.find("\n", start + CHUNK) + 1 or len(text)
        yield text[start:end]
        start = end


def _code_points(text: str) -> NDArray[Any]:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
