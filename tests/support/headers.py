"""The prototypes of cuDNN's and cuBLAS's C functions, from the headers that their wheels ship."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import NamedTuple

__all__ = ["Prototype", "include_folder", "installed_version", "parse", "prototypes"]

_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
_FUNCTION = re.compile(
    r"(?P<deprecated>\bCUDNN_DEPRECATED\s+)?(?P<returns>\b(?:const\s+)?\w+\b[\s*]*)\bCU(?:DNN|BLAS)WINAPI\s+"
    r"(?P<name>\w+)\s*\((?P<parameters>[^()]*)\)\s*;"
)
_PARAMETER = re.compile(r"(?P<type>.*?[\s*])(?P<name>\w+)\s*(?P<arrays>(?:\[\w*\]\s*)*)$", re.DOTALL)


class Prototype(NamedTuple):
    """A function's types, each as in C with single spaces: `const void *`, `cudnnHandle_t`, `int`.

    Parameters
    ----------
    parameters
        The types of its parameters. An array is a pointer to its elements.
    deprecated
        Whether the header marks it as deprecated.
    """

    returns: str
    parameters: tuple[str, ...]
    deprecated: bool = False


def include_folder(package: str = "nvidia.cudnn") -> Path:
    """Where the installed wheel has its headers. Raises `ModuleNotFoundError`."""
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError(package)
    return Path(found.submodule_search_locations[0]) / "include"


def installed_version() -> tuple[int, ...]:
    """The version of cuDNN that the installed headers are of: (9, 28, 1)."""
    text = (include_folder() / "cudnn_version.h").read_text(encoding="utf-8")
    numbers = dict(re.findall(r"#define CUDNN_(MAJOR|MINOR|PATCHLEVEL) (\d+)", text))
    return tuple(int(numbers[name]) for name in ("MAJOR", "MINOR", "PATCHLEVEL"))


def prototypes(folder: Path) -> dict[str, dict[str, Prototype]]:
    """The functions of each header that has any, by the header's name without its version: `cudnn_ops`."""
    found: dict[str, dict[str, Prototype]] = {}
    for path in sorted(folder.glob("*.h")):
        if functions := parse(path.read_text(encoding="utf-8")):
            found.setdefault(re.sub(r"_v\d+$", "", path.stem), functions)
    return found


def parse(text: str) -> dict[str, Prototype]:
    """The functions that a header declares, by their names."""
    functions = {}
    for match in _FUNCTION.finditer(_COMMENT.sub(" ", text)):
        parameters = [] if match["parameters"].strip() in ("", "void") else match["parameters"].split(",")
        functions[match["name"]] = Prototype(
            returns=_squeezed(match["returns"]),
            parameters=tuple(_type(parameter.strip()) for parameter in parameters),
            deprecated=match["deprecated"] is not None,
        )
    return functions


def _type(parameter: str) -> str:
    match = _PARAMETER.match(parameter)
    assert match is not None, parameter
    return _squeezed(match["type"] + "*" * match["arrays"].count("["))


def _squeezed(text: str) -> str:
    """With one space between words and before the first star, and none between stars."""
    words = text.replace("*", " ").split()
    return " ".join([*words, "*" * text.count("*")]).strip()
