"""Which keys a class or function takes that a config names, as its source says. Torch-free.

Nothing is imported: the answer comes before torch, and from code that nobody has allowed yet.
"""

import ast
import builtins
import importlib.util
import sys
from collections.abc import Iterable, Iterator, Mapping, Set
from functools import cache
from importlib.machinery import SOURCE_SUFFIXES, FileFinder, ModuleSpec, SourceFileLoader
from pathlib import Path
from typing import Any, NamedTuple

from ddp_runner.errors import UserError, nearest

ANY = "**"  # among keywords: it takes any
CLOSE = 0.65  # the least likeness of a key's intended name: depth is not width
# A keyword's type, also where it may be null; None: another than these, or no annotation.
PLAIN = {kind.__name__: kind for kind in (bool, int, float, str)}


class Keyword(NamedTuple):
    """One keyword of a class or function."""

    kind: type | None
    is_required: bool = False


Keywords = Mapping[str, Keyword]


class _UnknownError(Exception):
    """The source does not say."""


def unknown_key(key: str, group: str, *, target: Any, known: Set[str]) -> UserError:
    """Return the error of a key in a group whose `target` knows only other keywords."""
    names = sorted(known)
    meant = nearest(key, names, cutoff=CLOSE)
    hint = f"did you mean {group}.{meant}?" if meant else f"it has {', '.join(names) or 'none'}"
    return UserError(f"{group}.{key} is not a keyword of {target}; {hint}")


def source_keywords(name: str) -> Keywords | None:
    """Return the keywords of what a dotted name stands for, ANY among them if it takes any.

    None: the source does not say, since it is compiled, decorated or computed.

    Raises:
        ImportError: there is no such name in its module; the text says what to write.
    """
    try:
        return _named(name) or {}
    except (_UnknownError, RecursionError, OSError, SyntaxError, ValueError):
        return None  # the rank that imports it reports what is wrong with it


def source_file(name: str) -> Path | None:
    """Return the file of the module that a dotted name is in; None: it is not known."""
    try:
        return _module(name, tuple(sys.path))[0]
    except (_UnknownError, ImportError, ValueError):
        return None


def _named(name: str) -> Keywords | None:
    source, rest = _module(name, tuple(sys.path))
    if len(rest) != 1 or source is None or source.suffix != ".py":
        raise _UnknownError
    return _keywords(source, rest[0], name)


@cache  # the jobs of a sweep ask again
def _module(name: str, path: tuple[str, ...]) -> tuple[Path | None, list[str]]:
    """Return the file of the module that a name is in, and the name's words within it.

    `path` is sys.path.
    """
    first, *rest = name.split(".")
    spec = importlib.util.find_spec(first)
    if spec is None:
        raise _UnknownError
    while rest and (inner := _submodule(spec, rest[0])) is not None:
        spec, rest = inner, rest[1:]
    return Path(spec.origin) if spec.has_location and spec.origin else None, rest


def _submodule(spec: ModuleSpec, name: str) -> ModuleSpec | None:
    """Return where a package's submodule is found; None if it has none of that name."""
    for place in spec.submodule_search_locations or ():
        inner = FileFinder(place, (SourceFileLoader, SOURCE_SUFFIXES)).find_spec(name)
        if inner is not None:
            return inner
    return None


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield a module's statements, with those inside its if and try blocks."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _statements([*node.body, *node.orelse])
        if isinstance(node, ast.Try):
            yield from _statements(one for handler in node.handlers for one in handler.body)


@cache  # likewise
def _keywords(source: Path, word: str, name: str) -> Keywords | None:
    """Return the keywords of a module's `word`, whose whole name is `name`; None: of no class's."""
    known = set[str]()
    for node in _statements(ast.parse(source.read_bytes()).body):
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


def _of_class(source: Path, node: ast.ClassDef, name: str) -> Keywords | None:
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
    if any(base.rpartition(".")[2] == "NamedTuple" or hasattr(builtins, base) for base in bases):
        raise _UnknownError
    inherited = [
        _keywords(source, base, f"{name.rpartition('.')[0]}.{base}")
        for base in bases
        if base.rpartition(".")[2] not in ("Protocol", "ABC", "Generic", "object")
    ]
    found = [one for one in inherited if one is not None]
    if not is_dataclass and len(found) > 1:  # the order of bases may let another one count
        return {key: Keyword(one.kind) for key, one in found[0].items()}
    if not is_dataclass:
        return found[0] if found else None
    fields = {key: kind for one in reversed(found) for key, kind in one.items()}
    for one in node.body:
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
            if "ClassVar" in ast.unparse(one.annotation):
                continue
            fields[one.target.id] = Keyword(_kind(one.annotation), one.value is None)
    return fields


def _arguments(node: ast.FunctionDef, *, bound: int = 0) -> Keywords:
    if node.decorator_list:
        raise _UnknownError  # it may take other arguments
    given = node.args
    plain = [*given.posonlyargs, *given.args]
    defaults = [*[None] * (len(plain) - len(given.defaults)), *given.defaults, *given.kw_defaults]
    pairs = list(zip([*plain, *given.kwonlyargs], defaults, strict=True))[bound:]
    found = {one.arg: Keyword(_kind(one.annotation), default is None) for one, default in pairs}
    return found | ({ANY: Keyword(None)} if given.kwarg else {})


def _kind(annotation: ast.expr | None) -> type | None:
    """Return what an annotation such as ``int`` or ``float | None`` says."""
    words = ast.unparse(annotation).split(" | ") if annotation else []
    kinds = [PLAIN.get(word) for word in words if word != "None"]
    return kinds[0] if len(kinds) == 1 else None
