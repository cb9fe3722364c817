"""Reads from the source which keywords a class or function takes. Torch-free.

The source is parsed, not imported: the answer must come before torch, and the code may not be
allowed yet.
"""

import ast
import builtins
import importlib.util
import sys
from collections.abc import Iterator, Mapping, Set
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, NamedTuple

from ddp_runner.errors import UserError, nearest

ANY = "**"  # among keywords: any keyword is accepted
CLOSE = 0.65  # the least likeness for a hint about a key: depth is not width
# The types of keywords that are checked, also with ``| None``.
PLAIN = {kind.__name__: kind for kind in (bool, int, float, str)}
# The first words of annotations that certainly leave out None: others may be aliases.
NOT_NONE = {*PLAIN, "Tensor", "list", "tuple", "dict", "Sequence", "Mapping", "Callable"}


class Keyword(NamedTuple):
    """One keyword of a class or function."""

    kind: type | None = None  # None: not in PLAIN, or no annotation
    is_required: bool = False
    takes_null: bool = True


Keywords = Mapping[str, Keyword]


class _UnknownError(Exception):
    """The source does not show the keywords."""


def unknown_key(key: str, group: str, *, target: Any, known: Set[str]) -> UserError:
    """Return the error for a key of a group that its `target` does not take."""
    names = sorted(known)
    match = nearest(key, names, cutoff=CLOSE)
    hint = f"did you mean {group}.{match}?" if match else f"it has {', '.join(names) or 'none'}"
    return UserError(f"{group}.{key} is not a keyword of {target}", hint)


def source_keywords(name: str) -> Keywords:
    """Return the keywords of a dotted name, with ANY if it takes any keyword.

    Return only ANY if the source does not show them: it is compiled, decorated or computed.

    Raises:
        ImportError: the module does not define the name; the text ends with the fix.
    """
    try:
        return _name_keywords(name) or {}
    except (_UnknownError, RecursionError, OSError, SyntaxError, ValueError):
        return {ANY: Keyword()}  # the rank that imports it reports the fault


def source_file(name: str) -> Path | None:
    """Return the file of the module that a dotted name is in; None if it is unknown."""
    return _find_module(name, tuple(sys.path))[0]


def _name_keywords(name: str) -> Keywords | None:
    source, rest = _find_module(name, tuple(sys.path))
    if len(rest) != 1 or source is None or source.suffix != ".py":
        raise _UnknownError
    return _module_keywords(source, rest[0], name)


@cache  # the jobs of a sweep repeat their names
def _find_module(name: str, path: tuple[str, ...]) -> tuple[Path | None, list[str]]:
    """Return the file of a name's module, and the name's words within it; `path` is sys.path."""
    first, *rest = name.split(".")
    # find_spec raises a ValueError for these.
    spec = None if first in ("", "__main__") else importlib.util.find_spec(first)
    if spec is None:
        return None, rest
    while rest:
        inner = PathFinder.find_spec(rest[0], spec.submodule_search_locations or [])
        if inner is None:
            break
        spec, rest = inner, rest[1:]
    return Path(spec.origin) if spec.has_location and spec.origin else None, rest


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a module's statements, also those inside its if and try blocks."""
    for child in ast.iter_child_nodes(node):
        yield child
        if isinstance(child, ast.If | ast.Try | ast.ExceptHandler):
            yield from _statements(child)


@cache  # the jobs of a sweep repeat their names
def _module_keywords(source: Path, word: str, name: str) -> Keywords | None:
    """Return the keywords of a module's `word`; None: a class that defines no constructor.

    The word of a base class may be dotted, as in torch.optim.SGD.
    """
    module, (first, *rest) = name.removesuffix(f".{word}"), word.split(".")
    path, defined = module.split("."), set[str]()
    for node in _statements(ast.parse(source.read_bytes())):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            defined.add(node.name)
            if node.name == word:
                if isinstance(node, ast.FunctionDef):
                    return _function_keywords(node)
                return _class_keywords(source, node, name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            is_from, parents = isinstance(node, ast.ImportFrom), list[str]()
            if isinstance(node, ast.ImportFrom):
                up = node.level - (source.name == "__init__.py")  # such a file is its package
                parents = path[: len(path) - up] if node.level else []
                parents += filter(None, [node.module])
            for alias in node.names:
                bound = alias.asname or (alias.name if is_from else alias.name.split(".")[0])
                defined.add(bound)
                if bound == first and (is_from or rest):
                    origin = alias.name if is_from or alias.asname else bound
                    return _name_keywords(".".join([*parents, origin, *rest]))
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                defined |= {item.id for item in ast.walk(target) if isinstance(item, ast.Name)}
    if first in defined or defined & {"*", "__getattr__"}:
        raise _UnknownError  # it is computed
    match = nearest(word, defined)
    hint = f"did you mean {module}.{match}?" if match else "name another"
    raise ImportError(f"{module} has no {word}; {hint}")


def _class_keywords(source: Path, node: ast.ClassDef, name: str) -> Keywords | None:
    """Return the keywords of a class, else of the first base class that has any."""
    decorators = [ast.unparse(item).partition("(")[0] for item in node.decorator_list]
    is_dataclass = decorators in (["dataclass"], ["dataclasses.dataclass"])
    if node.keywords or (decorators and not is_dataclass):
        raise _UnknownError
    for word in ("__init__", "__new__"):
        for item in node.body:
            if isinstance(item, ast.FunctionDef) and item.name == word:
                return _function_keywords(item, bound=1)
    bases = [ast.unparse(base).partition("[")[0] for base in node.bases]
    if any(base.rpartition(".")[2] == "NamedTuple" or hasattr(builtins, base) for base in bases):
        raise _UnknownError
    inherited = []
    for base in bases:
        if base.rpartition(".")[2] not in ("Protocol", "ABC", "Generic", "object"):
            of_base = _module_keywords(source, base, f"{name.removesuffix(node.name)}{base}")
            inherited += [] if of_base is None else [of_base]
    if not is_dataclass and len(inherited) > 1:  # the MRO may choose another base's constructor
        return {key: Keyword(item.kind) for key, item in inherited[0].items()}
    if not is_dataclass:
        return inherited[0] if inherited else None
    fields = {key: item for of_base in reversed(inherited) for key, item in of_base.items()}
    for item in node.body:
        if not (isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)):
            continue
        if "ClassVar" not in ast.unparse(item.annotation):
            fields[item.target.id] = _keyword(item.annotation, item.value)
    return fields


def _function_keywords(node: ast.FunctionDef, *, bound: int = 0) -> Keywords:
    """Return the keywords of a function without its first `bound` parameters."""
    if node.decorator_list:
        raise _UnknownError  # a decorator may change the keywords
    parameters = node.args
    plain = [*parameters.posonlyargs, *parameters.args]
    missing = [None] * (len(plain) - len(parameters.defaults))
    defaults = [*missing, *parameters.defaults, *parameters.kw_defaults]
    pairs = list(zip([*plain, *parameters.kwonlyargs], defaults, strict=True))[bound:]
    names = {item.arg: _keyword(item.annotation, default) for item, default in pairs}
    return names | ({ANY: Keyword()} if parameters.kwarg else {})


def _keyword(annotation: ast.expr | None, default: ast.expr | None) -> Keyword:
    """Return a keyword with an annotation such as ``int`` or ``float | None``."""
    words = ast.unparse(annotation).split(" | ") if annotation else ["None"]
    kinds = [PLAIN.get(word) for word in words if word != "None"]
    is_null = isinstance(default, ast.Constant) and default.value is None
    excludes_null = {word.partition("[")[0] for word in words} <= NOT_NONE
    return Keyword(
        kinds[0] if len(kinds) == 1 else None,
        is_required=default is None,
        takes_null=is_null or not excludes_null,
    )
