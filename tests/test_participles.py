"""Functions are named by a verb, or by a noun for what they return, and not by a bare participle like `made`.

A participle leaves open what it is of, and whether a call does it or asks whether it was done. Two kinds of
names stay: those of properties that say whether something is so (`closed`), and the names in `STAYS`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

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
STAYS = {
    "users call them, or read them": [
        "BlockingRequests.batched",
        "ExitReason.killed",
        "FaultInjector.fired",
        "Graph.encoded",
        "Loop.stacked",
        "Operation.named",
        "OperationGraph.bound",
        "OperationGraph.written",
        "PoolRequests.batched",
        "RayRequests.batched",
        "Recorder.added",
        "RequestCounts.finished",
        "Requests.batched",
        "TensorSpec.packed",
        "TensorSpec.strided",
    ],
    "computations of `chaos` have what operations have": ["GraphComputation.named", "LoopComputation.named"],
    "a listener is told of what has happened": [
        "Listener.happened",
        "Listener.lost",
        "Membership.happened",
        "Membership.lost",
        "RequestObserver.answered",
        "RequestObserver.received",
        "RequestObserver.replayed",
        "RequestObserver.sent",
        "RequestSpans.answered",
        "RequestSpans.received",
        "RequestSpans.replayed",
        "RequestSpans.sent",
        "Session.answered",
        "Takes.answered",
    ],
    "the name that futures have": ["Asked.done"],
    "a property that says why it is closed; None while it is open": ["Mailbox.closed"],
}
"""Methods that are named by a bare participle all the same, and why."""


def _is_participle(name: str) -> bool:
    word = name.strip("_")
    return "_" not in word and word not in _OTHERS and _PARTICIPLE.fullmatch(word) is not None


def _says_whether(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether it is a property that is true or false."""
    decorators = {ast.unparse(each).rpartition(".")[2] for each in function.decorator_list}
    is_bool = function.returns is not None and ast.unparse(function.returns) == "bool"
    return is_bool and not decorators.isdisjoint({"property", "cached_property"})


def _named_by_participles(node: ast.AST, within: str = "") -> Iterator[tuple[str, int]]:
    """The names of a tree's functions that are bare participles, with the class or function around them, and
    their lines."""
    for each in ast.iter_child_nodes(node):
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
            if _is_participle(each.name) and not _says_whether(each):
                yield f"{within}{each.name}", each.lineno
            yield from _named_by_participles(each, f"{each.name}.")
        elif isinstance(each, ast.ClassDef):
            yield from _named_by_participles(each, f"{each.name}.")
        else:
            yield from _named_by_participles(each, within)


def participles() -> dict[str, list[str]]:
    """The functions that are named by a bare participle, with the class of each, and where they are."""
    found: dict[str, list[str]] = {}
    for top in ("actors", "protocol", "supervision", "cudnn_actor"):
        for file in sorted((ROOT / top).rglob("*.py")):
            path = file.relative_to(ROOT)
            if path.parts[:2] in {("cudnn_actor", link) for link in ("actors", "protocol", "supervision")}:
                continue
            text = file.read_text(encoding="utf-8")
            if not any(map(_is_participle, _FUNCTION.findall(text))):
                continue  # which is most of them: a tree takes ten milliseconds
            for name, line in _named_by_participles(ast.parse(text)):
                found.setdefault(name, []).append(f"{path}:{line}")
    return found


def test_no_function_is_named_by_a_bare_participle_without_a_reason() -> None:
    found = participles()
    stays = [name for names in STAYS.values() for name in names]
    others = {name: places for name, places in found.items() if name not in stays}
    assert not others, "name them by what they do, or by what they return"
    assert sorted(stays) == sorted(found), "there is no such function"


def test_each_function_that_is_named_by_a_participle_is_found() -> None:
    tree = ast.parse(
        "class Door:\n"
        "    @property\n"
        "    def closed(self) -> bool: ...\n"
        "    @property\n"
        "    def painted(self) -> str: ...\n"
        "    def opened(self) -> bool:\n"
        "        def hidden(): ...\n"
        "    if True:\n"
        "        async def shut_and_locked(self): ...\n"
        "        async def locked(self): ...\n"
        "def _made(): ...\n"
    )
    found = [name for name, _ in _named_by_participles(tree)]
    assert found == ["Door.painted", "Door.opened", "opened.hidden", "Door.locked", "_made"]
