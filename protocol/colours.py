"""Telling a graph's tensors apart by nothing but their place in it."""

from __future__ import annotations

from collections.abc import Iterable

from cudnn_actor.protocol.canonical import blake, canonical_bytes
from cudnn_actor.protocol.operations import GraphTensor, Operation

__all__ = ["Colours"]


class Colours:
    """A colour for each tensor that depends on its place in the graph and on nothing else.

    Colour refinement: a tensor's colour takes in its meaning, the operation that writes it and those that
    read it, over and over until no more tensors are told apart. Tensors that still share a colour are
    (but for graphs built to defy this) mirror images, so one of them is singled out, and so on until every
    tensor has its own. https://en.wikipedia.org/wiki/Colour_refinement_algorithm
    """

    def __init__(self, tensors: Iterable[GraphTensor], operations: Iterable[Operation]) -> None:
        self._operations = [(op, _hash(op.attributes())) for op in operations]
        self._start = {t.uid: _hash(t.meaning()) for t in tensors}

    def distinct(self) -> dict[int, str]:
        """Each uid's colour, no two the same."""
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
        """The uids that share the lowest shared colour; none when all differ."""
        sharing: dict[str, list[int]] = {}
        for uid, colour in colours.items():
            sharing.setdefault(colour, []).append(uid)
        return min(((c, uids) for c, uids in sharing.items() if len(uids) > 1), default=("", []))[1]


def _hash(value: object) -> str:
    return blake(canonical_bytes(value))
