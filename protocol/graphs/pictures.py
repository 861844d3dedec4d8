"""Pictures of graphs: for Graphviz, and as SVG, which needs nothing else.

With an explanation, operations that run together stand in one box, which says
what runs them, and how long that takes if it was measured. An operation for which
nothing is launched has a dashed box.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING, NamedTuple

from cudnn_actor.protocol.graphs.box_placement import Point, Size, place
from cudnn_actor.protocol.graphs.explanation import Explanation, PieceOfPlan
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.graphs.step_kinds import StepKind

if TYPE_CHECKING:
    from cudnn_actor.protocol.graphs.named_graph import Graph

__all__ = ["dot", "svg"]

_SIZE, _LETTER, _ROW = 11, 6.63, 14
"""The size of the monospaced font, the width of a letter, and the height of a row, in pixels."""
_PAD, _MARGIN, _GAP = 8, 24, Size(24, 44)


class _Node(NamedTuple):
    """A port or an operation, and the user's line that added it."""

    key: Hashable
    name: str
    line: str = ""
    is_port: bool = False


class _Edge(NamedTuple):
    """A tensor, from its source to a reader. `is_update`: it is an input's new value, and leads back."""

    source: Hashable
    target: Hashable
    label: str
    is_update: bool = False


def _nodes_and_edges(graph: Graph) -> tuple[list[_Node], list[_Edge]]:
    """The nodes and edges of a graph's picture. Each node comes after those that lead to it."""
    body = graph.body
    nodes = [
        _Node(("in", number), _show(port.name), is_port=True) for number, port in enumerate(graph.inputs)
    ]
    edges: list[_Edge] = []
    made: dict[int, Hashable] = {
        port.uid: ("in", number) for number, port in enumerate(graph.inputs) if port.uid is not None
    }
    for number, operation in enumerate(body.operations):
        name, _, line = body.label(number).partition(" at ")
        nodes.append(_Node(number, name, line))
        sources = [uid for uid in operation.reads if uid in made]  # the others are numbers
        edges += [_Edge(made[uid], number, _shape(body, uid)) for uid in sources]
        made |= dict.fromkeys(operation.writes, number)
    for number, port in enumerate(graph.outputs):
        nodes.append(_Node(("out", number), _show(port.name), is_port=True))
        if port.uid is not None:
            edges.append(_Edge(made[port.uid], ("out", number), _shape(body, port.uid)))
    for tensor in body.tensors:
        if tensor.overwrites is not None:
            label = _shape(body, tensor.uid)
            edges.append(_Edge(made[tensor.uid], made[tensor.overwrites], label, is_update=True))
    return nodes, edges


def _first(nodes: list[_Node], edges: list[_Edge], most: int) -> tuple[list[_Node], list[_Edge]]:
    """The first operations, with the inputs that they read and the outputs that they write, as far as `most`
    nodes go; one more node, to which their other readers belong, counts the others."""
    if len(nodes) <= most:
        return nodes, edges
    sources: dict[Hashable, list[Hashable]] = {}
    for edge in edges:
        if not edge.is_update:
            sources.setdefault(edge.target, []).append(edge.source)
    ports = {node.key for node in nodes if node.is_port}
    kept: set[Hashable] = set()
    for node in nodes:
        read = sources.get(node.key, [])
        if node.is_port and not read:
            continue  # an input comes with what reads it
        wanted = {node.key, *ports.intersection(read)} - kept
        # Where something does not fit, all that reads it is left out, too.
        if len(kept) + len(wanted) <= most and all(key in kept or key in wanted for key in read):
            kept |= wanted
    rest = _Node("rest", f"and {len(nodes) - len(kept):,} more", is_port=True)
    edges = [
        edge if edge.target in kept else edge._replace(target=rest.key)
        for edge in edges
        if edge.source in kept and (edge.target in kept or not edge.is_update)
    ]
    return [*(node for node in nodes if node.key in kept), rest], edges


def _shape(body: OperationGraph, uid: int) -> str:
    tensor = body.tensor(uid)
    return f"{tensor.dtype} {'×'.join(map(str, tensor.dims)) or 'scalar'}"


def _show(name: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in name)


def _head(number: int, piece: PieceOfPlan) -> str:
    """The text about a piece: the engine that runs it, and its time if that was measured."""
    took = "" if piece.time is None else f", {piece.time.us:,.1f} us"
    return f"{number}: {' + '.join(dict.fromkeys(piece.steps))}{took}"


def _colour(piece: PieceOfPlan) -> str:
    """The colour of a piece: that of its first step."""
    return StepKind.colour_of(piece.steps[0] if piece.steps else "")


# Graphviz.


def dot(graph: Graph, explanation: Explanation | None = None) -> str:
    """See `Graph.to_dot`."""
    nodes, edges = _nodes_and_edges(graph)
    texts = {
        node.key: f"{_name(node.key)} [{'shape=ellipse, ' if node.is_port else ''}"
        f"label={_quote(f'{node.name} {node.line}'.strip())}];"
        for node in nodes
    }
    lines = ["digraph {", "  rankdir=TB; node [shape=box];"]
    for number, piece in enumerate(explanation.pieces if explanation else ()):
        lines.append(f"  subgraph cluster{number} {{ label={_quote(_head(number, piece))};")
        lines.append(f'    style=filled; fillcolor="{_colour(piece)}";')
        lines += [f"    {texts.pop(operation)}" for operation in piece.operations]
        lines.append("  }")
    lines += [f"  {text}" for text in texts.values()]
    for edge in edges:
        style = "style=dashed, " if edge.is_update else ""
        ends = f"{_name(edge.source)} -> {_name(edge.target)}"
        lines.append(f"  {ends} [{style}label={_quote(edge.label)}];")
    return "\n".join([*lines, "}", ""])


def _name(key: Hashable) -> str:
    return "".join(map(str, key)) if isinstance(key, tuple) else f"op{key}"


def _quote(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


# SVG.


def svg(graph: Graph, explanation: Explanation | None = None, *, most: int = sys.maxsize) -> str:
    """See `Graph.to_svg`. Of a graph with more nodes than `most`, the first ones are drawn."""
    nodes, edges = _first(*_nodes_and_edges(graph), most)
    boxes = _boxes(nodes, explanation.pieces if explanation else ())
    home = {key: box.key for box in boxes for key in box.holds}
    below: dict[Hashable, float] = {}
    for edge in edges:
        below[home[edge.source]] = max(below.get(home[edge.source], 0), _LETTER * len(edge.label) + _PAD)
    down: dict[tuple[Hashable, Hashable], dict[str, None]] = {}
    for edge in edges:
        pair = home[edge.source], home[edge.target]
        if pair[0] != pair[1] and not edge.is_update:
            down.setdefault(pair, {})[edge.label] = None
    sizes = {box.key: Size(max(box.width, below.get(box.key, 0)), box.height) for box in boxes}
    placed = place(sizes, list(down), gap=_GAP)
    updates = [(home[edge.source], home[edge.target]) for edge in edges if edge.is_update]
    shapes = [_path(line) for line in placed.lines]
    shapes += [_update(placed.boxes[source], placed.boxes[target]) for source, target in updates]
    shapes += [shape for box in boxes for shape in box.elements(*placed.boxes[box.key])]
    told: set[tuple[Hashable, str]] = set()
    told_first = sorted(zip(down.items(), placed.lines, strict=True), key=lambda each: each[1][-1][1])
    for ((source, _), labels), line in told_first:
        label = ", ".join(labels)
        if (source, label) not in told:  # a tensor that several boxes read is labelled once
            told.add((source, label))
            (x, y), (next_x, next_y) = line[:2]
            shapes.append(_text(x + (next_x - x) * 0.2, y + (next_y - y) * 0.4, label))
    left = _MARGIN + (2 * _GAP.width if updates else 0)
    return _document(left, placed.width, placed.height, shapes)


class _Box(NamedTuple):
    """A port, an operation, or a piece with its operations: what a picture shows as one box.

    Parameters
    ----------
    key
        The node's key; for a piece, ("piece", its number).
    holds
        The keys of the nodes in it.
    rows
        Its lines of text, each with a bold part and a plain part.
    fill
        Its colour; empty for an operation that nothing runs, whose box is dashed.
    radius
        The radius of its corners, in pixels.
    """

    key: Hashable
    holds: Sequence[Hashable]
    rows: Sequence[tuple[str, str]]
    fill: str = "#ffffff"
    radius: int = 3

    @property
    def width(self) -> float:
        """The width, in pixels."""
        return _LETTER * max(len(f"{bold} {plain}".strip()) for bold, plain in self.rows) + 2 * _PAD

    @property
    def height(self) -> float:
        """The height, in pixels."""
        return _ROW * len(self.rows) + _PAD

    def elements(self, x: float, y: float) -> Iterator[str]:
        """The SVG elements of the box, with its middle at a point."""
        left, top = x - self.width / 2, y - self.height / 2
        style = f'fill="{self.fill}"' if self.fill else 'fill="#ffffff" stroke-dasharray="3 3"'
        yield (
            f'<rect x="{left:.1f}" y="{top:.1f}" width="{self.width:.1f}" height="{self.height:.1f}" '
            f'rx="{self.radius}" stroke="#567" {style}/>'
        )
        for number, (bold, plain) in enumerate(self.rows):
            text = f"<tspan>{escape(bold)}</tspan> {escape(plain)}".strip()
            yield f'<text x="{left + _PAD:.1f}" y="{top + _ROW * (number + 1):.1f}">{text}</text>'


def _boxes(nodes: Sequence[_Node], pieces: Sequence[PieceOfPlan]) -> list[_Box]:
    known = {node.key: node for node in nodes}
    boxes = []
    for number, piece in enumerate(pieces):
        inside = [known.pop(operation) for operation in piece.operations]
        rows = [(_head(number, piece), ""), *((f"  {node.name}", node.line) for node in inside)]
        boxes.append(_Box(("piece", number), [node.key for node in inside], rows, _colour(piece)))
    for node in known.values():
        fill = "" if pieces and not node.is_port else "#ffffff"
        boxes.append(_Box(node.key, [node.key], [(node.name, node.line)], fill, 9 if node.is_port else 3))
    return boxes


def _path(points: Sequence[Point]) -> str:
    """A line that leaves and enters each point downwards."""
    (x, y), *others = points
    path = f"M{x:.1f} {y:.1f}"
    for next_x, next_y in others:
        middle = (y + next_y) / 2
        path += f"C{x:.1f} {middle:.1f} {next_x:.1f} {middle:.1f} {next_x:.1f} {next_y:.1f}"
        x, y = next_x, next_y
    return f'<path d="{path}" marker-end="url(#tip)"/>'


def _update(source: Point, target: Point) -> str:
    """A dashed line from the new value of an input back to the input."""
    (x, y), (end_x, end_y) = source, target
    side = min(x, end_x) - 2 * _GAP.width
    path = f"M{x:.1f} {y:.1f}C{side:.1f} {y:.1f} {side:.1f} {end_y:.1f} {end_x:.1f} {end_y:.1f}"
    return f'<path d="{path}" stroke-dasharray="5 4"/>'


def _text(x: float, y: float, text: str) -> str:
    return f'<text class="shape" x="{x:.1f}" y="{y:.1f}" text-anchor="middle">{escape(text)}</text>'


def _document(left: float, width: float, height: float, shapes: Sequence[str]) -> str:
    wide, high = left + width + _MARGIN, height + 2 * _MARGIN
    size = f'viewBox="{-left:.0f} {-_MARGIN} {wide:.0f} {high:.0f}" width="{wide:.0f}" height="{high:.0f}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size}>',
            f"<style>text{{font:{_SIZE}px 'DejaVu Sans Mono',Menlo,Consolas,monospace;fill:#667}}"
            "tspan{font-weight:bold;fill:#123}.shape{paint-order:stroke;stroke:#fff;stroke-width:4px}"
            "path{fill:none;stroke:#789}marker path{fill:#789;stroke:none}</style>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto"><path d="M0 0L8 4L0 8z"/></marker></defs>',
            f'<rect x="{-left:.0f}" y="{-_MARGIN}" width="100%" height="100%" fill="#fff" stroke="#fff"/>',
            *shapes,
            "</svg>",
            "",
        ]
    )
