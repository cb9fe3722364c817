"""What the property tests share: how many examples, and what a refusal is; helpers, not a test."""

import re

from hypothesis import settings

# What no user should read: the name of an exception, or where in the code it was raised.
INTERNALS = re.compile(r"Traceback|\b[A-Z][a-z]\w*(?:Error|Exception)\b|\.py\", line \d|<class '")


def examples(number: int) -> settings:
    """Return settings for so many examples; the thorough profile tries fifty times as many."""
    return settings(max_examples=number * settings().max_examples // 100)


def check_sentence(sentence: str) -> None:
    """Fail unless this is one line that can be printed and shows nothing of the program's inside.

    Only what the program says counts: keep names of exceptions out of what is put in.
    """
    assert sentence.strip(), "an empty sentence"
    assert sentence.isprintable(), f"{sentence!r} is not one printable line"
    found = INTERNALS.search(sentence)
    assert found is None, f"{sentence!r} shows {found and found[0]}"
