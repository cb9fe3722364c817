"""The files of a tokenizer's folder, and the token ids in them. Torch-free."""

import json
from collections.abc import Mapping
from pathlib import Path

from ddp_runner.errors import UserError

TOKENIZER_FILE, VOCABULARY_FILE = "tokenizer.json", "vocab.txt"
PADDING_TOKENS = ("[PAD]", "<pad>")
NEEDS_TEXT_EXTRA = 'text needs the packages of an extra; write pip install "ddp-runner[text]"'


def tokenizer_file(folder: Path) -> Path:
    """Return the tokenizer.json of a folder, or else its vocab.txt.

    Raises:
        UserError: there is neither.
    """
    for name in (TOKENIZER_FILE, VOCABULARY_FILE):
        if (folder / name).is_file():
            return folder / name
    raise UserError(
        f"dataset.tokenizer ({folder}): there is neither {TOKENIZER_FILE} nor {VOCABULARY_FILE} in "
        f"{folder.absolute()}; name the folder of a tokenizer, or null to build a vocabulary"
    )


def token_ids(folder: Path) -> dict[str, int]:
    """Return the id of each token of a tokenizer's folder.

    Raises:
        UserError: there is no tokenizer, or its file is damaged.
    """
    path = tokenizer_file(folder)
    try:
        text = path.read_text(encoding="utf-8")
        if path.name == VOCABULARY_FILE:
            return {token: index for index, token in enumerate(text.split("\n")) if token}
        content = json.loads(text)
        vocabulary = content["model"]["vocab"]
        if isinstance(vocabulary, list):  # Unigram models: tokens with their scores
            vocabulary = {token: index for index, (token, _) in enumerate(vocabulary)}
        added = {token["content"]: token["id"] for token in content["added_tokens"]}
        return {str(token): int(index) for token, index in (vocabulary | added).items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"{path} is not a tokenizer file ({reason}); restore it") from error


def padding_id(ids: Mapping[str, int], folder: Path) -> int:
    """Return the id of the token that fills up short sequences.

    Raises:
        UserError: the tokenizer has none.
    """
    for token in PADDING_TOKENS:
        if token in ids:
            return ids[token]
    raise UserError(
        f"the tokenizer in {folder} has no {' or '.join(PADDING_TOKENS)} to fill up short texts; "
        "use the tokenizer of a BERT-type model"
    )
