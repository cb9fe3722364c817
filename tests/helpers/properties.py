"""What the property tests share: how many examples, and what a refusal is; helpers, not a test."""

import json
import re
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st

# The runner inside a program that tells afterwards whether torch has been imported.
WATCHED = """
import runpy, sys
sys.argv[0] = "ddp_runner"
try:
    runpy.run_module("ddp_runner", run_name="__main__", alter_sys=True)
finally:
    print("torch" in sys.modules)
"""

# What no user should read: the name of an exception, or where in the code it was raised.
INTERNALS = re.compile(
    r"Traceback|\b[A-Z][a-z]\w*(?:Error|Exception)\b|Override\(type=|\.py\", line \d|<class '"
)


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


DEEP = 100_000  # deeper than Python's parsers go
# What stands where something else belongs, as it is written in JSON.
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
    """The content with a few changes: bits, bytes or ranges altered, lost, doubled or put in."""
    data = bytearray(content)
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(data)))
        end = min(len(data), start + draw(st.integers(0, 40)))
        kind = draw(st.sampled_from(["bit", "cut", "delete", "put in", "overwrite", "double"]))
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
            data[start : start if kind == "put in" else start + len(more)] = more
    return bytes(data)


@st.composite
def altered_json(draw: st.DrawFn, content: bytes) -> bytes:
    """A JSON document with other values, or lost keys, at one or two places."""
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
    return [(tree, key) for key in keys] + [place for one in inner for place in _places(one)]


def faulty(content: bytes, *, is_json: bool = False) -> st.SearchStrategy[bytes]:
    """Anything that may stand in a file's place: damaged, of other values, or arbitrary bytes."""
    kinds = [damaged(content), damaged(content), st.binary(max_size=200)]
    return st.one_of(*kinds, *[altered_json(content)] * 3 * is_json)
