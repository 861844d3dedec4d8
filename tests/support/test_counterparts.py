"""The table of counterparts has every function of the installed headers and of the frontend, and no other."""

from __future__ import annotations

from ..counterparts.table import FRONTEND, HEADERS
from .child import Child
from .headers import include_folder, installed_version, prototypes


def test_every_function_of_the_installed_headers_is_in_the_table() -> None:
    version = installed_version()
    found = {name: set(functions) for name, functions in prototypes(include_folder()).items()}
    listed: dict[str, set[str]] = {}
    for header in HEADERS:
        if header.since <= version and not (header.optional and header.name not in found):
            listed.setdefault(header.name, set()).update(name for row in header.rows for name in row.names)
    assert listed == found


def names_of_pygraph() -> set[str]:
    import cudnn

    return {name for name in dir(cudnn.pygraph) if not name.startswith("_")}


def test_every_public_name_of_the_frontend_s_graphs_is_in_the_table(child: Child) -> None:
    listed = {name for _, rows in FRONTEND for row in rows for name in row.names}
    assert listed == child.call(names_of_pygraph)
