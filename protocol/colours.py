"""Distinguishes a graph's tensors by their position in the graph alone."""

from __future__ import annotations

from collections.abc import Iterable

from cudnn_actor.protocol.canonical import blake, canonical_bytes
from cudnn_actor.protocol.operations import GraphTensor, Operation

__all__ = ["Colours"]


class Colours:
    """Gives each tensor a colour that depends only on its meaning and its position in the graph.

    This is colour refinement: a tensor's colour is computed from its meaning, the operation that writes it
    and the operations that read it, repeatedly, until no more tensors get different colours. Tensors that
    still share a colour are symmetric (except in graphs constructed to defeat this). One of them is given a
    colour of its own and refinement goes on, until every colour is unique.
    https://en.wikipedia.org/wiki/Colour_refinement_algorithm
    """

    def __init__(self, tensors: Iterable[GraphTensor], operations: Iterable[Operation]) -> None:
        self._operations = [(op, _hash(op.attributes())) for op in operations]
        self._start = {t.uid: _hash(t.meaning()) for t in tensors}

    def distinct(self) -> dict[int, str]:
        """Each uid's colour; all colours differ."""
        colours = self._refine(self._start)
        while tied := self._tied(colours):
            candidates = [self._refine(colours | {uid: _hash(("chosen", colours[uid]))}) for uid in tied]
            colours = min(candidates, key=lambda found: sorted(found.values()))
        return colours

    def _refine(self, colours: dict[int, str]) -> dict[int, str]:
        count = 0
        while count < len(set(colours.values())):
            count = len(set(colours.values()))
            colours = self._step(colours)
        return colours

    def _step(self, colours: dict[int, str]) -> dict[int, str]:
        around: dict[int, list[tuple[str, int, str]]] = {uid: [] for uid in colours}
        for operation, attributes in self._operations:
            uids = (operation.output, *operation.inputs)
            seen = _hash((attributes, tuple(colours[uid] for uid in uids)))
            for place, uid in enumerate(uids):
                around[uid].append((attributes, place, seen))
        return {uid: _hash((colours[uid], tuple(sorted(around[uid])))) for uid in colours}

    @staticmethod
    def _tied(colours: dict[int, str]) -> list[int]:
        """The uids that share the lowest shared colour; empty if all colours differ."""
        sharing: dict[str, list[int]] = {}
        for uid, colour in colours.items():
            sharing.setdefault(colour, []).append(uid)
        return min(((c, uids) for c, uids in sharing.items() if len(uids) > 1), default=("", []))[1]


def _hash(value: object) -> str:
    return blake(canonical_bytes(value))
