"""Which keys of a resumed run's dataset follow other keys of it, as its YAML says."""

import re
from collections.abc import Mapping
from contextlib import suppress
from functools import reduce
from operator import getitem
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ddp_runner.config.secrets import texts


def follow_again(frozen: DictConfig, own: Any, unresolved: Mapping[str, Any]) -> None:
    """Let what followed other keys of a run's dataset follow them again. Change it in place.

    A frozen config holds values, so without this dataset.folder would change, and not the root of
    the pictures. What the run's own command had changed stays as it is. A run may be anybody's:
    only our texts are resolved, among the run's values that are no texts to resolve.

    Args:
        frozen: the run's config.
        own: likewise, with nothing resolved.
        unresolved: the dataset that this command composes.
    """
    plain = OmegaConf.create(_without_texts(own))
    for place, text in texts(unresolved):
        if not re.search(r"\$\{(dataset\.|data_root\})", text):
            continue
        with suppress(LookupError, TypeError, OmegaConfBaseException):  # it is another dataset
            value = reduce(getitem, place, own["dataset"])
            owner: Any = reduce(getitem, place[:-1], plain.dataset)
            before = owner[place[-1]]
            owner[place[-1]] = text
            try:
                follows = owner[place[-1]] == value
            finally:
                owner[place[-1]] = before
            if follows:
                reduce(getitem, place[:-1], cast(Any, frozen.dataset))[place[-1]] = text


def _without_texts(tree: Any) -> Any:
    """Return a plain tree with None in place of what OmegaConf would resolve."""
    if isinstance(tree, dict):
        return {key: _without_texts(one) for key, one in tree.items()}
    if isinstance(tree, list):
        return [*map(_without_texts, tree)]
    return None if isinstance(tree, str) and "${" in tree else tree
