"""Which keys a class or function takes that a config names, as its source says. Torch-free.

Nothing is imported: the answer comes before torch, and from code that nobody has allowed yet.
"""

import ast
import importlib.util
import sys
from collections.abc import Iterator, Mapping, Set
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from ddp_runner.config.schema import (
    LIST_GROUPS,
    PACKAGE,
    RUNNER_KEYS,
    Config,
    has_own_loop,
    runner_keys,
)
from ddp_runner.errors import UserError, nearest

ANY = "**"  # in a set of keywords: it takes any
# What the runner gives itself, or reads itself: no key of a user's.
GIVEN = {
    "optimizer": {"params", "module"},
    "scheduler": {"optimizer", "last_epoch"},
    "loop": {"run"},
}
READ = {"scheduler": {"monitor"}, "trackers": {"wait_s"}}


class _UnknownError(Exception):
    """The source does not say."""


def validate_keywords(config: Config) -> None:
    """Reject a key that the class or function beside it does not take, and a name that is nowhere.

    What the source does not tell is left to the rank, which imports it.

    Raises:
        UserError: a key or a name is wrong.
    """
    for group in (*RUNNER_KEYS, *LIST_GROUPS):
        _validate_tree(getattr(config, group), group)
    loss = config.model.get("loss")
    if isinstance(loss, str):
        _known("model.loss", loss)
    step = config.train.step
    if isinstance(step, Mapping):
        _validate_tree(step, "train.step")
        step = step.get("_target_")
    takes_loss = "loss" in (_known("train.step", str(step)) or ())
    if takes_loss and loss is None and config.task in ("train", "check"):
        raise UserError(
            f"model.loss is null or deleted, and train.step ({step}) needs it; write "
            "model.loss=ddp_runner.train.losses.cross_entropy, or a train.step of your own"
        )
    if has_own_loop(config.task):
        _known("task", config.task)
        _validate_keys({"_target_": config.task, **config.loop}, "loop")


def _validate_tree(tree: Any, key: str) -> None:
    if isinstance(tree, list):
        tree = dict(enumerate(tree))
    if not isinstance(tree, Mapping):
        return
    if isinstance(tree.get("_target_"), str):
        _validate_keys(tree, key)
    for name, one in tree.items():
        _validate_tree(one, f"{key}.{name}")


def _validate_keys(settings: Mapping[str, Any], key: str) -> None:
    target = settings["_target_"]
    known = _known(f"{key}._target_", target)
    if known is None or ANY in known:
        return
    known |= READ.get(key.partition(".")[0], set())
    read = {"name", *runner_keys(key)}
    for name in settings:
        if not (name in known | read or name.startswith("_")):
            raise unknown_key(name, key, target=target, known=known - GIVEN.get(key, set()))


def _known(key: str, name: str) -> frozenset[str] | None:
    """Return what ``source_keywords`` does of the value of a key; an error names the key."""
    try:
        return source_keywords(name)
    except ImportError as error:
        raise UserError(f"{key} ({name}) does not exist: {error}") from None


def unknown_key(key: str, group: str, *, target: Any, known: Set[str]) -> UserError:
    """Return the error of a key in a group whose `target` knows only other keywords."""
    names = sorted(known)
    meant = nearest(key, names)
    hint = f"did you mean {group}.{meant}?" if meant else f"it has {', '.join(names) or 'none'}"
    return UserError(f"{group}.{key} is not a keyword of {target}; {hint}")


def source_keywords(name: str) -> frozenset[str] | None:
    """Return the keywords of what a dotted name stands for, ANY among them if it takes any.

    None: the source does not say, since it is compiled, decorated or computed.

    Raises:
        ImportError: there is no such name in its module; the text says what to write.
    """
    try:
        return _named(name) or frozenset()
    except (_UnknownError, RecursionError, OSError, SyntaxError, ValueError):
        return None  # the rank that imports it reports what is wrong with it


def source_file(name: str) -> Path | None:
    """Return the file of the module that a dotted name is in; None: it is not known."""
    try:
        return _module(name, tuple(sys.path))[0]
    except (_UnknownError, ImportError, ValueError):
        return None


def _named(name: str) -> frozenset[str] | None:
    source, rest = _module(name, tuple(sys.path))
    if len(rest) != 1 or source is None or source.suffix != ".py":
        raise _UnknownError
    return _keywords(source, rest[0], name)


@lru_cache(maxsize=1000)  # the jobs of a sweep ask again
def _module(name: str, path: tuple[str, ...]) -> tuple[Path | None, list[str]]:
    """Return the file of the module that a name is in, and the name's words; `path` is sys.path."""
    first, *rest = name.split(".")
    source, places = _package(first, path)
    while rest and (inner := _submodule(places, rest[0])) is not None:
        (source, places), rest = inner, rest[1:]
    return source, rest


@cache
def _package(name: str, path: tuple[str, ...]) -> tuple[Path | None, list[Path]]:
    """Return the file of a package, and the folders of its submodules; `path` is sys.path."""
    if name == PACKAGE.name:
        return None, [PACKAGE]
    spec = importlib.util.find_spec(name)
    if spec is None:
        raise _UnknownError
    source = Path(spec.origin) if spec.origin else None
    return source, [Path(one) for one in spec.submodule_search_locations or ()]


def _submodule(places: list[Path], name: str) -> tuple[Path | None, list[Path]] | None:
    """Return a submodule's file and the folders of its own submodules; None if there is none."""
    for place in places:
        if (package := place / name / "__init__.py").is_file():
            return package, [package.parent]
        if (module := place / f"{name}.py").is_file():
            return module, []
        if (place / name).is_dir():
            return None, [place / name]
    return None


def _statements(source: Path) -> tuple[ast.stmt, ...]:
    """Return a module's statements, with those inside its if and try blocks."""

    def opened(body: list[ast.stmt]) -> Iterator[ast.stmt]:
        for node in body:
            yield node
            if isinstance(node, ast.If | ast.Try):
                yield from opened([*node.body, *node.orelse])
            if isinstance(node, ast.Try):
                yield from opened([one for handler in node.handlers for one in handler.body])

    return tuple(opened(ast.parse(source.read_bytes()).body))


@cache  # the jobs of a sweep ask again
def _keywords(source: Path, word: str, name: str) -> frozenset[str] | None:
    """Return the keywords of a module's `word`, whose whole name is `name`; None: of no class's."""
    known = set[str]()
    for node in _statements(source):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            known.add(node.name)
            if node.name == word:
                if isinstance(node, ast.FunctionDef):
                    return _arguments(node)
                return _of_class(source, node, name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = {(one.asname or one.name): one.name for one in node.names}
            known |= names.keys()
            if word in names and isinstance(node, ast.ImportFrom):
                return _named(f"{_module_of(node, source, name)}.{names[word]}")
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                known |= {one.id for one in ast.walk(target) if isinstance(one, ast.Name)}
    if word in known or known & {"*", "__getattr__"}:
        raise _UnknownError  # it is computed
    meant = nearest(word, known)
    module = name.rpartition(".")[0]
    hint = f"did you mean {module}.{meant}?" if meant else "name another"
    raise ImportError(f"{module} has no {word}; {hint}")


def _module_of(node: ast.ImportFrom, source: Path, name: str) -> str:
    """Return the module that a statement imports from, in the module that `name` is in."""
    if node.level == 0:
        return node.module or ""
    package = name.split(".")[:-1]
    up = node.level - (source.name == "__init__.py")
    return ".".join([*package[: len(package) - up], *filter(None, [node.module])])


def _of_class(source: Path, node: ast.ClassDef, name: str) -> frozenset[str] | None:
    """Return the keywords of a class: its own, else of the first base that has any."""
    decorators = [ast.unparse(one).partition("(")[0] for one in node.decorator_list]
    is_dataclass = decorators in (["dataclass"], ["dataclasses.dataclass"])
    if node.keywords or (decorators and not is_dataclass):
        raise _UnknownError
    for word in ("__init__", "__new__"):
        for one in node.body:
            if isinstance(one, ast.FunctionDef) and one.name == word:
                return _arguments(one, bound=1)
    bases = [ast.unparse(base).partition("[")[0] for base in node.bases]
    inherited = [
        _keywords(source, base, f"{name.rpartition('.')[0]}.{base}")
        for base in bases
        if base.rpartition(".")[2] not in ("Protocol", "ABC", "Generic", "object")
    ]
    found = [one for one in inherited if one is not None]
    if is_dataclass:
        fields = [one.target for one in node.body if isinstance(one, ast.AnnAssign)]
        return frozenset(one.id for one in fields if isinstance(one, ast.Name)).union(*found)
    return found[0] if found else None


def _arguments(node: ast.FunctionDef, *, bound: int = 0) -> frozenset[str]:
    if node.decorator_list:
        raise _UnknownError  # it may take other arguments
    positional = [*node.args.posonlyargs, *node.args.args][bound:]
    names = {one.arg for one in (*positional, *node.args.kwonlyargs)}
    return frozenset(names | ({ANY} if node.args.kwarg else set()))
