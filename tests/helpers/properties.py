"""What property tests share: the number of examples, damaged files, and readable error lines."""

import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.configuration import set_hypothesis_home_dir

# What no error line may contain: the name of an exception, or a place in the code.
INTERNALS = re.compile(
    r"Traceback|\b[A-Z][a-z]\w*(?:Error|Exception)\b|Override\(type=|\.py\", line \d|<class '"
)

# The profile `quick` tries the same examples in every run, `thorough` new ones and fifty times as
# many. Two health checks are off: a busy machine is no failure, and no fixture has to be new for
# each example.
for profile, factor in {"quick": 1, "thorough": 50}.items():
    settings.register_profile(
        profile,
        max_examples=100 * factor,
        derandomize=profile == "quick",
        deadline=None,
        database=None,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))
set_hypothesis_home_dir(Path(tempfile.gettempdir()) / f"hypothesis-{os.getuid()}")  # its caches


def examples(number: int) -> settings:
    """Return settings for a number of examples; the thorough profile tries fifty times as many."""
    return settings(max_examples=number * settings().max_examples // 100)


def assert_one_line(sentence: str) -> None:
    """Assert that this is one printable line without names of exceptions or places in the code.

    Keep names of exceptions out of the input, because an error line may quote it.
    """
    assert sentence.strip(), "an empty sentence"
    assert sentence.isprintable(), f"{sentence!r} is not one printable line"
    match = INTERNALS.search(sentence)
    assert match is None, f"{sentence!r} shows {match and match[0]}"


DEEP = 100_000  # deeper than Python's parsers go
# JSON values for places where others belong.
ODD_JSON = (
    "null",
    "true",
    "0",
    "-1",
    "2.5",
    "1e400",
    "-1e400",
    "NaN",
    "9" * 400,
    "9" * 5000,
    "[]",
    "{}",
    '""',
    '"text"',
    '"\\ud800"',
    '"\\u0000\\n\\u001b[2J"',
    "[1, [2]]",
    '{"a": {"b": 1}}',
    '"../../x"',
    '"/"',
    '"."',
    "[" * DEEP,
    '{"a":' * DEEP,
    '[["x", null], 3]',
    "1e308",
    "[true]",
)


ODD_BYTES = (
    b"\0",
    b"\xff\xfe",
    b"\xed\xa0\x80",
    b'"',
    b"\n",
    b"\r",
    b"," * 9,
    b"9" * 400,
    b"{",
    b"[",
)


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """The content after a few changes: bits flipped, ranges lost, doubled or overwritten."""
    data = bytearray(content)
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(data)))
        end = min(len(data), start + draw(st.integers(0, 40)))
        kind = draw(st.sampled_from(["bit", "cut", "delete", "insert", "overwrite", "double"]))
        if kind == "bit" and start < len(data):
            data[start] ^= 1 << draw(st.integers(0, 7))
        elif kind == "cut":
            del data[start:]
        elif kind == "delete":
            del data[start:end]
        elif kind == "double":
            data[start:start] = data[start:end]
        else:
            more = draw(st.one_of(st.binary(max_size=8), st.sampled_from(ODD_BYTES)))
            data[start : start if kind == "insert" else start + len(more)] = more
    return bytes(data)


@st.composite
def altered_json(draw: st.DrawFn, content: bytes) -> bytes:
    """A JSON document with another value or a missing key at one or two places."""
    tree, marks = {"root": json.loads(content)}, {}
    for number in range(draw(st.integers(1, 2))):
        owner, key = draw(st.sampled_from(_places(tree)))
        if owner is not tree and draw(st.integers(0, 4)) == 0:
            del owner[key]
        else:
            owner[key] = mark = f"@{number}@"
            marks[mark] = draw(st.sampled_from(ODD_JSON))
    text = json.dumps(tree["root"])
    for mark, odd in marks.items():
        text = text.replace(json.dumps(mark), odd)
    return text.encode()


def _places(tree: Any) -> list[tuple[Any, Any]]:
    """Return every container within a JSON document, with each key or index of it."""
    keys = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
    inner = [tree[key] for key in keys if isinstance(tree[key], dict | list)]
    return [(tree, key) for key in keys] + [place for part in inner for place in _places(part)]


def faulty(content: bytes, *, is_json: bool = False) -> st.SearchStrategy[bytes]:
    """A damaged file: some bytes changed, some JSON values changed, or arbitrary bytes."""
    kinds = [damaged(content), damaged(content), st.binary(max_size=200)]
    return st.one_of(*kinds, *[altered_json(content)] * 3 * is_json)
