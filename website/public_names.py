"""The directive `public-names` documents the public names of packages and modules, and unions by their names.

    .. public-names:: cudnn_actor.service cudnn_actor.supervision.LifecycleEvent

The names are those of `__all__` of the public packages. A name that is on no page, or on two, is a warning,
and so an error in `make site`.
"""

from __future__ import annotations

import functools
import importlib
import types
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any, get_args

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

from cudnn_actor.moved_names import HOMES

__all__ = ["PACKAGES", "PublicNames", "public_names", "setup"]

PACKAGES = (
    "cudnn_actor",
    *dict.fromkeys(HOMES.values()),
    "cudnn_actor.pool",
    "cudnn_actor.ray",
    "cudnn_actor.blocking",
    "cudnn_actor.protocol",
    "cudnn_actor.metrics.prometheus",
    "cudnn_actor.metrics.opentelemetry",
    "cudnn_actor.onnx",
    "cudnn_actor.onnx.backend",
    "cudnn_actor.logging",
)
"""Where users import from; a name that several have is documented as the first one's."""

_log = logging.getLogger(__name__)


@functools.cache
def public_names() -> Mapping[str, str]:
    """Each public name with its package, and the module that defines it. A first call blocks for imports."""
    found: dict[str, str] = {}
    seen: list[Any] = []
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in module.__all__:
            value = getattr(module, name)
            if not any(value is other for other in seen):
                seen.append(value)
                found[f"{package}.{name}"] = _home(value, f"{package}.{name}")
    return types.MappingProxyType(found)


def _home(value: Any, name: str) -> str:
    """The module that defines a value; of a union, which knows none, its name."""
    module: str = getattr(value, "__module__", "")
    return module if module.startswith("cudnn_actor") else name


class PublicNames(SphinxDirective):
    """The public names that are defined in the given modules and packages, by name."""

    has_content = False
    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        """Parse a directive of autodoc for each name. Warns of none, and of one that another page has."""
        homes = self.arguments[0].split()
        documented: dict[str, str] = self.env.__dict__.setdefault("public_names", {})
        names = sorted(name for name, home in public_names().items() if _within(home, homes))
        if not names:
            _log.warning("no public name is defined in %s", homes, location=self.get_location())
        for name in names:
            if documented.setdefault(name, self.env.docname) != self.env.docname:
                _log.warning("%s is on two pages", name, location=self.get_location())
        return self.parse_text_to_nodes("\n".join(line for name in names for line in _documented(name)))


def _within(home: str, places: list[str]) -> bool:
    return any(home == place or home.startswith(f"{place}.") for place in places)


def _documented(name: str) -> Iterator[str]:
    package, _, attribute = name.rpartition(".")
    value = getattr(importlib.import_module(package), attribute)
    if isinstance(value, type):
        yield f".. autoclass:: {name}"
        if issubclass(value, Enum):
            yield "   :undoc-members:"
        else:
            yield f"   :inherited-members: {', '.join(_with_pages(value))}"
    elif callable(value) and not get_args(value):
        yield f".. autofunction:: {name}"
    else:
        yield f".. autodata:: {name}"
        yield "   :no-value:"
    yield ""


def _with_pages(cls: type) -> list[str]:
    """The bases whose members are not documented again: public ones, and those of other packages."""
    ours = importlib.import_module("cudnn_actor")
    return [
        base.__name__
        for base in cls.__mro__[1:]
        if not base.__module__.startswith("cudnn_actor") or getattr(ours, base.__name__, None) is base
    ]


def _check(_: Sphinx, env: BuildEnvironment) -> None:
    """Warn of each public name that is on no page."""
    for name in sorted(set(public_names()) - set(env.__dict__.get("public_names", {}))):
        _log.warning("%s is on no page of the reference", name)


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directive. The pages are read in one process: names are counted there."""
    app.add_directive("public-names", PublicNames)
    app.connect("env-check-consistency", _check)
    return {"version": "1", "parallel_read_safe": False}
