"""The private names of the product that tests use: attributes, imports, and what `monkeypatch` exchanges."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

from .test_packages import ROOT, TOP, declared

__all__ = ["private_names"]

_DEFINITION = re.compile(
    r"(?:def|class) (_[A-Za-z]\w*)|(?:self|cls)\.(_[A-Za-z]\w*)|^ *(_[A-Za-z]\w*)(?:: [^=\n]+)? = ",
    re.MULTILINE,
)
_PERHAPS = re.compile(
    r"""(?<!self)(?<!cls)\._[a-z]|^from cudnn_actor.*\b_[A-Za-z]|^    _\w+,$|setattr\(.*["']_[a-z]""",
    re.MULTILINE,
)


def private_names(file: Path) -> list[str]:
    """The private names of the product that a file uses, once for each use.

    Left out are those of the file's own classes, and constants: a test makes a limit small to reach it.
    """
    text = file.read_text(encoding="utf-8")
    if not _PERHAPS.search(text):
        return []  # which is most of them: a tree takes ten milliseconds
    tree = ast.parse(text)
    own = _defined(tree)
    return [name for name in _used(tree) if name in _of_the_product() - own and not name.isupper()]


def _used(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=value, attr=name) if _is_private(name) and not _is_itself(value):
                yield name
            case ast.ImportFrom(module=str(module), names=names) if module.partition(".")[0] == TOP[0]:
                yield from (each.name for each in names if _is_private(each.name))
            case ast.Call(func=ast.Attribute(attr="setattr"), args=[_, ast.Constant(value=str(name)), *_]):
                yield from {name} if _is_private(name) else ()


@functools.cache
def _of_the_product() -> frozenset[str]:
    """All private names that a file of the product defines; not those that are public by agreement."""
    files = [file for folder in declared().values() for file in (ROOT / folder).glob("*.py")]
    found = {
        name
        for file in files
        for names in _DEFINITION.findall(file.read_text(encoding="utf-8"))
        for name in filter(None, names)
    }
    return frozenset(found) - {"_fields", "_replace", "_asdict", "_exit", "_repr_html_", "_repr_svg_"}


def _defined(tree: ast.AST) -> frozenset[str]:
    """The private names that a module or its classes define."""
    found = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
            case ast.Attribute(value=value, attr=name, ctx=ast.Store()) if _is_itself(value):
                found.add(name)
    return frozenset(filter(_is_private, found))


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def _is_itself(value: ast.expr) -> bool:
    match value:
        case ast.Name(id="self" | "cls") | ast.Call(func=ast.Name(id="super")):
            return True
    return False
