"""Functions are named by a verb, or by a noun for what they return, and not by a bare participle like `made`.

A participle leaves open what it is of, and whether a call does it or asks whether it was done. So the numbers
only fall. Names that stay: properties that say how something is (`closed`), and methods by which a listener
is told of what has happened (`answered`, `lost`).
"""

from __future__ import annotations

import ast
import re

from .test_packages import ROOT

_PARTICIPLE = re.compile(
    r"\w{3,}ed|"
    r"beaten|begun|born|bound|bought|broken|brought|built|caught|chosen|dealt|done|drawn|driven|"
    r"fallen|felt|found|frozen|given|gone|grown|heard|held|hidden|kept|known|laid|led|left|lent|lost|"
    r"made|meant|met|overwritten|paid|rebuilt|redone|rewritten|ridden|risen|said|seen|sent|shown|sold|"
    r"sought|spent|spoken|stood|struck|stuck|taken|taught|thought|thrown|told|torn|undone|unseen|"
    r"unwritten|woken|won|worn|wound|written"
)
_FUNCTION = re.compile(r"\bdef\s+(\w+)")
_OTHERS = frozenset(["deed", "exceed", "feed", "need", "proceed", "seed", "shed", "speed", "succeed"])
"""Verbs and nouns that end as participles do."""
MOST = {
    "actors": 2,
    "cudnn_actor/attached": 4,
    "cudnn_actor/blocking": 2,
    "cudnn_actor/broker": 6,
    "cudnn_actor/engines": 2,
    "cudnn_actor/execution": 1,
    "cudnn_actor/isolation": 1,
    "cudnn_actor/metrics": 4,
    "cudnn_actor/models": 3,
    "cudnn_actor/pool": 14,
    "cudnn_actor/processes": 1,
    "cudnn_actor/ray": 1,
    "cudnn_actor/service": 2,
    "cudnn_actor/serving": 1,
    "cudnn_actor/trials": 2,
    "protocol": 23,
    "supervision": 5,
}
"""How many functions of each room are named by a bare participle. Whoever renames one lowers its number."""


def _is_participle(name: str) -> bool:
    word = name.strip("_")
    return "_" not in word and word not in _OTHERS and _PARTICIPLE.fullmatch(word) is not None


def participles() -> dict[str, list[str]]:
    """The functions of each room that are named by a bare participle, as `file:line name`."""
    found: dict[str, list[str]] = {}
    for top in ("actors", "protocol", "supervision", "cudnn_actor"):
        for file in sorted((ROOT / top).rglob("*.py")):
            path = file.relative_to(ROOT)
            if path.parts[:2] in {("cudnn_actor", link) for link in ("actors", "protocol", "supervision")}:
                continue
            room = "/".join(path.parts[:2]) if top == "cudnn_actor" and len(path.parts) > 2 else top
            text = file.read_text(encoding="utf-8")
            if not any(map(_is_participle, _FUNCTION.findall(text))):
                continue  # which is most of them: a tree takes ten milliseconds
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _is_participle(node.name):
                    found.setdefault(room, []).append(f"{path}:{node.lineno} {node.name}")
    return found


def test_as_many_functions_of_each_room_as_are_listed_are_named_by_a_bare_participle() -> None:
    """No more: name them by what they do, or by what they return. With fewer, the next one would pass."""
    found = participles()
    others = {room: names for room, names in found.items() if len(names) != MOST.get(room)}
    assert not others
    assert found.keys() == MOST.keys()
