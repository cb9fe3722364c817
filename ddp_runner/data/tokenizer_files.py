"""The files that a config names: a CSV, pictures, a tokenizer's or a pretrained model's folder.

``__main__`` asks for them before anything starts; dataset and model read the tokens' ids here.
Torch-free.
"""

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddp_runner.errors import UserError

TOKENIZER_FILE, VOCABULARY_FILE, MODEL_FILE = "tokenizer.json", "vocab.txt", "config.json"
PADDING_TOKENS = ("[PAD]", "<pad>")
BERT, IMAGE_FOLDER = (
    "ddp_runner.models.bert.Bert",
    "ddp_runner.data.sources.image_folder.ImageFolder",
)
NEEDS_TEXT_EXTRA = 'text needs the packages of an extra; write pip install "ddp-runner[text]"'


def check_text_files(
    model: Mapping[str, Any], dataset: Mapping[str, Any], *, data_root: Path
) -> None:
    """Check that what these groups' keys name is there.

    Raises:
        UserError: it is not.
    """
    if model.get("_target_") == BERT and importlib.util.find_spec("transformers") is None:
        raise UserError(f"model=bert: {NEEDS_TEXT_EXTRA}")
    if (path := dataset.get("path")) is not None and not (data_root / str(path)).is_file():
        raise UserError(
            f"dataset.path ({path}): there is no file {(data_root / str(path)).absolute()}; give a "
            "path under data_root, or an absolute one"
        )
    if dataset.get("_target_") == IMAGE_FOLDER:
        folder = data_root / str(dataset.get("folder"))
        if not folder.is_dir():
            raise UserError(
                f"dataset.folder ({dataset.get('folder')}): there is no folder "
                f"{folder.absolute()}; give one under data_root, or an absolute one"
            )
    if (name := model.get("pretrained")) is not None and not Path(str(name), MODEL_FILE).is_file():
        raise UserError(
            f"model.pretrained ({name}): there is no {MODEL_FILE} in {Path(str(name)).absolute()}; "
            "name a folder of trained weights, as transformers' save_pretrained leaves it"
        )
    if (name := dataset.get("tokenizer")) is not None:
        tokenizer_file(Path(str(name)))


def tokenizer_file(folder: Path) -> Path:
    """Return the file of a tokenizer's folder that says most.

    Raises:
        UserError: there is none.
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
        if isinstance(vocabulary, list):  # of tokens and their scores, in Unigram models
            vocabulary = {token: index for index, (token, _) in enumerate(vocabulary)}
        added = {one["content"]: one["id"] for one in content["added_tokens"]}
        return {str(token): int(index) for token, index in (vocabulary | added).items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"{path} is not a tokenizer's ({reason}); restore it") from error


def padding_id(ids: Mapping[str, int], folder: Path) -> int:
    """Return the id of the token that fills a short sequence.

    Raises:
        UserError: the tokenizer has none.
    """
    for token in PADDING_TOKENS:
        if token in ids:
            return ids[token]
    raise UserError(
        f"the tokenizer in {folder} has no {' or '.join(PADDING_TOKENS)} to fill short texts with; "
        "name the one of a BERT-type model"
    )
