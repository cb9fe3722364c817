"""The form of messages, and the words that must not come back."""

import ast
import pickle
import re
from pathlib import Path

import pytest

import ddp_runner
from ddp_runner.errors import UserError, is_lost_peer

FILES = sorted(Path(ddp_runner.__file__).parent.rglob("*.py"))
# Word orders and idioms of another language. A genitive in front: "Of the batch ...".
FOREIGN = (
    r"\b(go(es)? on|anew|in vain|by itself|so many|mends?)\b|(?:\"|# |\. )Of (the|a|all|each)\b"
)


def test_a_message_is_the_rule_and_the_fix_on_one_line() -> None:
    """This holds for any value, and in another process as well."""
    error = UserError("world_size (0\n) must be 1 or greater", "leave it out")
    assert str(error) == r"world_size (0\n) must be 1 or greater; leave it out"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert str(UserError("k (0) must be 1 or greater")) == "k (0) must be 1 or greater"


def texts(call: ast.Call) -> list[str]:
    """Return the literal parts of a call's arguments, with {} for each value."""
    parts = [arg.values if isinstance(arg, ast.JoinedStr) else [arg] for arg in call.args]
    return [
        "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in values)
        for values in parts
    ]


def test_every_message_has_this_form() -> None:
    """A rule without a fix says what must be; neither ends like a sentence or holds both parts."""
    wrong = []
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "UserError":
                rule, *fix = texts(node)
                is_whole = (
                    bool(fix)
                    or rule == "{}"
                    or re.search(r"must|is not|cannot|needs|^write|: ", rule)
                )
                if (
                    not is_whole
                    or re.search(r"; (?!or)", rule)
                    or (rule + "".join(fix)).endswith((".", " ", ";"))
                ):
                    wrong.append(f"{path.name}:{node.lineno}: {rule} | {fix}")
    assert not wrong


@pytest.mark.parametrize("folder", ["ddp_runner", "conf"])
def test_the_english_is_plain(folder: str) -> None:
    """The idioms of another language that were in this source stay out of it."""
    root = Path(ddp_runner.__file__).parent.parent
    lines = [
        f"{path.name}:{number}: {line.strip()}"
        for path in sorted([*(root / folder).rglob("*.py"), *(root / folder).rglob("*.yaml")])
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if re.search(FOREIGN, line)
    ]
    assert not lines


@pytest.mark.parametrize(
    ("text", "is_lost"),
    [
        ("[pair.cc:534] Connection closed by peer [127.0.0.1]:41", True),
        ("wait timeout after 1000ms, keys: /default_pg/0//store_based_barrier_key", True),
        ("could not restore the tokenizer", False),
        ("mat1 and mat2 shapes cannot be multiplied", False),
    ],
)
def test_a_lost_peer_is_told_from_an_error_of_the_users_own(text: str, is_lost: bool) -> None:
    """The launcher names the rank that failed first, not the ranks that lost it."""
    assert is_lost_peer(RuntimeError(text)) is is_lost
